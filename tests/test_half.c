/* base/half.h against exact arithmetic in double: every 16-bit value, every tie, subnormals, Inf,
 * NaN. */
#include "base/half.h"

#include <math.h>

#include "support.h"

typedef struct format {
    const char *name;
    int precision;    /* significand bits, the hidden one included */
    int lowest;       /* the smallest positive value is 2^lowest */
    double limit;     /* first magnitude that is out of range */
    uint32_t special; /* bits of Inf */
    uint16_t (*narrow)(float);
    float (*widen)(uint16_t);
} format;

static const format formats[] = {
    {"bf16", 8, -133, 0x1p128, 0x7f80, ra_f32_to_bf16, ra_bf16_to_f32},
    {"f16", 11, -24, 0x1p16, 0x7c00, ra_f32_to_f16, ra_f16_to_f32},
};
enum { FORMAT_COUNT = sizeof formats / sizeof formats[0] };

/* Nearest value of the format, ties to even, by exact scaling and the default rounding mode. */
static double rounded(const format *f, double x)
{
    if (x == 0 || !isfinite(x)) {
        return x;
    }
    int exponent;
    frexp(x, &exponent);
    int quantum = exponent - f->precision > f->lowest ? exponent - f->precision : f->lowest;
    double y = ldexp(nearbyint(ldexp(x, -quantum)), quantum);
    return fabs(y) >= f->limit ? copysign(INFINITY, x) : y;
}

/* The value of a pattern, decoded field by field. */
static double decoded(const format *f, uint32_t bits)
{
    int fraction_bits = f->precision - 1;
    uint32_t magnitude = bits & 0x7fffu;
    uint32_t fraction = magnitude & ((1u << fraction_bits) - 1u);
    int exponent = (int)(magnitude >> fraction_bits);
    double sign = bits & 0x8000u ? -1.0 : 1.0;
    if (magnitude >= f->special) {
        return magnitude > f->special ? NAN : sign * INFINITY;
    }
    if (exponent == 0) {
        return sign * ldexp((double)fraction, f->lowest);
    }
    return sign * ldexp((double)(fraction + (1u << fraction_bits)), f->lowest + exponent - 1);
}

static void check_narrow(const format *f, float x)
{
    uint16_t got = f->narrow(x);
    if (isnan(x)) {
        assert_true((got & 0x7fffu) > f->special);
        return;
    }
    double expected = rounded(f, (double)x);
    if (decoded(f, got) != expected || (bool)signbit(x) != (bool)(got & 0x8000u)) {
        fail_msg("%s of %a: %a, expected %a", f->name, (double)x, decoded(f, got), expected);
    }
}

static void every_value_round_trips(void **state)
{
    (void)state;
    for (int i = 0; i < FORMAT_COUNT; i++) {
        const format *f = &formats[i];
        for (uint32_t bits = 0; bits < 0x10000u; bits++) {
            float x = f->widen((uint16_t)bits);
            if ((bits & 0x7fffu) > f->special) {
                assert_true(isnan(x));
                assert_true((f->narrow(x) & 0x7fffu) > f->special);
                continue;
            }
            assert_true((double)x == decoded(f, bits));
            assert_int_equal(f->narrow(x), bits);
        }
    }
}

static void ties_and_their_neighbours_round_to_even(void **state)
{
    (void)state;
    for (int i = 0; i < FORMAT_COUNT; i++) {
        const format *f = &formats[i];
        for (uint32_t bits = 0; bits < f->special; bits++) {
            double low = decoded(f, bits);
            double high = bits + 1 < f->special ? decoded(f, bits + 1) : f->limit;
            float tie = (float)(low + (high - low) / 2);
            const float near[] = {tie, nextafterf(tie, 0.0f), nextafterf(tie, INFINITY)};
            for (int j = 0; j < 3; j++) {
                check_narrow(f, near[j]);
                check_narrow(f, -near[j]);
            }
            uint32_t even = bits + (bits & 1u);
            assert_int_equal(f->narrow(tie), even);
        }
    }
}

static void random_patterns_round_like_double(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    for (int i = 0; i < 2000000; i++) {
        float x = ra_float_of((uint32_t)rng_next(&r));
        check_narrow(&formats[i % FORMAT_COUNT], x);
    }
}

static void special_values(void **state)
{
    (void)state;
    assert_int_equal(ra_f32_to_f16(65504.0f), 0x7bff);
    assert_int_equal(ra_f32_to_f16(65519.996f), 0x7bff);
    assert_int_equal(ra_f32_to_f16(65520.0f), 0x7c00);
    assert_int_equal(ra_f32_to_f16(-INFINITY), 0xfc00);
    assert_int_equal(ra_f32_to_f16(0x1p-24f), 1);
    assert_int_equal(ra_f32_to_f16(0x1p-25f), 0);
    assert_int_equal(ra_f32_to_f16(0x1.8p-25f), 1);
    assert_int_equal(ra_f32_to_f16(-0.0f), 0x8000);
    assert_int_equal(ra_f32_to_bf16(1.0f), 0x3f80);
    assert_int_equal(ra_f32_to_bf16(0x1.fffffep127f), 0x7f80);
    assert_int_equal(ra_f32_to_bf16(ra_float_of(0x7f800001u)), 0x7fc0);
    assert_int_equal(ra_f32_to_bf16(0x1.01p0f), 0x3f80);
    assert_int_equal(ra_f32_to_bf16(0x1.03p0f), 0x3f82);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_value_round_trips),
        cmocka_unit_test(ties_and_their_neighbours_round_to_even),
        cmocka_unit_test(random_patterns_round_like_double),
        cmocka_unit_test(special_values),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
