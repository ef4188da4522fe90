/* Delays are functions of the host that a stream waits for. */
#include "soak_rank.h"

#include <time.h>

#include "backend/cuda/check.h"
#include "comm/comm.h"
#include "support_relay.h"

/* The calls of this file are for tensors that are on the device already. */
#undef ra_attn_forward
#undef ra_attn_backward
#undef ra_backend_close

enum { COMPUTE_NS_MAX = 1500000, EXCHANGE_NS_MAX = 400000, CHANCE = 50 /* percent */ };
enum { LANDING_BYTES = 1 << 18 }; /* so that gradients come home in several pieces */

static _Thread_local soak_rank *here; /* the rank that computes on this thread */

static void doze(void *ns)
{
    struct timespec t = {0, (long)(intptr_t)ns};
    nanosleep(&t, NULL);
}

static ra_status delay_stream(const soak_rank *s, rng *r, int64_t ns_max, cudaStream_t stream)
{
    int64_t ns = rng_int(r, 0, ns_max);
    if (s->delayed && rng_chance(r, CHANCE)) {
        RA_CUDA_TRY(cudaLaunchHostFunc(stream, doze, (void *)(intptr_t)ns));
    }
    return RA_OK;
}

/* ---- computations */

static ra_status delayed_fold(void *self, const ra_fold_job *job)
{
    RA_TRY(delay_stream(here, &here->computes, COMPUTE_NS_MAX, here->compute));
    return here->real->ops->fold(self, job);
}

static ra_status delayed_grad(void *self, const ra_grad_job *job)
{
    RA_TRY(delay_stream(here, &here->computes, COMPUTE_NS_MAX, here->compute));
    return here->real->ops->grad(self, job);
}

static void wrap_backend(soak_rank *s)
{
    here = s;
    s->ops = *s->real->ops;
    s->ops.fold = delayed_fold;
    s->ops.grad = delayed_grad;
    s->ops.landing_bytes = LANDING_BYTES;
    s->backend = (ra_backend){&s->ops, s->real->self};
}

/* ---- exchanges */

static ra_status delayed_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    soak_rank *s = user;
    int64_t ns = rng_int(&s->exchanges, 0, EXCHANGE_NS_MAX);
    if (s->delayed && rng_chance(&s->exchanges, CHANCE)) {
        doze((void *)(intptr_t)ns);
    }
    return ra_comm_exchange(s->inner, xfers, count, timeout_ms);
}

/* The transfer's stream waits for another one, which is late. */
static ra_status delayed_exchange_behind(void *user, const ra_xfer *xfers, int count,
                                         int timeout_ms, const ra_order *order)
{
    soak_rank *s = user;
    ra_order later = *order;
    RA_CUDA_TRY(cudaSetDevice(s->device));
    RA_CUDA_TRY(cudaStreamWaitEvent(s->transfer, (cudaEvent_t)order->after, 0));
    RA_TRY(delay_stream(s, &s->exchanges, EXCHANGE_NS_MAX, s->transfer));
    RA_CUDA_TRY(cudaEventRecord(s->late, s->transfer));
    later.after = s->late;
    return ra_comm_exchange_behind(s->inner, xfers, count, timeout_ms, &later);
}

static ra_status wrap_comm(soak_rank *s, ra_comm **out)
{
    ra_comm_callbacks callbacks = relay_callbacks(s);
    callbacks.exchange = delayed_exchange;
    callbacks.close = relay_close_nothing;
    RA_TRY(ra_comm_open_custom(ra_comm_rank(s->inner), ra_comm_size(s->inner), &callbacks, out));
    if (ra_comm_has_exchange_behind(s->inner)) {
        ra_comm_set_exchange_behind(*out, delayed_exchange_behind);
    }
    return RA_OK;
}

/* ---- a rank */

static ra_status open_streams(soak_rank *s)
{
    RA_CUDA_TRY(cudaGetDevice(&s->device));
    RA_CUDA_TRY(cudaStreamCreateWithFlags(&s->compute, cudaStreamNonBlocking));
    RA_CUDA_TRY(cudaStreamCreateWithFlags(&s->transfer, cudaStreamNonBlocking));
    RA_CUDA_TRY(cudaEventCreateWithFlags(&s->late, cudaEventDisableTiming));
    return ra_backend_open_cuda(s->device, NULL, &s->real);
}

static ra_status put_tensors(soak_rank *s, const problem *p, const layout *l)
{
    rank_data_create(&s->data, p, l, ra_comm_rank(s->inner), STRIDES_BSHD, 0, false);
    s->forward = rank_data_forward(&s->data);
    s->backward = rank_data_backward(&s->data);
    ra_forward_io *f = &s->forward;
    ra_backward_io *b = &s->backward;
    ra_tensor *list[] = {&f->q, &f->k,   &f->v,   &f->out,  &f->lse, &b->q,  &b->k,
                         &b->v, &b->out, &b->lse, &b->dout, &b->dq,  &b->dk, &b->dv};
    return device_copy_put(&s->copy, list, sizeof list / sizeof *list);
}

bool soak_rank_open(soak_rank *s, ra_comm *inner, const problem *p, const layout *l, ra_comm **comm,
                    rank_report *report)
{
    *s = (soak_rank){.inner = inner};
    s->computes = s->exchanges = rng_of(support_seed() + (uint64_t)ra_comm_rank(inner));
    if (!report_keep(report, open_streams(s), "streams") ||
        !report_keep(report, put_tensors(s, p, l), "device tensors") ||
        !report_keep(report, wrap_comm(s, comm), "wrap")) {
        return false;
    }
    wrap_backend(s);
    return true;
}

void soak_rank_close(soak_rank *s)
{
    if (s->copy.staging) {
        device_copy_get(&s->copy);
        rank_data_free(&s->data);
    }
    ra_backend_close(s->real);
    cudaEventDestroy(s->late);
    cudaStreamDestroy(s->compute);
    cudaStreamDestroy(s->transfer);
}

bool soak_rank_call(soak_rank *s, ra_ctx *ctx, const ra_plan *plan, rank_report *report)
{
    ra_stream stream = {s->compute};
    return report_keep(report, ra_attn_forward(ctx, plan, &s->forward, stream), "forward") &&
           report_keep(report, ra_attn_backward(ctx, plan, &s->backward, stream), "backward");
}

uint64_t soak_rank_sum(soak_rank *s)
{
    uint64_t sum = 0;
    if (cudaStreamSynchronize(s->compute) ||
        ra_cuda_copy(s->copy.staging, s->copy.memory, s->copy.total, (ra_stream){0})) {
        return 0;
    }
    for (size_t i = 0; i < s->copy.total; i++) {
        sum = (sum ^ (unsigned char)s->copy.staging[i]) * 0x100000001b3u;
    }
    return sum;
}
