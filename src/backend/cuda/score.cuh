/*
 * What both score kernels do when products are there: p and ds, rounded, to the workspace. Must not
 * know how the products came about.
 */
#ifndef RA_BACKEND_CUDA_SCORE_CUH
#define RA_BACKEND_CUDA_SCORE_CUH

#include "backend/cuda/grad.cuh"

namespace grad
{

constexpr float LOG2E = 1.44269504088896341f;

/* What a thread knows of its two rows, eight apart, of 16 of a warp. */
struct row_values {
    float a, b;
};

/* Which of `count` columns a row sees, [begin, end), in two bytes; none is 0. */
RA_PTX uint32_t span_of(int begin, int end, int count)
{
    begin = max(begin, 0);
    end = min(end, count);
    return begin < end ? begin | end << 8 : 0;
}

template <typename E> RA_PTX float2 unpack(uint32_t pair);
template <> __device__ __forceinline__ float2 unpack<__nv_bfloat16>(uint32_t pair)
{
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
}
template <> __device__ __forceinline__ float2 unpack<__half>(uint32_t pair)
{
    return __half22float2(*(const __half2 *)&pair);
}

/* acc becomes p (x: lse in base 2) or ds (x: delta) and is rounded into staging memory, 64 columns
 * after 64; p is kept. spans: of both rows. */
template <typename E, bool MASKED, bool DS, int N>
RA_PTX void round_rows(float (&acc)[N], uint32_t (&p)[N / 2], uint32_t staging, float scale,
                       row_values x, uint32_t spans, int lane)
{
    const int own = (lane & 3) * 2;
    const int begin_a = (int)(spans & 0xff) - own,
              count_a = (int)(spans >> 8 & 0xff) - own - begin_a;
    const int begin_b = (int)(spans >> 16 & 0xff) - own,
              count_b = (int)(spans >> 24) - own - begin_b;
    const uint32_t row = staging + (lane & 15) * 128;
#pragma unroll
    for (int j = 0; j < N / 4; j += 2) { /* 16 columns */
        uint32_t out[4];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int i = (j + h) * 4, column = (j + h) * 8;
            float y[4];
            if constexpr (DS) {
                const float2 pa = unpack<E>(p[i / 2]), pb = unpack<E>(p[i / 2 + 1]);
                y[0] = (acc[i] - x.a) * pa.x;
                y[1] = (acc[i + 1] - x.a) * pa.y;
                y[2] = (acc[i + 2] - x.b) * pb.x;
                y[3] = (acc[i + 3] - x.b) * pb.y;
            } else {
                y[0] = ex2_approx(fmaf(acc[i], scale, -x.a));
                y[1] = ex2_approx(fmaf(acc[i + 1], scale, -x.a));
                y[2] = ex2_approx(fmaf(acc[i + 2], scale, -x.b));
                y[3] = ex2_approx(fmaf(acc[i + 3], scale, -x.b));
            }
            if constexpr (MASKED) { /* by selection: a NaN is gone */
                y[0] = (uint32_t)(column - begin_a) < (uint32_t)count_a ? y[0] : 0.0f;
                y[1] = (uint32_t)(column + 1 - begin_a) < (uint32_t)count_a ? y[1] : 0.0f;
                y[2] = (uint32_t)(column - begin_b) < (uint32_t)count_b ? y[2] : 0.0f;
                y[3] = (uint32_t)(column + 1 - begin_b) < (uint32_t)count_b ? y[3] : 0.0f;
            }
            out[2 * h] = cvt_rn_x2<E>(y[0], y[1]);
            out[2 * h + 1] = cvt_rn_x2<E>(y[2], y[3]);
            if constexpr (!DS) {
                p[i / 2] = out[2 * h];
                p[i / 2 + 1] = out[2 * h + 1];
            }
        }
        const uint32_t chunk = (uint32_t)((j & 7) + (lane >> 4)) ^ (lane & 7);
        stmatrix_x4(row + j / 8 * 2048 + (chunk << 4), out[0], out[1], out[2], out[3]);
    }
}

} /* namespace grad */

#endif
