/*
 * Forward and backward for any head dim, dtype, mask and strides, to be read rather than to be
 * fast: the truth on the device that tuned kernels are compared with, and what runs where no tuned
 * kernel does. A warp owns one row of a result and its lanes the channels; partners are taken 32 at
 * a time, in the order of the work lists, so every run gives the same bits. Only partners that the
 * mask allows are read.
 */
#include "backend/cuda/check.h"
#include "backend/cuda/element.cuh"

enum { WARPS = 4, LANE_CHANNELS = RA_HEAD_DIM_MAX / RA_WARP };

/* A lane's channels of a row: lane, lane + 32, ...; 0 past the end. */
struct slice {
    float x[LANE_CHANNELS];
};

static __device__ int lane_of()
{
    return threadIdx.x % RA_WARP;
}

template <typename T> static __device__ slice load(const T *row, int chan)
{
    slice s;
#pragma unroll
    for (int n = 0; n < LANE_CHANNELS; n++) {
        int c = lane_of() + n * RA_WARP;
        s.x[n] = c < chan ? ra_to_f32(row[c]) : 0.0f;
    }
    return s;
}

template <typename T> static __device__ void store(T *row, const slice &s, float factor, int chan)
{
#pragma unroll
    for (int n = 0; n < LANE_CHANNELS; n++) {
        int c = lane_of() + n * RA_WARP;
        if (c < chan) {
            row[c] = ra_from_f32<T>(s.x[n] * factor);
        }
    }
}

static __device__ float dot(const slice &a, const slice &b)
{
    float sum = 0;
#pragma unroll
    for (int n = 0; n < LANE_CHANNELS; n++) {
        sum += a.x[n] * b.x[n];
    }
    return ra_warp_sum(sum);
}

/* to = keep * to + add * from */
static __device__ void blend(slice &to, float keep, float add, const slice &from)
{
#pragma unroll
    for (int n = 0; n < LANE_CHANNELS; n++) {
        to.x[n] = keep * to.x[n] + add * from.x[n];
    }
}

/* Offsets of the run's keys that the query sees. */
static __device__ int2 seen_of(const ra_work_run &run, const ra_work_reach &reach)
{
    return {max(0, reach.begin - run.pos), min(run.count, reach.end - run.pos)};
}

/* ---- forward */

/* A running softmax: out = sum / l, lse = m + log l. */
struct softmax {
    float m, l;
    slice sum;
};

static __device__ softmax softmax_open(const ra_fold_job &job, const ra_work_item &item, int head,
                                       int index)
{
    softmax s = {-INFINITY, 0.0f, {}};
    if (!(item.flags & RA_WORK_FRESH)) {
        float lse = *ra_row<float>(job.lse, item.row, head, index);
        if (lse != -INFINITY) {
            s.m = lse;
            s.l = job.lse_rest.data ? expf(*ra_row<float>(job.lse_rest, item.row, head, index)) : 1;
            slice acc =
                load(ra_row<float>(job.acc, item.row, head, index), (int)job.q.size[RA_CHAN]);
            blend(s.sum, 0.0f, s.l, acc);
        }
    }
    return s;
}

/* Keys [begin, begin + count) of the run, at most 32. */
template <typename T>
static __device__ void fold_keys(const ra_fold_job &job, const ra_work_run &run, int head,
                                 int begin, int count, const slice &q, softmax &s)
{
    const ra_tensor &k = job.k[run.source], &v = job.v[run.source];
    int chan = (int)k.size[RA_CHAN];
    float score = -INFINITY; /* of the key that this lane holds */
    for (int t = 0; t < count; t++) {
        float one = dot(q, load(ra_row<T>(k, run.row, head, run.index + begin + t), chan));
        score = lane_of() == t ? one * job.scale : score;
    }
    float m = fmaxf(s.m, ra_warp_max(score));
    float keep = s.m == -INFINITY ? 0.0f : expf(s.m - m);
    float p = lane_of() < count ? expf(score - m) : 0.0f;
    slice part = {};
    for (int t = 0; t < count; t++) {
        blend(part, 1.0f, __shfl_sync(0xffffffffu, p, t),
              load(ra_row<T>(v, run.row, head, run.index + begin + t), chan));
    }
    s.m = m;
    s.l = keep * s.l + ra_warp_sum(p);
    blend(s.sum, keep, 1.0f, part);
}

