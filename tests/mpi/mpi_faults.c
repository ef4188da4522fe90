/* One process of a ring is killed, stopped or late at a moment of its own choice. Every other
 * process must return RA_E_COMM in time, naming a rank and the hop, and live on; it then says so in
 * a file. faults.sh starts this and reads the files.
 * usage: mpi_faults DIR FAULT PHASE MOMENT CALL: FAULT is kill, stop, slow, error or none, PHASE
 * forward or backward, MOMENT before, at or after the CALL-th exchange of that phase. */
#include <mpi.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "comm/comm.h"
#include "ringattn_mpi.h"
#include "support_world.h"

enum { TIMEOUT_MS = 500, VICTIM = 1, SEQ = 1536 };

typedef struct wire {
    ra_comm *inner;
    int rank, phase, calls; /* phase: 0 = set-up, 1 = forward, 2 = backward; calls of this phase */
} wire;

static struct plan {
    const char *folder, *fault, *moment;
    int phase, call;
} plan;

static void sleep_ms(int ms)
{
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

static ra_status strike(const char *moment, const wire *w)
{
    if (w->rank != VICTIM || w->phase != plan.phase || w->calls != plan.call ||
        strcmp(moment, plan.moment) != 0) {
        return RA_OK;
    }
    if (strcmp(plan.fault, "kill") == 0) {
        kill(getpid(), SIGKILL);
    } else if (strcmp(plan.fault, "stop") == 0) {
        kill(getpid(), SIGSTOP);
    } else if (strcmp(plan.fault, "slow") == 0) {
        sleep_ms(3 * TIMEOUT_MS);
    } else if (strcmp(plan.fault, "error") == 0) {
        return ra_fail(RA_E_COMM, "the network card caught fire");
    }
    return RA_OK;
}

/* In the middle of an exchange, from a thread beside it. */
static void *strike_later(void *arg)
{
    struct timespec t = {0, 100000};
    nanosleep(&t, NULL);
    const wire *w = arg;
    if (strike("at", w)) {
        ra_comm_abort(w->inner, ra_last_error());
    }
    return NULL;
}

static ra_status wire_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    wire *w = user;
    pthread_t thread;
    w->calls++;
    bool beside = strcmp(plan.moment, "at") == 0 && w->rank == VICTIM && w->phase == plan.phase &&
                  w->calls == plan.call && !pthread_create(&thread, NULL, strike_later, w);
    ra_status status = strike("before", w);
    status = status ? status : ra_comm_exchange(w->inner, xfers, count, timeout_ms);
    if (beside) {
        pthread_join(thread, NULL);
    }
    return status ? status : strike("after", w);
}

static ra_status wire_gather(void *user, const void *mine, size_t bytes, void *all, int timeout_ms)
{
    return ra_comm_gather(((wire *)user)->inner, mine, bytes, all, timeout_ms);
}

static ra_status wire_barrier(void *user, int timeout_ms)
{
    return wire_gather(user, NULL, 0, NULL, timeout_ms);
}

static void wire_abort(void *user, const char *why)
{
    ra_comm_abort(((wire *)user)->inner, why);
}

static void wire_close(void *user)
{
    ra_comm_close(((wire *)user)->inner);
}

/* Forward and backward until something fails. */
static double run_until_failure(wire *w, ra_comm *comm, const problem *p, rank_report *report)
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
            w->phase = 1;
            w->calls = 0;
            start = support_now();
            if (report_keep(report,
                            ra_attn_forward(ctx, ra_step_plan(step, 0), &forward, (ra_stream){0}),
                            "forward")) {
                w->phase = 2;
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
    snprintf(path, sizeof path, "%s/rank.%d", plan.folder, rank);
    return access(path, F_OK) == 0;
}

/* One line, which appears whole. */
static void say(int rank, const rank_report *report, double seconds)
{
    char path[4096], hidden[4096];
    snprintf(path, sizeof path, "%s/rank.%d", plan.folder, rank);
    snprintf(hidden, sizeof hidden, "%s/hidden.%d", plan.folder, rank);
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
    wire w = {0};
    ra_comm *comm = NULL;
    rank_report report = {0};
    problem p;
    if (argc != 6) {
        return 2;
    }
    plan = (struct plan){argv[1], argv[2], argv[4], strcmp(argv[3], "forward") == 0 ? 1 : 2,
                         atoi(argv[5])};
    MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &level);
    MPI_Comm_rank(world, &w.rank);
    MPI_Comm_size(world, &size);
    rng r = rng_of(support_seed());
    problem_create(&p, layer_of(2, 2, 256, RA_F32), 1, SEQ); /* messages of several pieces */
    problem_fill_unit(&p, &r);
    int32_t pid = getpid(), pids[PROBLEM_RANKS_MAX];
    const ra_comm_callbacks callbacks = {.size = sizeof callbacks,
                                         .user = &w,
                                         .exchange = wire_exchange,
                                         .gather = wire_gather,
                                         .barrier = wire_barrier,
                                         .abort = wire_abort,
                                         .close = wire_close};
    if (ra_comm_open_mpi(&world, &w.inner) ||
        ra_comm_gather(w.inner, &pid, sizeof pid, pids, 10000) ||
        ra_comm_open_custom(w.rank, size, &callbacks, &comm)) {
        fprintf(stderr, "mpi_faults: %s\n", ra_last_error());
        return 1;
    }
    double seconds = run_until_failure(&w, comm, &p, &report);
    say(w.rank, &report, seconds);
    problem_free(&p);
    /* Nobody leaves before everybody has spoken: launchers end a job when its ranks leave. A
     * stopped rank runs on when the others are done, and must fail as well. */
    bool waits_for_victim = strcmp(plan.fault, "kill") != 0;
    for (int waited = 0; waited < 400; waited++) {
        int left = 0, left_alive = 0;
        for (int rank = 0; rank < size; rank++) {
            left += (waits_for_victim || rank != VICTIM) && !said(rank);
            left_alive += rank != VICTIM && !said(rank);
        }
        if (left == 0) {
            break;
        }
        if (left_alive == 0 && w.rank == 0 && strcmp(plan.fault, "stop") == 0) {
            kill(pids[VICTIM], SIGCONT);
        }
        sleep_ms(20);
    }
    sleep_ms(100);
    if (strcmp(plan.fault, "none") == 0) {
        MPI_Finalize();
    }
    fflush(NULL);
    _exit(0);
}
