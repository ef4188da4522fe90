/*
 * The two calls, and the file to read first: check, walk the plan's hops, or its passes backward,
 * finish. While hop h is computed, the rows of hop h + 1 and the gradients of hop h - 1 travel.
 * Which rows travel and what a hop covers is the plan's business (plan/schedule.h); how they travel
 * is the ring's (ring/collect.h, ring/route.h); the mathematics is the backend's
 * (backend/backend.h).
 */
#include <math.h>

#include "attn/check.h"
#include "ring/collect.h"
#include "ring/route.h"

/* Ends a computation in the trace: when it is done, not when it is under way, so that on a device
 * the caller waits for it here. Exchanges go on meanwhile. */
static ra_status end_compute(const ra_ctx *ctx, int64_t begin, const char *name, int hop)
{
    if (ctx->options.trace) {
        const ra_backend *backend = ctx->backend;
        RA_TRY(backend->ops->mark(backend->self, RA_MARK_TRACE));
        RA_TRY(backend->ops->wait_mark(backend->self, RA_MARK_TRACE));
        ra_trace_end(ctx->options.trace, begin, name, RA_LANE_COMPUTE, ra_comm_rank(ctx->comm),
                     hop);
    }
    return RA_OK;
}

static ra_tensor rows_of(const ra_tensor *t, const ra_local_rows *rows)
{
    ra_tensor view = ra_tensor_slice_seq(t, rows->index, rows->count);
    view.data = ra_tensor_at(&view, rows->row, 0, 0);
    view.size[RA_ROW] = 1;
    return view;
}

/* Padding attends nothing: these rows are in no hop. */
static ra_status fill_idle(const ra_plan *plan, const ra_tensor *t, float value)
{
    const ra_backend *backend = plan->step->ctx->backend;
    for (int64_t i = 0; i < plan->step->idle_count; i++) {
        ra_tensor rows = rows_of(t, &plan->step->idle[i]);
        RA_TRY(backend->ops->fill(backend->self, &rows, value));
    }
    return RA_OK;
}

/* The ring's side of one call. It lives in the public call's frame until no courier task can use it
 * any more. */
typedef struct ring_call {
    ra_ring ring;
    ra_collect collect;
    ra_route route;
} ring_call;

static void open_collect(ra_ctx *ctx, const ra_plan *plan, const ra_tensor *k, const ra_tensor *v,
                         void *const slot_k[2], void *const slot_v[2], ring_call *call)
{
    call->ring = ra_ctx_ring(ctx, &plan->schedule, plan->layer);
    call->collect = (ra_collect){
        .ring = &call->ring,
        .k = *k,
        .v = *v,
        .slot_k = {slot_k[0], slot_k[1]},
        .slot_v = {slot_v[0], slot_v[1]},
    };
}

static ra_status run_forward(ra_ctx *ctx, const ra_plan *plan, const ra_forward_io *io,
                             ring_call *call)
{
    const ra_backend *backend = ctx->backend;
    ra_scratch_shape shape = ra_plan_shape(plan);
    ra_forward_scratch s = ra_forward_carve(&shape, ctx->scratch);
    open_collect(ctx, plan, &io->k, &io->v, s.slot_k, s.slot_v, call);
    if (ctx->options.keep_kv) {
        call->collect.kept_k = io->kept_k;
        call->collect.kept_v = io->kept_v;
    }
    RA_TRY(fill_idle(plan, &io->out, 0.0f));
    RA_TRY(fill_idle(plan, &io->lse, -INFINITY));
    RA_TRY(ra_collect_start(&call->collect, true));
    for (int h = 0; h < plan->schedule.hop_count; h++) {
        ra_fold_job job = {
            .cover = &plan->schedule.hop[h].cover,
            .prepared = plan->fold_lists[h],
            .scale = plan->layer->scale,
            .q = io->q,
            .k = {[RA_SOURCE_OWN] = io->k},
            .v = {[RA_SOURCE_OWN] = io->v},
            .acc = s.acc,
            .lse = io->lse,
            .lse_rest = s.lse_rest,
            .out = io->out,
        };
        if (h > 0) {
            RA_TRY(ra_collect_next(&call->collect, h, &job.k[RA_SOURCE_CHUNK],
                                   &job.v[RA_SOURCE_CHUNK]));
        }
        if (job.cover->q_count > 0) {
            int64_t begin = ra_trace_begin(ctx->options.trace);
            RA_TRY(backend->ops->fold(backend->self, &job));
            RA_TRY(end_compute(ctx, begin, "forward", h));
        }
    }
    return RA_OK;
}

