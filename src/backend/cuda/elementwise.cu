/* A warp takes a row of channels at a time: rows may lie anywhere, channels are contiguous. All are
 * limited by memory. */
#include "backend/cuda/elementwise.h"

#include "backend/cuda/check.h"
#include "backend/cuda/element.cuh"

enum { WARPS = 8, BLOCKS_MAX = 132 * 16 };

struct place {
    int64_t row, head, seq;
};

static __device__ place place_of(const ra_tensor &t, int64_t i)
{
    int64_t seq = t.size[RA_SEQ], heads = t.size[RA_HEAD];
    return {i / seq / heads, i / seq % heads, i % seq};
}

/* Calls body(place) for every row of `like`, a warp a row. */
template <typename Body> static __device__ void for_rows(const ra_tensor &like, Body body)
{
    int64_t rows = like.size[RA_ROW] * like.size[RA_HEAD] * like.size[RA_SEQ];
    int64_t step = (int64_t)gridDim.x * WARPS;
    for (int64_t i = (int64_t)blockIdx.x * WARPS + threadIdx.x / RA_WARP; i < rows; i += step) {
        body(place_of(like, i));
    }
}

static int blocks_of(const ra_tensor *t)
{
    int64_t rows = t->size[RA_ROW] * t->size[RA_HEAD] * t->size[RA_SEQ];
    int64_t blocks = (rows + WARPS - 1) / WARPS;
    return blocks < BLOCKS_MAX ? (int)blocks : (int)BLOCKS_MAX;
}

template <typename T> static __global__ void fill_rows(ra_tensor t, float value)
{
    for_rows(t, [&](place at) {
        T *row = ra_row<T>(t, at.row, at.head, at.seq);
        for (int64_t c = threadIdx.x % RA_WARP; c < t.size[RA_CHAN]; c += RA_WARP) {
            row[c] = ra_from_f32<T>(value);
        }
    });
}

static __global__ void add_rows(ra_tensor to, ra_tensor from)
{
    for_rows(to, [&](place at) {
        float *row = ra_row<float>(to, at.row, at.head, at.seq);
        const float *part = ra_row<float>(from, at.row, at.head, at.seq);
        for (int64_t c = threadIdx.x % RA_WARP; c < to.size[RA_CHAN]; c += RA_WARP) {
            row[c] += part[c];
        }
    });
}

template <typename T> static __global__ void cast_rows(ra_tensor to, ra_tensor from)
{
    for_rows(to, [&](place at) {
        T *row = ra_row<T>(to, at.row, at.head, at.seq);
        const float *exact = ra_row<float>(from, at.row, at.head, at.seq);
        for (int64_t c = threadIdx.x % RA_WARP; c < to.size[RA_CHAN]; c += RA_WARP) {
            row[c] = ra_from_f32<T>(exact[c]);
        }
    });
}

template <typename T> static __global__ void dot_rows(ra_tensor a, ra_tensor b, ra_tensor dot)
{
    for_rows(a, [&](place at) {
        const T *left = ra_row<T>(a, at.row, at.head, at.seq);
        const T *right = ra_row<T>(b, at.row, at.head, at.seq);
        float sum = 0;
        for (int64_t c = threadIdx.x % RA_WARP; c < a.size[RA_CHAN]; c += RA_WARP) {
            sum += ra_to_f32(left[c]) * ra_to_f32(right[c]);
        }
        sum = ra_warp_sum(sum);
        if (threadIdx.x % RA_WARP == 0) {
            *ra_row<float>(dot, at.row, at.head, at.seq) = sum;
        }
    });
}

static bool is_dense(const ra_tensor *t)
{
    int64_t expected = 1;
    for (int axis = RA_CHAN; axis >= 0; axis--) {
        if (t->size[axis] > 1 && t->stride[axis] != expected) {
            return false;
        }
        expected *= t->size[axis];
    }
    return true;
}

ra_status ra_cuda_fill(const ra_tensor *t, float value, cudaStream_t stream)
{
    int blocks = blocks_of(t);
    int64_t count = ra_tensor_count(t);
    if (count == 0) {
        return RA_OK;
    }
    if (value == 0.0f && is_dense(t)) { /* the sums of the backward: as fast as memory is */
        RA_CUDA_TRY(cudaMemsetAsync(t->data, 0, (size_t)count * ra_dtype_bytes(t->dtype), stream));
        return RA_OK;
    }
    RA_CUDA_WITH_TYPE(t->dtype, (fill_rows<T><<<blocks, WARPS * RA_WARP, 0, stream>>>(*t, value)));
    RA_CUDA_TRY(cudaGetLastError());
    return RA_OK;
}

ra_status ra_cuda_add(const ra_tensor *to, const ra_tensor *from, cudaStream_t stream)
{
    if (ra_tensor_count(to) > 0) {
        add_rows<<<blocks_of(to), WARPS * RA_WARP, 0, stream>>>(*to, *from);
        RA_CUDA_TRY(cudaGetLastError());
    }
    return RA_OK;
}

ra_status ra_cuda_cast(const ra_tensor *to, const ra_tensor *from, cudaStream_t stream)
{
    int blocks = blocks_of(to);
    if (ra_tensor_count(to) > 0) {
        RA_CUDA_WITH_TYPE(to->dtype,
                          (cast_rows<T><<<blocks, WARPS * RA_WARP, 0, stream>>>(*to, *from)));
        RA_CUDA_TRY(cudaGetLastError());
    }
    return RA_OK;
}

ra_status ra_cuda_row_dot(const ra_tensor *a, const ra_tensor *b, const ra_tensor *dot,
                          cudaStream_t stream)
{
    int blocks = blocks_of(a);
    if (ra_tensor_count(dot) > 0) {
        RA_CUDA_WITH_TYPE(a->dtype,
                          (dot_rows<T><<<blocks, WARPS * RA_WARP, 0, stream>>>(*a, *b, *dot)));
        RA_CUDA_TRY(cudaGetLastError());
    }
    return RA_OK;
}
