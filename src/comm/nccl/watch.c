/* Polls. */
#include "comm/nccl/watch.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "backend/cuda/check.h"
#include "base/clock.h"

static int64_t deadline_of(int timeout_ms)
{
    return ra_clock_ns() + (int64_t)timeout_ms * 1000000;
}

ra_nccl_watch ra_nccl_watch_begin(ra_nccl_member *m, const ra_xfer *xfers, int count,
                                  int timeout_ms)
{
    return (ra_nccl_watch){m, xfers, count, timeout_ms, deadline_of(timeout_ms), NULL};
}

/* ---- failure */

void ra_nccl_fail(ra_nccl_member *m, const char *why)
{
    if (!m->ended) {
        m->ended = true;
        snprintf(m->why, sizeof m->why, "%s", why);
        ra_nccl_notice_tell(m->notice, why);
        ra_nccl_end(m->ending, m->comm, true, 0);
    }
}

ra_status ra_nccl_check_ended(const ra_nccl_member *m)
{
    return m->ended ? RA_FAIL(RA_E_COMM, "rank %d aborted: %.400s", m->rank, m->why) : RA_OK;
}

ra_status ra_nccl_check(const ra_nccl_member *m, ncclResult_t result, const char *what)
{
    if (result == ncclSuccess || result == ncclInProgress) {
        return RA_OK;
    }
    return RA_FAIL(RA_E_COMM, "%s: %.100s: %.300s", what, m->nccl.error_string(result),
                   m->comm ? m->nccl.last_error(m->comm) : "");
}

/* The ranks that an exchange waits for; NCCL does not tell them apart. */
static ra_status fail_late(const ra_nccl_watch *w)
{
    char peers[128] = "";
    for (int i = 0; i < w->xfer_count; i++) {
        size_t used = strlen(peers);
        bool named = false;
        for (int j = 0; j < i; j++) {
            named = named || w->xfers[j].peer == w->xfers[i].peer;
        }
        if (!named) {
            snprintf(peers + used, sizeof peers - used, "%s%d", used ? ", " : "", w->xfers[i].peer);
        }
    }
    if (!w->xfers) {
        return RA_FAIL(RA_E_COMM, "not all of %d ranks came within %d ms", w->m->size,
                       w->timeout_ms);
    }
    return RA_FAIL(RA_E_COMM, "rank %s sent or took too little within %d ms", peers, w->timeout_ms);
}

/* ---- waiting */

/* The thread may be one that computes as well: soon it lets others run. */
static void rest(int64_t waited_ns)
{
    enum { SOON_NS = 2000000, LATE_NS = 20000000 };
    const struct timespec nap = {.tv_nsec = waited_ns < LATE_NS ? 50000 : 200000};
    if (waited_ns < SOON_NS) {
        sched_yield();
    } else {
        nanosleep(&nap, NULL);
    }
}

static ra_status is_past(cudaEvent_t event, bool *past)
{
    cudaError_t error = cudaEventQuery(event);
    if (error == cudaErrorNotReady) {
        cudaGetLastError();
    }
    *past = error == cudaSuccess;
    return *past || error == cudaErrorNotReady ? RA_OK
                                               : ra_cuda_fail(error, "waiting for an event");
}

/* Is NCCL done with what it was told? */
static ra_status is_ready(const ra_nccl_watch *w, bool *ready)
{
    const ra_nccl_member *m = w->m;
    ncclResult_t state = ncclSuccess;
    RA_TRY(ra_nccl_check_ended(m));
    RA_TRY(ra_nccl_check(m, m->nccl.async_error(m->comm, &state), "ncclCommGetAsyncError"));
    RA_TRY(ra_nccl_check(m, state, "NCCL"));
    *ready = state == ncclSuccess;
    return RA_OK;
}

/* Is the device done with what was queued? */
static ra_status is_done(const ra_nccl_watch *w, bool *done)
{
    bool ready;
    RA_TRY(is_ready(w, &ready));
    return is_past(w->m->done, done);
}

/* Has the event come behind which the exchange may begin? */
static ra_status is_due(const ra_nccl_watch *w, bool *due)
{
    RA_TRY(ra_nccl_check_ended(w->m));
    return is_past((cudaEvent_t)w->order->after, due);
}

/* Polls until true, an end or the deadline. */
static ra_status wait_for(const ra_nccl_watch *w,
                          ra_status (*is_true)(const ra_nccl_watch *w, bool *yes))
{
    int64_t begin = ra_clock_ns();
    bool yes = false;
    for (;;) {
        RA_TRY(is_true(w, &yes));
        if (yes) {
            return RA_OK;
        }
        RA_TRY(ra_nccl_notice_check(w->m->notice, w->xfers, w->xfer_count));
        int64_t now = ra_clock_ns();
        if (now >= w->deadline_ns) {
            return fail_late(w);
        }
        pthread_mutex_unlock(&w->m->lock);
        rest(now - begin);
        pthread_mutex_lock(&w->m->lock);
    }
}

ra_status ra_nccl_wait_done(const ra_nccl_watch *w)
{
    RA_CUDA_TRY(cudaEventRecord(w->m->done, w->m->stream));
    return wait_for(w, is_done);
}

ra_status ra_nccl_wait_ready(const ra_nccl_watch *w)
{
    return wait_for(w, is_ready);
}

ra_status ra_nccl_wait_due(ra_nccl_watch *w)
{
    w->deadline_ns = INT64_MAX; /* this rank's own computation is not late */
    RA_TRY(wait_for(w, is_due));
    w->deadline_ns = deadline_of(w->timeout_ms);
    return RA_OK;
}
