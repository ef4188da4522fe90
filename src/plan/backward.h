/*
 * The backward of a schedule: its computations in order, and which results are begun or ended by
 * which. Must not know tensors, dtypes or transports.
 *
 * The order is half of hop 0, the other hops, the rest of hop 0. What is local comes first and last
 * because something travels then: the first keys and values under the first half, the last hop's
 * gradients, which the rank at the other end may give late, under the rest. Where few rows travel,
 * they do so under delta, and all of hop 0 comes last; or hop 1 has its queries too, if the backend
 * can tell in the middle of a computation that the chunk's gradients may travel.
 */
#ifndef RA_PLAN_BACKWARD_H
#define RA_PLAN_BACKWARD_H

#include "plan/schedule.h"

/* Where the queries of hop 0 are computed. */
typedef enum ra_backward_order {
    RA_BACKWARD_HALVES, /* half of them first, the rest last */
    RA_BACKWARD_LAST,   /* all last */
    RA_BACKWARD_JOINED, /* in hop 1: of a neighbourhood, which has no other */
} ra_backward_order;

/* From the covers of the hops, linked and not marked yet, to passes and returned rows. tile: as in
 * ra_schedule_inputs. */
ra_status ra_backward_build(ra_schedule *schedule, ra_backward_order order, int64_t tile);

#endif
