/* Both sides of the courier, with what it costs the computation in the trace. */
#include "ring/ring.h"

/* The device's event of a mark, if exchanges are queued there, else NULL. Without overlap an
 * exchange is done before the computation is queued. */
static void *queued_behind(const ra_ring *ring, int mark)
{
    const ra_backend *backend = ring->backend;
    bool queues = ra_comm_has_exchange_behind(ring->comm) && ra_courier_overlaps(ring->courier);
    return queues ? backend->ops->mark_event(backend->self, mark) : NULL;
}

static void say_queued(void *arg, void *event)
{
    ra_courier_say_begun(arg, event);
}

ra_status ra_ring_exchange(const ra_ring *ring, int mark, int xfer_count)
{
    const ra_backend *backend = ring->backend;
    void *after = queued_behind(ring, mark);
    if (after) {
        const ra_order order = {
            .after = after,
            .queued = say_queued,
            .arg = ring->courier,
        };
        return ra_comm_exchange_behind(ring->comm, ring->xfers, xfer_count, ring->timeout_ms,
                                       &order);
    }
    RA_TRY(backend->ops->wait_mark(backend->self, mark));
    return ra_comm_exchange(ring->comm, ring->xfers, xfer_count, ring->timeout_ms);
}

ra_status ra_ring_let_begin(const ra_ring *ring, int64_t ticket, int mark)
{
    const ra_backend *backend = ring->backend;
    bool queued = queued_behind(ring, mark) != NULL;
    void *event = queued ? ra_courier_wait_begun(ring->courier, ticket) : NULL;
    return event ? backend->ops->follow(backend->self, event) : RA_OK;
}

int64_t ra_ring_post(const ra_ring *ring, ra_task task, int hop)
{
    /* Without a thread of its own the courier exchanges here, while nothing is computed. */
    ra_trace *trace = ra_courier_overlaps(ring->courier) ? NULL : ring->trace;
    int64_t begin = ra_trace_begin(trace);
    int64_t ticket = ra_courier_post(ring->courier, task);
    ra_trace_end(trace, begin, "exchange between computations", RA_LANE_WAIT,
                 ra_comm_rank(ring->comm), hop);
    return ticket;
}

ra_status ra_ring_wait(const ra_ring *ring, int64_t ticket, const char *what, int hop)
{
    int64_t begin = ra_trace_begin(ring->trace);
    ra_status status = ra_courier_wait(ring->courier, ticket);
    ra_trace_end(ring->trace, begin, what, RA_LANE_WAIT, ra_comm_rank(ring->comm), hop);
    return status;
}
