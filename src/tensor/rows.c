/* Moves rows between dense [rows, heads, seq, chan] tensors and packed [1, heads, total, chan] ones
 * by flat index, one row of channels at a time. Must not know why a row is picked. */

#include <math.h>

#include "base/limits.h"
#include "base/mathx.h"
#include "tensor/check.h"

/* Both views and the index; the one that is written is checked as an output. */
static ra_status pair_check(const ra_tensor *dense, const ra_tensor *packed, bool to_dense,
                            const int64_t *index, int64_t total)
{
    RA_TRY(ra_view_check(dense, "dense", to_dense));
    RA_TRY(ra_view_check(packed, "packed", !to_dense));
    RA_TRY(ra_index_check(index, total, dense->size[RA_ROW] * dense->size[RA_SEQ]));
    return ra_tensor_check(packed, "packed", packed->dtype, 1, dense->size[RA_HEAD], total,
                           dense->size[RA_CHAN]);
}

static ra_status same_dtype_check(const ra_tensor *dense, const ra_tensor *packed)
{
    if (dense->dtype != packed->dtype) {
        return RA_FAIL(RA_E_SHAPE, "packed: dtype %s, expected %s as dense",
                       ra_dtype_name(packed->dtype), ra_dtype_name(dense->dtype));
    }
    return RA_OK;
}

/* The row of channels that an index entry names. */
static void *dense_at(const ra_tensor *dense, int64_t head, int64_t flat)
{
    return ra_tensor_at(dense, flat / dense->size[RA_SEQ], head, flat % dense->size[RA_SEQ]);
}

static size_t row_bytes(const ra_tensor *t)
{
    return (size_t)t->size[RA_CHAN] * ra_dtype_bytes(t->dtype);
}

ra_status ra_rows_gather(const ra_tensor *dense, const int64_t *index, int64_t total,
                         const ra_tensor *packed)
{
    RA_TRY(pair_check(dense, packed, false, index, total));
    RA_TRY(same_dtype_check(dense, packed));
    if (ra_tensor_count(packed) == 0) {
        return RA_OK;
    }
    for (int64_t head = 0; head < dense->size[RA_HEAD]; head++) {
        for (int64_t i = 0; i < total; i++) {
            memcpy(ra_tensor_at(packed, 0, head, i), dense_at(dense, head, index[i]),
                   row_bytes(dense));
        }
    }
    return RA_OK;
}

ra_status ra_rows_scatter(const ra_tensor *packed, const int64_t *index, int64_t total,
                          const ra_tensor *dense)
{
    RA_TRY(pair_check(dense, packed, true, index, total));
    RA_TRY(same_dtype_check(dense, packed));
    if (ra_tensor_count(dense) == 0) {
        return RA_OK;
    }
    for (int64_t head = 0; head < dense->size[RA_HEAD]; head++) {
        for (int64_t flat = 0; flat < dense->size[RA_ROW] * dense->size[RA_SEQ]; flat++) {
            memset(dense_at(dense, head, flat), 0, row_bytes(dense));
        }
        for (int64_t i = 0; i < total; i++) {
            memcpy(dense_at(dense, head, index[i]), ra_tensor_at(packed, 0, head, i),
                   row_bytes(dense));
        }
    }
    return RA_OK;
}

static void load(ra_dtype dtype, const void *from, int64_t begin, int64_t count, float *to)
{
    const float *f32 = from;
    const uint16_t *half = from;
    for (int64_t i = 0; i < count; i++) {
        to[i] = dtype == RA_F32    ? f32[begin + i]
                : dtype == RA_BF16 ? ra_bf16_to_f32(half[begin + i])
                                   : ra_f16_to_f32(half[begin + i]);
    }
}

