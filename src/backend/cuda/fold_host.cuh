/*
 * The host side that the tuned forward kernels share: may a job run, its arguments, the launch of a
 * persistent grid. Must not know how a kernel computes.
 */
#ifndef RA_BACKEND_CUDA_FOLD_HOST_CUH
#define RA_BACKEND_CUDA_FOLD_HOST_CUH

#include "backend/cuda/check.h"
#include "backend/cuda/fold.h"
#include "backend/cuda/fold_common.cuh"

/* What a copy takes: positions and slabs of each operand's box. */
struct fold_boxes {
    int q_seq, q_slabs, k_seq, k_slabs, v_seq, v_slabs;
};

/* May 16-byte words of a row be touched, and is `t` there at all? */
static inline bool fold_words_fit(const ra_tensor *t)
{
    const int64_t bytes = (int64_t)ra_dtype_bytes(t->dtype);
    bool fit = (uintptr_t)t->data % 16 == 0;
    for (int axis = RA_ROW; axis < RA_CHAN; axis++) {
        fit = fit && (t->size[axis] <= 1 || t->stride[axis] * bytes % 16 == 0);
    }
    return !t->data || fit;
}

/* The scale is positive: maxima are taken before it is applied. */
static inline bool fold_supports(const ra_fold_job *job, const ra_cuda_work *work,
                                 const ra_cuda_launch *at, int rows)
{
    bool fits = at->capability == 90 && job->scale > 0 && work->host.q_tile <= rows &&
                ra_tensor_map_fits(&job->q) && fold_words_fit(&job->acc) &&
                fold_words_fit(&job->out) &&
                work->host.item_count * job->q.size[RA_HEAD] <= INT32_MAX;
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        fits = fits && (!job->k[i].data || ra_tensor_map_fits(&job->k[i])) &&
               (!job->v[i].data || ra_tensor_map_fits(&job->v[i]));
    }
    return fits;
}

/* A cover without keys has neither source: then the query tensor stands for both. Its tiles are
 * copied, never seen. */
static inline const ra_tensor *fold_any_keys(const ra_fold_job *job)
{
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        if (job->k[i].data) {
            return &job->k[i];
        }
    }
    return &job->q;
}

static inline int fold_heads_per_kv(const ra_cuda_work *work)
{
    return work->q_heads / work->kv_heads;
}

static inline fold_view fold_view_of(const ra_tensor *t)
{
    return fold_view{t->data, t->stride[RA_ROW], t->stride[RA_HEAD], t->stride[RA_SEQ]};
}

static inline ra_status fold_encode_maps(const ra_fold_job *job, fold_boxes box, fold_args *args)
{
    const ra_tensor *any = fold_any_keys(job);
    RA_TRY(ra_tensor_map_encode(&job->q, box.q_seq, box.q_slabs, &args->q));
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        const ra_tensor *k = job->k[i].data ? &job->k[i] : any;
        const ra_tensor *v = job->v[i].data ? &job->v[i] : any;
        RA_TRY(ra_tensor_map_encode(k, box.k_seq, box.k_slabs, &args->k[i]));
        RA_TRY(ra_tensor_map_encode(v, box.v_seq, box.v_slabs, &args->v[i]));
    }
    return RA_OK;
}

/* Clusters of a grid, as many as there are SMs for. Units that are all as long are done in rounds:
 * then fewer, if they take no more rounds, which leaves each more of the memory and the power. */
static inline int fold_clusters(const ra_work *work, int units, int most)
{
    const int rounds = (units + most - 1) / most;
    if (work->longest == work->shortest) {
        return (units + rounds - 1) / rounds;
    }
    return units < most ? units : most;
}

/* The last heads hand out together what keeps every cluster busy for some units. */
static inline void fold_order(const ra_cuda_work *work, fold_args *args)
{
    const int per_head = args->unit_count / work->kv_heads;
    const int wanted = 7 * args->clusters / (per_head > 0 ? per_head : 1) + 1;
    args->tail_heads = wanted < work->kv_heads ? wanted : work->kv_heads;
    args->tail_head = work->kv_heads - args->tail_heads;
}

/* ctas: of a cluster; they divide the query heads of a KV head. */
static inline ra_status fold_arguments(const ra_fold_job *job, const ra_cuda_work *work,
                                       const ra_cuda_launch *at, int ctas, fold_boxes box,
                                       fold_args *args)
{
    memset(args, 0, sizeof *args);
    args->acc = fold_view_of(&job->acc);
    args->lse = fold_view_of(&job->lse);
    args->out = fold_view_of(&job->out);
    args->item = work->item;
    args->run = work->run;
    args->reach = work->reach;
    args->counter = at->counters;
    args->item_count = (int)work->host.item_count;
    args->unit_count = (int)(work->host.item_count * job->q.size[RA_HEAD] / ctas);
    args->clusters = fold_clusters(&work->host, args->unit_count, at->sm_count / ctas);
    args->heads_per_kv = fold_heads_per_kv(work);
    fold_order(work, args);
    args->channels = (int)job->q.size[RA_CHAN];
    args->scale_log2 = job->scale * RA_LOG2E;
    return fold_encode_maps(job, box, args);
}

/* One CTA an SM for as long as there are units. */
static inline ra_status fold_run(void (*kernel)(fold_args), const fold_args *args,
                                 const ra_cuda_launch *at, int ctas, int threads, int shared_bytes)
{
    RA_CUDA_TRY(cudaMemsetAsync(args->counter, 0, sizeof *args->counter, at->stream));
    RA_CUDA_TRY(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = ctas;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(ctas * args->clusters);
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = at->stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    RA_CUDA_TRY(cudaLaunchKernelEx(&config, kernel, *args));
    return RA_OK;
}

#endif
