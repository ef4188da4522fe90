/* The parent keeps a pipe's two ends for the children, who learn of them, and of their ranks, from
 * the environment. */
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

static const char variable[] = "RINGATTN_LAUNCHED"; /* rank, size, and the pipe's two ends */

enum {
    SHARE_MAX = 512,  /* bytes that a pipe takes and gives as one */
    GRACE_MS = 10000, /* for the others to end by themselves: they may be about to report */
    POLL_MS = 20,
};

/* ---- a child's side */

static bool read_variable(int *rank, int *size, int ends[2])
{
    const char *text = getenv(variable);
    return text && sscanf(text, "%d %d %d %d", rank, size, &ends[0], &ends[1]) == 4;
}

bool ra_launched(int *rank, int *size)
{
    int ends[2];
    if (!read_variable(rank, size, ends)) {
        return false;
    }
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* nobody is left to report to */
    return true;
}

ra_status ra_launch_share(void *bytes, size_t count)
{
    int rank = 0, size = 1, ends[2] = {-1, -1};
    RA_CHECK(count <= SHARE_MAX);
    read_variable(&rank, &size, ends);
    bool done = rank == 0 || read(ends[0], bytes, count) == (ssize_t)count;
    for (int i = 1; rank == 0 && i < size; i++) {
        done = done && write(ends[1], bytes, count) == (ssize_t)count;
    }
    return done ? RA_OK
                : RA_FAIL(RA_E_COMM, "rank %d: the pipe between the ranks has failed", rank);
}

/* ---- the parent's side */

typedef struct family {
    int size, left; /* not ended yet */
    pid_t *child;   /* [size] 0: has ended */
    int worst;      /* exit status */
} family;

static ra_status start_child(family *f, int rank, const int ends[2], char **argv)
{
    extern char **environ;
    char text[64];
    snprintf(text, sizeof text, "%d %d %d %d", rank, f->size, ends[0], ends[1]);
    if (setenv(variable, text, 1) != 0) {
        return RA_FAIL(RA_E_NOMEM, "rank %d: its environment: %s", rank, strerror(errno));
    }
    int error = posix_spawn(&f->child[rank], "/proc/self/exe", NULL, NULL, argv, environ);
    if (error) {
        f->child[rank] = 0;
        return RA_FAIL(RA_E_NOMEM, "rank %d: its process: %s", rank, strerror(error));
    }
    f->left++;
    return RA_OK;
}

/* Signals those that have not ended. */
static void end_others(const family *f, int signal_number)
{
    for (int rank = 0; rank < f->size; rank++) {
        if (f->child[rank]) {
            kill(f->child[rank], signal_number);
        }
    }
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
            if (WIFSIGNALED(how) && f->worst < RA_EXIT_USE) {
                ra_fail(RA_E_COMM, "rank %d: its process was ended by signal %d, %s", rank,
                        WTERMSIG(how), strsignal(WTERMSIG(how)));
                ra_error_print();
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

int ra_launch(int ranks, char **argv)
{
    family f = {.size = ranks};
    int ends[2] = {-1, -1};
    ra_status status = RA_NEW(&f.child, ranks);
    if (!status && pipe(ends) != 0) {
        status = RA_FAIL(RA_E_NOMEM, "the pipe between the ranks: %s", strerror(errno));
    }
    for (int rank = 0; !status && rank < ranks; rank++) {
        status = start_child(&f, rank, ends, argv);
    }
    close(ends[0]);
    close(ends[1]);
    if (status) {
        ra_error_print();
        f.worst = RA_EXIT_MACHINE;
        end_others(&f, SIGTERM);
    }
    wait_for_all(&f);
    ra_free(f.child);
    return f.worst;
}
