/* The faults of threads of one process, one of three ranks each: late, or an error, before, in the
 * middle of and after an exchange, in the forward and in the backward. The others return RA_E_COMM
 * within the time-out + 2 s, naming a rank and the hop, and nothing leaks. tests/mpi and
 * tests/gpu/test_gpu_nccl_faults.c do the same to processes; docs/ring.md has all in one table. */
#include "support_fault.h"
#include "support_world.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { RANKS = 3, VICTIM = 1, TIMEOUT_MS = 300, LATE_MS = 900, SEQ = 96 };

typedef struct trial {
    fault plan;
    problem p;
    layout l;
    double seconds[RANKS]; /* of the call that failed */
    rank_report report[RANKS];
    ra_alloc_probe probe[RANKS];
} trial;

/* Forward and backward until something fails; the last exchange's fault is found by the next. */
static void call_until_failure(trial *t, fault_wire *w, ra_ctx *ctx, const ra_plan *plan)
{
    rank_report *report = &t->report[w->rank];
    rank_data data;
    rank_data_create(&data, &t->p, &t->l, w->rank, STRIDES_BHSD, 0, false);
    ra_forward_io forward = rank_data_forward(&data);
    ra_backward_io backward = rank_data_backward(&data);
    for (int i = 0; i < 3 && report->status == RA_OK; i++) {
        double start = support_now();
        w->phase = FAULT_FORWARD;
        w->calls = 0;
        if (report_keep(report, ra_attn_forward(ctx, plan, &forward, (ra_stream){0}), "forward")) {
            start = support_now();
            w->phase = FAULT_BACKWARD;
            w->calls = 0;
            report_keep(report, ra_attn_backward(ctx, plan, &backward, (ra_stream){0}), "backward");
        }
        t->seconds[w->rank] = support_now() - start;
    }
    rank_data_free(&data);
}

static void run_rank(int rank, ra_comm *inner, void *arg)
{
    trial *t = arg;
    fault_wire w = {.inner = inner, .plan = &t->plan, .borrowed = true};
    ra_comm *comm = NULL;
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    rank_report *report = &t->report[rank];
    ra_alloc_probe *before = ra_alloc_watch(&t->probe[rank]);
    ra_ctx_options options = {.size = sizeof options, .timeout_ms = TIMEOUT_MS};
    ra_step_desc desc = rank_desc(&t->p, &t->l, rank);
    if (report_keep(report, fault_comm_open(&w, &comm), "wire") &&
        report_keep(report, ra_backend_open_cpu(1, NULL, &backend), "backend") &&
        report_keep(report, ra_ctx_create(backend, comm, &t->p.layer, 1, &options, &ctx), "ctx") &&
        report_keep(report, ra_step_create(ctx, &desc, &step), "step")) {
        call_until_failure(t, &w, ctx, ra_step_plan(step, 0));
    }
    rank_desc_free(&desc);
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_comm_close(comm);
    ra_backend_close(backend);
    ra_alloc_watch(before);
}

static void run_trial(const char *kind, int phase, const char *moment, const problem *p)
{
    const char *name = phase == FAULT_FORWARD ? "forward" : "backward";
    double worst = 0;
    trial t = {.plan = {.kind = kind,
                        .moment = moment,
                        .victim = VICTIM,
                        .phase = phase,
                        .call = 1,
                        .late_ms = LATE_MS},
               .p = *p,
               .l = layout_zigzag(RANKS, p->seq)};
    support_limit(20, "%s, %s, %s", kind, name, moment);
    assert_true(world_each(RANKS, run_rank, &t));
    for (int rank = 0; rank < RANKS; rank++) {
        const rank_report *r = &t.report[rank];
        bool placed = strstr(r->message, "rank ") && strstr(r->message, "hop ");
        if (r->status != RA_E_COMM || (rank != VICTIM && !placed)) {
            fail_msg("%s: rank %d: %s: %s", support_case(), rank, ra_status_name(r->status),
                     r->message);
        }
        assert_true(atomic_load(&t.probe[rank].live_bytes) == 0);
        worst = rank != VICTIM && t.seconds[rank] > worst ? t.seconds[rank] : worst;
    }
    assert_true(worst < 1e-3 * TIMEOUT_MS + 2);
    printf("%-5s %-8s %-6s: %4.2f s: ok; %s\n", kind, name, moment, worst, t.report[0].message);
}

static void every_moment(void **state)
{
    (void)state;
    static const char *const kinds[] = {"slow", "error"};
    static const char *const moments[] = {"before", "at", "after"};
    problem p;
    rng r = rng_of(support_seed());
    problem_create(&p, layer_of(2, 1, 16, RA_F32), 1, SEQ);
    problem_fill_unit(&p, &r);
    for (int k = 0; k < 2; k++) {
        for (int phase = FAULT_FORWARD; phase <= FAULT_BACKWARD; phase++) {
            for (int m = 0; m < 3; m++) {
                run_trial(kinds[k], phase, moments[m], &p);
            }
        }
    }
    printf("kill: n/a: SIGKILL ends the whole process, all ranks of it\n"
           "stop: n/a: SIGSTOP stops the whole process, all ranks of it\n"
           "cut : n/a: threads of one process have no link\n");
    problem_free(&p);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_moment)};
    support_start(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