template <typename T>
static __device__ void fold_row(const ra_fold_job &job, const ra_cuda_work &work,
                                const ra_work_item &item, int head, int i)
{
    int index = item.index + i, chan = (int)job.q.size[RA_CHAN];
    int kv_head = head / (work.q_heads / work.kv_heads);
    ra_work_reach reach = work.reach[item.reach + i];
    slice q = load(ra_row<T>(job.q, item.row, head, index), chan);
    softmax s = softmax_open(job, item, head, index);
    for (int r = item.run_first; r < item.run_first + item.run_count; r++) {
        ra_work_run run = work.run[r];
        int2 seen = seen_of(run, reach);
        for (int begin = seen.x; begin < seen.y; begin += RA_WARP) {
            fold_keys<T>(job, run, kv_head, begin, min(RA_WARP, seen.y - begin), q, s);
        }
    }
    bool empty = s.l == 0.0f;
    float factor = empty ? 0.0f : 1.0f / s.l;
    if (item.flags & RA_WORK_FINAL) {
        store(ra_row<T>(job.out, item.row, head, index), s.sum, factor, chan);
    } else {
        store(ra_row<float>(job.acc, item.row, head, index), s.sum, factor, chan);
    }
    if (lane_of() == 0) {
        float lse = empty ? -INFINITY : s.m + logf(s.l);
        *ra_row<float>(job.lse, item.row, head, index) = lse;
        if (job.lse_rest.data && !(item.flags & RA_WORK_FINAL)) {
            *ra_row<float>(job.lse_rest, item.row, head, index) =
                empty ? 0.0f : s.m - lse + logf(s.l);
        }
    }
}

template <typename T>
static __global__ void fold_items(const __grid_constant__ ra_fold_job job,
                                  const __grid_constant__ ra_cuda_work work)
{
    ra_work_item item = work.item[blockIdx.x];
    for (int i = threadIdx.x / RA_WARP; i < item.count; i += WARPS) {
        fold_row<T>(job, work, item, blockIdx.y, i);
    }
}

/* ---- backward */

/* p and ds of one pair from its two products. */
static __device__ float2 weights_of(const ra_grad_job &job, float score, float product, float lse,
                                    float delta)
{
    float p = expf(job.scale * score - lse);
    return {p, p * (product - delta) * job.scale};
}

/* Ends one row of a gradient as the item says: of the sums, or of the result. */
template <typename T>
static __device__ void store_sum(const ra_tensor &sums, const ra_tensor &result,
                                 const ra_work_item &item, int head, int index, slice &s)
{
    int chan = (int)sums.size[RA_CHAN];
    float *sum = ra_row<float>(sums, item.row, head, index);
    if (!(item.flags & RA_WORK_FRESH)) {
        blend(s, 1.0f, 1.0f, load(sum, chan));
    }
    if (item.flags & RA_WORK_FINAL) {
        store(ra_row<T>(result, item.row, head, index), s, 1.0f, chan);
    } else {
        store(sum, s, 1.0f, chan);
    }
}

/* dq of one query. */
template <typename T>
static __device__ void grad_query(const ra_grad_job &job, const ra_cuda_work &work,
                                  const ra_work_item &item, int head, int i)
{
    int index = item.index + i, chan = (int)job.q.size[RA_CHAN];
    int kv_head = head / (work.q_heads / work.kv_heads);
    ra_work_reach reach = work.reach[item.reach + i];
    slice q = load(ra_row<T>(job.q, item.row, head, index), chan);
    slice dout = load(ra_row<T>(job.dout, item.row, head, index), chan);
    float lse = *ra_row<float>(job.lse, item.row, head, index);
    float delta = *ra_row<float>(job.delta, item.row, head, index);
    slice dq = {};
    for (int r = item.run_first; r < item.run_first + item.run_count; r++) {
        ra_work_run run = work.run[r];
        const ra_tensor &keys = job.k[run.source], &values = job.v[run.source];
        int2 seen = seen_of(run, reach);
        for (int begin = seen.x; begin < seen.y; begin += RA_WARP) {
            slice part = {};
            for (int j = begin; j < min(begin + RA_WARP, seen.y); j++) {
                slice k = load(ra_row<T>(keys, run.row, kv_head, run.index + j), chan);
                slice v = load(ra_row<T>(values, run.row, kv_head, run.index + j), chan);
                float2 w = weights_of(job, dot(q, k), dot(dout, v), lse, delta);
                blend(part, 1.0f, w.y, k);
            }
            blend(dq, 1.0f, 1.0f, part);
        }
    }
    store_sum<T>(job.dq, job.to.dq, item, head, index, dq);
}

template <typename T>
static __global__ void grad_queries(const __grid_constant__ ra_grad_job job,
                                    const __grid_constant__ ra_cuda_work work)
{
    ra_work_item item = work.item[blockIdx.x];
    for (int i = threadIdx.x / RA_WARP; item.run_count > 0 && i < item.count; i += WARPS) {
        grad_query<T>(job, work, item, blockIdx.y, i);
    }
}

