/* A rank of a long run on a device: tensors that stay there, and streams that are delayed at
 * random, the one that computes before every computation, the one that transfers before every
 * exchange. Must change no byte. */
#ifndef RA_TESTS_SOAK_RANK_H
#define RA_TESTS_SOAK_RANK_H

#include <cuda_runtime_api.h>
#include <stdatomic.h>

#include "backend/backend.h"
#include "ringattn_cuda.h"
#include "support_world.h"

typedef struct soak_rank {
    ra_comm *inner;          /* borrowed; first, for support_relay.h */
    rng computes, exchanges; /* delays, on two threads */
    atomic_bool delayed;
    int device;
    cudaStream_t compute, transfer;
    cudaEvent_t late;
    ra_backend *real, backend; /* backend: the real one behind delays */
    ra_backend_ops ops;
    device_copy copy;
    rank_data data;
    ra_forward_io forward;
    ra_backward_io backward;
} soak_rank;

/* On the thread that will call; the device is its current one. *comm goes before s and inner. */
bool soak_rank_open(soak_rank *s, ra_comm *inner, const problem *p, const layout *l, ra_comm **comm,
                    rank_report *report);
void soak_rank_close(soak_rank *s);
/* Forward and backward with s->backend; they may be under way when this returns. */
bool soak_rank_call(soak_rank *s, ra_ctx *ctx, const ra_plan *plan, rank_report *report);
/* Waits; bits of all inputs and results, summed with their places. */
uint64_t soak_rank_sum(soak_rank *s);

#endif
