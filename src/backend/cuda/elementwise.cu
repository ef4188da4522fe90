/* A warp takes a row of channels at a time: rows may lie anywhere, channels are contiguous. All are
 * limited by memory, so a thread moves PACK channels at once, 16 bytes an access, where every row
 * of every tensor allows that. Must not know attention. */
#include "backend/cuda/elementwise.h"

#include "backend/cuda/check.h"
#include "backend/cuda/element.cuh"

enum { WARPS = 8, THREADS = WARPS * RA_WARP, BLOCKS_MAX = 132 * 16, GRID_Y_MAX = 65535 };
enum { PACK = 8, PACK_BYTES = 16 }; /* channels; bytes of an access */
enum { DOT_ROWS = 4 };              /* of a warp at once: so many loads on their way */

struct place {
    int64_t row, head, seq;
};

/* Calls body(place) for every ROWS rows of `like` that follow each other, by their first, a warp
 * each. A block keeps to one head: finding it for each row takes divisions, longer than the row. */
template <int ROWS = 1, typename Body>
static __device__ void for_rows(const ra_tensor &like, Body body)
{
    const uint32_t heads = (uint32_t)like.size[RA_HEAD], all = (uint32_t)like.size[RA_ROW] * heads;
    const int64_t first = ((int64_t)blockIdx.x * WARPS + threadIdx.x / RA_WARP) * ROWS;
    const int64_t step = (int64_t)gridDim.x * WARPS * ROWS;
    for (uint32_t i = blockIdx.y; i < all; i += gridDim.y) {
        for (int64_t seq = first; seq < like.size[RA_SEQ]; seq += step) {
            body(place{i / heads, i % heads, seq});
        }
    }
}

static int64_t at_most(int64_t x, int64_t limit)
{
    return x < limit ? x : limit;
}

/* For for_rows: as many blocks as run at once, if there is work for them. */
static dim3 grid_of(const ra_tensor *t, int rows = 1)
{
    int64_t heads = t->size[RA_ROW] * t->size[RA_HEAD];
    int64_t blocks = (t->size[RA_SEQ] + WARPS * rows - 1) / (WARPS * rows);
    RA_CHECK(heads <= UINT32_MAX);
    int64_t share = (BLOCKS_MAX + heads - 1) / heads;
    return dim3((unsigned)at_most(blocks, share), (unsigned)at_most(heads, GRID_Y_MAX));
}

/* Consecutive channels of one thread: W is PACK, or 1 where rows are not aligned. */
template <typename T, int W> struct alignas(W == 1 ? sizeof(T) : (size_t)PACK_BYTES) pack {
    T x[W];
};

template <typename T, int W> static __device__ pack<T, W> load(const T *row, int64_t c)
{
    return *reinterpret_cast<const pack<T, W> *>(row + c);
}

template <typename T, int W> static __device__ void store(T *row, int64_t c, const pack<T, W> &p)
{
    *reinterpret_cast<pack<T, W> *>(row + c) = p;
}

/* Calls body(channel) for this thread's first channel of every pack of a row. */
template <int W, typename Body> static __device__ void for_packs(const ra_tensor &t, Body body)
{
    for (int64_t c = threadIdx.x % RA_WARP * W; c < t.size[RA_CHAN]; c += RA_WARP * W) {
        body(c);
    }
}

template <typename T, int W> static __global__ void fill_rows(ra_tensor t, float value)
{
    pack<T, W> filled;
    for (int i = 0; i < W; i++) {
        filled.x[i] = ra_from_f32<T>(value);
    }
    for_rows(t, [&](place at) {
        T *row = ra_row<T>(t, at.row, at.head, at.seq);
        for_packs<W>(t, [&](int64_t c) { store<T, W>(row, c, filled); });
    });
}

template <int W> static __global__ void add_rows(ra_tensor to, ra_tensor from)
{
    for_rows(to, [&](place at) {
        float *row = ra_row<float>(to, at.row, at.head, at.seq);
        const float *part = ra_row<float>(from, at.row, at.head, at.seq);
        for_packs<W>(to, [&](int64_t c) {
            pack<float, W> sum = load<float, W>(row, c), more = load<float, W>(part, c);
            for (int i = 0; i < W; i++) {
                sum.x[i] += more.x[i];
            }
            store<float, W>(row, c, sum);
        });
    });
}

template <typename T, int W> static __global__ void cast_rows(ra_tensor to, ra_tensor from)
{
    for_rows(to, [&](place at) {
        T *row = ra_row<T>(to, at.row, at.head, at.seq);
        const float *exact = ra_row<float>(from, at.row, at.head, at.seq);
        for_packs<W>(to, [&](int64_t c) {
            pack<float, W> x = load<float, W>(exact, c);
            pack<T, W> rounded;
            for (int i = 0; i < W; i++) {
                rounded.x[i] = ra_from_f32<T>(x.x[i]);
            }
            store<T, W>(row, c, rounded);
        });
    });
}

/* PACK channels, by one access if rows are aligned. */
template <typename T, bool ALIGNED>
static __device__ pack<T, PACK> load_pack(const T *row, int64_t c)
{
    if constexpr (ALIGNED) {
        return load<T, PACK>(row, c);
    } else {
        pack<T, PACK> p;
        for (int i = 0; i < PACK; i++) {
            p.x[i] = row[c + i];
        }
        return p;
    }
}

