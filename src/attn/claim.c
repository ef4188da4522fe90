/* Configurations as texts, and texts compared item by item. */
#include "attn/claim.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/hash.h"

/* Texts "name value, name value, ...": equal exactly if the configurations are, and ready for the
 * message if they are not. Names have no blank, values no comma. */
typedef struct claim {
    char common[160];
    char layer[RA_LAYERS_MAX][192];
} claim;

static claim make_claim(const ra_ctx *ctx)
{
    static const char *const vision[] = {"off", "over_window", "within_window"};
    claim mine = {0};
    snprintf(mine.common, sizeof mine.common,
             "version %s, backend %.16s, layers %d, forward_only %d, keep_kv %d, plan_only %d",
             ra_version(), ra_backend_name(ctx->backend), ctx->layer_count,
             ctx->options.forward_only, ctx->options.keep_kv, ctx->options.plan_only);
    for (int i = 0; i < ctx->layer_count; i++) {
        const ra_layer *layer = &ctx->layer[i];
        snprintf(mine.layer[i], sizeof mine.layer[i],
                 "q_heads %d, kv_heads %d, head_dim %d, dtype %s, scale %.9g, causal %d, "
                 "window %lld, window_right %lld, vision %s",
                 layer->q_heads, layer->kv_heads, layer->head_dim, ra_dtype_name(layer->dtype),
                 (double)layer->scale, layer->causal, (long long)layer->window,
                 (long long)layer->window_right, vision[layer->vision]);
    }
    return mine;
}

/* Both texts have the same names in the same order. `where` goes before the name. */
static ra_status compare_items(const char *where, int rank, const char *theirs, const char *first)
{
    while (*theirs && *first) {
        size_t name = strcspn(theirs, " "), length = strcspn(theirs, ",");
        size_t first_length = strcspn(first, ",");
        if (length != first_length || strncmp(theirs, first, length) != 0) {
            return RA_FAIL(RA_E_MISMATCH, "%s%.*s: rank %d has %.*s, rank 0 has %.*s", where,
                           (int)name, theirs, rank, (int)(length - name - 1), theirs + name + 1,
                           (int)(first_length - name - 1), first + name + 1);
        }
        theirs += length + strspn(theirs + length, ", ");
        first += first_length + strspn(first + first_length, ", ");
    }
    return RA_OK;
}

static ra_status compare_claims(const claim *all, int size)
{
    for (int rank = 1; rank < size; rank++) {
        RA_TRY(compare_items("", rank, all[rank].common, all[0].common));
        for (int i = 0; i < RA_LAYERS_MAX; i++) {
            char where[32];
            snprintf(where, sizeof where, "layer %d, ", i);
            RA_TRY(compare_items(where, rank, all[rank].layer[i], all[0].layer[i]));
        }
    }
    return RA_OK;
}

/* Hashes first: that all agree is the rule, and their texts would be a large table on every rank.
 */
ra_status ra_claims_agree(const ra_ctx *ctx, ra_comm *comm, ra_status mine, int timeout_ms)
{
    claim own = {0}, *all = NULL;
    if (!mine) {
        own = make_claim(ctx);
    }
    uint64_t hash = ra_hash(RA_HASH_START, &own, sizeof own);
    ra_status status = ra_comm_agree_on(comm, mine, "configuration", hash, timeout_ms);
    if (status != RA_E_MISMATCH) {
        return status;
    }
    int size = ra_comm_size(comm);
    status = ra_comm_agree(comm, RA_NEW(&all, size), timeout_ms);
    status = status ? status : ra_comm_gather(comm, &own, sizeof own, all, timeout_ms);
    status = status ? status : compare_claims(all, size);
    ra_free(all);
    return status;
}