/* What other ranks gave arrives behind the last hop, so these rows are rounded then. */
static ra_status round_returned(const ra_plan *plan, const ra_backward_io *io,
                                const ra_backward_scratch *s)
{
    const ra_backend *backend = plan->step->ctx->backend;
    for (int64_t i = 0; i < plan->schedule.returned_count; i++) {
        const ra_local_rows *rows = &plan->schedule.returned[i];
        ra_tensor dk = rows_of(&io->dk, rows), dk_sum = rows_of(&s->sum.dk, rows);
        ra_tensor dv = rows_of(&io->dv, rows), dv_sum = rows_of(&s->sum.dv, rows);
        RA_TRY(backend->ops->cast(backend->self, &dk, &dk_sum));
        RA_TRY(backend->ops->cast(backend->self, &dv, &dv_sum));
    }
    return RA_OK;
}

static ra_status zero_empty(const ra_plan *plan, const ra_backward_scratch *s)
{
    const ra_backend *backend = plan->step->ctx->backend;
    for (int64_t i = 0; i < plan->schedule.empty_count; i++) {
        const ra_local_rows *rows = &plan->schedule.empty[i];
        ra_tensor dk = rows_of(&s->sum.dk, rows), dv = rows_of(&s->sum.dv, rows);
        RA_TRY(backend->ops->fill(backend->self, &dk, 0.0f));
        RA_TRY(backend->ops->fill(backend->self, &dv, 0.0f));
    }
    return RA_OK;
}

static ra_status walk_backward(ra_ctx *ctx, const ra_plan *plan, const ra_backward_io *io,
                               const ra_backward_scratch *s, ring_call *call)
{
    const ra_backend *backend = ctx->backend;
    for (int i = 0; i < plan->schedule.pass_count; i++) {
        const ra_pass *pass = &plan->schedule.pass[i];
        int h = pass->hop;
        ra_grad_job job = ra_backward_job(plan->layer, pass->cover, io, &s->sum);
        job.prepared = plan->grad_lists[i];
        if (h > 0) {
            RA_TRY(ra_collect_next(&call->collect, h, &job.k[RA_SOURCE_CHUNK],
                                   &job.v[RA_SOURCE_CHUNK]));
            RA_TRY(
                ra_route_slot(&call->route, h, &job.dk[RA_SOURCE_CHUNK], &job.dv[RA_SOURCE_CHUNK]));
        } else if (i > 0) {
            RA_TRY(ra_route_settle(&call->route));
        }
        bool joined = plan->schedule.joined && h > 0 && job.cover->q_count > 0;
        if (job.cover->q_count > 0) {
            int64_t begin = ra_trace_begin(ctx->options.trace);
            job.chunk_mark = joined ? ra_route_mark(h) : 0;
            RA_TRY(backend->ops->grad(backend->self, &job));
            RA_TRY(joined ? ra_route_send(&call->route, h, true) : RA_OK);
            RA_TRY(end_compute(ctx, begin, "backward", h));
        }
        if (h > 0 && !joined) {
            RA_TRY(ra_route_send(&call->route, h, false));
        }
    }
    if (plan->schedule.hop_count > 1) {
        RA_TRY(ra_route_add(&call->route));
    }
    return ra_route_finish(&call->route);
}

