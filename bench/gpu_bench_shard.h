/* One rank's part of a problem that is sharded over GPUs, for the benchmark of the ring: its
 * tensors, its plan, its calls. With one rank it is the whole problem. Must not know time. */
#ifndef RA_BENCH_GPU_BENCH_SHARD_H
#define RA_BENCH_GPU_BENCH_SHARD_H

#include "gpu_bench.h"

struct ring_shape {
    const char *name;
    int64_t seq;
    int q_heads, kv_heads, head_dim;
    int64_t window;
    int documents; /* of equal lengths; 0 = one */
    bool zigzag;   /* else contiguous */
};

struct shard : job {
    int device;
    int run_count;
    ra_run runs[2];
    int64_t length; /* of the sequence, here */
};

/* Collective. trace may be NULL. */
void shard_open(const ring_shape &s, ra_backend *backend, ra_comm *comm, int device,
                ra_trace *trace, shard *out);
void shard_wait(const shard &p);

/* Largest difference of a result, |part - whole| / |whole| over all its elements, whole being all
 * of the sequence on one GPU. */
double shard_difference(const shard &part, const shard &whole);

#endif
