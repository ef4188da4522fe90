/*
 * Between the CUDA backend and its kernels: what a launch gets, what a kernel offers, and the
 * choice among them. A tuned kernel states which jobs it supports; the first in the table that
 * supports a job runs it, and the plain kernels of simple.cu, at the end, run every job. Adding a
 * kernel is one entry here and one in dispatch.c. Must not know how a kernel works.
 *
 * All declarations have C linkage: the host side is C, the kernels are CUDA C++.
 */
#ifndef RA_BACKEND_CUDA_DISPATCH_H
#define RA_BACKEND_CUDA_DISPATCH_H

#include <assert.h>
#include <math.h>
#include <string.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "backend/backend.h"
#include "backend/cuda/work.h"

/* Queries of a work item: what the tuned forward of this head dim takes. */
static inline int32_t ra_cuda_q_tile(int head_dim)
{
    return head_dim > 256 ? 64 : 128;
}
enum { RA_CUDA_K_TILE = 128 };

/* What a kernel made of the lists at its first launch over them, to be used again and freed with
 * them. */
typedef struct ra_cuda_kept {
    void *memory; /* NULL: nothing so far */
    /* stream: behind the last use */
    void (*discard)(void *memory, cudaStream_t stream);
} ra_cuda_kept;

/* The work lists of one cover. Counts are those of `host`; the arrays are copies of its arrays in
 * device memory. */
typedef struct ra_cuda_work {
    ra_work host;          /* for kernels that plan on the host */
    int q_heads, kv_heads; /* of the layer; a source without keys may have a tensor without sizes */
    const ra_work_item *item;
    const ra_work_run *run;
    const ra_work_item *key_item;
    const ra_work_run *key_run;
    const ra_work_reach *reach;
    ra_cuda_kept *kept; /* of the one gradient kernel that keeps something */
} ra_cuda_work;

enum { RA_CUDA_COUNTERS = 512 };

/* Where a launch goes. */
typedef struct ra_cuda_launch {
    cudaStream_t stream;
    cudaMemPool_t pool; /* for lists that a kernel keeps */
    int device, sm_count;
    int capability;     /* 10 * major + minor: 90 on Hopper */
    uint32_t *counters; /* [RA_CUDA_COUNTERS] device words for a kernel's own use on this stream;
                           their content at entry is undefined */
    void *workspace; /* for gradient kernels that ask for it: device memory, 256-byte aligned; NULL
                        in supports and for a fold */
    size_t workspace_bytes; /* known to supports, too */
    cudaEvent_t chunk_done; /* for gradient kernels that mark it; NULL = nobody asks */
} ra_cuda_launch;

/* supports: may read the job, the lists' host side and the device, but launches nothing. launch:
 * puts the whole job on the stream and returns without waiting; a failure is a status from
 * RA_CUDA_TRY (check.h). Jobs have at least one item; tensors are device memory. */
typedef struct ra_cuda_fold_kernel {
    const char *name;
    bool (*supports)(const ra_fold_job *job, const ra_cuda_work *work, const ra_cuda_launch *at);
    ra_status (*launch)(const ra_fold_job *job, const ra_cuda_work *work, const ra_cuda_launch *at);
} ra_cuda_fold_kernel;

typedef struct ra_cuda_grad_kernel {
    const char *name;
    bool (*supports)(const ra_grad_job *job, const ra_cuda_work *work, const ra_cuda_launch *at);
    ra_status (*launch)(const ra_grad_job *job, const ra_cuda_work *work, const ra_cuda_launch *at);
    bool workspace;   /* launch uses at->workspace */
    bool marks_chunk; /* and records at->chunk_done */
} ra_cuda_grad_kernel;

/* The plain kernels: any head dim, dtype, mask and strides. */
extern const ra_cuda_fold_kernel ra_cuda_simple_fold;
extern const ra_cuda_grad_kernel ra_cuda_simple_grad;

/* RA_E_UNSUPPORTED if no kernel runs on such a device. */
ra_status ra_cuda_capability_check(int device, int capability);

/* The first kernel that supports the job. simple_only: the plain one, for comparisons. */
const ra_cuda_fold_kernel *ra_cuda_fold_choose(const ra_fold_job *job, const ra_cuda_work *work,
                                               const ra_cuda_launch *at, bool simple_only);
const ra_cuda_grad_kernel *ra_cuda_grad_choose(const ra_grad_job *job, const ra_cuda_work *work,
                                               const ra_cuda_launch *at, bool simple_only);

#ifdef __cplusplus
}
#endif

#endif
