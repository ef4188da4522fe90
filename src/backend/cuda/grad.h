/* What the two kernels of the tuned backward are launched with, and their launches. Must not know
 * how either computes, nor how slabs are chosen. */
#ifndef RA_BACKEND_CUDA_GRAD_H
#define RA_BACKEND_CUDA_GRAD_H

#include <cuda.h>

#include "backend/cuda/dispatch.h"
#include "backend/cuda/slabs.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const ra_cuda_grad_kernel ra_cuda_block_grad;

/* A tensor on the device, f32 unless said: strides count elements. */
typedef struct ra_grad_view {
    void *data;
    int64_t row, head, seq;
} ra_grad_view;

/* One slab, for both kernels; lists are in device memory. */
typedef struct ra_grad_slab {
    const ra_slab_strip *strip;
    const ra_slab_tile *tile;
    const ra_slab_block *block; /* from the slab's first */
    const ra_slab_ref *ref;
    const ra_slab_output *output;
    const ra_slab_unit *unit; /* from the slab's first */
    const ra_slab_run *run;   /* likewise */
    int strip_first, strip_count, block_count;
    int unit_count;          /* of gemm, of one KV head */
    int run_count;           /* likewise, of the score kernel for runs; 0: the other one */
    int kv_first, kv_count;  /* KV heads */
    int group;               /* query heads of a KV head */
    int pairs;               /* pairs of units of a KV head: group / 2, or group if that is odd */
    int unit_head, unit_row; /* from the first unit of a pair to the second: heads or queries */
    int chan;
    float scale;
    uint16_t *dead; /* one bit a query that has no keys or is none: [unit][strip][8] */
    uint32_t *counter, *later_counter; /* units handed out; a later launch's, to be cleared */
    bool first;                        /* launch of a chain: begins when all before it has ended */
} ra_grad_slab;

typedef struct ra_score_args {
    /* Copies of 128 x one slab and, of the workspace, of 16 queries x 128 keys; for runs of 64 x
     * two slabs and of 16 x 64. */
    CUtensorMap q, dout, k[RA_SOURCE_COUNT], v[RA_SOURCE_COUNT];
    CUtensorMap p, ds;
    ra_grad_view lse, delta;
    const ra_work_reach *reach;
    ra_grad_slab slab;
} ra_score_args;

typedef struct ra_gemm_args {
    CUtensorMap k[RA_SOURCE_COUNT], q, dout; /* copies of 64 x two slabs */
    CUtensorMap ds_rows;                     /* the workspace: copies of 128 queries x 64 keys */
    CUtensorMap ds_keys, p_keys;             /* 64 queries x 128 keys */
    CUtensorMap add_dq, add_dk[RA_SOURCE_COUNT], add_dv[RA_SOURCE_COUNT]; /* 16 x 32 channels */
    ra_grad_view dq, dk[RA_SOURCE_COUNT], dv[RA_SOURCE_COUNT];
    CUtensorMap final_dq, final_dk, final_dv;     /* 16 x one slab of channels */
    ra_grad_view result_dq, result_dk, result_dv; /* of the dtype */
    ra_grad_slab slab;
} ra_gemm_args;

/* clusters: of two CTAs, one CTA an SM. */
ra_status ra_grad_score(const ra_score_args *args, ra_dtype dtype, int clusters,
                        cudaStream_t stream);
ra_status ra_grad_score_256(const ra_score_args *args, ra_dtype dtype, int clusters,
                            cudaStream_t stream);
ra_status ra_grad_gemm(const ra_gemm_args *args, ra_dtype dtype, int clusters, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
