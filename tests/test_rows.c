/* Rows by flat index, lse by flat index, and merging parts: values worked out by hand. */
#include <math.h>
#include <string.h>

#include "base/half.h"
#include "support.h"
#include "tensor/tensor.h"

enum { ROWS = 2, HEADS = 3, SEQ = 4, CHAN = 8, TOTAL = 5 };

static const int64_t index_[TOTAL] = {6, 0, 3, 7, 4};

/* A number that tells where it is from. */
static double tag(int64_t row, int64_t head, int64_t pos, int64_t chan)
{
    return (double)(row * 96 + head * 32 + pos * 8 + chan + 1);
}

static void fill_tags(const ra_tensor *t)
{
    for (int64_t row = 0; row < t->size[RA_ROW]; row++) {
        for (int64_t head = 0; head < t->size[RA_HEAD]; head++) {
            for (int64_t pos = 0; pos < t->size[RA_SEQ]; pos++) {
                for (int64_t c = 0; c < t->size[RA_CHAN]; c++) {
                    ra_tensor_set(t, row, head, pos, c, tag(row, head, pos, c));
                }
            }
        }
    }
}

/* The packed row of a flat index, or -1. */
static int64_t packed_row(int64_t flat)
{
    for (int64_t i = 0; i < TOTAL; i++) {
        if (index_[i] == flat) {
            return i;
        }
    }
    return -1;
}

/* Packed as [total, heads, chan] memory. */
static ra_tensor thd(void *data, ra_dtype dtype)
{
    return (ra_tensor){data, dtype, {1, HEADS, TOTAL, CHAN}, {0, CHAN, HEADS * CHAN, 1}};
}

static void gather_then_scatter(void **state)
{
    (void)state;
    static const ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F16, RA_F64};
    for (int d = 0; d < 4; d++) {
        double from[ROWS * HEADS * SEQ * CHAN], to[ROWS * HEADS * SEQ * CHAN];
        double middle[HEADS * TOTAL * CHAN];
        ra_tensor dense = ra_tensor_bhsd(from, dtypes[d], ROWS, HEADS, SEQ, CHAN);
        ra_tensor back = ra_tensor_bhsd(to, dtypes[d], ROWS, HEADS, SEQ, CHAN);
        ra_tensor packed = thd(middle, dtypes[d]);
        fill_tags(&dense);
        memset(to, 0xff, sizeof to); /* NaN */
        assert_int_equal(ra_rows_gather(&dense, index_, TOTAL, &packed), RA_OK);
        assert_int_equal(ra_rows_scatter(&packed, index_, TOTAL, &back), RA_OK);
        for (int64_t flat = 0; flat < ROWS * SEQ; flat++) {
            for (int64_t head = 0; head < HEADS; head++) {
                for (int64_t c = 0; c < CHAN; c++) {
                    double x = ra_tensor_get(&dense, flat / SEQ, head, flat % SEQ, c);
                    int64_t at = packed_row(flat);
                    assert_true(at < 0 || ra_tensor_get(&packed, 0, head, at, c) == x);
                    assert_true(ra_tensor_get(&back, flat / SEQ, head, flat % SEQ, c) ==
                                (at < 0 ? 0 : x));
                }
            }
        }
    }
}

