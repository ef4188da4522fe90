/*
 * The kernels in 512-bit vectors, with products of bf16 pairs: one instruction multiplies two pairs
 * of bf16 in a lane and adds both to its f32 sum, twice the rate of f32. Inputs of other dtypes are
 * computed as at level avx512. Compiled with the instructions, called only where the machine has
 * them.
 */
#include "backend/cpu/level.h"

#include "backend/cpu/pairs.inc"

static void narrow_transposed(const float *tile, int64_t row, int64_t m, int64_t n, float *out)
{
    for (int64_t i = 0; i < m; i += PAIR) {
        for (int64_t at = 0; at < n; at += LANES) {
            store_vec(out + i / PAIR * row + at, pair_rows(tile, row, m, i, at));
        }
    }
}

INLINE vec multiply_pairs(float a, vec b, vec sum)
{
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_ps(a), (__m512bh)b);
}

#define PRODUCT(name) product_pairs_##name
#define MULTIPLY_ADD multiply_pairs
#define DEPTH PAIR
#include "backend/cpu/product.inc"

static void product_pairs(const ra_product *p)
{
    if (p->a_col == 1) {
        product_pairs_strided(p, p->a_row, 1);
    } else {
        product_pairs_strided(p, 1, p->a_col);
    }
}

static bool runs(void)
{
    return runs_vectors512() && __builtin_cpu_supports("avx512bf16");
}

static const ra_operands pairs = {
    .depth = PAIR,
    .mr = BLOCK_ROWS,
    .queries = 24,
    .tile_channels = 12288,
    .load = load_pairs,
    .pack = pack_pairs,
    .pack_transposed = pack_pairs_transposed,
    .narrow = narrow,
    .narrow_transposed = narrow_transposed,
    .product = product_pairs,
};

const ra_level ra_level_avx512bf16 = LEVEL_TABLE("avx512bf16", &pairs);
