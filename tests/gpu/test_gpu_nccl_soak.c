/* 500 calls, forward and backward, over NCCL on two GPUs, one behind the other: the memory in use
 * stays, and delays of the computation and of the exchanges change no bit of a result. */
#include "nccl_world.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

#include "comm/comm.h"
#include "support_relay.h"

/* The calls of this file are for tensors that are on the device already. */
#undef ra_attn_forward
#undef ra_attn_backward
#undef ra_backend_close

enum { TIMEOUT_MS = 20000, CALLS = 500, SEQ = 512 };

/* Ready-made device tensors, so that call follows call. */
typedef struct soak {
    ra_comm *inner;       /* first, for support_relay.h */
    rng exchanges, calls; /* delays, on two threads */
    atomic_bool delayed;
    device_copy copy;
    rank_data data;
    ra_forward_io forward;
    ra_backward_io backward;
} soak;

static void doze(void *arg)
{
    struct timespec t = {0, *(const long *)arg};
    nanosleep(&t, NULL);
}

static ra_status soak_exchange_behind(void *user, const ra_xfer *xfers, int count, int timeout_ms,
                                      const ra_order *order)
{
    soak *s = user;
    long ns = rng_int(&s->exchanges, 0, 400000);
    if (s->delayed) {
        doze(&ns);
    }
    return order ? ra_comm_exchange_behind(s->inner, xfers, count, timeout_ms, order)
                 : ra_comm_exchange(s->inner, xfers, count, timeout_ms);
}

static ra_status soak_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    return soak_exchange_behind(user, xfers, count, timeout_ms, NULL);
}

static bool soak_open(soak *s, ra_comm *inner, int rank, const problem *p, const layout *l,
                      ra_comm **out, rank_report *report)
{
    ra_comm_callbacks callbacks = relay_callbacks(s);
    callbacks.exchange = soak_exchange;
    *s = (soak){.inner = inner};
    s->exchanges = s->calls = rng_of(support_seed() + (uint64_t)rank);
    rank_data_create(&s->data, p, l, rank, STRIDES_BSHD, 0, false);
    s->forward = rank_data_forward(&s->data);
    s->backward = rank_data_backward(&s->data);
    ra_forward_io *f = &s->forward;
    ra_backward_io *b = &s->backward;
    ra_tensor *list[] = {&f->q, &f->k,   &f->v,   &f->out,  &f->lse, &b->q,  &b->k,
                         &b->v, &b->out, &b->lse, &b->dout, &b->dq,  &b->dk, &b->dv};
    bool open = report_keep(report, device_copy_put(&s->copy, list, sizeof list / sizeof *list),
                            "device tensors") &&
                report_keep(report, ra_comm_open_custom(rank, 2, &callbacks, out), "wrap");
    if (open) {
        ra_comm_set_exchange_behind(*out, soak_exchange_behind);
    }
    return open;
}

/* Bits of all results, summed with their places. */
static uint64_t checksum(soak *s)
{
    uint64_t sum = 0;
    if (ra_cuda_copy(s->copy.staging, s->copy.memory, s->copy.total, (ra_stream){0})) {
        return 0;
    }
    for (size_t i = 0; i < s->copy.total; i++) {
        sum = (sum ^ (unsigned char)s->copy.staging[i]) * 0x100000001b3u;
    }
    return sum;
}

static void soak_calls(soak *s, ra_ctx *ctx, const ra_plan *plan, rank_report *report)
{
    uint64_t first = 0;
    size_t free_before = 0, free_after = 0, total = 0;
    for (int call = 0; call < CALLS && !report->status; call++) {
        long ns = rng_int(&s->calls, 0, 1500000);
        s->delayed = call % 5 == 4; /* the others follow each other closely */
        if (s->delayed) {
            cudaLaunchHostFunc(NULL, doze, &ns);
        }
        if (!report_keep(report, ra_attn_forward(ctx, plan, &s->forward, (ra_stream){0}),
                         "forward") ||
            !report_keep(report, ra_attn_backward(ctx, plan, &s->backward, (ra_stream){0}),
                         "backward")) {
            break;
        }
        if (s->delayed || call == 0) {
            uint64_t sum = checksum(s); /* waits, so that ns is not needed any more */
            first = call == 0 ? sum : first;
            nccl_expect(report, sum == first, "bits of a call with delays");
        }
        if (call == 20) {
            cudaMemGetInfo(&free_before, &total);
        }
    }
    cudaMemGetInfo(&free_after, &total);
    printf("rank %d: %zu bytes free behind call 20, %zu behind call %d\n", ra_comm_rank(s->inner),
           free_before, free_after, CALLS);
    nccl_expect(report, report->status || free_before == free_after, "memory after 500 calls");
}

static void run_soak(int rank, ra_comm *inner, void *arg, rank_report *report)
{
    const problem *p = arg;
    layout l = layout_zigzag(2, p->seq);
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_comm *comm = NULL;
    soak s;
    ra_step_desc desc = rank_desc(p, &l, rank);
    ra_ctx_options options = {.size = sizeof options, .timeout_ms = TIMEOUT_MS};
    if (soak_open(&s, inner, rank, p, &l, &comm, report) &&
        report_keep(report, ra_backend_open_cuda(rank, NULL, &backend), "backend") &&
        report_keep(report, ra_ctx_create(backend, comm, &p->layer, 1, &options, &ctx), "ctx") &&
        report_keep(report, ra_step_create(ctx, &desc, &step), "step")) {
        soak_calls(&s, ctx, ra_step_plan(step, 0), report);
    }
    rank_desc_free(&desc);
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_comm_close(comm);
    ra_backend_close(backend);
    device_copy_get(&s.copy);
    rank_data_free(&s.data);
}

static void test_soak(void **state)
{
    (void)state;
    problem p;
    rng r = rng_of(support_seed());
    ra_layer layer = layer_of(8, 2, 512, RA_BF16);
    layer.scale = 1.0f / sqrtf(512.0f);
    problem_create(&p, layer, 1, SEQ);
    problem_fill_unit(&p, &r);
    support_limit(100, "500 calls on 2 GPUs");
    nccl_world_run(2, run_soak, &p);
    problem_free(&p);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_soak)};
    support_start(argc, argv);
    if (nccl_devices() < 2 || nccl_unavailable()) {
        printf("skipped: 500 calls over NCCL need 2 GPUs and NCCL, here are %d: %s\n",
               nccl_devices(),
               nccl_unavailable() ? nccl_unavailable() : "NCCL refuses two ranks on one");
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