static void add_touches_index_only_and_mixes_dtypes(void **state)
{
    (void)state;
    static const ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F16};
    for (int d = 0; d < 9; d++) {
        float into[ROWS * HEADS * SEQ * CHAN], from[HEADS * TOTAL * CHAN];
        ra_tensor dense = ra_tensor_bhsd(into, dtypes[d % 3], ROWS, HEADS, SEQ, CHAN);
        ra_tensor packed = thd(from, dtypes[d / 3]);
        for (int64_t i = 0; i < ROWS * HEADS * SEQ * CHAN; i++) {
            int64_t row = i / (HEADS * SEQ * CHAN), head = i / (SEQ * CHAN) % HEADS;
            ra_tensor_set(&dense, row, head, i / CHAN % SEQ, i % CHAN, 0.5);
        }
        fill_tags(&packed);
        assert_int_equal(ra_rows_add(&packed, index_, TOTAL, &dense), RA_OK);
        for (int64_t flat = 0; flat < ROWS * SEQ; flat++) {
            for (int64_t head = 0; head < HEADS; head++) {
                for (int64_t c = 0; c < CHAN; c++) {
                    int64_t at = packed_row(flat);
                    float sum = 0.5f;
                    if (at >= 0) {
                        sum += (float)ra_tensor_get(&packed, 0, head, at, c);
                    }
                    sum = dense.dtype == RA_BF16  ? ra_bf16_to_f32(ra_f32_to_bf16(sum))
                          : dense.dtype == RA_F16 ? ra_f16_to_f32(ra_f32_to_f16(sum))
                                                  : sum;
                    assert_true(ra_tensor_get(&dense, flat / SEQ, head, flat % SEQ, c) ==
                                (double)sum);
                }
            }
        }
    }
}

/* More channels than a block of the sum, and a row named twice is added twice. */
static void add_many_channels_and_repeats(void **state)
{
    (void)state;
    float into[2 * 200], from[2 * 200];
    const int64_t twice[] = {1, 1};
    for (int i = 0; i < 400; i++) {
        into[i] = (float)i;
        from[i] = 1000.0f;
    }
    ra_tensor dense = ra_tensor_bhsd(into, RA_F32, 1, 1, 2, 200);
    ra_tensor packed = ra_tensor_bhsd(from, RA_F32, 1, 1, 2, 200);
    assert_int_equal(ra_rows_add(&packed, twice, 2, &dense), RA_OK);
    for (int i = 0; i < 400; i++) {
        assert_true(into[i] == (float)i + (i < 200 ? 0.0f : 2000.0f));
    }
}

static void assert_message(const char *part)
{
    if (!strstr(ra_last_error(), part)) {
        fail_msg("message \"%s\" does not name \"%s\"", ra_last_error(), part);
    }
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    float a[ROWS * HEADS * SEQ * CHAN] = {0}, b[HEADS * TOTAL * CHAN] = {0};
    ra_tensor dense = ra_tensor_bhsd(a, RA_F32, ROWS, HEADS, SEQ, CHAN), packed = thd(b, RA_F32);
    const int64_t high[TOTAL] = {0, 1, 8, 2, 3}, low[TOTAL] = {0, 1, 2, -1, 3};
    assert_int_equal(ra_rows_gather(&dense, high, TOTAL, &packed), RA_E_ARG);
    assert_message("index[2]: 8, expected 0 or more and less than 8");
    assert_int_equal(ra_rows_scatter(&packed, low, TOTAL, &dense), RA_E_ARG);
    assert_message("index[3]: -1");
    assert_int_equal(ra_rows_add(&packed, NULL, TOTAL, &dense), RA_E_ARG);
    assert_message("index: NULL");
    assert_int_equal(ra_rows_gather(&dense, index_, TOTAL - 1, &packed), RA_E_SHAPE);
    assert_message("packed: size of axis 2");
    assert_int_equal(ra_rows_gather(NULL, index_, TOTAL, &packed), RA_E_ARG);
    assert_int_equal(ra_rows_gather(&dense, index_, TOTAL, NULL), RA_E_ARG);
    ra_tensor other = packed;
    other.dtype = RA_BF16;
    assert_int_equal(ra_rows_gather(&dense, index_, TOTAL, &other), RA_E_SHAPE);
    assert_message("packed: dtype bf16, expected f32");
    other = packed;
    other.size[RA_HEAD] = 2;
    assert_int_equal(ra_rows_scatter(&other, index_, TOTAL, &dense), RA_E_SHAPE);
    double wide[HEADS * TOTAL * CHAN] = {0};
    other = thd(wide, RA_F64);
    assert_int_equal(ra_rows_add(&other, index_, TOTAL, &dense), RA_E_SHAPE);
    assert_message("f64");
    dense.stride[RA_ROW] = 0;
    assert_int_equal(ra_rows_scatter(&packed, index_, TOTAL, &dense), RA_E_SHAPE);
    assert_int_equal(ra_rows_gather(&dense, index_, TOTAL, &packed), RA_OK);
}

