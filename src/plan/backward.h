/*
 * The backward of a schedule: its computations in order, and which results are begun or ended by
 * which. Must not know tensors, dtypes or transports.
 *
 * The order is half of hop 0, the other hops, the rest of hop 0. What is local comes first and last
 * because something travels then: the first keys and values under the first half, the last hop's
 * gradients, which the rank at the other end may give late, under the rest. Where few rows travel,
 * they do so under delta, and all of hop 0 comes last.
 */
#ifndef RA_PLAN_BACKWARD_H
#define RA_PLAN_BACKWARD_H

#include "plan/schedule.h"

/* From the covers of the hops, linked and not marked yet, to passes and returned rows. halved: is
 * some of hop 0 first? */
ra_status ra_backward_build(ra_schedule *schedule, bool halved);

#endif
