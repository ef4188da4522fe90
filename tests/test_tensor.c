/* Views: addresses, slices, single elements, and checks that name argument, axis and value. */
#include "tensor/tensor.h"

#include <math.h>

#include "support.h"
#include "tensor/check.h"

static float storage[2 * 3 * 5 * 8];

static ra_tensor sample(void)
{
    return ra_tensor_bhsd(storage, RA_F32, 2, 3, 5, 8);
}

static ra_status check(const ra_tensor *t)
{
    return ra_tensor_check(t, "q", RA_F32, 2, 3, 5, 8);
}

static void assert_message(const char *part)
{
    if (!strstr(ra_last_error(), part)) {
        fail_msg("message \"%s\" does not name \"%s\"", ra_last_error(), part);
    }
}

static void contiguous_views_address_in_order(void **state)
{
    (void)state;
    ra_tensor t = sample();
    const float *expected = storage;
    for (int64_t row = 0; row < 2; row++) {
        for (int64_t head = 0; head < 3; head++) {
            for (int64_t pos = 0; pos < 5; pos++, expected += 8) {
                assert_ptr_equal(ra_tensor_at(&t, row, head, pos), expected);
            }
        }
    }
    assert_int_equal(ra_tensor_count(&t), 240);
    assert_int_equal(check(&t), RA_OK);
}

static void any_stride_is_an_address(void **state)
{
    (void)state;
    /* [T, H, D] memory seen as [1, H, T, D]. */
    ra_tensor thd = {storage, RA_F32, {1, 3, 10, 8}, {0, 8, 24, 1}};
    assert_ptr_equal(ra_tensor_at(&thd, 0, 2, 9), storage + 9 * 24 + 2 * 8);
    assert_int_equal(ra_tensor_check_output(&thd, "q", RA_F32, 1, 3, 10, 8), RA_OK);
    /* Rows from the last to the first. */
    ra_tensor back = {storage + 9 * 8, RA_F32, {1, 1, 10, 8}, {80, 80, -8, 1}};
    assert_ptr_equal(ra_tensor_at(&back, 0, 0, 9), storage);
    assert_int_equal(ra_tensor_check(&back, "q", RA_F32, 1, 1, 10, 8), RA_OK);
    /* Element offsets past 2^31 keep all their bits. */
    ra_tensor big = ra_tensor_bhsd(storage, RA_F32, 8, 64, 1 << 20, 512);
    int64_t bytes = (char *)ra_tensor_at(&big, 7, 63, (1 << 20) - 1) - (char *)storage;
    assert_true(bytes == (ra_tensor_count(&big) - 512) * 4);
}

static void a_slice_keeps_strides(void **state)
{
    (void)state;
    ra_tensor t = sample(), slice = ra_tensor_slice_seq(&t, 2, 3);
    assert_int_equal(slice.size[RA_SEQ], 3);
    assert_ptr_equal(ra_tensor_at(&slice, 1, 2, 0), ra_tensor_at(&t, 1, 2, 2));
    ra_tensor empty = ra_tensor_bhsd(NULL, RA_F32, 2, 3, 0, 8);
    assert_null(ra_tensor_slice_seq(&empty, 0, 0).data);
}

static void elements_of_every_dtype(void **state)
{
    (void)state;
    const struct {
        ra_dtype dtype;
        double stored; /* what 1.00048828125 + 2^-30 becomes */
    } cases[] = {
        {RA_F32, 1.00048828125}, {RA_BF16, 1.0}, {RA_F16, 1.0}, {RA_F64, 1.00048828125 + 0x1p-30}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        double memory[32] = {0};
        ra_tensor t = ra_tensor_bhsd(memory, cases[i].dtype, 1, 2, 2, 8);
        ra_tensor_set(&t, 0, 1, 1, 7, 1.00048828125 + 0x1p-30);
        assert_true(ra_tensor_get(&t, 0, 1, 1, 7) == cases[i].stored);
        assert_true(ra_tensor_get(&t, 0, 1, 1, 6) == 0);
        assert_true(ra_tensor_get(&t, 0, 0, 1, 7) == 0);
    }
    assert_int_equal(ra_dtype_bytes((ra_dtype)9), 0);
    assert_string_equal(ra_dtype_name(RA_BF16), "bf16");
    assert_string_equal(ra_dtype_name((ra_dtype)9), "unknown dtype");
}

static void checks_name_what_is_wrong(void **state)
{
    (void)state;
    ra_tensor t = sample();
    t.dtype = RA_BF16;
    assert_int_equal(check(&t), RA_E_SHAPE);
    assert_message("q: dtype bf16, expected f32");
    for (int axis = 0; axis < RA_NDIM; axis++) {
        static const char *const names[] = {"axis 0 (rows)", "axis 1 (heads)", "axis 2 (seq)",
                                            "axis 3 (chan)"};
        t = sample();
        t.size[axis] += 2;
        assert_int_equal(check(&t), RA_E_SHAPE);
        assert_message(names[axis]);
    }
    t = sample();
    t.data = NULL;
    assert_int_equal(check(&t), RA_E_ARG);
    assert_message("NULL");
    t.data = (char *)storage + 2;
    assert_int_equal(check(&t), RA_E_ARG);
    assert_message("aligned");
    t = sample();
    t.stride[RA_CHAN] = 2;
    assert_int_equal(check(&t), RA_E_SHAPE);
    assert_message("axis 3 (chan) is 2");
    t = sample();
    t.stride[RA_ROW] = INT64_MAX / 2;
    assert_int_equal(check(&t), RA_E_SHAPE);
    t.stride[RA_ROW] = INT64_MIN;
    assert_int_equal(check(&t), RA_E_SHAPE);
    assert_message("64-bit");
}

