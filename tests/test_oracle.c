/* The oracle against answers worked out by hand and against finite differences of itself. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "oracle/plain.h"
#include "support_problem.h"
#include "tensor/tensor.h"

static ra_forward_io forward_of(const problem *p, const answer *a)
{
    return (ra_forward_io){sizeof(ra_forward_io), p->q, p->k, p->v, a->out, a->lse, {0}, {0}};
}

static ra_backward_io backward_of(const problem *p, const answer *a)
{
    return (ra_backward_io){.size = sizeof(ra_backward_io),
                            .q = p->q,
                            .k = p->k,
                            .v = p->v,
                            .dout = p->dout,
                            .dq = a->dq,
                            .dk = a->dk,
                            .dv = a->dv};
}

/* Results in f64, all of them written. */
static void solve(const problem *p, answer *a)
{
    answer_create(a, p, RA_F64, RA_F64, false);
    ra_step_desc desc = problem_desc(p);
    ra_forward_io forward = forward_of(p, a);
    ra_backward_io backward = backward_of(p, a);
    assert_int_equal(ra_oracle_forward(&desc, &p->layer, &forward), RA_OK);
    assert_int_equal(ra_oracle_backward(&desc, &p->layer, &backward), RA_OK);
}

static void assert_near(double got, double expected, double bound)
{
    if (!(fabs(got - expected) <= bound) && got != expected) {
        fail_msg("%.17g, expected %.17g within %g", got, expected, bound);
    }
}

/* Mask probe: row i of out is 1/n_i on n_i keys, lse is ln n_i; an empty row is 0 and -inf. */
static void assert_visible(problem *p, const int *visible)
{
    answer a;
    double total = 0;
    problem_fill_probe(p);
    solve(p, &a);
    for (int64_t i = 0; i < p->seq; i++) {
        int count = 0;
        for (int64_t j = 0; j < p->layer.head_dim; j++) {
            double x = ra_tensor_get(&a.out, 0, 0, i, j);
            count += x != 0;
            assert_near(x, x != 0 ? 1.0 / visible[i] : 0, 1e-15);
        }
        assert_int_equal(count, visible[i]);
        assert_near(ra_tensor_get(&a.lse, 0, 0, i, 0), log(visible[i]), 1e-15);
        total += visible[i] > 0;
        total -= ra_tensor_get(&a.dv, 0, 0, i, 0); /* sum of dV = rows that see a key */
    }
    assert_near(total, 0, 1e-14);
    answer_free(&a, false);
}

static void assert_dv(problem *p, const double *expected)
{
    answer a;
    problem_fill_probe(p);
    solve(p, &a);
    for (int64_t j = 0; j < p->seq; j++) {
        assert_near(ra_tensor_get(&a.dv, 0, 0, j, 3), expected[j], 1e-15);
        assert_near(ra_tensor_get(&a.dk, 0, 0, j, 3), 0, 1e-15);
        assert_near(ra_tensor_get(&a.dq, 0, 0, j, 3), 0, 1e-15);
    }
    answer_free(&a, false);
}

static problem probe(int64_t seq, int64_t window, ra_vision vision)
{
    problem p;
    ra_layer layer = layer_of(1, 1, 16, RA_F32);
    layer.window = window;
    layer.vision = vision;
    problem_create(&p, layer, 1, seq);
    return p;
}

static void windows(void **state)
{
    (void)state;
    problem p = probe(8, 4, RA_VISION_OFF);
    assert_visible(&p, (int[]){1, 2, 3, 4, 4, 4, 4, 4});
    p.layer.window = 1;
    assert_visible(&p, (int[]){1, 1, 1, 1, 1, 1, 1, 1});
    p.layer.window = 100;
    assert_visible(&p, (int[]){1, 2, 3, 4, 5, 6, 7, 8});
    p.layer.window = 0;
    p.layer.causal = false; /* lse is ln 8 everywhere, natural and not base 2 */
    assert_visible(&p, (int[]){8, 8, 8, 8, 8, 8, 8, 8});
    p.layer.window = 3;
    p.layer.window_right = 2;
    assert_visible(&p, (int[]){2, 3, 4, 4, 4, 4, 4, 3});
    problem_free(&p);
}