/* What 32 queries from `begin` on add to dk and dv of one key at position pos. */
template <typename T>
static __device__ void grad_chunk(const ra_grad_job &job, const ra_cuda_work &work,
                                  const ra_work_run &run, int head, int begin, int pos,
                                  const slice &k, const slice &v, slice &dk, slice &dv)
{
    int chan = (int)job.q.size[RA_CHAN], mine = begin + lane_of();
    bool sees = false;
    if (mine < run.count) {
        ra_work_reach reach = work.reach[run.reach + mine];
        sees = reach.begin <= pos && pos < reach.end;
    }
    slice part_k = {}, part_v = {};
    for (unsigned left = __ballot_sync(0xffffffffu, sees); left; left &= left - 1) {
        int index = run.index + begin + __ffs((int)left) - 1;
        slice q = load(ra_row<T>(job.q, run.row, head, index), chan);
        slice dout = load(ra_row<T>(job.dout, run.row, head, index), chan);
        float2 w =
            weights_of(job, dot(q, k), dot(dout, v), *ra_row<float>(job.lse, run.row, head, index),
                       *ra_row<float>(job.delta, run.row, head, index));
        blend(part_k, 1.0f, w.y, q);
        blend(part_v, 1.0f, w.x, dout);
    }
    blend(dk, 1.0f, 1.0f, part_k);
    blend(dv, 1.0f, 1.0f, part_v);
}

/* dk and dv of one key, over all query heads that read it. */
template <typename T>
static __device__ void grad_key(const ra_grad_job &job, const ra_cuda_work &work,
                                const ra_work_item &item, int kv_head, int i)
{
    int source = item.flags & RA_WORK_CHUNK ? RA_SOURCE_CHUNK : RA_SOURCE_OWN;
    int index = item.index + i, chan = (int)job.q.size[RA_CHAN];
    int group = work.q_heads / work.kv_heads;
    slice k = load(ra_row<T>(job.k[source], item.row, kv_head, index), chan);
    slice v = load(ra_row<T>(job.v[source], item.row, kv_head, index), chan);
    slice dk = {}, dv = {};
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int r = item.run_first; r < item.run_first + item.run_count; r++) {
            ra_work_run run = work.key_run[r];
            for (int begin = 0; begin < run.count; begin += RA_WARP) {
                grad_chunk<T>(job, work, run, head, begin, item.reach + i, k, v, dk, dv);
            }
        }
    }
    store_sum<T>(job.dk[source], job.to.dk, item, kv_head, index, dk);
    store_sum<T>(job.dv[source], job.to.dv, item, kv_head, index, dv);
}

template <typename T>
static __global__ void grad_keys(const __grid_constant__ ra_grad_job job,
                                 const __grid_constant__ ra_cuda_work work)
{
    ra_work_item item = work.key_item[blockIdx.x];
    for (int i = threadIdx.x / RA_WARP; i < item.count; i += WARPS) {
        grad_key<T>(job, work, item, blockIdx.y, i);
    }
}

/* ---- launches */

static bool supports_fold(const ra_fold_job *, const ra_cuda_work *, const ra_cuda_launch *)
{
    return true;
}

static ra_status launch_fold(const ra_fold_job *job, const ra_cuda_work *work,
                             const ra_cuda_launch *at)
{
    dim3 grid((unsigned)work->host.item_count, (unsigned)work->q_heads);
    RA_CUDA_WITH_TYPE(job->q.dtype,
                      (fold_items<T><<<grid, WARPS * RA_WARP, 0, at->stream>>>(*job, *work)));
    RA_CUDA_TRY(cudaGetLastError());
    return RA_OK;
}

static bool supports_grad(const ra_grad_job *, const ra_cuda_work *, const ra_cuda_launch *)
{
    return true;
}

static ra_status launch_grad(const ra_grad_job *job, const ra_cuda_work *work,
                             const ra_cuda_launch *at)
{
    dim3 queries((unsigned)work->host.item_count, (unsigned)work->q_heads);
    dim3 keys((unsigned)work->host.key_item_count, (unsigned)work->kv_heads);
    RA_CUDA_WITH_TYPE(job->q.dtype,
                      (grad_queries<T><<<queries, WARPS * RA_WARP, 0, at->stream>>>(*job, *work)));
    RA_CUDA_TRY(cudaGetLastError());
    if (work->host.key_item_count > 0) {
        RA_CUDA_WITH_TYPE(job->q.dtype,
                          (grad_keys<T><<<keys, WARPS * RA_WARP, 0, at->stream>>>(*job, *work)));
        RA_CUDA_TRY(cudaGetLastError());
    }
    return RA_OK;
}

extern "C" const ra_cuda_fold_kernel ra_cuda_simple_fold = {"simple", supports_fold, launch_fold};
extern "C" const ra_cuda_grad_kernel ra_cuda_simple_grad = {
    "simple", supports_grad, launch_grad, false, false,
};
