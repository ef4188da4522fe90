/* 500 calls, forward and backward, over NCCL on two GPUs, one behind the other: the memory in use
 * stays, and delays of the streams that compute and that transfer change no bit of a result. */
#include "nccl_world.h"
#include "soak_rank.h"

#include <math.h>
#include <stdio.h>

#include "comm/comm.h"

enum { TIMEOUT_MS = 20000, CALLS = 500, SEQ = 512 };

static void soak_calls(soak_rank *s, ra_ctx *ctx, const ra_plan *plan, rank_report *report)
{
    uint64_t first = 0;
    size_t free_before = 0, free_after = 0, total = 0;
    for (int call = 0; call < CALLS && !report->status; call++) {
        s->delayed = call % 5 == 4; /* the others follow each other closely */
        if (!soak_rank_call(s, ctx, plan, report)) {
            break;
        }
        if (s->delayed || call == 0) {
            uint64_t sum = soak_rank_sum(s);
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
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_comm *comm = NULL;
    soak_rank s;
    ra_step_desc desc = rank_desc(p, &l, rank);
    ra_ctx_options options = {.size = sizeof options, .timeout_ms = TIMEOUT_MS};
    if (soak_rank_open(&s, inner, p, &l, &comm, report) &&
        report_keep(report, ra_ctx_create(&s.backend, comm, &p->layer, 1, &options, &ctx), "ctx") &&
        report_keep(report, ra_step_create(ctx, &desc, &step), "step")) {
        soak_calls(&s, ctx, ra_step_plan(step, 0), report);
    }
    rank_desc_free(&desc);
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_comm_close(comm);
    soak_rank_close(&s);
    ra_comm_close(inner);
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