static void image_blocks(void **state)
{
    (void)state;
    problem p = probe(8, 4, RA_VISION_WITHIN_WINDOW);
    problem_set_image(&p, 1, 7);
    assert_visible(&p, (int[]){1, 7, 7, 7, 6, 5, 4, 4});
    p.layer.vision = RA_VISION_OVER_WINDOW;
    assert_visible(&p, (int[]){1, 7, 7, 7, 6, 6, 6, 4});
    p.layer.window = 0; /* global layers never use vision */
    assert_visible(&p, (int[]){1, 2, 3, 4, 5, 6, 7, 8});
    problem_free(&p);
    p = probe(8, 4, RA_VISION_WITHIN_WINDOW);
    problem_set_image(&p, 3, 5);
    assert_visible(&p, (int[]){1, 2, 3, 5, 4, 4, 4, 4});
    assert_dv(&p,
              (double[]){61. / 30, 77. / 60, 31. / 30, 19. / 20, 6. / 5, 3. / 4, 1. / 2, 1. / 4});
    p.layer.vision = RA_VISION_OFF; /* metadata without the flag: causal */
    assert_visible(&p, (int[]){1, 2, 3, 4, 4, 4, 4, 4});
    problem_free(&p);
    p = probe(8, 4, RA_VISION_WITHIN_WINDOW); /* the flag without metadata: causal */
    assert_visible(&p, (int[]){1, 2, 3, 4, 4, 4, 4, 4});
    problem_free(&p);
}

static void documents_and_padding(void **state)
{
    (void)state;
    problem p = probe(8, 0, RA_VISION_OFF);
    problem_set_docs(&p, (int32_t[]){1, 1, 1, 2, 2, 3, 3, 3});
    assert_visible(&p, (int[]){1, 2, 3, 1, 2, 1, 2, 3});
    problem_set_pads(&p, (uint8_t[]){0, 0, 0, 0, 0, 0, 0, 0});
    assert_visible(&p, (int[]){1, 2, 3, 1, 2, 1, 2, 3});
    problem_set_pads(&p, (uint8_t[]){0, 1, 0, 0, 0, 0, 0, 7});
    assert_visible(&p, (int[]){1, 0, 2, 1, 2, 1, 2, 0});
    problem_set_pads(&p, (uint8_t[]){0, 0, 0, 0, 0, 0, 0, 0});
    problem_set_docs(&p, (int32_t[]){1, 1, 1, 0, 0, 0, -5, 0});
    assert_visible(&p, (int[]){1, 2, 3, 0, 0, 0, 0, 0});
    assert_dv(&p, (double[]){11. / 6, 5. / 6, 1. / 3, 0, 0, 0, 0, 0});
    problem_set_docs(&p, (int32_t[]){4, 9, 4, 0, 9, 4, 0, 4}); /* one id, several runs */
    p.layer.window = 4;
    assert_visible(&p, (int[]){1, 1, 2, 0, 2, 2, 0, 2});
    problem_free(&p);
    p = probe(4, 0, RA_VISION_OFF);
    assert_dv(&p, (double[]){25. / 12, 13. / 12, 7. / 12, 1. / 4});
    problem_free(&p);
}

