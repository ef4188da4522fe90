/*
 * Online softmax in the registers of a warpgroup. A thread holds two rows of a score tile, eight
 * apart: elements i with (i & 2) == 0 are of the first, the others of the second, at column
 * (i / 4) * 8 + 2 * (lane % 4) + i % 2. Scores stay unscaled; maxima and exponents are in base 2.
 * Must not know where scores come from or where probabilities go.
 */
#ifndef RA_BACKEND_CUDA_SOFTMAX_CUH
#define RA_BACKEND_CUDA_SOFTMAX_CUH

#include "backend/cuda/ptx.cuh"

constexpr float RA_LOG2E = 1.44269504088896341f, RA_LN2 = 0.69314718055994531f;

/* A maximum is raised only when it grew by more than this, in base 2: probabilities then reach 2^8
 * at most, which every dtype holds, and the numerator is rarely rescaled. The result is exact
 * either way. */
constexpr float RA_MAX_SLACK = 8.0f;

struct softmax_rows {
    float max0, max1; /* scaled, base 2; -inf: no key so far */
    float sum0, sum1; /* this thread's share; the quad's four shares make the row's sum */
};

/* Columns [x, y) of a tile that a row may see; everything else becomes -inf, by selection, so that
 * a NaN there is gone. Of elements [begin, end), both multiples of 4. */
template <int N>
RA_PTX void softmax_mask(float (&s)[N], int2 row0, int2 row1, int lane, int begin = 0, int end = N)
{
    const int own = (lane & 3) * 2;
    const int begin0 = row0.x - own, end0 = row0.y - own;
    const int begin1 = row1.x - own, end1 = row1.y - own;
#pragma unroll
    for (int i = begin; i < end; i += 4) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int column = i * 2 + u;
            s[i + u] = column >= begin0 && column < end0 ? s[i + u] : -INFINITY;
            s[i + 2 + u] = column >= begin1 && column < end1 ? s[i + 2 + u] : -INFINITY;
        }
    }
}

/* Over the four lanes that share a row. */
RA_PTX float quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
RA_PTX float quad_sum(float x)
{
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

/* Of what this thread holds of its two rows, elements [begin, end), both multiples of 8. */
template <int N> RA_PTX float2 softmax_own_max(const float (&s)[N], int begin = 0, int end = N)
{
    float x0 = fmaxf(s[begin], s[begin + 1]), x1 = fmaxf(s[begin + 2], s[begin + 3]);
    float y0 = fmaxf(s[begin + 4], s[begin + 5]), y1 = fmaxf(s[begin + 6], s[begin + 7]);
#pragma unroll
    for (int i = begin + 8; i < end; i += 8) {
        x0 = fmaxf(x0, fmaxf(s[i], s[i + 1]));
        x1 = fmaxf(x1, fmaxf(s[i + 2], s[i + 3]));
        y0 = fmaxf(y0, fmaxf(s[i + 4], s[i + 5]));
        y1 = fmaxf(y1, fmaxf(s[i + 6], s[i + 7]));
    }
    return make_float2(fmaxf(x0, y0), fmaxf(x1, y1));
}

/* Takes a thread's maxima of a tile in; the result is what numerators so far must be multiplied by.
 * A row without any key so far has no numerator: 1. */
RA_PTX float2 softmax_raise_to(softmax_rows &rows, float2 own, float scale_log2)
{
    const float x0 = quad_max(own.x) * scale_log2, x1 = quad_max(own.y) * scale_log2;
    float2 factor = make_float2(1.0f, 1.0f);
    if (x0 > rows.max0 + RA_MAX_SLACK) {
        factor.x = rows.max0 == -INFINITY ? 1.0f : ex2_approx(rows.max0 - x0);
        rows.max0 = x0;
    }
    if (x1 > rows.max1 + RA_MAX_SLACK) {
        factor.y = rows.max1 == -INFINITY ? 1.0f : ex2_approx(rows.max1 - x1);
        rows.max1 = x1;
    }
    rows.sum0 *= factor.x;
    rows.sum1 *= factor.y;
    return factor;
}

/* The same for a warp whose numerators change only if this returns true. Threads compare what they
 * hold with the maxima so far, so that a tile that raises none costs no exchange of maxima. */
RA_PTX bool softmax_raises(softmax_rows &rows, float2 own, float scale_log2, float2 &factor)
{
    const bool raises = __any_sync(~0u, own.x * scale_log2 > rows.max0 + RA_MAX_SLACK ||
                                            own.y * scale_log2 > rows.max1 + RA_MAX_SLACK);
    if (raises) {
        factor = softmax_raise_to(rows, own, scale_log2);
    }
    return raises;
}
template <int N>
RA_PTX bool softmax_raises(softmax_rows &rows, const float (&s)[N], float scale_log2,
                           float2 &factor)
{
    return softmax_raises(rows, softmax_own_max(s), scale_log2, factor);
}

/* What is added to scaled scores before ex2; 0 where every score is -inf, so that it stays so. */
RA_PTX float softmax_shift(float max)
{
    return max == -INFINITY ? 0.0f : -max;
}

/* Elements [begin, end) of a tile, both multiples of 8, become probabilities and enter the sums. */
template <int N>
RA_PTX void softmax_exp(softmax_rows &rows, float (&s)[N], int begin, int end, float scale_log2,
                        float shift0, float shift1)
{
#pragma unroll
    for (int i = begin; i < end; i++) {
        s[i] = ex2_approx(fmaf(s[i], scale_log2, i & 2 ? shift1 : shift0));
    }
#pragma unroll
    for (int i = begin; i < end; i += 8) {
        rows.sum0 += (s[i] + s[i + 1]) + (s[i + 4] + s[i + 5]);
        rows.sum1 += (s[i + 2] + s[i + 3]) + (s[i + 6] + s[i + 7]);
    }
}

/* A row's sum is complete: what its numerator is multiplied by, and its lse. A row without keys
 * gives 0 and -inf; a NaN stays one. Sums are 1 or more, but for rounding, and far from overflow,
 * so that a step of Newton makes the inverse exact to a bit without the branches of a division. */
RA_PTX float softmax_inverse(float sum)
{
    const float x = rcp_approx(sum);
    return sum == 0.0f ? 0.0f : fmaf(fmaf(-sum, x, 1.0f), x, x);
}
RA_PTX float softmax_lse(float max, float sum)
{
    return sum == 0.0f ? -INFINITY : (max + log2f(sum)) * RA_LN2;
}

#endif
