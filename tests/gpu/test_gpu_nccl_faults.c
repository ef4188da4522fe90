/* Faults over NCCL, two processes with a GPU each: one is killed, stopped or late, or returns an
 * error, or their link is cut, before, in the middle of or after an exchange, in the forward and in
 * the backward. The other must return RA_E_COMM within the time-out + 2 s, naming a rank and the
 * hop, free its memory, live, and open a new communicator. Worlds run beside each other, but for
 * two in which the memory is watched. The link that is cut is the loopback of a network namespace
 * in which NCCL is told to use nothing but sockets. */
#include "nccl_world.h"
#include "support_fault.h"

#include <cuda_runtime_api.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "comm/comm.h"

enum { TIMEOUT_MS = 1000, WARM_MS = 20000, VICTIM = 1, SEQ = 4096, BESIDE = 6, WORLDS_MAX = 32 };

static const char *const only_sockets[][2] = {
    {"NCCL_P2P_DISABLE", "1"}, {"NCCL_SHM_DISABLE", "1"},    {"NCCL_IB_DISABLE", "1"},
    {"NCCL_NET", "Socket"},    {"NCCL_SOCKET_IFNAME", "lo"},
};

/* One world's fault, and what its ranks say; shared. */
typedef struct trial {
    fault plan;
    const problem *p;
    double seconds[2];      /* of the call that failed */
    bool lives[2];          /* a communicator of its own works afterwards */
    bool alone;             /* runs alone, so that the device's free memory means something */
    long long freed_mib[2]; /* by closing the comm */
    rank_report seen[2];
} trial;

static size_t free_memory(void)
{
    size_t available = 0, total = 0;
    cudaDeviceSynchronize();
    cudaMemGetInfo(&available, &total);
    return available;
}

/* Forward and backward until something fails; the first pair without a fault, for NCCL connects
 * its ranks at the first exchange. */
static void call_until_failure(fault_wire *w, ra_ctx *ctx, const ra_plan *plan, rank_data *data,
                               trial *t)
{
    ra_forward_io forward = rank_data_forward(data);
    ra_backward_io backward = rank_data_backward(data);
    rank_report *seen = &t->seen[w->rank];
    for (int i = 0; i < 3 && seen->status == RA_OK; i++) {
        double start = support_now();
        w->phase = FAULT_FORWARD;
        w->calls = 0;
        if (report_keep(seen, ra_attn_forward(ctx, plan, &forward, (ra_stream){0}), "forward")) {
            start = support_now();
            w->phase = FAULT_BACKWARD;
            w->calls = 0;
            report_keep(seen, ra_attn_backward(ctx, plan, &backward, (ra_stream){0}), "backward");
        }
        t->seconds[w->rank] = support_now() - start;
    }
}

static void run_ctx(fault_wire *w, ra_comm *comm, trial *t, int timeout_ms)
{
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    rank_report *seen = &t->seen[w->rank];
    layout l = layout_zigzag(2, t->p->seq);
    ra_step_desc desc = rank_desc(t->p, &l, w->rank);
    ra_ctx_options options = {.size = sizeof options, .timeout_ms = timeout_ms};
    report_keep(seen, ra_backend_open_cpu(1, NULL, &backend), "backend");
    if (report_keep(seen, ra_ctx_create(backend, comm, &t->p->layer, 1, &options, &ctx), "ctx") &&
        report_keep(seen, ra_step_create(ctx, &desc, &step), "step")) {
        rank_data data;
        rank_data_create(&data, t->p, &l, w->rank, STRIDES_BHSD, 0, false);
        if (timeout_ms == WARM_MS) {
            ra_forward_io forward = rank_data_forward(&data);
            ra_backward_io backward = rank_data_backward(&data);
            const ra_plan *plan = ra_step_plan(step, 0);
            report_keep(seen, ra_attn_forward(ctx, plan, &forward, (ra_stream){0}), "warm");
            report_keep(seen, ra_attn_backward(ctx, plan, &backward, (ra_stream){0}), "warm");
        } else {
            call_until_failure(w, ctx, ra_step_plan(step, 0), &data, t);
        }
        rank_data_free(&data);
    }
    rank_desc_free(&desc);
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_backend_close(backend);
}

