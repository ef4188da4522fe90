/* What the parts of the GPU benchmark share: a row of its table, the problem that the row is, and
 * sustained time. Must not know which rows there are. */
#ifndef RA_BENCH_GPU_BENCH_H
#define RA_BENCH_GPU_BENCH_H

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <cuda_runtime.h>

#include "gpu_bench_hop.h"
#include "gpu_bench_job.h"

/* Ends the process with what failed and why. */
void must(bool ok, const char *what, const char *why);
#define MUST_RA(call) must((call) == RA_OK, #call, ra_last_error())
#define MUST_CUDA(call)                                                                            \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        must(error_ == cudaSuccess, #call, cudaGetErrorString(error_));                            \
    } while (0)

enum content {
    WHOLE,     /* one document a row */
    DOCUMENTS, /* of 1,024 tokens, side by side */
    RANDOM,    /* documents of random lengths, the seed below */
    IMAGES,    /* blocks of 256 image tokens, a fifth of all */
    HOP,       /* a middle hop: state in, state out, all keys seen */
};
enum { DOCUMENT = 1024, IMAGE = 256, IMAGE_EVERY = 1280, DOCUMENT_SEED = 1 };

struct shape {
    int64_t rows, seq;
    int q_heads, kv_heads, head_dim;
    bool causal;
    int64_t window;
    content holds = WHOLE;
    bool backward = false;
    int workspace_mib = 0; /* of the backward; 0 = the default */
    /* Name of the row to compare with, by rate on allowed pairs or by rate on tiles; "" = none. */
    const char *against = "";
    bool by_tiles = false;
};

std::string name_of(const shape &s);

/* One problem on one rank. */
struct problem : job {
    ra_backend *backend;
    ra_comm *comm;
    ra_plan_info info;
    gpu_bench_hop *hop;                    /* of HOP, else NULL */
    std::vector<int32_t> doc, type, group; /* empty = none */
};

void problem_open(const shape &s, ra_backend *backend, problem *p);
void problem_close(problem *p);
void problem_call(const problem &p, bool backward);
/* Calls once, the backward behind its forward. The largest error of sampled rows as a share of what
 * is allowed. */
double problem_check(const problem &p, bool backward);
double problem_flops(const problem &p, bool backward);
/* Of whole tiles of 64 queries by 64 keys, wherever a pair of them is allowed. */
double problem_tile_flops(const problem &p, bool backward);

/* Random bf16 for a seed other than 0. */
ra_tensor device_tensor(ra_dtype dtype, int64_t rows, int64_t heads, int64_t seq, int64_t chan,
                        uint64_t seed);

/* Milliseconds of one call, once warm: calls are queued in batches, so that the device never waits
 * for the host. */
double time_sustained(double seconds, const std::function<void()> &call);
/* TFLOP/s of a cuBLAS product of 8192^3 in bf16. */
double time_cublas(double seconds);

#endif
