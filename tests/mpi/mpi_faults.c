/* One process of a ring is killed, stopped or late at a moment of its own choice, or its network is
 * cut. Every other process must return RA_E_COMM in time, naming a rank and the hop, and live on;
 * it then says so in a file. faults.sh and hosts.sh start this and read the files.
 * usage: mpi_faults DIR FAULT PHASE MOMENT CALL: FAULT is kill, stop, slow, error, cut or none,
 * PHASE forward or backward, MOMENT before, at or after the CALL-th exchange of that phase. */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "comm/comm.h"
#include "ringattn_mpi.h"
#include "support_fault.h"
#include "support_world.h"

enum { TIMEOUT_MS = 500, VICTIM = 1, SEQ = 1536 };

static const char *folder;

static void sleep_ms(int ms)
{
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

/* Forward and backward until something fails. */
static double run_until_failure(fault_wire *w, ra_comm *comm, const problem *p, rank_report *report)
{
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    double start = support_now();
    ra_ctx_options options = {.size = sizeof options, .timeout_ms = TIMEOUT_MS};
    layout l = layout_zigzag(ra_comm_size(comm), p->seq);
    ra_step_desc desc = rank_desc(p, &l, w->rank);
    report_keep(report, ra_backend_open_cpu(1, NULL, &backend), "backend");
    if (report_keep(report, ra_ctx_create(backend, comm, &p->layer, 1, &options, &ctx), "ctx") &&
        report_keep(report, ra_step_create(ctx, &desc, &step), "step")) {
        rank_data data;
        rank_data_create(&data, p, &l, w->rank, STRIDES_BHSD, 0, false);
        ra_forward_io forward = rank_data_forward(&data);
        ra_backward_io backward = rank_data_backward(&data);
        for (int i = 0; i < 3 && report->status == RA_OK; i++) {
            w->phase = FAULT_FORWARD;
            w->calls = 0;
            start = support_now();
            if (report_keep(report,
                            ra_attn_forward(ctx, ra_step_plan(step, 0), &forward, (ra_stream){0}),
                            "forward")) {
                w->phase = FAULT_BACKWARD;
                w->calls = 0;
                start = support_now();
                report_keep(report,
                            ra_attn_backward(ctx, ra_step_plan(step, 0), &backward, (ra_stream){0}),
                            "backward");
            }
        }
        rank_data_free(&data);
    }
    double seconds = support_now() - start;
    rank_desc_free(&desc);
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_comm_close(comm);
    ra_backend_close(backend);
    return seconds;
}

static bool said(int rank)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/rank.%d", folder, rank);
    return access(path, F_OK) == 0;
}

/* One line, which appears whole. */
static void say(int rank, const rank_report *report, double seconds)
{
    char path[4096], hidden[4096];
    snprintf(path, sizeof path, "%s/rank.%d", folder, rank);
    snprintf(hidden, sizeof hidden, "%s/hidden.%d", folder, rank);
    FILE *file = fopen(hidden, "w");
    if (!file || fprintf(file, "%s %.2f %lld %s: %s\n", ra_status_name(report->status), seconds,
                         (long long)ra_mpi_parked(), report->call ? report->call : "nothing",
                         report->message) < 0) {
        abort();
    }
    fclose(file);
    rename(hidden, path);
}

int main(int argc, char **argv)
{
    int level = 0, size = 0;
    MPI_Comm world = MPI_COMM_WORLD;
    fault plan;
    fault_wire w = {.plan = &plan};
    ra_comm *comm = NULL;
    rank_report report = {0};
    problem p;
    if (argc != 6) {
        return 2;
    }
    folder = argv[1];
    plan = (fault){.kind = argv[2],
                   .moment = argv[4],
                   .folder = folder,
                   .victim = VICTIM,
                   .phase = strcmp(argv[3], "forward") == 0 ? FAULT_FORWARD : FAULT_BACKWARD,
                   .call = atoi(argv[5]),
                   .late_ms = 3 * TIMEOUT_MS};
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_size(world, &size);
    rng r = rng_of(support_seed());
    problem_create(&p, layer_of(2, 2, 256, RA_F32), 1, SEQ); /* messages of several pieces */
    problem_fill_unit(&p, &r);
    int32_t pid = getpid(), pids[PROBLEM_RANKS_MAX];
    if (ra_comm_open_mpi(&world, &w.inner) ||
        ra_comm_gather(w.inner, &pid, sizeof pid, pids, 10000) || fault_comm_open(&w, &comm)) {
        fprintf(stderr, "mpi_faults: %s\n", ra_last_error());
        return 1;
    }
    double seconds = run_until_failure(&w, comm, &p, &report);
    say(w.rank, &report, seconds);
    problem_free(&p);
    /* Nobody leaves before everybody has spoken: launchers end a job when its ranks leave. A
     * stopped rank runs on when the others are done, and must fail as well. */
    bool waits_for_victim = strcmp(plan.kind, "kill") != 0;
    for (int waited = 0; waited < 400; waited++) {
        int left = 0, left_alive = 0;
        for (int rank = 0; rank < size; rank++) {
            left += (waits_for_victim || rank != VICTIM) && !said(rank);
            left_alive += rank != VICTIM && !said(rank);
        }
        if (left == 0) {
            break;
        }
        if (left_alive == 0 && w.rank == 0 && strcmp(plan.kind, "stop") == 0) {
            kill(pids[VICTIM], SIGCONT);
        }
        sleep_ms(20);
    }
    sleep_ms(100);
    if (strcmp(plan.kind, "none") == 0) {
        MPI_Finalize();
    }
    fflush(NULL);
    _exit(0);
}