static void scores_scale_and_heads(void **state)
{
    (void)state;
    problem p;
    answer a;
    problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, 1);
    ra_tensor_set(&p.q, 0, 0, 0, 0, 2);
    ra_tensor_set(&p.k, 0, 0, 0, 0, 2);
    for (int i = 1; i <= 3; i++) { /* scale is the caller's, exactly */
        p.layer.scale = (float)i / 2;
        solve(&p, &a);
        assert_true(ra_tensor_get(&a.lse, 0, 0, 0, 0) == 2.0 * i);
        answer_free(&a, false);
    }
    problem_free(&p);
    /* Scores 0 and ln 3: weights 1/4 and 3/4, lse ln 4. */
    problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, 2);
    ra_tensor_set(&p.q, 0, 0, 1, 5, 1);
    ra_tensor_set(&p.k, 0, 0, 1, 5, log(3));
    ra_tensor_set(&p.v, 0, 0, 0, 0, 4);
    ra_tensor_set(&p.v, 0, 0, 1, 0, 8);
    ra_tensor_set(&p.dout, 0, 0, 1, 0, 1);
    solve(&p, &a);
    assert_near(ra_tensor_get(&a.out, 0, 0, 1, 0), 7, 1e-6);
    assert_near(ra_tensor_get(&a.lse, 0, 0, 1, 0), log(4), 1e-7);
    assert_near(ra_tensor_get(&a.dv, 0, 0, 0, 0), 0.25, 1e-7);
    assert_near(ra_tensor_get(&a.dv, 0, 0, 1, 0), 0.75, 1e-7);
    assert_near(ra_tensor_get(&a.dk, 0, 0, 1, 5), 0.75 * (8 - 7), 1e-6);
    assert_near(ra_tensor_get(&a.dk, 0, 0, 0, 5), 0.25 * (4 - 7), 1e-6);
    assert_near(ra_tensor_get(&a.dq, 0, 0, 1, 5), 0.75 * log(3), 1e-6);
    answer_free(&a, false);
    problem_free(&p);
    /* Query heads 0, 1 read KV head 0, heads 2, 3 KV head 1; gradients add over the heads. */
    problem_create(&p, layer_of(4, 2, 8, RA_F32), 1, 3);
    tensor_fill(&p.dout, 1);
    for (int i = 0; i < 6; i++) {
        ra_tensor_set(&p.v, 0, i / 3, i % 3, 2, i / 3 + 1);
    }
    solve(&p, &a);
    for (int head = 0; head < 4; head++) {
        assert_near(ra_tensor_get(&a.out, 0, head, 2, 2), head / 2 + 1, 1e-15);
    }
    for (int head = 0; head < 2; head++) {
        assert_near(ra_tensor_get(&a.dv, 0, head, 0, 2), 2 * 11. / 6, 1e-14);
    }
    answer_free(&a, false);
    problem_free(&p);
}

/* A constant on every key moves every score of a query alike: same out, lse grows by it. */
static void shifted_keys_shift_lse(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    problem p;
    answer before, after;
    problem_create(&p, layer_of(2, 1, 16, RA_F32), 2, 9);
    p.layer.scale = 0.5f;
    problem_fill_unit(&p, &r);
    for (int64_t i = 0; i < 2 * 9 * 16; i++) { /* few bits, so that adding 3 is exact */
        double x = ra_tensor_get(&p.k, i / 144, 0, i / 16 % 9, i % 16);
        ra_tensor_set(&p.k, i / 144, 0, i / 16 % 9, i % 16, nearbyint(x * 1024) / 1024);
    }
    solve(&p, &before);
    for (int64_t i = 0; i < 2 * 9; i++) {
        double x = ra_tensor_get(&p.k, i / 9, 0, i % 9, 7);
        ra_tensor_set(&p.k, i / 9, 0, i % 9, 7, x + 3);
    }
    solve(&p, &after);
    assert_near(tensor_error(&before.out, &after.out), 0, 1e-13);
    for (int64_t i = 0; i < 2 * 2 * 9; i++) {
        double grown = ra_tensor_get(&after.lse, i / 18, i / 9 % 2, i % 9, 0) -
                       ra_tensor_get(&before.lse, i / 18, i / 9 % 2, i % 9, 0);
        assert_near(grown, 0.5 * 3 * ra_tensor_get(&p.q, i / 18, i / 9 % 2, i % 9, 7), 1e-13);
    }
    answer_free(&before, false);
    answer_free(&after, false);
    problem_free(&p);
}

/* Copies the first rows of a longer problem. */
static void copy_prefix(const ra_tensor *from, const ra_tensor *to)
{
    for (int64_t i = 0; i < to->size[RA_SEQ]; i++) {
        for (int64_t c = 0; c < to->size[RA_CHAN]; c++) {
            ra_tensor_set(to, 0, 0, i, c, ra_tensor_get(from, 0, 0, i, c));
        }
    }
}

