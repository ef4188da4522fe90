/*
 * A rank's side of an NCCL communicator, and the watch over a call: nothing waits but by polling,
 * so that a deadline, an error that NCCL reports or an abort from another thread ends it. All
 * functions are called, and left, under the member's lock. Must not know what is exchanged.
 */
#ifndef RA_COMM_NCCL_WATCH_H
#define RA_COMM_NCCL_WATCH_H

#include <cuda_runtime_api.h>
#include <pthread.h>

#include "base/limits.h"
#include "comm/comm.h"
#include "comm/nccl/ending.h"
#include "comm/nccl/notice.h"
#include "comm/nccl/rounds.h"

typedef struct ra_nccl_member {
    ra_nccl_library nccl;
    int rank, size, device;
    pthread_mutex_t lock; /* of all below but the memory of an exchange */
    ncclComm_t comm;
    ra_nccl_ending *ending;
    ra_nccl_notice *notice;
    bool ended;
    char why[RA_MESSAGE_BYTES]; /* it ended */
    cudaStream_t stream;
    cudaEvent_t start, done; /* before the first, and behind the last operation */
    char *staging;           /* of the device; one exchange or gather at a time */
    size_t staging_bytes;
    ra_nccl_rounds rounds;
} ra_nccl_member;

/* What a call waits for. */
typedef struct ra_nccl_watch {
    ra_nccl_member *m;
    const ra_xfer *xfers; /* of an exchange */
    int xfer_count, timeout_ms;
    int64_t deadline_ns;
    const ra_order *order; /* of an exchange behind an event, else NULL */
} ra_nccl_watch;

ra_nccl_watch ra_nccl_watch_begin(ra_nccl_member *m, const ra_xfer *xfers, int count,
                                  int timeout_ms);

/* Ends the communicator; the first reason stays. */
void ra_nccl_fail(ra_nccl_member *m, const char *why);
ra_status ra_nccl_check_ended(const ra_nccl_member *m);
/* What NCCL says went wrong; in progress is no failure. */
ra_status ra_nccl_check(const ra_nccl_member *m, ncclResult_t result, const char *what);

/* Until NCCL has done what it was told: what was posted is in the device's queues. */
ra_status ra_nccl_wait_ready(const ra_nccl_watch *w);
/* Until the event has come behind which the exchange may begin; from then on its time counts. */
ra_status ra_nccl_wait_due(ra_nccl_watch *w);
/* Until the device has done everything. */
ra_status ra_nccl_wait_done(const ra_nccl_watch *w);

#endif