static void lse_gather_then_scatter(void **state)
{
    (void)state;
    float dense[ROWS * HEADS * SEQ], packed[HEADS * TOTAL], back[ROWS * HEADS * SEQ];
    for (int i = 0; i < ROWS * HEADS * SEQ; i++) {
        dense[i] = (float)i;
        back[i] = NAN;
    }
    assert_int_equal(ra_lse_gather(dense, ROWS, HEADS, SEQ, index_, TOTAL, packed), RA_OK);
    assert_true(packed[0] == 14.0f);             /* head 0, index 6: row 1, position 2 */
    assert_true(packed[2 * TOTAL + 1] == 8.0f);  /* head 2, index 0 */
    assert_true(packed[1 * TOTAL + 4] == 16.0f); /* head 1, index 4: row 1, position 0 */
    assert_int_equal(ra_lse_scatter(packed, index_, TOTAL, ROWS, HEADS, SEQ, back), RA_OK);
    for (int64_t row = 0; row < ROWS; row++) {
        for (int64_t head = 0; head < HEADS; head++) {
            for (int64_t pos = 0; pos < SEQ; pos++) {
                int64_t at = (row * HEADS + head) * SEQ + pos;
                bool live = packed_row(row * SEQ + pos) >= 0;
                assert_true(back[at] == (live ? dense[at] : -INFINITY));
            }
        }
    }
    const int64_t high = 8;
    assert_int_equal(ra_lse_gather(dense, ROWS, HEADS, SEQ, &high, 1, packed), RA_E_ARG);
    assert_message("index[0]: 8");
    assert_int_equal(ra_lse_gather(NULL, ROWS, HEADS, SEQ, index_, TOTAL, packed), RA_E_ARG);
    assert_message("dense");
    assert_int_equal(ra_lse_scatter(NULL, index_, TOTAL, ROWS, HEADS, SEQ, back), RA_E_ARG);
    assert_message("packed");
    assert_int_equal(ra_lse_scatter(packed, index_, TOTAL, ROWS, -1, SEQ, back), RA_E_ARG);
    assert_int_equal(ra_lse_scatter(packed, NULL, 0, ROWS, HEADS, SEQ, back), RA_OK);
    assert_true(back[0] == -INFINITY);
}

/* One row and head: 8 channels each. */
typedef struct side {
    float out[CHAN], lse;
} side;

static void merge_sides(side *into, side *part)
{
    ra_tensor out = ra_tensor_bhsd(into->out, RA_F32, 1, 1, 1, CHAN);
    ra_tensor lse = ra_tensor_bhsd(&into->lse, RA_F32, 1, 1, 1, 1);
    ra_tensor part_out = ra_tensor_bhsd(part->out, RA_F32, 1, 1, 1, CHAN);
    ra_tensor part_lse = ra_tensor_bhsd(&part->lse, RA_F32, 1, 1, 1, 1);
    assert_int_equal(ra_merge(&out, &lse, &part_out, &part_lse), RA_OK);
}

