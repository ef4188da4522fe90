/* What a forward and a backward take of the device beside the caller's tensors, at its peak, is
 * what the plan states: the ctx's scratch and the workspace of the backend's options. The driver's
 * pool of work lists, 32 MiB at the least, is in the 5 % that it may be off. Watched by asking the
 * driver all the while, so nothing else may use the device. */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

#include "on_device.h"
#include "ringattn_cuda.h"
#include "support.h"
#include "tensor/tensor.h"

/* Tensors stay on the device: no copies around the calls. */
#undef ra_attn_forward
#undef ra_attn_backward
#undef ra_backend_close

enum { Q_HEADS = 8, KV_HEADS = 1, SEQ = 16384, CHAN = 512, RANKS_MAX = 2 };
enum { Q, K, V, DOUT, OUT, DQ, DK, DV, LSE, TENSORS };

static const size_t workspace = (size_t)544 << 20; /* the default */

typedef struct rank_job {
    pthread_t thread;
    ra_comm *comm;
    int64_t seq; /* of this rank */
    ra_tensor tensor[TENSORS];
    uint64_t stated; /* bytes */
    char failure[256];
} rank_job;

/* ---- one rank; failures are told to the thread that may end the test */

static ra_status compute(rank_job *job, ra_ctx *ctx, const ra_plan *plan)
{
    const ra_tensor *t = job->tensor;
    ra_forward_io forward = {
        .size = sizeof forward, .q = t[Q], .k = t[K], .v = t[V], .out = t[OUT], .lse = t[LSE]};
    ra_backward_io backward = {.size = sizeof backward,
                               .q = t[Q],
                               .k = t[K],
                               .v = t[V],
                               .out = t[OUT],
                               .lse = t[LSE],
                               .dout = t[DOUT],
                               .dq = t[DQ],
                               .dk = t[DK],
                               .dv = t[DV]};
    ra_plan_info info = {.size = sizeof info};
    RA_TRY(ra_plan_inspect(plan, &info));
    job->stated = workspace + (info.scratch_forward_bytes > info.scratch_backward_bytes
                                   ? info.scratch_forward_bytes
                                   : info.scratch_backward_bytes);
    RA_TRY(ra_attn_forward(ctx, plan, &forward, (ra_stream){0}));
    RA_TRY(ra_attn_backward(ctx, plan, &backward, (ra_stream){0}));
    return ra_cuda_wait((ra_stream){0});
}

static ra_status run_rank(rank_job *job)
{
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_layer layer = {.size = sizeof layer,
                      .q_heads = Q_HEADS,
                      .kv_heads = KV_HEADS,
                      .head_dim = CHAN,
                      .dtype = RA_BF16,
                      .scale = 0.0442f, /* 1 / sqrt(CHAN) */
                      .causal = true};
    ra_step_desc desc = {.size = sizeof desc, .rows = 1, .seq_local = job->seq};
    ra_cuda_options options = {.size = sizeof options, .workspace_bytes = workspace};
    ra_status status = ra_backend_open_cuda(0, &options, &backend);
    status = status ? status : ra_ctx_create(backend, job->comm, &layer, 1, NULL, &ctx);
    status = status ? status : ra_step_create(ctx, &desc, &step);
    status = status ? status : compute(job, ctx, ra_step_plan(step, 0));
    if (status) {
        snprintf(job->failure, sizeof job->failure, "%s", ra_last_error());
    }
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_backend_close(backend);
    return status;
}

static void *rank_main(void *user)
{
    run_rank(user);
    return NULL;
}

/* ---- all ranks, beside their tensors */

static ra_tensor new_tensor(int which, int64_t seq)
{
    bool of_keys = which == K || which == V || which == DK || which == DV;
    ra_tensor t = ra_tensor_bhsd(NULL, which == LSE ? RA_F32 : RA_BF16, 1,
                                 of_keys ? KV_HEADS : Q_HEADS, seq, which == LSE ? 1 : CHAN);
    size_t bytes = (size_t)ra_tensor_count(&t) * ra_dtype_bytes(t.dtype);
    assert_int_equal(ra_cuda_alloc(0, bytes, &t.data), RA_OK);
    return t;
}

/* 0 if the driver does not say. */
static size_t free_bytes(void)
{
    size_t free = 0, total = 0;
    return cudaMemGetInfo(&free, &total) == cudaSuccess ? free : 0;
}

typedef struct watch {
    pthread_t thread;
    atomic_bool over;
    size_t least; /* bytes that were free */
} watch;

static void *watch_main(void *user)
{
    watch *w = user;
    const struct timespec pause = {.tv_nsec = 200000};
    while (!atomic_load(&w->over)) {
        size_t now = free_bytes();
        w->least = now < w->least ? now : w->least;
        nanosleep(&pause, NULL);
    }
    return NULL;
}

/* Bytes that the ranks took at the most, and what their plans state. */
static uint64_t run_ranks(int ranks, int64_t seq, uint64_t *stated)
{
    rank_job job[RANKS_MAX] = {0};
    ra_comm *comm[RANKS_MAX];
    assert_int_equal(ra_comm_open_threads_cuda(ranks, comm), RA_OK);
    for (int rank = 0; rank < ranks; rank++) {
        job[rank].comm = comm[rank];
        job[rank].seq = seq / ranks;
        for (int i = 0; i < TENSORS; i++) {
            job[rank].tensor[i] = new_tensor(i, job[rank].seq);
        }
    }
    size_t before = free_bytes();
    assert_true(before > 0);
    watch w = {.least = before};
    assert_int_equal(pthread_create(&w.thread, NULL, watch_main, &w), 0);
    for (int rank = 0; rank < ranks; rank++) {
        assert_int_equal(pthread_create(&job[rank].thread, NULL, rank_main, &job[rank]), 0);
    }
    *stated = 0;
    for (int rank = 0; rank < ranks; rank++) {
        pthread_join(job[rank].thread, NULL);
        *stated += job[rank].stated;
    }
    atomic_store(&w.over, true);
    pthread_join(w.thread, NULL);
    for (int rank = 0; rank < ranks; rank++) {
        assert_string_equal(job[rank].failure, "");
        ra_comm_close(comm[rank]);
        for (int i = 0; i < TENSORS; i++) {
            ra_cuda_free(job[rank].tensor[i].data);
        }
    }
    return before - w.least;
}

static void test_peak(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= RANKS_MAX; ranks++) {
        uint64_t stated = 0;
        support_limit(100, "peak memory on %d ranks", ranks);
        run_ranks(ranks, 1024, &stated); /* loads the kernels, which stay */
        uint64_t peak = run_ranks(ranks, SEQ, &stated);
        double ratio = (double)peak / (double)stated;
        printf("%d ranks: %.1f MiB at the peak, %.1f stated, ratio %.4f\n", ranks,
               (double)peak * 0x1p-20, (double)stated * 0x1p-20, ratio);
        assert_true(ratio > 0.95 && ratio < 1.05);
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_peak)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
