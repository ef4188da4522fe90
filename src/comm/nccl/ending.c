/* The thread, and what it shares with the communicator's owner. */
#include "comm/nccl/ending.h"

#include <cuda_runtime_api.h>
#include <errno.h>

#include "base/alloc.h"
#include "base/clock.h"

struct ra_nccl_ending {
    ra_nccl_library nccl;
    ncclComm_t comm;
    int device, timeout_ms;
    bool fails;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool begun, done; /* of the end */
    bool left;        /* by the owner: the thread frees */
};

ra_status ra_nccl_ending_create(const ra_nccl_library *nccl, int device, ra_nccl_ending **out)
{
    ra_nccl_ending *e = NULL;
    ra_alloc_probe *probe = ra_alloc_watch(NULL); /* may be freed by a thread without the probe */
    ra_status status = RA_NEW(&e, 1);
    ra_alloc_watch(probe);
    RA_TRY(status);
    e->nccl = *nccl;
    e->device = device;
    pthread_mutex_init(&e->lock, NULL);
    ra_cond_init(&e->changed);
    *out = e;
    return RA_OK;
}

static void free_memory(ra_nccl_ending *e)
{
    ra_alloc_probe *probe = ra_alloc_watch(NULL);
    pthread_mutex_destroy(&e->lock);
    pthread_cond_destroy(&e->changed);
    ra_free(e);
    ra_alloc_watch(probe);
}

/* Are all ranks ready to end, before the deadline? */
static bool finalized(const ra_nccl_ending *e)
{
    const struct timespec nap = {.tv_nsec = 200000};
    int64_t deadline = ra_clock_ns() + (int64_t)e->timeout_ms * 1000000;
    ncclResult_t state = e->nccl.finalize(e->comm);
    while (state == ncclInProgress && ra_clock_ns() < deadline) {
        nanosleep(&nap, NULL);
        if (e->nccl.async_error(e->comm, &state) != ncclSuccess) {
            return false;
        }
    }
    return state == ncclSuccess;
}

static void *run(void *arg)
{
    ra_nccl_ending *e = arg;
    cudaSetDevice(e->device);
    if (e->comm && !e->fails && finalized(e)) {
        e->nccl.destroy(e->comm);
    } else if (e->comm) {
        e->nccl.abort(e->comm);
    }
    pthread_mutex_lock(&e->lock);
    e->done = true;
    bool last = e->left;
    pthread_cond_broadcast(&e->changed);
    pthread_mutex_unlock(&e->lock);
    if (last) {
        free_memory(e);
    }
    return NULL;
}

void ra_nccl_end(ra_nccl_ending *e, ncclComm_t comm, bool fails, int timeout_ms)
{
    pthread_t thread;
    e->begun = true;
    e->comm = comm;
    e->fails = fails;
    e->timeout_ms = timeout_ms;
    if (pthread_create(&thread, NULL, run, e) == 0) {
        pthread_detach(thread);
    } else {
        run(e);
    }
}

bool ra_nccl_ended(ra_nccl_ending *e, int timeout_ms)
{
    struct timespec deadline = ra_deadline(timeout_ms);
    int late = 0;
    pthread_mutex_lock(&e->lock);
    while (!e->done && late != ETIMEDOUT) {
        late = pthread_cond_timedwait(&e->changed, &e->lock, &deadline);
    }
    bool done = e->done;
    pthread_mutex_unlock(&e->lock);
    return done;
}

void ra_nccl_ending_free(ra_nccl_ending *e)
{
    if (!e) {
        return;
    }
    pthread_mutex_lock(&e->lock);
    e->left = true;
    bool last = e->done || !e->begun;
    pthread_mutex_unlock(&e->lock);
    if (last) {
        free_memory(e);
    }
}
