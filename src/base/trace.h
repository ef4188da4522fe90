/* Timed events in a fixed ring, written as a Chrome trace or added up. A NULL trace records
 * nothing. Must not know what is timed. */
#ifndef RA_BASE_TRACE_H
#define RA_BASE_TRACE_H

#include "base/status.h"

typedef enum ra_lane {
    RA_LANE_CALL,    /* whole calls of the library */
    RA_LANE_COMPUTE, /* computations of a call */
    RA_LANE_COMM,    /* exchanges */
    RA_LANE_WAIT,    /* a call waits for an exchange */
    RA_LANE_COUNT
} ra_lane;

/* Now, to be handed to ra_trace_end. */
int64_t ra_trace_begin(const ra_trace *trace);
/* name: a string literal; rank and hop say whose event it is. */
void ra_trace_end(ra_trace *trace, int64_t begin_ns, const char *name, ra_lane lane, int rank,
                  int hop);

#endif