/* Does the process still have a working device and NCCL? */
static bool lives_on(int rank)
{
    ra_nccl_id id;
    ra_comm *comm = NULL;
    int32_t mine = rank + 40, all = 0;
    bool works = ra_nccl_id_create(&id) == RA_OK &&
                 ra_comm_open_nccl(&id, 0, 1, rank, &comm) == RA_OK &&
                 ra_comm_gather(comm, &mine, sizeof mine, &all, WARM_MS) == RA_OK && all == mine;
    ra_comm_close(comm);
    return works;
}

/* Restores a link that was cut, when nobody waits for it any more: a new communicator needs it. */
static void mend(const trial *t, int rank)
{
    struct timespec nap = {0, 50000000};
    double limit = support_now() + 10;
    if (strcmp(t->plan.kind, "cut") == 0) {
        while (!*(volatile const ra_status *)&t->seen[1 - rank].status && support_now() < limit) {
            nanosleep(&nap, NULL);
        }
        fault_network_set(true);
    }
}

static void run_trial(int rank, ra_comm *inner, void *arg, rank_report *report)
{
    trial *t = arg;
    fault none = {.kind = "none", .moment = ""};
    fault_wire w = {.inner = inner, .plan = &none};
    ra_comm *comm = NULL;
    if (!report_keep(report, fault_comm_open(&w, &comm), "wrap")) {
        return;
    }
    run_ctx(&w, comm, t, WARM_MS);
    size_t before = free_memory();
    w.plan = &t->plan;
    if (!t->seen[rank].status) {
        run_ctx(&w, comm, t, TIMEOUT_MS);
    }
    mend(t, rank);
    ra_comm_close(comm);
    t->freed_mib[rank] = ((long long)free_memory() - (long long)before) / (1 << 20);
    t->lives[rank] = lives_on(rank);
}

static void judge(const trial *t, const nccl_world *w, int *failures)
{
    const rank_report *r = &t->seen[1 - VICTIM];
    bool killed = strcmp(t->plan.kind, "kill") == 0, none = strcmp(t->plan.kind, "none") == 0;
    bool right = none ? r->status == RA_OK && t->seen[VICTIM].status == RA_OK
                      : r->status == RA_E_COMM && strstr(r->message, "rank ") &&
                            strstr(r->message, "hop ") &&
                            t->seconds[1 - VICTIM] < 1e-3 * TIMEOUT_MS + 2 &&
                            (killed || t->seen[VICTIM].status == RA_E_COMM);
    right = right && t->lives[1 - VICTIM] && (killed || t->lives[VICTIM]) &&
            (!t->alone || t->freed_mib[1 - VICTIM] > 0) && w->report[1 - VICTIM].status == RA_OK &&
            (killed || w->report[VICTIM].status == RA_OK);
    printf("%-5s %-8s %-6s: %4.2f s: %s", t->plan.kind,
           t->plan.phase == FAULT_FORWARD ? "forward" : "backward", t->plan.moment,
           t->seconds[1 - VICTIM], right ? "ok" : "FAILED");
    if (t->alone) {
        printf(", %lld MiB freed", t->freed_mib[1 - VICTIM]);
    }
    printf("; %s\n", r->message);
    for (int rank = 0; !right && rank < 2; rank++) {
        printf("  rank %d: %s %s, %.2f s, lives %d; process: %s\n", rank,
               ra_status_name(t->seen[rank].status), t->seen[rank].message, t->seconds[rank],
               t->lives[rank], w->report[rank].message);
    }
    *failures += !right;
}

