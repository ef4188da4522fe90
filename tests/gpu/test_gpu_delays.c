/* Delays of the streams that compute and that transfer change no bit: thread ranks on one GPU,
 * chunked and neighbourhood plans, exchanges that the host starts and exchanges that are queued on
 * the device. Over NCCL test_gpu_nccl_soak.c does the same. */
#include "soak_rank.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 3, CALLS = 30, SEQ = 400 };

typedef struct job {
    problem p;
    layout l;
    rank_report report[RANKS];
} job;

static void run_calls(soak_rank *s, ra_ctx *ctx, const ra_plan *plan, rank_report *report)
{
    uint64_t first = 0;
    for (int call = 0; call < CALLS; call++) {
        s->delayed = call > 0;
        if (!soak_rank_call(s, ctx, plan, report)) {
            return;
        }
        if (call % 3 == 0) { /* the others follow each other closely */
            uint64_t sum = soak_rank_sum(s);
            first = call == 0 ? sum : first;
            report_keep(report, sum == first ? RA_OK : RA_E_DEVICE, "bits of a call with delays");
        }
    }
}

static void run_rank(int rank, ra_comm *inner, void *arg)
{
    job *j = arg;
    rank_report *report = &j->report[rank];
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_comm *comm = NULL;
    soak_rank s;
    ra_step_desc desc = rank_desc(&j->p, &j->l, rank);
    ra_ctx_options options = {.size = sizeof options, .timeout_ms = 20000};
    if (soak_rank_open(&s, inner, &j->p, &j->l, &comm, report) &&
        report_keep(report, ra_ctx_create(&s.backend, comm, &j->p.layer, 1, &options, &ctx),
                    "ctx") &&
        report_keep(report, ra_step_create(ctx, &desc, &step), "step")) {
        run_calls(&s, ctx, ra_step_plan(step, 0), report);
    }
    rank_desc_free(&desc);
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_comm_close(comm);
    soak_rank_close(&s);
}

static void test_delays(void **state)
{
    (void)state;
    static const struct {
        int q_heads, kv_heads, head_dim;
        int64_t window;
    } kinds[] = {{8, 2, 512, 0}, {4, 2, 256, 60}};
    for (int i = 0; i < 4; i++) {
        job j = {0};
        rng r = rng_of(support_seed() + (uint64_t)i);
        ra_layer layer =
            layer_of(kinds[i / 2].q_heads, kinds[i / 2].kv_heads, kinds[i / 2].head_dim, RA_BF16);
        layer.scale = 1.0f / sqrtf((float)layer.head_dim);
        layer.window = kinds[i / 2].window;
        problem_create(&j.p, layer, 1, SEQ);
        problem_fill_unit(&j.p, &r);
        j.l = layer.window ? layout_contiguous(RANKS, SEQ) : layout_zigzag(RANKS, SEQ);
        setenv("RA_TEST_QUEUED", i % 2 ? "1" : "0", 1);
        support_limit(60, "delays, head_dim %d, %s", layer.head_dim,
                      i % 2 ? "queued on the device" : "started by the host");
        assert_true(world_each(RANKS, run_rank, &j));
        for (int rank = 0; rank < RANKS; rank++) {
            if (j.report[rank].status) {
                fail_msg("%s: rank %d: %s: %s", support_case(), rank, j.report[rank].call,
                         j.report[rank].message);
            }
        }
        problem_free(&j.p);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_delays)};
    support_start(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
