/*
 * One instruction set: its kernels on tiles in scratch memory. The algorithms of fold.c and
 * grad.c are written once against this table; a file of tuned kernels is one more table in
 * level.c. Must not know masks, pieces or threads.
 *
 * Layouts. A TILE is row-major f32 with a row stride of its own. PANELS hold the right operand B
 * [k, n] of a block product: panel j is [k][nr] with the columns j * nr to (j + 1) * nr, panels lie
 * `stride` floats apart. A tile of one f32 a word is B as it is, in panels nr floats apart. A
 * product always runs over whole panels; what B holds past n reaches only what C holds past n.
 *
 * OPERANDS. A and B consist of 32-bit words, whatever they hold: one f32, or two bf16 that follow
 * each other along k. Strides count words, m, n and k count values. C is f32. A product may read
 * both to the next multiple of RA_DEPTH_STEP along k, where its form of operands has made them
 * zero.
 */
#ifndef RA_BACKEND_CPU_LEVEL_H
#define RA_BACKEND_CPU_LEVEL_H

#include "base/status.h"
#include "rule/mask_rule.h"

enum { RA_DEPTH_STEP = 32 };

/* Rows of a tensor: contiguous channels of any dtype, a row every `stride` elements. */
typedef struct ra_rows {
    const void *data;
    ra_dtype dtype;
    int64_t stride, count, chan;
} ra_rows;

/* What a product does with the C it finds. */
typedef enum ra_product_mode {
    RA_PRODUCT_SET, /* C = A B */
    RA_PRODUCT_ADD, /* C = C + A B */
} ra_product_mode;

typedef struct ra_product {
    ra_product_mode mode;
    int64_t m, n, k; /* m is a multiple of mr, n of nr */
    int64_t n_first; /* columns [n_first, n) are computed, a multiple of nr */
    const float *a;  /* A[i, l] is in a[i * a_row + l / depth * a_col] */
    int64_t a_row, a_col;
    const float *b; /* panels b_stride words apart, rows of a panel b_row words apart */
    int64_t b_stride, b_row;
    float *c; /* C[i, j] = c[i * c_row + j] */
    int64_t c_row;
    float *rest; /* NULL, or like c, depth and a_col being 1: C + rest is the sum to twice the
                    precision */
    /* For every mr rows, or NULL: the columns of C that matter, and the l for which A is not zero.
     * What is not computed is left as it is. */
    const ra_range *columns, *live;
    /* The number of the first l: sums are cut into chains at fixed multiples of it, so that leaving
     * out l for which A is zero changes no bit. */
    int64_t k_first;
} ra_product;

/* The running softmax of the rows of a tile of scores. */
typedef struct ra_softmax {
    int64_t rows, n; /* of the tile; n is a multiple of nr */
    float *score;
    const float *rest; /* like score, or NULL: score + rest is the score to twice the precision */
    int64_t row;       /* floats from row to row of both */
    const ra_range *keys; /* [rows] columns that a row sees */
    float scale;
    float *max;  /* [rows] near the largest scale * score, -inf before the first key */
    float *sum;  /* [rows] of exp(scale * score - max) */
    float *keep; /* [rows] out: the factor by which earlier numerators shrink */
} ra_softmax;

/* Backward of the softmax of one row: score -> p = exp(scale * score - lse), dp -> p * (dp - delta)
 * * scale; both zero outside [begin, end), and everywhere if lse is -inf. */
typedef struct ra_gradient {
    float *score, *dp;
    const float *score_rest, *dp_rest; /* both or none NULL */
    float scale, lse, delta;
} ra_gradient;

/* One form of the operands, and the product of two of that form. */
typedef struct ra_operands {
    int64_t depth; /* values in a word: 1 or 2 */
    int64_t mr;    /* a product is computed in blocks of mr rows by nr columns */
    int64_t
        queries; /* rows of a block of scores: multiple of mr, small enough for the first cache */
    /* Of a forward tile: blocks of 24 queries times head_dim. A packed key tile should serve many
     * where packing is dear beside a product; less memory suits the second cache. */
    int64_t tile_channels;
    /* Rows to a tile of words; rows from count to row_end are zero. */
    void (*load)(const ra_rows *rows, int64_t row_end, float *tile, int64_t tile_row);
    /* B = rows: k = count, n = chan. */
    void (*pack)(const ra_rows *rows, float *panels, int64_t stride);
    /* B = rows transposed: k = chan, n = count. */
    void (*pack_transposed)(const ra_rows *rows, float *panels, int64_t stride);
    /* An f32 tile [m, n] as A, k being n, a multiple of nr; or, transposed, as A^T: l of A^T[i, l]
     * is a row of the tile, whole vectors of columns are read and written. `row` is the stride of
     * both. NULL: an f32 tile is A as it is. */
    void (*narrow)(const float *tile, int64_t row, int64_t m, int64_t n, float *out);
    /* Words from row to row of such an A^T; 0: it is stored column by column, `row` words apart. */
    int64_t transposed_row;
    void (*narrow_transposed)(const float *tile, int64_t row, int64_t m, int64_t n, float *out);
    void (*product)(const ra_product *product);
} ra_operands;

typedef struct ra_level {
    const char *name;
    bool (*runs)(void); /* does this machine have the instructions? */
    int64_t nr;         /* columns of a panel */

    const ra_operands *full; /* for inputs of any dtype */
    const ra_operands *bf16; /* for inputs in bf16; may be the same */

    void (*scale)(float *row, int64_t n, float factor);
    void (*add)(float *to, const float *from, int64_t n); /* to += from */
    /* Of n channels, summed in f64; the same bits at every level. */
    float (*dot)(const void *a, ra_dtype a_dtype, const void *b, ra_dtype b_dtype, int64_t n);
    /* to[n] of any dtype = from times factor. */
    void (*store)(const float *from, int64_t n, float factor, ra_dtype dtype, void *to);

    /* Turns scores into exp(scale * score - max), zero outside keys. */
    void (*softmax)(const ra_softmax *tile);
    void (*gradient)(const ra_gradient *row, int64_t n, int64_t begin, int64_t end);
} ra_level;

extern const ra_level ra_level_portable;
#ifdef RA_CPU_X86
extern const ra_level ra_level_avx2;
extern const ra_level ra_level_avx512;
extern const ra_level ra_level_avx512bf16;
extern const ra_level ra_level_amxbf16;
#endif

static inline const ra_operands *ra_level_operands(const ra_level *level, ra_dtype dtype)
{
    return dtype == RA_BF16 ? level->bf16 : level->full;
}

/* The level of this name, or the best that runs for NULL. RA_E_ARG names those built in,
 * RA_E_UNSUPPORTED tells that the machine lacks it. */
ra_status ra_level_find(const char *name, const ra_level **out);

#endif