static void nan_in_padding_reaches_nothing(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    problem p, shorter;
    answer a, expected;
    problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, 4);
    problem_create(&shorter, p.layer, 1, 3);
    problem_set_docs(&p, (int32_t[]){1, 1, 1, 0});
    problem_fill_unit(&p, &r);
    const ra_tensor *from[] = {&p.q, &p.k, &p.v, &p.dout};
    const ra_tensor *to[] = {&shorter.q, &shorter.k, &shorter.v, &shorter.dout};
    for (int t = 0; t < 4; t++) {
        copy_prefix(from[t], to[t]);
        for (int64_t c = 0; c < 8; c++) {
            ra_tensor_set(from[t], 0, 0, 3, c, NAN);
        }
    }
    solve(&p, &a);
    solve(&shorter, &expected);
    const ra_tensor *got[] = {&a.out, &a.dq, &a.dk, &a.dv};
    const ra_tensor *same[] = {&expected.out, &expected.dq, &expected.dk, &expected.dv};
    for (int t = 0; t < 4; t++) {
        ra_tensor prefix = ra_tensor_slice_seq(got[t], 0, 3);
        prefix.stride[RA_HEAD] = prefix.stride[RA_ROW] = 24;
        assert_true(tensor_same_bits(&prefix, same[t]));
        for (int64_t c = 0; c < 8; c++) {
            assert_true(ra_tensor_get(got[t], 0, 0, 3, c) == 0);
        }
    }
    assert_true(ra_tensor_get(&a.lse, 0, 0, 3, 0) == -INFINITY);
    answer_free(&a, false);
    answer_free(&expected, false);
    problem_free(&p);
    problem_free(&shorter);
}

/* NaN of one document stays in it. */
static void nan_in_a_document_stays_there(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    problem p;
    answer a;
    problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, 6);
    problem_set_docs(&p, (int32_t[]){1, 1, 1, 2, 2, 2});
    problem_fill_unit(&p, &r);
    ra_tensor_set(&p.k, 0, 0, 1, 0, NAN);
    ra_tensor_set(&p.v, 0, 0, 1, 0, NAN);
    solve(&p, &a);
    for (int64_t i = 0; i < 6; i++) {
        bool touched = i == 1 || i == 2;
        assert_int_equal(isnan(ra_tensor_get(&a.lse, 0, 0, i, 0)) != 0, touched);
        assert_int_equal(isnan(ra_tensor_get(&a.out, 0, 0, i, 0)) != 0, touched);
        assert_true(i < 3 || isfinite(ra_tensor_get(&a.dk, 0, 0, i, 0)));
    }
    answer_free(&a, false);
    problem_free(&p);
}

static double loss_of(const problem *p, const answer *a)
{
    double loss = 0;
    ra_step_desc desc = problem_desc(p);
    ra_forward_io io = forward_of(p, a);
    assert_int_equal(ra_oracle_forward(&desc, &p->layer, &io), RA_OK);
    for (int64_t row = 0; row < p->rows; row++) {
        for (int64_t head = 0; head < p->layer.q_heads; head++) {
            for (int64_t i = 0; i < p->seq * p->layer.head_dim; i++) {
                int64_t pos = i / p->layer.head_dim, c = i % p->layer.head_dim;
                loss += ra_tensor_get(&a->out, row, head, pos, c) *
                        ra_tensor_get(&p->dout, row, head, pos, c);
            }
        }
    }
    return loss;
}

static void assert_gradient(const problem *p, const answer *scratch, const ra_tensor *input,
                            const ra_tensor *gradient)
{
    for (int64_t i = 0; i < ra_tensor_count(input); i++) {
        float *x = (float *)input->data + i, kept = *x;
        double high, low, width;
        *x = kept + 0x1p-8f;
        width = (double)*x;
        high = loss_of(p, scratch);
        *x = kept - 0x1p-8f;
        width -= (double)*x;
        low = loss_of(p, scratch);
        *x = kept;
        assert_near(((const double *)gradient->data)[i], (high - low) / width, 2e-4);
    }
}

static void gradients_are_finite_differences(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    for (int step = 0; step < 6; step++) {
        problem p;
        answer a, scratch;
        ra_layer layer = layer_of(step % 2 ? 2 : 4, 2, 8, RA_F32);
        layer.scale = step % 2 ? 1.0f : 0.35f;
        layer.causal = step != 1;
        layer.window = step < 2 ? 0 : 3;
        layer.vision = (ra_vision)(step % 3);
        problem_create(&p, layer, 2, 6);
        int32_t doc[12], type[12];
        for (int i = 0; i < 12; i++) {
            doc[i] = (int32_t)rng_int(&r, 0, 2);
            type[i] = (int32_t)rng_int(&r, 0, 1);
        }
        if (step > 2) {
            problem_set_docs(&p, doc);
        }
        problem_set_types(&p, type);
        problem_fill_unit(&p, &r);
        solve(&p, &a);
        answer_create(&scratch, &p, RA_F64, RA_F64, false);
        assert_gradient(&p, &scratch, &p.q, &a.dq);
        assert_gradient(&p, &scratch, &p.k, &a.dk);
        assert_gradient(&p, &scratch, &p.v, &a.dv);
        answer_free(&scratch, false);
        answer_free(&a, false);
        problem_free(&p);
    }
}