/* A thread sums whole packs, aligned or not, so that strides do not change the order of the sum. */
template <typename T, bool ALIGNED>
static __global__ void dot_rows(ra_tensor a, ra_tensor b, ra_tensor dot)
{
    for_rows<DOT_ROWS>(a, [&](place at) {
        const int64_t last = a.size[RA_SEQ] - 1;
        const T *left[DOT_ROWS], *right[DOT_ROWS];
        float sum[DOT_ROWS] = {};
        for (int r = 0; r < DOT_ROWS; r++) { /* behind the last row: that one again */
            const int64_t seq = at.seq + r < last ? at.seq + r : last;
            left[r] = ra_row<T>(a, at.row, at.head, seq);
            right[r] = ra_row<T>(b, at.row, at.head, seq);
        }
        for_packs<PACK>(a, [&](int64_t c) {
            pack<T, PACK> x[DOT_ROWS], y[DOT_ROWS];
            for (int r = 0; r < DOT_ROWS; r++) {
                x[r] = load_pack<T, ALIGNED>(left[r], c);
                y[r] = load_pack<T, ALIGNED>(right[r], c);
            }
            for (int r = 0; r < DOT_ROWS; r++) {
                for (int i = 0; i < PACK; i++) {
                    sum[r] += ra_to_f32(x[r].x[i]) * ra_to_f32(y[r].x[i]);
                }
            }
        });
        for (int r = 0; r < DOT_ROWS; r++) {
            const float whole = ra_warp_sum(sum[r]);
            if (threadIdx.x % RA_WARP == 0 && at.seq + r <= last) {
                *ra_row<float>(dot, at.row, at.head, at.seq + r) = whole;
            }
        }
    });
}

/* Does every row consist of whole packs, at addresses for them? */
static bool has_packs(const ra_tensor *t)
{
    bool has = (uintptr_t)t->data % PACK_BYTES == 0 && t->size[RA_CHAN] % PACK == 0;
    for (int axis = RA_ROW; axis < RA_CHAN; axis++) {
        has = has && (t->size[axis] == 1 || t->stride[axis] % PACK == 0);
    }
    return has;
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

/* One thread watches the clock of its SM. */
static __global__ void pause_stream(long long cycles)
{
    const long long begin = clock64();
    while (clock64() - begin < cycles) {
    }
}

/* ---- launches */

template <typename T> static void fill(const ra_tensor *t, float value, cudaStream_t stream)
{
    auto kernel = has_packs(t) ? fill_rows<T, PACK> : fill_rows<T, 1>;
    kernel<<<grid_of(t), THREADS, 0, stream>>>(*t, value);
}

template <typename T> static void cast(const ra_tensor *to, const ra_tensor *from, cudaStream_t s)
{
    auto kernel = has_packs(to) && has_packs(from) ? cast_rows<T, PACK> : cast_rows<T, 1>;
    kernel<<<grid_of(to), THREADS, 0, s>>>(*to, *from);
}

template <typename T>
static void row_dot(const ra_tensor *a, const ra_tensor *b, const ra_tensor *dot, cudaStream_t s)
{
    RA_CHECK(a->size[RA_CHAN] % PACK == 0); /* head dims are multiples of 8 */
    auto kernel = has_packs(a) && has_packs(b) ? dot_rows<T, true> : dot_rows<T, false>;
    kernel<<<grid_of(a, DOT_ROWS), THREADS, 0, s>>>(*a, *b, *dot);
}

ra_status ra_cuda_fill(const ra_tensor *t, float value, cudaStream_t stream)
{
    int64_t count = ra_tensor_count(t);
    if (count == 0) {
        return RA_OK;
    }
    if (value == 0.0f && is_dense(t)) { /* the sums of the backward: as fast as memory is */
        RA_CUDA_TRY(cudaMemsetAsync(t->data, 0, (size_t)count * ra_dtype_bytes(t->dtype), stream));
        return RA_OK;
    }
    RA_CUDA_WITH_TYPE(t->dtype, fill<T>(t, value, stream));
    RA_CUDA_TRY(cudaGetLastError());
    return RA_OK;
}

ra_status ra_cuda_add(const ra_tensor *to, const ra_tensor *from, cudaStream_t stream)
{
    if (ra_tensor_count(to) > 0) {
        auto kernel = has_packs(to) && has_packs(from) ? add_rows<PACK> : add_rows<1>;
        kernel<<<grid_of(to), THREADS, 0, stream>>>(*to, *from);
        RA_CUDA_TRY(cudaGetLastError());
    }
    return RA_OK;
}

ra_status ra_cuda_cast(const ra_tensor *to, const ra_tensor *from, cudaStream_t stream)
{
    if (ra_tensor_count(to) > 0) {
        RA_CUDA_WITH_TYPE(to->dtype, cast<T>(to, from, stream));
        RA_CUDA_TRY(cudaGetLastError());
    }
    return RA_OK;
}

ra_status ra_cuda_row_dot(const ra_tensor *a, const ra_tensor *b, const ra_tensor *dot,
                          cudaStream_t stream)
{
    if (ra_tensor_count(dot) > 0) {
        RA_CUDA_WITH_TYPE(a->dtype, row_dot<T>(a, b, dot, stream));
        RA_CUDA_TRY(cudaGetLastError());
    }
    return RA_OK;
}

ra_status ra_cuda_pause(cudaStream_t stream)
{
    pause_stream<<<1, 1, 0, stream>>>(10000);
    RA_CUDA_TRY(cudaGetLastError());
    return RA_OK;
}
