/* A pipe for each rank, from rank 0; the children learn of them, and of their ranks, from the
 * environment. */
#include "cli/launch.h"

#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/alloc.h"
#include "cli/commands.h"
#include "cli/report.h"

/* Rank, size, and the two ends of every rank's pipe. */
static const char variable[] = "RINGATTN_LAUNCHED";

enum {
    SHARE_MAX = 512, /* bytes that a pipe takes and gives as one */
    GRACE_MS = 4000, /* for the others to end by themselves: they may be about to report */
    POLL_MS = 20,
};

/* ---- a child's side */

/* The rest of the variable, or NULL. */
static const char *read_variable(int *rank, int *size)
{
    const char *text = getenv(variable);
    int length = 0;
    bool read = text && sscanf(text, "%d %d%n", rank, size, &length) == 2;
    return read && *rank >= 0 && *rank < *size ? text + length : NULL;
}

bool ra_launched(int *rank, int *size)
{
    if (!read_variable(rank, size)) {
        return false;
    }
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* nobody is left to report to */
    return true;
}

ra_status ra_launch_share(void *bytes, size_t count)
{
    int rank = 0, size = 1, ends[2], length = 0;
    const char *rest = read_variable(&rank, &size);
    bool done = rest || size == 1;
    RA_CHECK(count <= SHARE_MAX);
    for (int to = 0; done && to < size; to++, rest += length) {
        done = sscanf(rest, "%d %d%n", &ends[0], &ends[1], &length) == 2;
        if (done && rank == 0 && to > 0) {
            done = write(ends[1], bytes, count) == (ssize_t)count;
        }
        if (done && rank > 0 && to == rank) {
            done = read(ends[0], bytes, count) == (ssize_t)count;
        }
    }
    return done ? RA_OK
                : RA_FAIL(RA_E_COMM, "rank %d: the pipe between the ranks has failed", rank);
}

/* ---- the parent's side */

typedef struct family {
    int size, left; /* processes; those that have not ended */
    pid_t *child;   /* [size] 0: has ended */
    int *ends;      /* [2 * size] of the pipes */
    char *text;     /* for the environment */
    int worst;      /* exit status */
} family;

enum { WORD = 12 }; /* a number and a space */

static ra_status start_child(const family *f, int rank, char **argv)
{
    extern char **environ;
    char *at = f->text + sprintf(f->text, "%d %d", rank, f->size);
    for (int i = 0; i < 2 * f->size; i++) {
        at += sprintf(at, " %d", f->ends[i]);
    }
    if (setenv(variable, f->text, 1) != 0) {
        return RA_FAIL(RA_E_NOMEM, "rank %d: its environment: %s", rank, strerror(errno));
    }
    int error = posix_spawn(&f->child[rank], "/proc/self/exe", NULL, NULL, argv, environ);
    if (error) {
        f->child[rank] = 0;
        return RA_FAIL(RA_E_NOMEM, "rank %d: its process: %s", rank, strerror(error));
    }
    return RA_OK;
}

/* Signals those that have not ended. */
static void end_others(const family *f, int signal_number)
{
    for (int rank = 0; f->child && rank < f->size; rank++) {
        if (f->child[rank]) {
            kill(f->child[rank], signal_number);
        }
    }
}

static void report_end(int rank, int how)
{
    if (WIFSIGNALED(how)) {
        ra_fail(RA_E_COMM, "rank %d: its process was ended by signal %d, %s", rank, WTERMSIG(how),
                strsignal(WTERMSIG(how)));
    } else {
        ra_fail(RA_E_COMM, "rank %d: its process ended with status %d", rank, WEXITSTATUS(how));
    }
    ra_error_print();
}

/* Notes how a process ended. */
static void note_end(family *f, pid_t child, int how)
{
    int status = WIFEXITED(how) ? WEXITSTATUS(how) : RA_EXIT_MACHINE;
    for (int rank = 0; rank < f->size; rank++) {
        if (f->child[rank] == child) {
            f->child[rank] = 0;
            f->left--;
            /* Those that this process ends are no news. */
            if (status >= RA_EXIT_USE && f->worst < RA_EXIT_USE) {
                report_end(rank, how);
            }
        }
    }
    f->worst = status > f->worst ? status : f->worst;
}

/* Until all have ended; once one has failed the others have a while. */
static void wait_for_all(family *f)
{
    const struct timespec nap = {.tv_nsec = POLL_MS * 1000000};
    int how, waited = 0;
    while (f->left > 0) {
        bool failed = f->worst >= RA_EXIT_USE;
        pid_t child = waitpid(-1, &how, failed ? WNOHANG : 0);
        if (child > 0) {
            note_end(f, child, how);
        } else if (child < 0 && errno != EINTR) {
            return;
        } else if (failed) {
            nanosleep(&nap, NULL);
            waited += POLL_MS;
            if (waited == GRACE_MS || waited == 2 * GRACE_MS) {
                end_others(f, waited == GRACE_MS ? SIGTERM : SIGKILL);
            }
        }
    }
}

static ra_status open_pipes(family *f)
{
    RA_TRY(RA_NEW(&f->child, f->size));
    RA_TRY(RA_NEW(&f->ends, 2 * f->size));
    RA_TRY(RA_NEW(&f->text, WORD * 2 * (f->size + 1)));
    memset(f->ends, -1, 2 * (size_t)f->size * sizeof *f->ends);
    for (int rank = 0; rank < f->size; rank++) {
        if (pipe(f->ends + (ptrdiff_t)2 * rank) != 0) {
            return RA_FAIL(RA_E_NOMEM, "rank %d: its pipe: %s", rank, strerror(errno));
        }
    }
    return RA_OK;
}

int ra_launch(int ranks, char **argv)
{
    family f = {.size = ranks};
    ra_status status = open_pipes(&f);
    for (int rank = 0; !status && rank < ranks; rank++) {
        status = start_child(&f, rank, argv);
        f.left += !status;
    }
    unsetenv(variable);
    for (int i = 0; f.ends && i < 2 * ranks; i++) {
        close(f.ends[i]);
    }
    if (status) {
        ra_error_print();
        f.worst = RA_EXIT_MACHINE;
        end_others(&f, SIGTERM);
    }
    wait_for_all(&f);
    ra_free(f.child);
    ra_free(f.ends);
    ra_free(f.text);
    return f.worst;
}
