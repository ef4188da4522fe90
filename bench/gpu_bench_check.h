/* Sampled rows of a computed problem against a direct computation in double. Must not know where
 * the problem was computed: all tensors are host memory. */
#ifndef RA_BENCH_GPU_BENCH_CHECK_H
#define RA_BENCH_GPU_BENCH_CHECK_H

#include "ringattn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Contiguous [rows, heads, seq, chan]. */
typedef struct gpu_bench_sample {
    ra_layer layer;
    const int32_t *doc, *group; /* [rows, seq], of the mask; NULL = one document a row, text */
    ra_tensor q, k, v, out, lse;
    ra_tensor dout, dq, dk, dv; /* with backward */
} gpu_bench_sample;

/* The largest error of a few rows of each result, as a share of what rounding to the dtype
 * explains; above 1 is wrong, also where it is NaN. */
double gpu_bench_check(const gpu_bench_sample *sample, bool backward);

#ifdef __cplusplus
}
#endif

#endif
