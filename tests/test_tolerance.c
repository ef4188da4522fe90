/* The comparison rule on numbers whose verdict is known: it passes at the bound and fails past it.
 */
#include "oracle/tolerance.h"

#include <math.h>
#include <string.h>

#include "support.h"

enum { COUNT = 4 };

typedef struct sample {
    double got[COUNT], plain[COUNT], reference[COUNT];
} sample;

static ra_comparison compare(sample *s, ra_dtype rule)
{
    ra_comparison result;
    ra_tensor got = ra_tensor_bhsd(s->got, RA_F64, 1, 1, COUNT, 1);
    ra_tensor plain = ra_tensor_bhsd(s->plain, RA_F64, 1, 1, COUNT, 1);
    ra_tensor reference = ra_tensor_bhsd(s->reference, RA_F64, 1, 1, COUNT, 1);
    assert_int_equal(ra_compare(&got, &plain, &reference, rule, &result), RA_OK);
    return result;
}

static void the_maximum_bites(void **state)
{
    (void)state;
    /* Plain errors 1/8 everywhere; rms allows 3/16 + 1/512, the maximum 2/8 + 2/256. */
    sample s = {.got = {1.2578125, 1, -1, 1},
                .plain = {1.125, 1.125, -1.125, 0.875},
                .reference = {1, 1, -1, 1}};
    ra_comparison c = compare(&s, RA_BF16);
    assert_true(c.pass);
    assert_true(c.max_allowed == 0.2578125 && c.max_error == 0.2578125);
    assert_true(c.worst[RA_SEQ] == 0);
    s.got[0] = 1.2578126;
    c = compare(&s, RA_BF16);
    assert_false(c.pass);
    assert_true(c.rms_error <= c.rms_allowed);
    s.got[0] = 1.2578125;
    assert_false(compare(&s, RA_F16).pass); /* a finer dtype allows less */
}

static void the_mean_square_bites(void **state)
{
    (void)state;
    sample s = {.got = {1.189453125, 1.189453125, -1.189453125, 0.810546875},
                .plain = {1.125, 1.125, -1.125, 0.875},
                .reference = {1, 1, -1, 1}};
    ra_comparison c = compare(&s, RA_BF16);
    assert_true(c.rms_allowed == 0.1875 + 0.5 / 256);
    assert_true(c.pass);
    s.got[2] = -1.19;
    c = compare(&s, RA_BF16);
    assert_false(c.pass);
    assert_true(c.max_error <= c.max_allowed);
    assert_true(c.worst[RA_SEQ] == 2 && c.worst_got == -1.19 && c.worst_expected == -1);
}

static void equal_tensors_pass_with_no_plain_error(void **state)
{
    (void)state;
    sample s = {{3, 0, -2, 7}, {3, 0, -2, 7}, {3, 0, -2, 7}};
    ra_comparison c = compare(&s, RA_F32);
    assert_true(c.pass && c.max_error == 0 && c.max_allowed == 14 * 0x1p-24);
    s.got[0] += 15 * 0x1p-24;
    assert_false(compare(&s, RA_F32).pass);
}

static void specials_must_stand_where_the_reference_has_them(void **state)
{
    (void)state;
    sample s = {{-INFINITY, NAN, 1, INFINITY}, {0, 0, 1, 0}, {-INFINITY, NAN, 1, INFINITY}};
    ra_comparison c = compare(&s, RA_F32);
    assert_true(c.pass && c.misplaced == 0 && c.max_error == 0);
    s.got[3] = -INFINITY;
    c = compare(&s, RA_F32);
    assert_true(!c.pass && c.misplaced == 1 && c.worst[RA_SEQ] == 3);
    s.got[3] = INFINITY;
    s.got[2] = NAN;
    c = compare(&s, RA_F32);
    assert_true(!c.pass && c.worst[RA_SEQ] == 2 && isnan(c.worst_got));
    s.got[2] = 1;
    s.got[0] = 0; /* an empty row whose lse is not -inf */
    assert_false(compare(&s, RA_F32).pass);
}

static void an_overflow_of_the_plain_computation_allows_nothing(void **state)
{
    (void)state;
    sample s = {{1, 1, 1, 2}, {1, 1, 1, INFINITY}, {1, 1, 1, 1}};
    assert_false(compare(&s, RA_F16).pass);
    s.plain[3] = NAN;
    assert_false(compare(&s, RA_F16).pass);
}

static void shapes_must_agree_and_empty_passes(void **state)
{
    (void)state;
    float numbers[8] = {0};
    ra_comparison c;
    ra_tensor a = ra_tensor_bhsd(numbers, RA_F32, 1, 1, 8, 1);
    ra_tensor b = ra_tensor_bhsd(numbers, RA_F32, 1, 1, 7, 1);
    assert_int_equal(ra_compare(&a, &b, &a, RA_F32, &c), RA_E_SHAPE);
    assert_int_equal(ra_compare(&a, &a, &b, RA_F32, &c), RA_E_SHAPE);
    assert_non_null(strstr(ra_last_error(), "reference"));
    assert_int_equal(ra_compare(&a, &a, &a, (ra_dtype)0, &c), RA_E_ARG);
    ra_tensor none = ra_tensor_bhsd(NULL, RA_F32, 1, 1, 0, 1);
    assert_int_equal(ra_compare(&none, &none, &none, RA_F32, &c), RA_OK);
    assert_true(c.pass);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_maximum_bites),
        cmocka_unit_test(the_mean_square_bites),
        cmocka_unit_test(equal_tensors_pass_with_no_plain_error),
        cmocka_unit_test(specials_must_stand_where_the_reference_has_them),
        cmocka_unit_test(an_overflow_of_the_plain_computation_allows_nothing),
        cmocka_unit_test(shapes_must_agree_and_empty_passes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
