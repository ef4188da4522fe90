/* A backend whose computations return before they are done, as those of a device do: they wait in a
 * queue, those of `add` in another one beside it, and begin late. What is not waited for when it
 * has to be gives other bits. A grad that marks the chunk is two calls, with the mark between them.
 * Must not change any bits otherwise. */
#ifndef RA_TESTS_SUPPORT_QUEUED_H
#define RA_TESTS_SUPPORT_QUEUED_H

#include <pthread.h>

#include "backend/backend.h"
#include "support.h"

typedef struct queued_call queued_call;

/* Runs its calls in order, on a thread of its own. */
typedef struct call_queue {
    const ra_backend *inner;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    queued_call *first, **end;
    int64_t posted, done;
    bool stop, at_once; /* at_once: a call returns when it is done */
    ra_status status;   /* the first failure */
    rng r;
    int delay_us; /* a third of the calls begin late, by that at most */
} call_queue;

typedef struct queued_backend {
    ra_backend backend;
    ra_backend_ops ops;
    const ra_backend *inner;
    call_queue calls, additions;
    int64_t mark[RA_MARK_COUNT]; /* calls posted before it; under the lock of calls */
    /* Chunks that a grad marked; calls posted when it returned; chunks marked once more behind it,
     * where they wait for all of it. */
    int64_t chunks, behind_chunk, marked_again;
} queued_backend;

void queued_open(queued_backend *q, const ra_backend *inner, int delay_us, uint64_t seed);
ra_status queued_wait(queued_backend *q); /* until everything called so far is done */
void queued_close(queued_backend *q);

#endif
