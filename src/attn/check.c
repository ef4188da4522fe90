/* Tensors against the layer and the tokens of a call; the calls of a plan against its ctx. */
#include "attn/check.h"

#include "tensor/check.h"

static ra_status check_plan(const ra_ctx *ctx, const ra_plan *plan)
{
    if (!plan) {
        return RA_FAIL(RA_E_ARG, "plan: NULL");
    }
    if (plan->step->ctx != ctx) {
        return RA_FAIL(RA_E_ARG, "plan: belongs to another ctx");
    }
    if (ctx->options.plan_only) {
        return RA_FAIL(RA_E_ARG, "ctx: created with plan_only, its steps cannot be run");
    }
    uint64_t needed =
        plan->forward_bytes > plan->backward_bytes ? plan->forward_bytes : plan->backward_bytes;
    if (needed > ctx->scratch_bytes) {
        return RA_FAIL(RA_E_NOMEM,
                       "scratch: the plan needs %llu bytes, the ctx could not keep them",
                       (unsigned long long)needed);
    }
    return RA_OK;
}

/* A tensor of the operation: whose size it has, and whether it is written. */
typedef enum tensor_kind { LIKE_Q, LIKE_K, LIKE_LSE, LIKE_KEPT } tensor_kind;

typedef struct expectation {
    const ra_tensor *tensor;
    const char *name;
    tensor_kind kind;
    bool written;
} expectation;

static ra_status check_tensor(const ra_io_shape *shape, const expectation *e)
{
    const ra_layer *layer = shape->layer;
    bool lse = e->kind == LIKE_LSE, of_queries = lse || e->kind == LIKE_Q;
    bool kept = e->kind == LIKE_KEPT;
    int64_t keys = kept ? shape->kept_seq : shape->k_seq;
    ra_status (*check)(const ra_tensor *, const char *, ra_dtype, int64_t, int64_t, int64_t,
                       int64_t) = e->written ? ra_tensor_check_output : ra_tensor_check;
    RA_TRY(check(e->tensor, e->name, lse ? RA_F32 : layer->dtype, kept ? 1 : shape->rows,
                 of_queries ? layer->q_heads : layer->kv_heads, of_queries ? shape->q_seq : keys,
                 lse ? 1 : layer->head_dim));
    return ra_backend_check(shape->backend, e->tensor, e->name);
}

/* Sizes first, of all; then every result against every other tensor. Kept rows are the last two. */
static ra_status check_tensors(const ra_io_shape *shape, const expectation *list, int count)
{
    count -= shape->keeps ? 0 : 2;
    for (int i = 0; i < count; i++) {
        RA_TRY(check_tensor(shape, &list[i]));
    }
    for (int i = 0; i < count; i++) {
        for (int j = 0; list[i].written && j < count; j++) {
            if (i != j) {
                RA_TRY(ra_apart_check(list[i].tensor, list[i].name, list[j].tensor, list[j].name));
            }
        }
    }
    return RA_OK;
}

static ra_status check_size(const void *io, size_t size, size_t expected)
{
    if (!io) {
        return RA_FAIL(RA_E_ARG, "io: NULL, expected tensors");
    }
    if (size != expected) {
        return RA_FAIL(RA_E_ARG, "io.size: %zu, expected %zu", size, expected);
    }
    return RA_OK;
}

ra_status ra_forward_io_check(const ra_io_shape *shape, const ra_forward_io *io)
{
    RA_TRY(check_size(io, io ? io->size : 0, sizeof *io));
    const expectation list[] = {
        {&io->q, "q", LIKE_Q, false},
        {&io->k, "k", LIKE_K, false},
        {&io->v, "v", LIKE_K, false},
        {&io->out, "out", LIKE_Q, true},
        {&io->lse, "lse", LIKE_LSE, true},
        {&io->kept_k, "kept_k", LIKE_KEPT, true},
        {&io->kept_v, "kept_v", LIKE_KEPT, true},
    };
    return check_tensors(shape, list, sizeof list / sizeof *list);
}

ra_status ra_backward_io_check(const ra_io_shape *shape, const ra_backward_io *io)
{
    RA_TRY(check_size(io, io ? io->size : 0, sizeof *io));
    const expectation list[] = {
        {&io->q, "q", LIKE_Q, false},
        {&io->k, "k", LIKE_K, false},
        {&io->v, "v", LIKE_K, false},
        {&io->out, "out", LIKE_Q, false},
        {&io->dout, "dout", LIKE_Q, false},
        {&io->lse, "lse", LIKE_LSE, false},
        {&io->dq, "dq", LIKE_Q, true},
        {&io->dk, "dk", LIKE_K, true},
        {&io->dv, "dv", LIKE_K, true},
        {&io->kept_k, "kept_k", LIKE_KEPT, false},
        {&io->kept_v, "kept_v", LIKE_KEPT, false},
    };
    return check_tensors(shape, list, sizeof list / sizeof *list);
}

static ra_io_shape shape_of(const ra_plan *plan)
{
    const ra_step *step = plan->step;
    return (ra_io_shape){
        .backend = step->ctx->backend,
        .layer = plan->layer,
        .rows = step->rows,
        .q_seq = step->seq_local,
        .k_seq = step->seq_local,
        .keeps = step->ctx->options.keep_kv,
        .kept_seq = plan->schedule.rows_received,
    };
}

ra_status ra_forward_check(const ra_ctx *ctx, const ra_plan *plan, const ra_forward_io *io)
{
    RA_TRY(check_plan(ctx, plan));
    ra_io_shape shape = shape_of(plan);
    return ra_forward_io_check(&shape, io);
}

ra_status ra_backward_check(const ra_ctx *ctx, const ra_plan *plan, const ra_backward_io *io)
{
    RA_TRY(check_plan(ctx, plan));
    if (ctx->options.forward_only) {
        return RA_FAIL(RA_E_ARG, "ctx: created with forward_only, it has no backward");
    }
    ra_io_shape shape = shape_of(plan);
    return ra_backward_io_check(&shape, io);
}
