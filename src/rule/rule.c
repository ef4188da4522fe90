/* The mask rule and the vision numbering for callers outside the library: the same predicate that
 * every path agrees with. Must not know shards. */
#include "base/status.h"
#include "rule/mask_rule.h"

bool ra_mask_allows(const ra_layer *layer, ra_token query, ra_token key)
{
    ra_mask mask = ra_mask_of_layer(layer);
    return ra_mask_rule(&mask, query, key);
}

ra_status ra_vision_groups(const int32_t *token_type, int64_t rows, int64_t seq, int32_t *group)
{
    if (rows < 0 || rows > RA_ROWS_MAX) {
        return RA_FAIL(RA_E_ARG, "rows: %lld, expected 0 to %lld", (long long)rows,
                       (long long)RA_ROWS_MAX);
    }
    if (seq < 0 || seq > RA_SEQ_MAX) {
        return RA_FAIL(RA_E_ARG, "seq: %lld, expected 0 to %lld", (long long)seq,
                       (long long)RA_SEQ_MAX);
    }
    if (rows * seq > 0 && (!token_type || !group)) {
        return RA_FAIL(RA_E_ARG, "%s: NULL, expected %lld elements",
                       token_type ? "group" : "token_type", (long long)(rows * seq));
    }
    for (int64_t row = 0; row < rows; row++) {
        int32_t current = -1;
        bool inside = false;
        for (int64_t pos = row * seq; pos < (row + 1) * seq; pos++) {
            bool vision = token_type[pos] == 1 || token_type[pos] == 2;
            current += vision && !inside;
            inside = vision;
            group[pos] = vision ? current : -1;
        }
    }
    return RA_OK;
}