static void empty_parts_change_nothing(void **state)
{
    (void)state;
    const side empty = {{0}, -INFINITY}, value = {{0.1f, -3, 1e-30f, 7, 1e30f, -0.0f, 5, 6}, 3};
    const side poison = {{NAN, NAN, NAN, NAN, NAN, NAN, NAN, NAN}, -INFINITY};
    side into = empty, part = empty;
    merge_sides(&into, &part);
    assert_memory_equal(&into, &empty, sizeof into);
    into = value, part = empty;
    merge_sides(&into, &part);
    assert_memory_equal(&into, &value, sizeof into);
    into = empty, part = value;
    merge_sides(&into, &part);
    assert_memory_equal(&into, &value, sizeof into);
    /* What an empty side holds does not matter. */
    into = value, part = poison;
    merge_sides(&into, &part);
    assert_memory_equal(&into, &value, sizeof into);
    into = poison, part = value;
    merge_sides(&into, &part);
    assert_memory_equal(&into, &value, sizeof into);
    into = poison, part = poison;
    merge_sides(&into, &part);
    assert_memory_equal(&into, &empty, sizeof into);
}

static void parts_weigh_by_their_sums(void **state)
{
    (void)state;
    /* lse is natural: two parts of 4 equal keys are ln 4 each and ln 8 together. */
    side into = {{1, 2}, logf(4)}, part = {{3, 6}, logf(4)};
    merge_sides(&into, &part);
    assert_float_equal(into.lse, 2.0794415, 3e-7);
    assert_float_equal(into.out[0], 2, 1e-6);
    assert_float_equal(into.out[1], 4, 1e-6);
    /* 1 key against 3, far from zero so that exp alone would overflow. */
    into = (side){{8}, 300}, part = (side){{4}, 300 + logf(3)};
    merge_sides(&into, &part);
    assert_float_equal(into.out[0], 5, 2e-5);
    assert_float_equal(into.lse, 300 + logf(4), 4e-5);
    /* A part that is 2^-200 of the other is lost, without NaN. */
    into = (side){{8}, -1000}, part = (side){{4}, 1000};
    merge_sides(&into, &part);
    assert_true(into.out[0] == 4 && into.lse == 1000);
}

/* Splitting the keys of a row at every place gives the same result up to rounding. */
static void any_split_merges_to_the_whole(void **state)
{
    (void)state;
    enum { KEYS = 12 };
    rng r = rng_of(support_seed());
    double score[KEYS], value[KEYS];
    for (int j = 0; j < KEYS; j++) {
        score[j] = 4 * rng_normal(&r);
        value[j] = rng_normal(&r);
    }
    for (int cut = 0; cut <= KEYS; cut++) {
        double sum[2] = {0}, mean[2] = {0};
        for (int j = 0; j < KEYS; j++) {
            sum[j >= cut] += exp(score[j]);
            mean[j >= cut] += exp(score[j]) * value[j];
        }
        side into = {{(float)(sum[0] > 0 ? mean[0] / sum[0] : 0)}, (float)log(sum[0])};
        side part = {{(float)(sum[1] > 0 ? mean[1] / sum[1] : 0)}, (float)log(sum[1])};
        merge_sides(&into, &part);
        assert_true(fabs((double)into.out[0] - (mean[0] + mean[1]) / (sum[0] + sum[1])) < 2e-6);
        assert_true(fabs((double)into.lse - log(sum[0] + sum[1])) < 2e-6);
    }
}

