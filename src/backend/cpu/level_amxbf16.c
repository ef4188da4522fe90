/*
 * The kernels in 512-bit vectors, with products of bf16 in matrix tiles (AMX): one instruction
 * multiplies 16 rows of 16 pairs by 16 columns of 16 pairs and adds them to 16 x 16 sums in f32.
 * Inputs of other dtypes are computed as at level avx512. Compiled with the instructions, called
 * only where the machine has them.
 */
#include "backend/cpu/level.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "backend/cpu/pairs.inc"

enum {
    TILE_ROWS = 16,  /* of A, of the sums, and pairs of B */
    TILE_WORDS = 16, /* in a row of any tile */
    /* Words of k in one chain, so that scores are as exact as at level avx512bf16. What they are
     * multiplied with is 16 KiB of a panel, and stays in the first cache for all rows. */
    TILE_CHAIN = 64,
    /* Words of a row of A^T: the queries of a block in pairs. */
    TRANSPOSED_ROW = RA_DEPTH_STEP,
};

static int64_t padded_words(int64_t values)
{
    return (values + RA_DEPTH_STEP - 1) / RA_DEPTH_STEP * TILE_WORDS;
}

static void load_steps(const ra_rows *rows, int64_t row_end, float *tile, int64_t tile_row)
{
    load_pairs(rows, row_end, tile, tile_row);
    int64_t used = rows->chan / PAIR, left = padded_words(rows->chan) - used;
    for (int64_t i = 0; i < row_end && left > 0; i++) {
        memset(tile + i * tile_row + used, 0, (size_t)left * sizeof *tile);
    }
}

/* Zeroes the pairs that products reach beyond those of `values` along k, in panels of n columns. */
static void pad_panels(float *panels, int64_t stride, int64_t n, int64_t values)
{
    int64_t used = (values + PAIR - 1) / PAIR, left = padded_words(values) - used;
    for (int64_t column = 0; column < n; column += PANEL, panels += stride) {
        memset(panels + used * PANEL, 0, (size_t)(left * PANEL) * sizeof *panels);
    }
}

static void pack_steps(const ra_rows *rows, float *panels, int64_t stride)
{
    pack_pairs(rows, panels, stride);
    pad_panels(panels, stride, rows->chan, rows->count);
}

static void pack_steps_transposed(const ra_rows *rows, float *panels, int64_t stride)
{
    pack_pairs_transposed(rows, panels, stride);
    pad_panels(panels, stride, rows->count, rows->chan);
}

/* A tile is loaded row by row, so A^T is stored that way: by squares transposed in registers. */
static void narrow_transposed(const float *tile, int64_t row, int64_t m, int64_t n, float *out)
{
    for (int64_t i = 0; i < m; i += RA_DEPTH_STEP) {
        for (int64_t at = 0; at < n; at += LANES) {
            vec square[LANES];
            for (int j = 0; j < LANES; j++) {
                int64_t pair = i + j * PAIR;
                square[j] = pair < m ? pair_rows(tile, row, m, pair, at) : splat(0);
            }
            transpose(square);
            for (int j = 0; j < LANES; j++) {
                store_vec(out + (at + j) * TRANSPOSED_ROW + i / PAIR, square[j]);
            }
        }
    }
}

/* What the instructions want in memory: bytes and rows of each of the eight tiles. */
typedef struct tile_shapes {
    uint8_t palette, start_row, zero[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} tile_shapes;

static const tile_shapes all_whole = {
    .palette = 1,
    .bytes = {64, 64, 64, 64, 64, 64, 64, 64},
    .rows = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS,
             TILE_ROWS},
};

/* The part of words [l, end) in which the block of rows at `row` is not zero, in whole steps. */
static ra_range live_steps(const ra_product *p, int64_t row, int64_t l, int64_t end)
{
    ra_range words = {l, end};
    if (p->live) {
        ra_range live = p->live[row / TILE_ROWS];
        words.begin = ra_max_i64(l, live.begin / RA_DEPTH_STEP * TILE_WORDS);
        words.end = ra_min_i64(end, padded_words(live.end));
    }
    return words;
}

/* Four tiles of sums are a block of 16 rows by a panel; they hide the latency of one another.
 * Tiles have numbers that become part of an instruction's name. */
#define SUMS_0 0
#define SUMS_1 1
#define SUMS_2 2
#define SUMS_3 3
#define TILE_A 4
#define TILE_B 5
#define TILE_B_NEXT 6

INLINE void load_sums(const float *c, size_t c_bytes)
{
    _tile_loadd(SUMS_0, c, c_bytes);
    _tile_loadd(SUMS_1, c + LANES, c_bytes);
    _tile_loadd(SUMS_2, c + 2 * LANES, c_bytes);
    _tile_loadd(SUMS_3, c + 3 * LANES, c_bytes);
}

