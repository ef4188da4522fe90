/* Tensors against the plan's layer and this rank's part of the step. */
#include "attn/check.h"

#include "tensor/check.h"

static ra_status check_plan(const ra_ctx *ctx, const ra_plan *plan, const void *io)
{
    if (!plan || !io) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", plan ? "io" : "plan");
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

static ra_status check_tensor(const ra_plan *plan, const expectation *e)
{
    const ra_layer *layer = plan->layer;
    const ra_step *step = plan->step;
    bool q_heads = e->kind == LIKE_Q || e->kind == LIKE_LSE, kept = e->kind == LIKE_KEPT;
    ra_status (*check)(const ra_tensor *, const char *, ra_dtype, int64_t, int64_t, int64_t,
                       int64_t) = e->written ? ra_tensor_check_output : ra_tensor_check;
    RA_TRY(check(e->tensor, e->name, e->kind == LIKE_LSE ? RA_F32 : layer->dtype,
                 kept ? 1 : step->rows, q_heads ? layer->q_heads : layer->kv_heads,
                 kept ? plan->schedule.rows_received : step->seq_local,
                 e->kind == LIKE_LSE ? 1 : layer->head_dim));
    return ra_backend_check(step->ctx->backend, e->tensor, e->name);
}

/* Sizes first, of all; then every result against every other tensor. Kept rows, the last two, exist
 * with keep_kv only. */
static ra_status check_tensors(const ra_plan *plan, const expectation *list, int count)
{
    count -= plan->step->ctx->options.keep_kv ? 0 : 2;
    for (int i = 0; i < count; i++) {
        RA_TRY(check_tensor(plan, &list[i]));
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

ra_status ra_forward_check(const ra_ctx *ctx, const ra_plan *plan, const ra_forward_io *io)
{
    RA_TRY(check_plan(ctx, plan, io));
    if (io->size != sizeof *io) {
        return RA_FAIL(RA_E_ARG, "io.size: %zu, expected %zu", io->size, sizeof *io);
    }
    const expectation list[] = {
        {&io->q, "q", LIKE_Q, false},
        {&io->k, "k", LIKE_K, false},
        {&io->v, "v", LIKE_K, false},
        {&io->out, "out", LIKE_Q, true},
        {&io->lse, "lse", LIKE_LSE, true},
        {&io->kept_k, "kept_k", LIKE_KEPT, true},
        {&io->kept_v, "kept_v", LIKE_KEPT, true},
    };
    return check_tensors(plan, list, sizeof list / sizeof *list);
}

ra_status ra_backward_check(const ra_ctx *ctx, const ra_plan *plan, const ra_backward_io *io)
{
    RA_TRY(check_plan(ctx, plan, io));
    if (ctx->options.forward_only) {
        return RA_FAIL(RA_E_ARG, "ctx: created with forward_only, it has no backward");
    }
    if (io->size != sizeof *io) {
        return RA_FAIL(RA_E_ARG, "io.size: %zu, expected %zu", io->size, sizeof *io);
    }
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
    return check_tensors(plan, list, sizeof list / sizeof *list);
}
