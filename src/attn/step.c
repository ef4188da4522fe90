/* Gathered metadata to a step: shards, tokens, pieces, and a plan for every layer kind. */
#include "attn/step.h"

#include "attn/gathered.h"
#include "base/alloc.h"

ra_scratch_shape ra_plan_shape(const ra_plan *plan)
{
    return (ra_scratch_shape){
        .schedule = &plan->schedule,
        .layer = plan->layer,
        .rows = plan->step->rows,
        .seq_local = plan->step->seq_local,
        .keep_kv = plan->step->ctx->options.keep_kv,
        .landing_bytes = plan->step->ctx->backend->ops->landing_bytes,
    };
}

/* Byte offsets into the largest tensor, an f64 one of all query heads, must fit int64. */
static ra_status check_extent(const ra_step *step, const ra_layer *layer)
{
    int64_t product = (int64_t)layer->q_heads * layer->head_dim * 8;
    if (__builtin_mul_overflow(product, step->rows, &product) ||
        __builtin_mul_overflow(product, step->seq_local, &product)) {
        return RA_FAIL(
            RA_E_ARG, "desc: %lld rows of %lld tokens, %d heads of %d: beyond 64-bit addresses",
            (long long)step->rows, (long long)step->seq_local, layer->q_heads, layer->head_dim);
    }
    return RA_OK;
}

static ra_status build_plan(ra_step *step, const ra_layer *layer, ra_plan *plan)
{
    RA_TRY(check_extent(step, layer));
    plan->step = step;
    plan->layer = layer;
    plan->choice =
        ra_path_choose(layer, step->has_documents, step->has_vision, step->shards.contiguous);
    const ra_schedule_inputs inputs = {
        .tokens = &step->tokens,
        .pieces = &step->pieces,
        .mask = ra_mask_of_layer(layer),
        .rank = ra_comm_rank(step->ctx->comm),
        .rank_count = ra_comm_size(step->ctx->comm),
        .neighbourhood = plan->choice.path == RA_PATH_SLIDING,
        .forward_only = step->ctx->options.forward_only,
        .joined = step->ctx->backend->ops->marks_chunk,
        .tile = RA_SCHEDULE_TILE,
    };
    RA_TRY(ra_schedule_build(&inputs, &plan->schedule));
    RA_TRY(RA_NEW(&plan->fold_lists, plan->schedule.hop_count));
    RA_TRY(RA_NEW(&plan->grad_lists, plan->schedule.pass_count));
    ra_scratch_shape shape = ra_plan_shape(plan);
    plan->forward_bytes = ra_forward_carve(&shape, NULL).bytes;
    plan->backward_bytes =
        step->ctx->options.forward_only ? 0 : ra_backward_carve(&shape, NULL).bytes;
    return RA_OK;
}

/* Work lists of all hops and passes. */
static ra_status prepare_plan(ra_plan *plan)
{
    const ra_backend *backend = plan->step->ctx->backend;
    const ra_schedule *schedule = &plan->schedule;
    for (int h = 0; h < schedule->hop_count; h++) {
        RA_TRY(backend->ops->prepare(backend->self, &schedule->hop[h].cover, plan->layer,
                                     &plan->fold_lists[h]));
    }
    for (int i = 0; i < schedule->pass_count; i++) {
        const ra_pass *pass = &schedule->pass[i];
        if (schedule->pass_cover) {
            RA_TRY(backend->ops->prepare(backend->self, pass->cover, plan->layer,
                                         &plan->grad_lists[i]));
        } else {
            plan->grad_lists[i] = plan->fold_lists[pass->hop];
        }
    }
    return RA_OK;
}

static void free_plan(ra_plan *plan)
{
    const ra_schedule *schedule = &plan->schedule;
    for (int h = 0; plan->fold_lists && h < schedule->hop_count; h++) {
        const ra_backend *backend = plan->step->ctx->backend;
        backend->ops->discard(backend->self, plan->fold_lists[h]);
    }
    for (int i = 0; plan->grad_lists && schedule->pass_cover && i < schedule->pass_count; i++) {
        const ra_backend *backend = plan->step->ctx->backend;
        backend->ops->discard(backend->self, plan->grad_lists[i]);
    }
    ra_free(plan->fold_lists);
    ra_free(plan->grad_lists);
    ra_schedule_free(&plan->schedule);
}

static ra_status build_step(ra_step *step, const ra_gathered *gathered)
{
    ra_ctx *ctx = step->ctx;
    int rank = ra_comm_rank(ctx->comm);
    uint64_t scratch_bytes = 0;
    int64_t blocks = 0;
    step->rows = gathered->rows;
    step->has_documents = gathered->has_documents;
    RA_TRY(ra_shards_build(ra_comm_size(ctx->comm), gathered->run_counts, gathered->runs,
                           &step->shards));
    step->seq_local = step->shards.length[rank];
    RA_TRY(ra_tokens_build(&step->shards, step->rows, gathered->token_counts, gathered->token_runs,
                           &step->tokens));
    step->has_vision = step->tokens.block_count > 0;
    RA_TRY(ra_pieces_build(&step->shards, &step->tokens, &step->pieces));
    RA_TRY(ra_pieces_idle(&step->pieces, &step->shards, step->rows, rank, &step->idle,
                          &step->idle_count));
    for (int i = 0; i < ctx->layer_count; i++) {
        ra_plan *plan = &step->plan[i];
        RA_TRY(build_plan(step, &ctx->layer[i], plan));
        ra_scratch_shape shape = ra_plan_shape(plan);
        uint64_t bytes =
            plan->forward_bytes > plan->backward_bytes ? plan->forward_bytes : plan->backward_bytes;
        scratch_bytes = bytes > scratch_bytes ? bytes : scratch_bytes;
        blocks = ra_max_i64(blocks, ra_scratch_blocks(&shape));
    }
    if (ctx->options.plan_only) {
        return RA_OK;
    }
    for (int i = 0; i < ctx->layer_count; i++) {
        RA_TRY(prepare_plan(&step->plan[i]));
    }
    return ra_ctx_reserve(ctx, scratch_bytes, blocks);
}

ra_status ra_step_create(ra_ctx *ctx, const ra_step_desc *desc, ra_step **out)
{
    RA_TRY(ra_ctx_check(ctx));
    ra_step *step = NULL;
    ra_gathered gathered = {0};
    int timeout_ms = ctx->options.timeout_ms;
    ra_status status = out ? RA_NEW(&step, 1) : RA_FAIL(RA_E_ARG, "out: NULL");
    status = ra_comm_agree(ctx->comm, status, timeout_ms);
    status = status ? status : ra_gathered_build(ctx, desc, &gathered);
    if (!status) {
        step->ctx = ctx;
        status = build_step(step, &gathered);
        status = ra_comm_agree(ctx->comm, status, timeout_ms);
    }
    ra_gathered_free(&gathered);
    if (status) {
        ra_step_free(step);
        if (ra_comm_is_aborted(ctx->comm)) {
            ra_ctx_finish(ctx, status);
        }
        return status;
    }
    *out = step;
    return RA_OK;
}

void ra_step_free(ra_step *step)
{
    if (step) {
        for (int i = 0; i < RA_LAYERS_MAX; i++) {
            free_plan(&step->plan[i]);
        }
        ra_shards_free(&step->shards);
        ra_tokens_free(&step->tokens);
        ra_pieces_free(&step->pieces);
        ra_free(step->idle);
        ra_free(step);
    }
}

const ra_plan *ra_step_plan(const ra_step *step, int layer)
{
    return step && layer >= 0 && layer < step->ctx->layer_count ? &step->plan[layer] : NULL;
}