/* Key and value may be one tensor. */
static void shared_key_and_value(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    problem p, shared;
    answer a, b;
    problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, 5);
    problem_fill_unit(&p, &r);
    copy_prefix(&p.k, &p.v);
    solve(&p, &a);
    shared = p;
    shared.v = p.k;
    solve(&shared, &b);
    assert_true(tensor_same_bits(&a.out, &b.out));
    assert_true(tensor_same_bits(&a.dk, &b.dk) && tensor_same_bits(&a.dv, &b.dv));
    answer_free(&a, false);
    answer_free(&b, false);
    problem_free(&p);
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
    problem p;
    answer a;
    problem_create(&p, layer_of(2, 1, 8, RA_F32), 1, 4);
    answer_create(&a, &p, RA_F64, RA_F64, false);
    ra_step_desc desc = problem_desc(&p);
    ra_forward_io good = forward_of(&p, &a), io = good;
    assert_int_equal(ra_oracle_forward(NULL, &p.layer, &io), RA_E_ARG);
    assert_int_equal(ra_oracle_forward(&desc, NULL, &io), RA_E_ARG);
    assert_int_equal(ra_oracle_forward(&desc, &p.layer, NULL), RA_E_ARG);
    io.size = 0;
    assert_int_equal(ra_oracle_forward(&desc, &p.layer, &io), RA_E_ARG);
    assert_message("io.size: 0, expected");
    io = good, io.k.size[RA_SEQ] = 5;
    assert_int_equal(ra_oracle_forward(&desc, &p.layer, &io), RA_E_SHAPE);
    assert_message("k: size of axis 2");
    io = good, io.q.dtype = RA_F64;
    assert_int_equal(ra_oracle_forward(&desc, &p.layer, &io), RA_E_SHAPE);
    assert_message("q: dtype f64, expected f32");
    io = good, io.out = io.v;
    io.out.size[RA_HEAD] = 2;
    assert_int_equal(ra_oracle_forward(&desc, &p.layer, &io), RA_E_ARG);
    assert_message("out: data");
    io = good, io.lse.dtype = (ra_dtype)0;
    assert_int_equal(ra_oracle_forward(&desc, &p.layer, &io), RA_E_SHAPE);
    assert_message("lse");
    assert_int_equal(ra_plain_forward(RA_PLAIN_SUM_F32, &desc, &p.layer, &good), RA_E_SHAPE);
    assert_message("out: dtype f64, expected f32");
    ra_backward_io back = backward_of(&p, &a);
    back.dv = back.dk;
    assert_int_equal(ra_oracle_backward(&desc, &p.layer, &back), RA_E_ARG);
    assert_message("data");
    back = backward_of(&p, &a), back.size--;
    assert_int_equal(ra_oracle_backward(&desc, &p.layer, &back), RA_E_ARG);
    assert_message("io.size");
    desc.rows = 0;
    assert_int_equal(ra_oracle_forward(&desc, &p.layer, &good), RA_E_ARG);
    assert_message("rows: 0");
    desc = problem_desc(&p), p.layer.dropout = 0.1f;
    assert_int_equal(ra_oracle_forward(&desc, &p.layer, &good), RA_E_UNSUPPORTED);
    assert_true(isnan(ra_tensor_get(&a.out, 0, 0, 0, 0))); /* nothing was written */
    answer_free(&a, false);
    problem_free(&p);
}

static void an_empty_sequence_is_fine(void **state)
{
    (void)state;
    problem p;
    answer a;
    problem_create(&p, layer_of(2, 1, 8, RA_F32), 2, 0);
    solve(&p, &a);
    answer_free(&a, false);
    problem_free(&p);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(windows),
        cmocka_unit_test(image_blocks),
        cmocka_unit_test(documents_and_padding),
        cmocka_unit_test(scores_scale_and_heads),
        cmocka_unit_test(shifted_keys_shift_lse),
        cmocka_unit_test(nan_in_padding_reaches_nothing),
        cmocka_unit_test(nan_in_a_document_stays_there),
        cmocka_unit_test(gradients_are_finite_differences),
        cmocka_unit_test(shared_key_and_value),
        cmocka_unit_test(bad_arguments_are_named),
        cmocka_unit_test(an_empty_sequence_is_fine),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