static ra_status run_backward(ra_ctx *ctx, const ra_plan *plan, const ra_backward_io *io,
                              ring_call *call)
{
    const ra_backend *backend = ctx->backend;
    ra_scratch_shape shape = ra_plan_shape(plan);
    ra_backward_scratch s = ra_backward_carve(&shape, ctx->scratch);
    open_collect(ctx, plan, &io->k, &io->v, s.slot_k, s.slot_v, call);
    if (ctx->options.keep_kv) {
        call->collect.kept_k = io->kept_k;
        call->collect.kept_v = io->kept_v;
        call->collect.arrived = true;
    }
    call->route = (ra_route){
        .ring = &call->ring,
        .dk = s.sum.dk,
        .dv = s.sum.dv,
        .slot_k = {s.partial_k[0], s.partial_k[1]},
        .slot_v = {s.partial_v[0], s.partial_v[1]},
        .landing = s.landing,
        .landing_k = s.landing_k,
        .landing_v = s.landing_v,
    };
    RA_TRY(ra_collect_start(&call->collect, false)); /* delta leaves it room */
    int64_t begin = ra_trace_begin(ctx->options.trace);
    RA_TRY(fill_idle(plan, &io->dq, 0.0f));
    RA_TRY(fill_idle(plan, &io->dk, 0.0f));
    RA_TRY(fill_idle(plan, &io->dv, 0.0f));
    RA_TRY(zero_empty(plan, &s));
    RA_TRY(backend->ops->row_dot(backend->self, &io->out, &io->dout, &s.sum.delta));
    RA_TRY(end_compute(ctx, begin, "delta", 0));
    RA_TRY(walk_backward(ctx, plan, io, &s, call));
    begin = ra_trace_begin(ctx->options.trace);
    RA_TRY(round_returned(plan, io, &s));
    return end_compute(ctx, begin, "sums to gradients", plan->schedule.hop_count - 1);
}

/* A call that failed on its way leaves no number that could be taken for a result. */
static void spoil(const ra_backend *backend, const ra_tensor *const *results, int count)
{
    for (int i = 0; i < count; i++) {
        backend->ops->fill(backend->self, results[i], NAN);
    }
}

ra_status ra_attn_forward(ra_ctx *ctx, const ra_plan *plan, const ra_forward_io *io,
                          ra_stream stream)
{
    RA_TRY(ra_ctx_check(ctx));
    ra_status status = ra_forward_check(ctx, plan, io);
    if (status) {
        return ra_ctx_finish(ctx, status);
    }
    ring_call call;
    ctx->backend->ops->use_stream(ctx->backend->self, stream);
    int64_t begin = ra_trace_begin(ctx->options.trace);
    status = ra_ctx_finish(ctx, run_forward(ctx, plan, io, &call));
    ra_trace_end(ctx->options.trace, begin, "ra_attn_forward", RA_LANE_CALL,
                 ra_comm_rank(ctx->comm), 0);
    if (status) {
        spoil(ctx->backend, (const ra_tensor *const[]){&io->out, &io->lse}, 2);
    }
    return status;
}

ra_status ra_attn_backward(ra_ctx *ctx, const ra_plan *plan, const ra_backward_io *io,
                           ra_stream stream)
{
    RA_TRY(ra_ctx_check(ctx));
    ra_status status = ra_backward_check(ctx, plan, io);
    if (status) {
        return ra_ctx_finish(ctx, status);
    }
    ring_call call;
    ctx->backend->ops->use_stream(ctx->backend->self, stream);
    int64_t begin = ra_trace_begin(ctx->options.trace);
    status = ra_ctx_finish(ctx, run_backward(ctx, plan, io, &call));
    ra_trace_end(ctx->options.trace, begin, "ra_attn_backward", RA_LANE_CALL,
                 ra_comm_rank(ctx->comm), 0);
    if (status) {
        spoil(ctx->backend, (const ra_tensor *const[]){&io->dq, &io->dk, &io->dv}, 3);
    }
    return status;
}