static void empty_views_need_no_data(void **state)
{
    (void)state;
    ra_tensor t = ra_tensor_bhsd(NULL, RA_F32, 2, 3, 0, 8);
    assert_int_equal(ra_tensor_check_output(&t, "q", RA_F32, 2, 3, 0, 8), RA_OK);
}

static void outputs_must_not_overlap(void **state)
{
    (void)state;
    for (int axis = RA_ROW; axis <= RA_SEQ; axis++) {
        ra_tensor t = sample();
        t.stride[axis] = 0;
        assert_int_equal(check(&t), RA_OK);
        assert_int_equal(ra_tensor_check_output(&t, "out", RA_F32, 2, 3, 5, 8), RA_E_SHAPE);
        assert_message("out: stride 0");
    }
    ra_tensor a = sample(), b = sample();
    assert_int_equal(ra_apart_check(&a, "out", &b, "v"), RA_E_ARG);
    assert_message("out: data");
    b.data = storage + 8;
    assert_int_equal(ra_apart_check(&a, "out", &b, "v"), RA_E_ARG);
    b.data = storage + ra_tensor_count(&a);
    assert_int_equal(ra_apart_check(&a, "out", &b, "v"), RA_OK);
}

/* Query, key and value gradients as slices of one buffer: token-major, then head-major. */
static void slices_of_a_fused_buffer_are_apart(void **state)
{
    (void)state;
    enum { ROWS = 2, SEQ = 5, CHAN = 8, HEADS = 6 }; /* heads 0-3, 4 and 5 */
    static float fused[ROWS * SEQ * HEADS * CHAN];
    for (int token_major = 0; token_major < 2; token_major++) {
        int64_t seq = token_major ? HEADS * CHAN : CHAN, head = token_major ? CHAN : SEQ * CHAN;
        ra_tensor q = ra_tensor_bhsd(fused, RA_F32, ROWS, 4, SEQ, CHAN);
        q.stride[RA_ROW] = SEQ * HEADS * CHAN;
        q.stride[RA_SEQ] = seq;
        q.stride[RA_HEAD] = head;
        ra_tensor k = q, v = q;
        k.size[RA_HEAD] = v.size[RA_HEAD] = 1;
        k.data = fused + 4 * head;
        v.data = fused + 5 * head;
        const ra_tensor *const all[] = {&q, &k, &v};
        for (int i = 0; i < 3; i++) {
            for (int j = 0; j < 3; j++) {
                assert_int_equal(ra_apart_check(all[i], "dq", all[j], "dk"),
                                 i == j ? RA_E_ARG : RA_OK);
            }
        }
        k.data = fused + 4 * head - 1; /* one channel into q's last head */
        assert_int_equal(ra_apart_check(&q, "dq", &k, "dk"), RA_E_ARG);
        assert_int_equal(ra_apart_check(&k, "dk", &q, "dq"), RA_E_ARG);
        k.data = fused + 4 * head + 1; /* one into v's */
        assert_int_equal(ra_apart_check(&v, "dv", &k, "dk"), RA_E_ARG);
    }
}

static void rows_that_overlap_themselves_are_refused(void **state)
{
    (void)state;
    ra_tensor t = sample();
    t.stride[RA_SEQ] = 7; /* of 8 channels */
    assert_int_equal(check(&t), RA_OK);
    assert_int_equal(ra_tensor_check_output(&t, "out", RA_F32, 2, 3, 5, 8), RA_E_SHAPE);
    assert_message("stride 7 of axis 2");
}

static void views_of_any_size(void **state)
{
    (void)state;
    ra_tensor t = sample();
    assert_int_equal(ra_view_check(&t, "dense", true), RA_OK);
    assert_int_equal(ra_view_check(NULL, "dense", true), RA_E_ARG);
    t.size[RA_SEQ] = -1;
    assert_int_equal(ra_view_check(&t, "dense", false), RA_E_SHAPE);
    assert_message("dense: size of axis 2 is -1");
    t = sample();
    t.dtype = (ra_dtype)0;
    assert_int_equal(ra_view_check(&t, "dense", false), RA_E_SHAPE);
    const int64_t index[] = {0, 9, 10};
    assert_int_equal(ra_index_check(index, 2, 10), RA_OK);
    assert_int_equal(ra_index_check(index, 3, 10), RA_E_ARG);
    assert_message("index[2]: 10");
    assert_int_equal(ra_index_check(NULL, 0, 10), RA_OK);
    assert_int_equal(ra_index_check(NULL, 1, 10), RA_E_ARG);
    assert_int_equal(ra_index_check(index, -1, 10), RA_E_ARG);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(contiguous_views_address_in_order),
        cmocka_unit_test(any_stride_is_an_address),
        cmocka_unit_test(a_slice_keeps_strides),
        cmocka_unit_test(elements_of_every_dtype),
        cmocka_unit_test(checks_name_what_is_wrong),
        cmocka_unit_test(empty_views_need_no_data),
        cmocka_unit_test(outputs_must_not_overlap),
        cmocka_unit_test(slices_of_a_fused_buffer_are_apart),
        cmocka_unit_test(rows_that_overlap_themselves_are_refused),
        cmocka_unit_test(views_of_any_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
