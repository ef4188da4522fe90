/* Folds a partial result into a running one by the merge rule, one row of channels at a time: the
 * building block for callers with their own kernels, on host memory. Must not know which keys a
 * part came from. */
#include "rule/merge_rule.h"
#include "tensor/check.h"

static ra_status f32_check(const ra_tensor *t, const char *name, bool writable, int64_t rows,
                           int64_t heads, int64_t seq, int64_t chan)
{
    RA_TRY(ra_view_check(t, name, writable));
    return ra_tensor_check(t, name, RA_F32, rows, heads, seq, chan);
}

/* part has part_rows by part_seq rows of channels where out has its own. */
static ra_status merge_check(const ra_tensor *out, const ra_tensor *lse, const ra_tensor *part,
                             const ra_tensor *part_lse, int64_t part_rows, int64_t part_seq)
{
    int64_t heads = out->size[RA_HEAD], chan = out->size[RA_CHAN];
    if (chan < 1) {
        return RA_FAIL(RA_E_SHAPE, "out: size of axis 3 (chan) is 0, expected 1 or more");
    }
    RA_TRY(f32_check(out, "out", true, out->size[RA_ROW], heads, out->size[RA_SEQ], chan));
    RA_TRY(f32_check(lse, "lse", true, out->size[RA_ROW], heads, out->size[RA_SEQ], 1));
    RA_TRY(f32_check(part, "part", false, part_rows, heads, part_seq, chan));
    return f32_check(part_lse, "part_lse", false, part_rows, heads, part_seq, 1);
}

/* A side of weight 0 is never multiplied: an empty side may hold anything, and a side merged with
 * an empty one stays bit for bit. */
static void row_merge(float *out, float *lse, const float *part, float part_lse, int64_t chan)
{
    ra_merge_weights weights = ra_merge_rule(*lse, part_lse);
    *lse = weights.lse;
    if (weights.keep == 0.0f && weights.add == 0.0f) {
        for (int64_t c = 0; c < chan; c++) {
            out[c] = 0.0f;
        }
    } else if (weights.keep == 0.0f) {
        memmove(out, part, (size_t)chan * sizeof *out);
    } else if (weights.add != 0.0f) {
        for (int64_t c = 0; c < chan; c++) {
            out[c] = weights.keep * out[c] + weights.add * part[c];
        }
    }
}

ra_status ra_merge(const ra_tensor *out, const ra_tensor *lse, const ra_tensor *part,
                   const ra_tensor *part_lse)
{
    RA_TRY(ra_view_check(out, "out", true));
    RA_TRY(merge_check(out, lse, part, part_lse, out->size[RA_ROW], out->size[RA_SEQ]));
    int64_t chan = out->size[RA_CHAN];
    if (ra_tensor_count(lse) == 0) {
        return RA_OK;
    }
    for (int64_t row = 0; row < out->size[RA_ROW]; row++) {
        for (int64_t head = 0; head < out->size[RA_HEAD]; head++) {
            for (int64_t pos = 0; pos < out->size[RA_SEQ]; pos++) {
                const float *from_lse = ra_tensor_at(part_lse, row, head, pos);
                row_merge(ra_tensor_at(out, row, head, pos), ra_tensor_at(lse, row, head, pos),
                          ra_tensor_at(part, row, head, pos), *from_lse, chan);
            }
        }
    }
    return RA_OK;
}

ra_status ra_merge_rows(const ra_tensor *out, const ra_tensor *lse, const ra_tensor *part,
                        const ra_tensor *part_lse, const int64_t *index, int64_t total)
{
    RA_TRY(ra_view_check(out, "out", true));
    RA_TRY(ra_index_check(index, total, out->size[RA_ROW] * out->size[RA_SEQ]));
    RA_TRY(merge_check(out, lse, part, part_lse, 1, total));
    int64_t seq = out->size[RA_SEQ], chan = out->size[RA_CHAN];
    for (int64_t head = 0; head < out->size[RA_HEAD]; head++) {
        for (int64_t i = 0; i < total; i++) {
            int64_t row = index[i] / seq, pos = index[i] % seq;
            const float *from_lse = ra_tensor_at(part_lse, 0, head, i);
            row_merge(ra_tensor_at(out, row, head, pos), ra_tensor_at(lse, row, head, pos),
                      ra_tensor_at(part, 0, head, i), *from_lse, chan);
        }
    }
    return RA_OK;
}

bool ra_merge_rows_pays(int64_t live, int64_t rows)
{
    return live <= rows / 4;
}
