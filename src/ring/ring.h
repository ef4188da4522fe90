/* What collect and route share during one call. */
#ifndef RA_RING_RING_H
#define RA_RING_RING_H

#include "backend/backend.h"
#include "base/trace.h"
#include "comm/comm.h"
#include "ring/blocks.h"
#include "ring/courier.h"

typedef struct ra_ring {
    ra_backend *backend;
    ra_comm *comm;
    ra_courier *courier;
    ra_trace *trace;
    int timeout_ms;
    const ra_schedule *schedule;
    int64_t heads, head_dim; /* of keys and values */
    ra_block_list *blocks;   /* used by one courier task at a time */
    ra_xfer *xfers;          /* [2 * rank count] likewise */
} ra_ring;

/* In a courier task: exchanges ring->xfers behind a mark of the computation. */
ra_status ra_ring_exchange(const ra_ring *ring, int mark, int xfer_count);
/* Behind the post of a task that exchanges behind a mark, on the caller's side: where exchanges are
 * queued on the device, lets this one be queued before the next computation, which may leave it no
 * processor. */
ra_status ra_ring_let_begin(const ra_ring *ring, int64_t ticket, int mark);

/* ra_courier_post and ra_courier_wait; the time in which the computation stands still goes into
 * the trace. what: a string literal. */
int64_t ra_ring_post(const ra_ring *ring, ra_task task, int hop);
ra_status ra_ring_wait(const ra_ring *ring, int64_t ticket, const char *what, int hop);

#endif
