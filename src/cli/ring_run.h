/*
 * A whole case through the ring: shards it, runs every rank on a thread of its own, forward and
 * backward, and puts the shards' results together again. Must not know what is expected.
 */
#ifndef RA_CLI_RING_RUN_H
#define RA_CLI_RING_RUN_H

#include "cli/case.h"

typedef struct ra_ring_rank {
    ra_plan_info info;
    uint64_t forward_bytes, backward_bytes; /* really sent */
    double forward_seconds, backward_seconds;
    ra_trace_summary trace; /* of this run; wall 0 without a trace */
} ra_ring_rank;

typedef struct ra_ring_result {
    ra_tensor result[RA_RESULT_COUNT]; /* whole; data NULL: not computed */
    void *owned[RA_RESULT_COUNT];
    bool backward;
    int ranks;
    ra_ring_rank *rank; /* [ranks] */
    double seconds;     /* from start to end, setting up included */
} ra_ring_result;

/* *out is NULL without --trace. RA_E_ARG if its file is an input or the output. */
ra_status ra_trace_open(const ra_args *args, ra_trace **out);
/* Before any work: could the first rank write --out and --trace? */
ra_status ra_outputs_check(const ra_args *args);
/* A line for each rank of what its time went to; nothing without a trace. */
void ra_trace_print(const ra_ring_result *result);
/* The file appears whole or not at all. */
ra_status ra_trace_save(const ra_trace *trace, const char *path);

/* trace may be NULL. */
ra_status ra_ring_run(const ra_case *c, const ra_args *args, ra_trace *trace, ra_ring_result *out);
void ra_ring_result_free(ra_ring_result *result);

#endif
