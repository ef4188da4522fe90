/* Forks, brings the id around through pipes, and collects. */
#include "nccl_world.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/status.h"

void *shared_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        abort();
    }
    return memory;
}

/* What a child finds out about this machine. */
typedef struct machine {
    int devices;
    bool has_nccl;
    char why[RA_MESSAGE_BYTES];
} machine;

static const machine *look(void)
{
    static machine *seen;
    if (seen) {
        return seen;
    }
    seen = shared_memory(sizeof *seen);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        ra_nccl_id id;
        seen->devices = ra_cuda_device_count();
        seen->has_nccl = ra_nccl_id_create(&id) == RA_OK;
        snprintf(seen->why, sizeof seen->why, "%s", ra_last_error());
        printf("%d devices, NCCL %s\n", seen->devices, ra_nccl_version());
        fflush(stdout);
        _exit(0);
    }
    waitpid(child, NULL, 0);
    return seen;
}

int nccl_devices(void)
{
    return look()->devices;
}

const char *nccl_unavailable(void)
{
    return look()->has_nccl ? NULL : look()->why;
}

static bool bring_id(int rank, int size, const int pipe_of[2], ra_nccl_id *id)
{
    if (rank > 0) {
        return read(pipe_of[0], id, sizeof *id) == (ssize_t)sizeof *id;
    }
    bool written = ra_nccl_id_create(id) == RA_OK;
    for (int i = 1; i < size; i++) {
        written = written && write(pipe_of[1], id, sizeof *id) == (ssize_t)sizeof *id;
    }
    return written;
}

static void be_rank(int rank, int size, const int pipe_of[2], nccl_fn fn, void *arg,
                    rank_report *report)
{
    ra_comm *comm = NULL;
    ra_nccl_id id;
    device_choose(rank);
    if (!bring_id(rank, size, pipe_of, &id)) {
        report_keep(report, RA_E_COMM, "id");
    } else if (report_keep(report, ra_comm_open_nccl(&id, rank, size, rank, &comm), "open")) {
        fn(rank, comm, arg, report);
    }
    fflush(NULL);
    _exit(0);
}

void nccl_world_start(nccl_world *w, int size, nccl_fn fn, void *arg)
{
    int pipe_of[2];
    *w = (nccl_world){.size = size, .report = shared_memory((size_t)size * sizeof *w->report)};
    if (pipe(pipe_of) != 0) {
        abort();
    }
    fflush(NULL);
    for (int rank = 0; rank < size; rank++) {
        w->child[rank] = fork();
        if (w->child[rank] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL); /* the parent's time limit is the children's too */
            be_rank(rank, size, pipe_of, fn, arg, &w->report[rank]);
        }
    }
    close(pipe_of[0]);
    close(pipe_of[1]);
}

void nccl_world_wait(nccl_world *w)
{
    for (int rank = 0; rank < w->size; rank++) {
        int status = 0;
        if (w->child[rank] == 0) {
            continue;
        }
        waitpid(w->child[rank], &status, 0);
        w->child[rank] = 0;
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
            ra_fail(RA_E_COMM, "the process ended with %s %d",
                    WIFSIGNALED(status) ? "signal" : "status",
                    WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
            report_keep(&w->report[rank], RA_E_COMM, "process");
        }
    }
}

void nccl_world_check(const nccl_world *w)
{
    for (int rank = 0; rank < w->size; rank++) {
        const rank_report *r = &w->report[rank];
        if (r->status != RA_OK) {
            fail_msg("%s: rank %d of %d: %s: %s: %s", support_case(), rank, w->size, r->call,
                     ra_status_name(r->status), r->message);
        }
    }
}

void nccl_world_run(int size, nccl_fn fn, void *arg)
{
    nccl_world w;
    nccl_world_start(&w, size, fn, arg);
    nccl_world_wait(&w);
    nccl_world_check(&w);
    munmap(w.report, (size_t)size * sizeof *w.report);
}

bool nccl_expect(rank_report *report, bool right, const char *what)
{
    if (!right) {
        ra_fail(RA_E_COMM, "wrong: %s, after: %.300s", what, ra_last_error());
        report_keep(report, RA_E_COMM, what);
    }
    return right;
}
