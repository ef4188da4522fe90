/* The caller's side of the courier, with what it costs the computation in the trace. */
#include "ring/ring.h"

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
