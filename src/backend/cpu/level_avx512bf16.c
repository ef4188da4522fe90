/*
 * The kernels in 512-bit vectors, with products of bf16 pairs: one instruction multiplies two pairs
 * of bf16 in a lane and adds both to its f32 sum, twice the rate of f32. Inputs of other dtypes are
 * computed as at level avx512. Compiled with the instructions, called only where the machine has
 * them.
 */
#include "backend/cpu/level.h"

#include <immintrin.h>

enum { LANES = 16, VECTORS = 4, BLOCK_ROWS = 6 };
#define ZIP_LOW(a, b)                                                                              \
    __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b)                                                                             \
    __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LARGER(a, b) _mm512_max_ps(a, b)
#define SMALLER(a, b) _mm512_min_ps(a, b)
#include "backend/cpu/kernels.inc"

enum { PAIR = 2, HALVES = LANES * PAIR /* bf16 of a vector */ };

static void load_pairs(const ra_rows *rows, int64_t row_end, float *tile, int64_t tile_row)
{
    size_t bytes = (size_t)rows->chan * sizeof(uint16_t);
    for (int64_t i = 0; i < rows->count; i++) {
        memcpy(tile + i * tile_row, row_at(rows, i, RA_BF16), bytes);
    }
    for (int64_t i = rows->count; i < row_end; i++) {
        memset(tile + i * tile_row, 0, bytes);
    }
}

/* A vector of channels of a row from `at` on; those past its end are zero and not read. */
INLINE __m512i load_halves(const ra_rows *rows, int64_t row, int64_t at)
{
    int64_t live = rows->chan - at;
    __mmask32 mask = live >= HALVES ? ~0u : live > 0 ? (1u << live) - 1 : 0;
    return _mm512_maskz_loadu_epi16(mask, row_at(rows, row, RA_BF16) + at * PAIR);
}

/* Pairs are two rows in the same column. */
static void pack_pairs(const ra_rows *rows, float *panels, int64_t stride)
{
    const __m512i zero = _mm512_setzero_si512();
    /* The 16-bit halves of a and b in turn: word i is (a[i], b[i]). */
    __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39,
                                   7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(LANES));
    for (int64_t i = 0; i < rows->count; i += PAIR) {
        float *to = panels + i / PAIR * PANEL;
        for (int64_t panel = 0; panel < rows->chan; panel += PANEL, to += stride) {
            for (int at = 0; at < PANEL; at += HALVES) {
                __m512i a = load_halves(rows, i, panel + at);
                __m512i b = i + 1 < rows->count ? load_halves(rows, i + 1, panel + at) : zero;
                _mm512_storeu_si512(to + at, _mm512_permutex2var_epi16(a, low, b));
                _mm512_storeu_si512(to + at + LANES, _mm512_permutex2var_epi16(a, high, b));
            }
        }
    }
}

/* Pairs are two channels of a row: a row is a row of words, and these are transposed. */
static void pack_pairs_transposed(const ra_rows *rows, float *panels, int64_t stride)
{
    int64_t words = rows->chan / PAIR, padded = (rows->count + PANEL - 1) / PANEL * PANEL;
    for (int64_t row = 0; row < padded; row += LANES) {
        float *to = panels + row / PANEL * stride + row % PANEL;
        for (int64_t at = 0; at < words; at += LANES) {
            vec square[LANES];
            for (int i = 0; i < LANES; i++) {
                square[i] = row + i < rows->count
                                ? load_chans(row_at(rows, row + i, RA_BF16), at, words, RA_F32)
                                : splat(0);
            }
            transpose(square);
            int64_t live = words - at;
            for (int i = 0; i < LANES && i < live; i++) {
                store_vec(to + (at + i) * PANEL, square[i]);
            }
        }
    }
}

static void narrow(const float *tile, int64_t row, int64_t m, int64_t n, float *out)
{
    for (int64_t i = 0; i < m; i++) {
        for (int64_t at = 0; at < n; at += HALVES) {
            const float *from = tile + i * row + at;
            __m512bh pairs =
                _mm512_cvtne2ps_pbh((__m512)load_vec(from + LANES), (__m512)load_vec(from));
            _mm512_storeu_si512(out + i * row + at / PAIR, (__m512i)pairs);
        }
    }
}

static void narrow_transposed(const float *tile, int64_t row, int64_t m, int64_t n, float *out)
{
    const __m512i in_turn =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    for (int64_t i = 0; i < m; i += PAIR) {
        for (int64_t at = 0; at < n; at += LANES) {
            const float *from = tile + i * row + at;
            vec next = i + 1 < m ? load_vec(from + row) : splat(0);
            __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)next, (__m512)load_vec(from));
            _mm512_storeu_si512(out + i / PAIR * row + at,
                                _mm512_permutexvar_epi16(in_turn, halves));
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
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512bf16");
}

static const ra_operands pairs = {
    .depth = PAIR,
    .load = load_pairs,
    .pack = pack_pairs,
    .pack_transposed = pack_pairs_transposed,
    .narrow = narrow,
    .narrow_transposed = narrow_transposed,
    .product = product_pairs,
};

const ra_level ra_level_avx512bf16 = LEVEL_TABLE("avx512bf16", &pairs);
