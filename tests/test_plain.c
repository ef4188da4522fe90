/* The plain computation: as far from the oracle as its dtype makes it, and near enough that the
 * tolerance it sets notices wrong masks and scales. Both leave nothing behind when memory is short.
 */
#include "oracle/plain.h"

#include <math.h>

#include "base/alloc.h"
#include "oracle/tolerance.h"
#include "support_problem.h"

static ra_comparison compare(const ra_tensor *got, const ra_tensor *plain, const ra_tensor *exact,
                             ra_dtype rule)
{
    ra_comparison c;
    assert_int_equal(ra_compare(got, plain, exact, rule, &c), RA_OK);
    return c;
}

static void errors_are_those_of_the_dtype(void **state)
{
    (void)state;
    static const ra_dtype dtypes[] = {RA_F32, RA_F16, RA_BF16};
    rng r = rng_of(support_seed());
    for (int d = 0; d < 3; d++) {
        problem p;
        reference ref;
        ra_layer layer = layer_of(4, 2, 64, dtypes[d]);
        layer.window = 20;
        layer.vision = RA_VISION_WITHIN_WINDOW;
        problem_create(&p, layer, 2, 48);
        problem_set_image(&p, 5, 40);
        int32_t doc[96];
        for (int i = 0; i < 96; i++) {
            doc[i] = i % 48 < 30 ? 1 : i % 48 < 44 ? 2 : 0;
        }
        problem_set_docs(&p, doc);
        problem_fill_unit(&p, &r);
        reference_create(&ref, &p);
        const answer *plain = &ref.plain, *exact = &ref.oracle;
        double u = ra_unit_roundoff(dtypes[d]);
        const ra_tensor *pairs[][2] = {{&plain->out, &exact->out},
                                       {&plain->dq, &exact->dq},
                                       {&plain->dk, &exact->dk},
                                       {&plain->dv, &exact->dv}};
        for (int t = 0; t < 4; t++) {
            ra_comparison c = compare(pairs[t][0], pairs[t][0], pairs[t][1], dtypes[d]);
            assert_true(c.pass);
            assert_true(c.max_error > u / 64);
            assert_true(c.max_error < 128 * u);
        }
        ra_comparison c = compare(&plain->lse, &plain->lse, &exact->lse, RA_F32);
        assert_true(c.pass && c.misplaced == 0);
        assert_true(c.max_error < 64 * 0x1p-24);
        reference_free(&ref);
        problem_free(&p);
    }
}

/* A window one off, a scale of 0.99 and a missing document mask are noticed. */
static void the_tolerance_bites(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    problem p, mutant;
    reference ref, wrong;
    ra_layer layer = layer_of(2, 1, 64, RA_BF16);
    layer.window = 9;
    problem_create(&p, layer, 1, 40);
    int32_t doc[40];
    for (int i = 0; i < 40; i++) {
        doc[i] = 1 + i / 23;
    }
    problem_set_docs(&p, doc);
    problem_fill_gemma(&p, &r);
    reference_create(&ref, &p);
    for (int i = 0; i < 4; i++) {
        mutant = p;
        mutant.layer.window += i == 0 ? 1 : i == 1 ? -1 : 0;
        mutant.layer.scale *= i == 2 ? 0.99f : 1.0f;
        mutant.doc_id = i == 3 ? NULL : p.doc_id;
        reference_create(&wrong, &mutant);
        const answer *got = &wrong.plain, *plain = &ref.plain, *exact = &ref.oracle;
        assert_false(compare(&got->lse, &plain->lse, &exact->lse, RA_F32).pass);
        /* A scale of 0.99 is near the roundings of bf16 in out; lse shows it. */
        assert_true(i == 2 || !compare(&got->out, &plain->out, &exact->out, RA_BF16).pass);
        assert_true(i == 2 || !compare(&got->dv, &plain->dv, &exact->dv, RA_BF16).pass);
        reference_free(&wrong);
    }
    reference_free(&ref);
    problem_free(&p);
}

/* How far f32 numbers are apart at the magnitude of x. */
static double ulp_of(double x)
{
    int exponent;
    frexp(x, &exponent);
    return ldexp(1, exponent - 24);
}

/* f16 numbers of magnitude 1 to 2, so that double holds their products and sums exactly. */
static void fill_channels(rng *r, float *x, int64_t chan, bool mixed)
{
    for (int64_t c = 0; c < chan; c++) {
        float magnitude = 1.0f + (float)rng_int(r, 0, 1023) / 1024;
        x[c] = mixed && rng_chance(r, 50) ? -magnitude : magnitude;
    }
}

/* Cut toward zero 16 channels at a time: of one sign, a tensor sum is never above the exact one in
 * magnitude; of any sign, it is off by less than an ulp of the largest partial sum a step. */
static void tensor_sums_are_cut(void **state)
{
    (void)state;
    enum { CHAN = 512, STEPS = 32 };
    rng r = rng_of(support_seed());
    float a[CHAN], b[CHAN];
    double low = 0;
    for (int i = 0; i < 2000; i++) {
        bool mixed = i % 2 == 1;
        fill_channels(&r, a, CHAN, mixed);
        fill_channels(&r, b, CHAN, false);
        double exact = 0, largest = 1;
        for (int c = 0; c < CHAN; c++) {
            exact += (double)a[c] * (double)b[c];
            largest = c % 16 == 15 ? fmax(largest, fabs(exact)) : largest;
        }
        double got = (double)ra_plain_dot(RA_PLAIN_SUM_TENSOR, a, b, CHAN);
        assert_true(mixed || fabs(got) <= fabs(exact));
        assert_true(fabs(got - exact) < STEPS * ulp_of(largest));
        low += mixed ? 0 : (exact - got) / ulp_of(exact);
    }
    /* Half an ulp a step on average, the ulp growing with the sum. */
    assert_true(low / 1000 > 4 && low / 1000 < 16);
}