static void merge_rows_is_merge_at_the_index(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    float out[2][ROWS * HEADS * SEQ * CHAN], lse[2][ROWS * HEADS * SEQ];
    float part[HEADS * TOTAL * CHAN], part_lse[HEADS * TOTAL];
    float wide[ROWS * HEADS * SEQ * CHAN], wide_lse[ROWS * HEADS * SEQ];
    for (int i = 0; i < ROWS * HEADS * SEQ * CHAN; i++) {
        out[0][i] = out[1][i] = (float)rng_normal(&r);
    }
    for (int i = 0; i < ROWS * HEADS * SEQ; i++) {
        lse[0][i] = lse[1][i] = i % 5 ? (float)rng_normal(&r) : -INFINITY;
    }
    for (int i = 0; i < HEADS * TOTAL * CHAN; i++) {
        part[i] = (float)rng_normal(&r);
    }
    for (int i = 0; i < HEADS * TOTAL; i++) {
        part_lse[i] = i % 4 ? (float)rng_normal(&r) : -INFINITY;
    }
    ra_tensor dense[2], dense_lse[2];
    for (int i = 0; i < 2; i++) {
        dense[i] = ra_tensor_bhsd(out[i], RA_F32, ROWS, HEADS, SEQ, CHAN);
        dense_lse[i] = ra_tensor_bhsd(lse[i], RA_F32, ROWS, HEADS, SEQ, 1);
    }
    ra_tensor packed = thd(part, RA_F32);
    ra_tensor packed_lse = ra_tensor_bhsd(part_lse, RA_F32, 1, HEADS, TOTAL, 1);
    assert_int_equal(ra_merge_rows(&dense[0], &dense_lse[0], &packed, &packed_lse, index_, TOTAL),
                     RA_OK);
    ra_tensor whole = ra_tensor_bhsd(wide, RA_F32, ROWS, HEADS, SEQ, CHAN);
    ra_tensor whole_lse = ra_tensor_bhsd(wide_lse, RA_F32, ROWS, HEADS, SEQ, 1);
    assert_int_equal(ra_rows_scatter(&packed, index_, TOTAL, &whole), RA_OK);
    assert_int_equal(ra_lse_scatter(part_lse, index_, TOTAL, ROWS, HEADS, SEQ, wide_lse), RA_OK);
    for (int i = 0; i < ROWS * HEADS * SEQ; i++) { /* rows empty on both sides become 0 */
        for (int c = 0; lse[1][i] == -INFINITY && c < CHAN; c++) {
            out[1][i * CHAN + c] = 0;
            out[0][i * CHAN + c] = lse[0][i] == -INFINITY ? 0 : out[0][i * CHAN + c];
        }
    }
    assert_int_equal(ra_merge(&dense[1], &dense_lse[1], &whole, &whole_lse), RA_OK);
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    assert_memory_equal(lse[0], lse[1], sizeof lse[0]);
    const int64_t high = ROWS * SEQ;
    packed.size[RA_SEQ] = packed_lse.size[RA_SEQ] = 1;
    assert_int_equal(ra_merge_rows(&dense[0], &dense_lse[0], &packed, &packed_lse, &high, 1),
                     RA_E_ARG);
    assert_message("index[0]: 8");
    assert_int_equal(ra_merge(&dense[0], &dense_lse[0], &packed, &packed_lse), RA_E_SHAPE);
    assert_message("part");
    whole.dtype = RA_BF16;
    assert_int_equal(ra_merge(&dense[0], &dense_lse[0], &whole, &whole_lse), RA_E_SHAPE);
    assert_message("part: dtype bf16");
    assert_int_equal(ra_merge(&dense[0], NULL, &whole, &whole_lse), RA_E_ARG);
}

static void a_quarter_of_the_rows_pays(void **state)
{
    (void)state;
    assert_true(ra_merge_rows_pays(0, 100));
    assert_true(ra_merge_rows_pays(25, 100));
    assert_false(ra_merge_rows_pays(26, 100));
    assert_false(ra_merge_rows_pays(1, 3));
    assert_true(ra_merge_rows_pays(1, 4));
    assert_false(ra_merge_rows_pays(INT64_MAX, INT64_MAX));
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gather_then_scatter),
        cmocka_unit_test(add_touches_index_only_and_mixes_dtypes),
        cmocka_unit_test(add_many_channels_and_repeats),
        cmocka_unit_test(bad_arguments_are_named),
        cmocka_unit_test(lse_gather_then_scatter),
        cmocka_unit_test(empty_parts_change_nothing),
        cmocka_unit_test(parts_weigh_by_their_sums),
        cmocka_unit_test(any_split_merges_to_the_whole),
        cmocka_unit_test(merge_rows_is_merge_at_the_index),
        cmocka_unit_test(a_quarter_of_the_rows_pays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
