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

/* A tensor of the operation: name, which heads, and whether it is written. */
typedef struct expectation {
    const ra_tensor *tensor;
    const char *name;
    bool kv_heads, written;
} expectation;

static ra_status check_tensors(const ra_plan *plan, const expectation *list, int count)
{
    const ra_layer *layer = plan->layer;
    for (int i = 0; i < count; i++) {
        const expectation *e = &list[i];
        int64_t heads = e->kv_heads ? layer->kv_heads : layer->q_heads;
        RA_TRY((e->written ? ra_tensor_check_output
                           : ra_tensor_check)(e->tensor, e->name, layer->dtype, plan->step->rows,
                                              heads, plan->step->seq_local, layer->head_dim));
        RA_TRY(ra_backend_check(plan->step->ctx->backend, e->tensor, e->name));
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

static ra_status check_lse(const ra_plan *plan, const ra_tensor *lse, bool written)
{
    RA_TRY((written ? ra_tensor_check_output : ra_tensor_check)(
        lse, "lse", RA_F32, plan->step->rows, plan->layer->q_heads, plan->step->seq_local, 1));
    return ra_backend_check(plan->step->ctx->backend, lse, "lse");
}

static ra_status check_kept(const ra_plan *plan, const ra_tensor *kept_k, const ra_tensor *kept_v,
                            bool written)
{
    if (!plan->step->ctx->options.keep_kv) {
        return RA_OK;
    }
    const ra_layer *layer = plan->layer;
    int64_t kept_seq = plan->schedule.rows_received;
    ra_status (*check)(const ra_tensor *, const char *, ra_dtype, int64_t, int64_t, int64_t,
                       int64_t) = written ? ra_tensor_check_output : ra_tensor_check;
    RA_TRY(check(kept_k, "kept_k", layer->dtype, 1, layer->kv_heads, kept_seq, layer->head_dim));
    RA_TRY(check(kept_v, "kept_v", layer->dtype, 1, layer->kv_heads, kept_seq, layer->head_dim));
    RA_TRY(ra_backend_check(plan->step->ctx->backend, kept_k, "kept_k"));
    return ra_backend_check(plan->step->ctx->backend, kept_v, "kept_v");
}

ra_status ra_forward_check(const ra_ctx *ctx, const ra_plan *plan, const ra_forward_io *io)
{
    RA_TRY(check_plan(ctx, plan, io));
    if (io->size != sizeof *io) {
        return RA_FAIL(RA_E_ARG, "io.size: %zu, expected %zu", io->size, sizeof *io);
    }
    const expectation list[] = {
        {&io->q, "q", false, false},
        {&io->k, "k", true, false},
        {&io->v, "v", true, false},
        {&io->out, "out", false, true},
    };
    RA_TRY(check_tensors(plan, list, sizeof list / sizeof *list));
    RA_TRY(check_lse(plan, &io->lse, true));
    return check_kept(plan, &io->kept_k, &io->kept_v, true);
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
        {&io->q, "q", false, false},       {&io->k, "k", true, false},
        {&io->v, "v", true, false},        {&io->out, "out", false, false},
        {&io->dout, "dout", false, false}, {&io->dq, "dq", false, true},
        {&io->dk, "dk", true, true},       {&io->dv, "dv", true, true},
    };
    RA_TRY(check_tensors(plan, list, sizeof list / sizeof *list));
    RA_TRY(check_lse(plan, &io->lse, false));
    return check_kept(plan, &io->kept_k, &io->kept_v, false);
}