/* A tail of 8 channels, sums that are exact, and zero. */
static void short_sums_are_exact(void **state)
{
    (void)state;
    float a[24], b[24];
    for (int c = 0; c < 24; c++) {
        a[c] = (float)(c - 11);
        b[c] = 2;
    }
    assert_true(ra_plain_dot(RA_PLAIN_SUM_TENSOR, a, b, 24) == 24);
    assert_true(ra_plain_dot(RA_PLAIN_SUM_F32, a, b, 24) == 24);
    assert_true(ra_plain_dot(RA_PLAIN_SUM_TENSOR, a, b, 8) == -120);
    assert_true(ra_plain_dot(RA_PLAIN_SUM_TENSOR, a, b, 0) == 0);
    /* 2^24 and 1 do not fit f32 together: cut, of either sign. */
    const float big[8] = {0x1p12f, 1}, one[8] = {0x1p12f, 1.5f}, less[8] = {-0x1p12f, -1.5f};
    assert_true(ra_plain_dot(RA_PLAIN_SUM_TENSOR, big, one, 8) == 0x1p24f);
    assert_true(ra_plain_dot(RA_PLAIN_SUM_TENSOR, big, less, 8) == -0x1p24f);
    assert_true(ra_plain_dot(RA_PLAIN_SUM_F32, big, one, 8) == 0x1p24f + 2);
}

/* The kind of sum moves lse, and nothing in f32. */
static void sums_show_in_lse(void **state)
{
    (void)state;
    static const ra_dtype dtypes[] = {RA_F32, RA_F16, RA_BF16};
    rng r = rng_of(support_seed());
    for (int d = 0; d < 3; d++) {
        problem p;
        reference ref;
        answer cut;
        problem_create(&p, layer_of(2, 1, 256, dtypes[d]), 1, 32);
        problem_fill_gemma(&p, &r);
        reference_create(&ref, &p);
        answer_create(&cut, &p, dtypes[d], RA_F32, false);
        ra_step_desc desc = problem_desc(&p);
        ra_forward_io io = {.size = sizeof io, .q = p.q, .k = p.k, .v = p.v};
        io.out = cut.out, io.lse = cut.lse;
        assert_int_equal(ra_plain_forward(RA_PLAIN_SUM_TENSOR, &desc, &p.layer, &io), RA_OK);
        assert_int_equal(tensor_same_bits(&cut.lse, &ref.plain.lse), dtypes[d] == RA_F32);
        double error = tensor_error(&cut.lse, &ref.oracle.lse);
        assert_true(error <= 16 * ulp_of(tensor_largest(&ref.oracle.lse)));
        answer_free(&cut, false);
        reference_free(&ref);
        problem_free(&p);
    }
}

static ra_status plain_forward(const ra_step_desc *desc, const ra_layer *layer,
                               const ra_forward_io *io)
{
    return ra_plain_forward(RA_PLAIN_SUM_F32, desc, layer, io);
}

static ra_status plain_backward(const ra_step_desc *desc, const ra_layer *layer,
                                const ra_backward_io *io)
{
    return ra_plain_backward(RA_PLAIN_SUM_F32, desc, layer, io);
}

typedef ra_status forward_call(const ra_step_desc *, const ra_layer *, const ra_forward_io *);
typedef ra_status backward_call(const ra_step_desc *, const ra_layer *, const ra_backward_io *);

/* Both computations make the same three allocations. */
static void failed_allocations_leave_nothing(void **state)
{
    (void)state;
    static forward_call *const forward_of_kind[] = {ra_oracle_forward, plain_forward};
    static backward_call *const backward_of_kind[] = {ra_oracle_backward, plain_backward};
    problem p;
    answer a;
    problem_create(&p, layer_of(2, 1, 8, RA_F32), 1, 4);
    problem_set_image(&p, 1, 2);
    answer_create(&a, &p, RA_F32, RA_F32, false);
    ra_step_desc desc = problem_desc(&p);
    ra_forward_io forward = {.size = sizeof forward, .q = p.q, .k = p.k, .v = p.v};
    forward.out = a.out, forward.lse = a.lse;
    ra_backward_io backward = {.size = sizeof backward, .q = p.q, .k = p.k, .v = p.v};
    backward.dout = p.dout, backward.dq = a.dq, backward.dk = a.dk, backward.dv = a.dv;
    for (long run = 0; run < 16; run++) {
        ra_alloc_probe watch = {.fail_at = 1 + run / 4};
        ra_alloc_watch(&watch);
        ra_status status = run % 2 ? backward_of_kind[run / 2 % 2](&desc, &p.layer, &backward)
                                   : forward_of_kind[run / 2 % 2](&desc, &p.layer, &forward);
        ra_alloc_watch(NULL);
        assert_int_equal(status, run / 4 < 3 ? RA_E_NOMEM : RA_OK);
        assert_int_equal(atomic_load(&watch.live_bytes), 0);
    }
    answer_free(&a, false);
    problem_free(&p);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(errors_are_those_of_the_dtype),
        cmocka_unit_test(the_tolerance_bites),
        cmocka_unit_test(tensor_sums_are_cut),
        cmocka_unit_test(short_sums_are_exact),
        cmocka_unit_test(sums_show_in_lse),
        cmocka_unit_test(failed_allocations_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
