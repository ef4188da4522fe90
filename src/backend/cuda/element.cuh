/* Elements of any dtype as f32, addresses of rows, and sums over a warp: what the plain kernels and
 * the elementwise ones share. Must not know attention. */
#ifndef RA_BACKEND_CUDA_ELEMENT_CUH
#define RA_BACKEND_CUDA_ELEMENT_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backend/cuda/dispatch.h"

enum { RA_WARP = 32 };

static __device__ inline float ra_to_f32(float x)
{
    return x;
}
static __device__ inline float ra_to_f32(__nv_bfloat16 x)
{
    return __bfloat162float(x);
}
static __device__ inline float ra_to_f32(__half x)
{
    return __half2float(x);
}

template <typename T> static __device__ inline T ra_from_f32(float x);
template <> __device__ inline float ra_from_f32<float>(float x)
{
    return x;
}
template <> __device__ inline __nv_bfloat16 ra_from_f32<__nv_bfloat16>(float x)
{
    return __float2bfloat16(x);
}
template <> __device__ inline __half ra_from_f32<__half>(float x)
{
    return __float2half(x);
}

/* Channel 0 of a row. */
template <typename T>
static __device__ inline T *ra_row(const ra_tensor &t, int64_t row, int64_t head, int64_t seq)
{
    return static_cast<T *>(t.data) + row * t.stride[RA_ROW] + head * t.stride[RA_HEAD] +
           seq * t.stride[RA_SEQ];
}

/* The same sum in every lane: the tree is symmetric. */
static __device__ inline float ra_warp_sum(float x)
{
    for (int step = RA_WARP / 2; step > 0; step /= 2) {
        x += __shfl_xor_sync(0xffffffffu, x, step);
    }
    return x;
}

static __device__ inline float ra_warp_max(float x)
{
    for (int step = RA_WARP / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    }
    return x;
}

/* Runs `statement` with T the element type of a run-time dtype. */
#define RA_CUDA_WITH_TYPE(dtype, statement)                                                        \
    do {                                                                                           \
        if ((dtype) == RA_BF16) {                                                                  \
            using T = __nv_bfloat16;                                                               \
            statement;                                                                             \
        } else if ((dtype) == RA_F16) {                                                            \
            using T = __half;                                                                      \
            statement;                                                                             \
        } else {                                                                                   \
            using T = float;                                                                       \
            statement;                                                                             \
        }                                                                                          \
    } while (0)

#endif
