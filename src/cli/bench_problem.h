/*
 * One problem of the benchmark: random tensors of one layer kind on one rank, and a check of
 * sampled rows against a direct double computation, so that no wrong kernel is ever timed. Must not
 * time.
 */
#ifndef RA_CLI_BENCH_PROBLEM_H
#define RA_CLI_BENCH_PROBLEM_H

#include "cli/case.h"

typedef struct ra_bench_problem {
    ra_layer layer;
    int64_t seq;
    ra_tensor q, k, v, dout;           /* inputs */
    ra_tensor result[RA_RESULT_COUNT]; /* of the benchmarked operation */
    void *owned[4 + RA_RESULT_COUNT];
} ra_bench_problem;

ra_status ra_bench_problem_create(const ra_layer *layer, int64_t seq, ra_bench_problem *out);
void ra_bench_problem_free(ra_bench_problem *problem);

/* Compares rows of every result, which all have been computed, with a direct computation. *worst is
 * the largest error as a share of what rounding explains: above 1 is a failure. */
ra_status ra_bench_problem_check(const ra_bench_problem *problem, double *worst);

#endif
