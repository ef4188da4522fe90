/* A hop in the middle of a ring, alone: queries that come with a state and leave with one, all keys
 * seen, so that f32 sums are read and written. Goes to the backend's table, as no public call does
 * only this. */
#ifndef RA_BENCH_GPU_BENCH_HOP_H
#define RA_BENCH_GPU_BENCH_HOP_H

#include "ringattn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpu_bench_hop gpu_bench_hop;

/* Device tensors of one batch row; out is only where a last hop would store. The state is that of a
 * row without keys. */
ra_status gpu_bench_hop_open(const ra_backend *backend, const ra_layer *layer,
                             const ra_forward_io *io, gpu_bench_hop **out);
void gpu_bench_hop_close(gpu_bench_hop *hop);
/* Folds the same keys into the state: after n times out is what one time gives, lse ln n more. */
ra_status gpu_bench_hop_run(const gpu_bench_hop *hop);
/* The state so far, to io->out in its dtype; its lse is in io->lse, where it is kept. */
ra_status gpu_bench_hop_result(const gpu_bench_hop *hop, const ra_forward_io *io);

#ifdef __cplusplus
}
#endif

#endif