static void store(ra_dtype dtype, const float *from, int64_t begin, int64_t count, void *to)
{
    float *f32 = to;
    uint16_t *half = to;
    for (int64_t i = 0; i < count; i++) {
        if (dtype == RA_F32) {
            f32[begin + i] = from[i];
        } else {
            half[begin + i] = dtype == RA_BF16 ? ra_f32_to_bf16(from[i]) : ra_f32_to_f16(from[i]);
        }
    }
}

static void row_add(const ra_tensor *dense, void *to, const ra_tensor *packed, const void *from)
{
    enum { BLOCK = 64 };
    float sum[BLOCK], term[BLOCK];
    for (int64_t begin = 0; begin < dense->size[RA_CHAN]; begin += BLOCK) {
        int64_t count = ra_min_i64(BLOCK, dense->size[RA_CHAN] - begin);
        load(dense->dtype, to, begin, count, sum);
        load(packed->dtype, from, begin, count, term);
        for (int64_t i = 0; i < count; i++) {
            sum[i] += term[i];
        }
        store(dense->dtype, sum, begin, count, to);
    }
}

ra_status ra_rows_add(const ra_tensor *packed, const int64_t *index, int64_t total,
                      const ra_tensor *dense)
{
    RA_TRY(pair_check(dense, packed, true, index, total));
    if (dense->dtype == RA_F64 || packed->dtype == RA_F64) {
        return RA_FAIL(RA_E_SHAPE, "%s: dtype f64, expected f32, bf16 or f16: sums are f32",
                       dense->dtype == RA_F64 ? "dense" : "packed");
    }
    if (ra_tensor_count(packed) == 0) {
        return RA_OK;
    }
    for (int64_t head = 0; head < dense->size[RA_HEAD]; head++) {
        for (int64_t i = 0; i < total; i++) {
            row_add(dense, dense_at(dense, head, index[i]), packed,
                    ra_tensor_at(packed, 0, head, i));
        }
    }
    return RA_OK;
}

static ra_status lse_check(const void *dense, const void *packed, int64_t rows, int64_t heads,
                           int64_t seq, const int64_t *index, int64_t total)
{
    if (rows < 0 || rows > RA_ROWS_MAX || heads < 0 || heads > RA_HEADS_MAX || seq < 0 ||
        seq > RA_SEQ_MAX) {
        return RA_FAIL(RA_E_ARG,
                       "rows, heads, seq: %lld, %lld, %lld, expected 0 to %lld, %d and %lld",
                       (long long)rows, (long long)heads, (long long)seq, (long long)RA_ROWS_MAX,
                       RA_HEADS_MAX, (long long)RA_SEQ_MAX);
    }
    RA_TRY(ra_index_check(index, total, rows * seq));
    if ((!dense && rows * seq > 0 && heads > 0) || (!packed && total > 0 && heads > 0)) {
        return RA_FAIL(RA_E_ARG, "%s: NULL, expected %lld elements", dense ? "packed" : "dense",
                       (long long)(heads * (dense ? total : rows * seq)));
    }
    return RA_OK;
}

ra_status ra_lse_gather(const float *dense, int64_t rows, int64_t heads, int64_t seq,
                        const int64_t *index, int64_t total, float *packed)
{
    RA_TRY(lse_check(dense, packed, rows, heads, seq, index, total));
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t i = 0; i < total; i++) {
            int64_t row = index[i] / seq, pos = index[i] % seq;
            packed[head * total + i] = dense[(row * heads + head) * seq + pos];
        }
    }
    return RA_OK;
}

ra_status ra_lse_scatter(const float *packed, const int64_t *index, int64_t total, int64_t rows,
                         int64_t heads, int64_t seq, float *dense)
{
    RA_TRY(lse_check(dense, packed, rows, heads, seq, index, total));
    for (int64_t i = 0; i < rows * heads * seq; i++) {
        dense[i] = -INFINITY;
    }
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t i = 0; i < total; i++) {
            int64_t row = index[i] / seq, pos = index[i] % seq;
            dense[(row * heads + head) * seq + pos] = packed[head * total + i];
        }
    }
    return RA_OK;
}