/* Wakes the stopped when their survivors have had their time, and waits for all. */
static void finish(trial *trials, nccl_world *worlds, int count, int *failures)
{
    struct timespec nap = {0, 50000000};
    for (int i = 0; i < count; i++) {
        const char *kind = trials[i].plan.kind;
        double limit = support_now() + 60;
        while (strcmp(kind, "stop") == 0 && !trials[i].lives[1 - VICTIM] && support_now() < limit) {
            nanosleep(&nap, NULL);
        }
        if (strcmp(kind, "stop") == 0) {
            kill(worlds[i].child[VICTIM], SIGCONT);
        }
        nccl_world_wait(&worlds[i]);
        judge(&trials[i], &worlds[i], failures);
    }
}

static fault fault_of(const char *kind, const char *moment, int phase)
{
    return (fault){.kind = kind,
                   .moment = moment,
                   .victim = VICTIM,
                   .phase = phase,
                   .call = 1,
                   .late_ms = 3 * TIMEOUT_MS};
}

/* A fault at every moment. */
static void list_moments(const char *kind, trial *trials, int *count)
{
    static const char *const moments[] = {"before", "at", "after"};
    for (int phase = FAULT_FORWARD; phase <= FAULT_BACKWARD; phase++) {
        for (int m = 0; m < 3; m++) {
            trials[(*count)++] = (trial){.plan = fault_of(kind, moments[m], phase)};
        }
    }
}

static void run_trials(trial *trials, int count, const problem *p, int *failures)
{
    nccl_world worlds[WORLDS_MAX];
    for (int i = 0; i < count; i++) {
        trials[i].p = p;
    }
    for (int first = 0, beside; first < count; first += beside) {
        beside = trials[first].alone ? 1 : count - first < BESIDE ? count - first : BESIDE;
        support_limit(100, "faults over NCCL from number %d on", first);
        for (int i = first; i < first + beside; i++) {
            if (strcmp(trials[i].plan.kind, "cut") == 0) {
                assert_true(fault_network_own()); /* each world its own */
            }
            nccl_world_start(&worlds[i], 2, run_trial, &trials[i]);
        }
        finish(trials + first, worlds + first, beside, failures);
    }
}

static void make_problem(problem *p)
{
    rng r = rng_of(support_seed());
    problem_create(p, layer_of(4, 2, 256, RA_BF16), 1, SEQ);
    problem_fill_unit(p, &r);
}

static void test_faults(void **state)
{
    (void)state;
    static const char *const kinds[] = {"kill", "stop", "slow", "error"};
    trial *trials = shared_memory(WORLDS_MAX * sizeof *trials);
    problem p;
    int failures = 0, count = 0;
    make_problem(&p);
    trials[count++] = (trial){.plan = fault_of("none", "before", FAULT_FORWARD), .alone = true};
    trials[count++] = (trial){.plan = fault_of("error", "at", FAULT_FORWARD), .alone = true};
    for (int k = 0; k < 4; k++) {
        list_moments(kinds[k], trials, &count);
    }
    run_trials(trials, count, &p, &failures);
    problem_free(&p);
    assert_int_equal(failures, 0);
}

/* The last test: this process stays in a network of its own. */
static void test_cut_link(void **state)
{
    (void)state;
    trial *trials = shared_memory(WORLDS_MAX * sizeof *trials);
    problem p;
    int failures = 0, count = 0;
    if (!fault_network_own()) {
        printf("skipped: a cut link needs a network namespace, which needs root\n");
        return;
    }
    for (size_t i = 0; i < sizeof only_sockets / sizeof *only_sockets; i++) {
        setenv(only_sockets[i][0], only_sockets[i][1], 1);
    }
    make_problem(&p);
    list_moments("cut", trials, &count);
    run_trials(trials, count, &p, &failures);
    problem_free(&p);
    assert_int_equal(failures, 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_faults),
                                       cmocka_unit_test(test_cut_link)};
    support_start(argc, argv);
    if (nccl_devices() < 2 || nccl_unavailable()) {
        printf("skipped: faults over NCCL need 2 GPUs and NCCL, here are %d: %s\n", nccl_devices(),
               nccl_unavailable() ? nccl_unavailable() : "NCCL refuses two ranks on one");
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