INLINE void zero_sums(void)
{
    _tile_zero(SUMS_0);
    _tile_zero(SUMS_1);
    _tile_zero(SUMS_2);
    _tile_zero(SUMS_3);
}

INLINE void store_sums(float *c, size_t c_bytes)
{
    _tile_stored(SUMS_0, c, c_bytes);
    _tile_stored(SUMS_1, c + LANES, c_bytes);
    _tile_stored(SUMS_2, c + 2 * LANES, c_bytes);
    _tile_stored(SUMS_3, c + 3 * LANES, c_bytes);
}

INLINE void multiply(const float *a, size_t a_bytes, const float *b, ra_range words)
{
    const size_t b_bytes = PANEL * sizeof(float);
    for (int64_t l = words.begin; l < words.end; l += TILE_WORDS) {
        const float *b_rows = b + l * PANEL;
        _tile_loadd(TILE_A, a + l, a_bytes);
        _tile_loadd(TILE_B, b_rows, b_bytes);
        _tile_loadd(TILE_B_NEXT, b_rows + LANES, b_bytes);
        _tile_dpbf16ps(SUMS_0, TILE_A, TILE_B);
        _tile_dpbf16ps(SUMS_1, TILE_A, TILE_B_NEXT);
        _tile_loadd(TILE_B, b_rows + 2 * LANES, b_bytes);
        _tile_loadd(TILE_B_NEXT, b_rows + 3 * LANES, b_bytes);
        _tile_dpbf16ps(SUMS_2, TILE_A, TILE_B);
        _tile_dpbf16ps(SUMS_3, TILE_A, TILE_B_NEXT);
    }
}

/* A chain of one block of sums. Chains of a product that sets C are added outside the tiles, as
 * everything that a tile adds to a sum would be rounded with it. */
INLINE void multiply_block(const ra_product *p, int64_t row, int64_t column, ra_range words,
                           bool first)
{
    const size_t c_bytes = (size_t)p->c_row * sizeof(float);
    float *c = p->c + row * p->c_row + column;
    bool late = p->mode == RA_PRODUCT_SET && !first;
    if (p->mode == RA_PRODUCT_ADD) {
        load_sums(c, c_bytes);
    } else {
        zero_sums();
    }
    multiply(p->a + row * p->a_row, (size_t)p->a_row * sizeof(float),
             p->b + column / PANEL * p->b_stride, words);
    if (!late) {
        store_sums(c, c_bytes);
        return;
    }
    float chain[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    store_sums(chain, PANEL * sizeof(float));
    for (int i = 0; i < TILE_ROWS; i++) {
        for (int j = 0; j < PANEL; j += LANES) {
            float *to = c + i * p->c_row + j;
            store_vec(to, load_vec(to) + load_vec(chain + i * PANEL + j));
        }
    }
}

/* Whoever called may use tiles of other shapes, so the shapes are loaded each time. A sum takes its
 * pairs one after the other, so pairs of zeros may be left out anywhere. */
static void product_tiles(const ra_product *p)
{
    const int64_t words = padded_words(p->k);
    _tile_loadconfig(&all_whole);
    for (int64_t column = p->n_first; column < p->n; column += PANEL) {
        for (int64_t l = 0; l < words; l += TILE_CHAIN) {
            int64_t end = ra_min_i64(l + TILE_CHAIN, words);
            for (int64_t row = 0; row < p->m; row += TILE_ROWS) {
                ra_range live = live_steps(p, row, l, end);
                const ra_range *seen = p->columns ? &p->columns[row / TILE_ROWS] : NULL;
                bool wanted = !seen || (seen->begin < column + PANEL && seen->end > column);
                bool set = p->mode == RA_PRODUCT_SET && l == 0;
                if (wanted && (set || live.begin < live.end)) {
                    multiply_block(p, row, column, live, l == 0);
                }
            }
        }
    }
    _tile_release();
}

/* The kernel gives a process the memory of tiles on request. */
static bool runs(void)
{
    enum { ASK_PERMISSION = 0x1023, TILE_DATA = 18, AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24 };
    unsigned a, b, c, d;
    return runs_vectors512() && __builtin_cpu_supports("avx512bf16") &&
           __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE) &&
           syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0;
}

static const ra_operands tiles = {
    .depth = PAIR,
    .mr = TILE_ROWS,
    .queries = 48,
    .tile_channels = 24576,
    .load = load_steps,
    .pack = pack_steps,
    .pack_transposed = pack_steps_transposed,
    .narrow = narrow,
    .narrow_transposed = narrow_transposed,
    .transposed_row = TRANSPOSED_ROW,
    .product = product_tiles,
};

const ra_level ra_level_amxbf16 = LEVEL_TABLE("amxbf16", &tiles);
