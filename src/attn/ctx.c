/* Creation, agreement of all ranks, and the end. */
#include "attn/ctx.h"

#include <stdio.h>
#include <string.h>

#include "attn/claim.h"
#include "base/alloc.h"
#include "rule/layer.h"

static ra_status check_options(const ra_ctx_options *options)
{
    if (options->size != sizeof *options) {
        return RA_FAIL(RA_E_ARG, "options.size: %zu, expected %zu", options->size, sizeof *options);
    }
    if (options->timeout_ms < 0) {
        return RA_FAIL(RA_E_ARG, "options.timeout_ms: %d, expected 0 (default) or more",
                       options->timeout_ms);
    }
    return RA_OK;
}

static ra_status check_create(const ra_backend *backend, const ra_layer *layers, int layer_count,
                              const ra_ctx_options *options, ra_ctx *const *out)
{
    if (!backend || !layers || !out) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", !backend ? "backend" : !layers ? "layers" : "out");
    }
    if (layer_count < 1 || layer_count > RA_LAYERS_MAX) {
        return RA_FAIL(RA_E_ARG, "layer_count: %d, expected 1 to %d", layer_count, RA_LAYERS_MAX);
    }
    for (int i = 0; i < layer_count; i++) {
        ra_status status = ra_layer_check(&layers[i]);
        if (status) {
            return RA_FAIL(status, "layer %d: %.400s", i, ra_last_error());
        }
    }
    return options ? check_options(options) : RA_OK;
}

/* Everything that only concerns this rank. */
static ra_status create_local(ra_backend *backend, ra_comm *comm, const ra_layer *layers,
                              int layer_count, const ra_ctx_options *options, ra_ctx **out)
{
    RA_TRY(RA_NEW(out, 1));
    ra_ctx *ctx = *out;
    int size = ra_comm_size(comm);
    ctx->backend = backend;
    ctx->comm = comm;
    ctx->options = options ? *options : (ra_ctx_options){.size = sizeof *options};
    if (ctx->options.timeout_ms == 0) {
        ctx->options.timeout_ms = RA_TIMEOUT_MS_DEFAULT;
    }
    ctx->layer_count = layer_count;
    memcpy(ctx->layer, layers, (size_t)layer_count * sizeof *layers);
    RA_TRY(RA_NEW(&ctx->xfers, 2 * (int64_t)size));
    bool own_thread = size > 1 && !ctx->options.no_overlap && !ctx->options.plan_only;
    return ra_courier_create(own_thread, &ctx->courier);
}

ra_status ra_ctx_create(ra_backend *backend, ra_comm *comm, const ra_layer *layers, int layer_count,
                        const ra_ctx_options *options, ra_ctx **out)
{
    if (!comm) {
        return RA_FAIL(RA_E_ARG, "comm: NULL");
    }
    ra_ctx *ctx = NULL;
    ra_status status = check_create(backend, layers, layer_count, options, out);
    status = status ? status : create_local(backend, comm, layers, layer_count, options, &ctx);
    bool readable = options && options->size == sizeof *options && options->timeout_ms > 0;
    int timeout_ms = readable ? options->timeout_ms : RA_TIMEOUT_MS_DEFAULT;
    status = ra_claims_agree(ctx, comm, status, timeout_ms);
    if (status) {
        ra_ctx_free(ctx);
        return status;
    }
    *out = ctx;
    return RA_OK;
}

void ra_ctx_free(ra_ctx *ctx)
{
    if (ctx) {
        ra_courier_free(ctx->courier);
        ctx->backend->ops->free(ctx->backend->self, ctx->scratch);
        ra_free(ctx->blocks.block);
        ra_free(ctx->xfers);
        ra_free(ctx);
    }
}

ra_status ra_ctx_status(const ra_ctx *ctx)
{
    return ctx ? ctx->status : RA_E_ARG;
}

ra_status ra_ctx_check(const ra_ctx *ctx)
{
    if (!ctx) {
        return RA_FAIL(RA_E_ARG, "ctx: NULL");
    }
    if (ctx->status) {
        return RA_FAIL(RA_E_COMM, "ctx: ended by an earlier failure (%.400s); only ra_ctx_free",
                       ctx->message);
    }
    return RA_OK;
}

ra_status ra_ctx_finish(ra_ctx *ctx, ra_status status)
{
    if (status) {
        snprintf(ctx->message, sizeof ctx->message, "%s", ra_last_error());
        ctx->status = status;
        ra_comm_abort(ctx->comm, ctx->message);
        ra_courier_drain(ctx->courier);
        ra_fail(status, "%s", ctx->message);
    }
    return status;
}

/* Nothing in it outlives a call, so the old memory goes first; if there is not enough for more, the
 * steps that exist get theirs back. */
static ra_status grow_scratch(ra_ctx *ctx, uint64_t bytes)
{
    const ra_backend *backend = ctx->backend;
    uint64_t before = ctx->scratch_bytes;
    backend->ops->free(backend->self, ctx->scratch);
    ctx->scratch = NULL;
    ctx->scratch_bytes = 0;
    ra_status status = backend->ops->alloc(backend->self, (size_t)bytes, &ctx->scratch);
    if (!status) {
        ctx->scratch_bytes = bytes;
    } else if (before > 0) {
        char why[RA_MESSAGE_BYTES];
        snprintf(why, sizeof why, "%s", ra_last_error());
        if (!backend->ops->alloc(backend->self, (size_t)before, &ctx->scratch)) {
            ctx->scratch_bytes = before;
        }
        ra_fail(status, "%s", why);
    }
    return status;
}

ra_status ra_ctx_reserve(ra_ctx *ctx, uint64_t scratch_bytes, int64_t blocks)
{
    uint64_t limit = ctx->options.scratch_bytes_max;
    if (limit > 0 && scratch_bytes > limit) {
        return RA_FAIL(RA_E_NOMEM, "scratch: the step needs %llu bytes, scratch_bytes_max is %llu",
                       (unsigned long long)scratch_bytes, (unsigned long long)limit);
    }
    RA_TRY(RA_RESERVE(&ctx->blocks.block, &ctx->blocks.capacity, blocks));
    return scratch_bytes > ctx->scratch_bytes ? grow_scratch(ctx, scratch_bytes) : RA_OK;
}

ra_ring ra_ctx_ring(ra_ctx *ctx, const ra_schedule *schedule, const ra_layer *layer)
{
    return (ra_ring){
        .backend = ctx->backend,
        .comm = ctx->comm,
        .courier = ctx->courier,
        .trace = ctx->options.trace,
        .timeout_ms = ctx->options.timeout_ms,
        .schedule = schedule,
        .heads = layer->kv_heads,
        .head_dim = layer->head_dim,
        .blocks = &ctx->blocks,
        .xfers = ctx->xfers,
    };
}
