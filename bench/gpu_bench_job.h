/* What the benchmarks on one GPU and of the ring hold alike: a layer, its plan, the tensors of both
 * directions and the calls on them. Must not know how the sequence is cut, nor what fills it. */
#ifndef RA_BENCH_GPU_BENCH_JOB_H
#define RA_BENCH_GPU_BENCH_JOB_H

#include <cstdint>
#include <functional>

#include "ringattn_cuda.h"

struct job {
    ra_layer layer;
    ra_ctx *ctx;
    ra_step *step;
    const ra_plan *plan;
    ra_forward_io forward;
    ra_backward_io backward;
};

/* In bf16, with the usual scale. */
ra_layer job_layer(int q_heads, int kv_heads, int head_dim, bool causal, int64_t window);

/* A tensor of the caller's part of the sequence; random numbers for a seed other than 0. */
using job_allocator =
    std::function<ra_tensor(ra_dtype dtype, int64_t heads, int64_t chan, uint64_t seed)>;
/* backward: with the tensors that only the backward has. */
void job_make_tensors(job *j, const job_allocator &tensor, bool backward);

void job_call(const job &j, bool backward);
/* Frees the tensors, the step and the ctx. */
void job_close(job *j);

#endif
