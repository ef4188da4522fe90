/* Probes whose data matters: empty parts, shifted scores, NaN in padding, scales, shared tensors,
 * dtypes, and the growth of error with the number of ranks. */
#include "support_probe.h"
#include "support_random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/tensor.h"

/* P01: merging empty parts. */
static void merge_of_empty_parts(void **state)
{
    (void)state;
    const float none = -INFINITY;
    static const float x[8] = {1, -2, 3, 0.1f, 5, -6, 7, 8};
    const float lse_a[] = {none, 3, none}, lse_b[] = {none, none, 3};
    float out[3][8] = {{0}}, part[3][8] = {{0}}, lse[3], part_lse[3];
    memcpy(out[1], x, sizeof x);
    memcpy(part[2], x, sizeof x);
    memcpy(lse, lse_a, sizeof lse);
    memcpy(part_lse, lse_b, sizeof part_lse);
    ra_tensor o = ra_tensor_bhsd(out, RA_F32, 1, 1, 3, 8),
              p = ra_tensor_bhsd(part, RA_F32, 1, 1, 3, 8);
    ra_tensor l = ra_tensor_bhsd(lse, RA_F32, 1, 1, 3, 1);
    ra_tensor pl = ra_tensor_bhsd(part_lse, RA_F32, 1, 1, 3, 1);
    static const float zero[8] = {0};
    assert_int_equal(ra_merge(&o, &l, &p, &pl), RA_OK);
    assert_true(lse[0] == none && lse[1] == 3 && lse[2] == 3);
    assert_memory_equal(out[0], zero, sizeof zero);
    assert_memory_equal(out[1], x, sizeof x);
    assert_memory_equal(out[2], x, sizeof x);
}

static void check_padding_is_zero(const problem *p, const layout *l, const answer *a, void *arg)
{
    (void)l;
    (void)arg;
    for (int64_t i = 0; i < p->seq; i++) {
        if (p->doc_id[i] > 0) {
            continue;
        }
        assert_true(ra_tensor_get(&a->lse, 0, 0, i, 0) == -(double)INFINITY);
        for (int64_t c = 0; c < p->layer.head_dim; c++) {
            assert_true(ra_tensor_get(&a->out, 0, 0, i, c) == 0);
            assert_true(ra_tensor_get(&a->dq, 0, 0, i, c) == 0);
            assert_true(ra_tensor_get(&a->dk, 0, 0, i, c) == 0);
            assert_true(ra_tensor_get(&a->dv, 0, 0, i, c) == 0);
        }
    }
}

static void padding_half(void **state)
{
    (void)state;
    static const int32_t doc_id[] = {1, 1, 0, 0};
    support_limit(60, "P01");
    problem p;
    rng r = rng_of(support_seed());
    problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, 4);
    problem_set_docs(&p, doc_id);
    problem_fill_unit(&p, &r);
    probe_everywhere(&p, check_padding_is_zero, NULL);
    problem_free(&p);
}

/* P03: a constant vector on every key shifts lse by scale q.c and changes nothing else. */
static void shifted_scores(void **state)
{
    (void)state;
    problem p;
    rng r = rng_of(support_seed());
    problem_create(&p, layer_of(2, 1, 16, RA_F32), 1, 24);
    problem_fill_unit(&p, &r);
    for (int ranks = 1; ranks <= 4; ranks++) {
        layout l = layout_contiguous(ranks, p.seq);
        world_options o = {0};
        answer before, after;
        support_limit(60, "P03, %d ranks", ranks);
        world_run(&p, &l, &o, &before, NULL);
        for (int64_t i = 0; i < p.seq; i++) {
            for (int64_t c = 0; c < 16; c++) {
                ra_tensor_set(&p.k, 0, 0, i, c, ra_tensor_get(&p.k, 0, 0, i, c) + 4.0);
            }
        }
        world_run(&p, &l, &o, &after, NULL);
        for (int64_t i = 0; i < p.seq; i++) {
            double shift = 0;
            for (int64_t c = 0; c < 16; c++) {
                shift += 4.0 * ra_tensor_get(&p.q, 0, 1, i, c);
                ra_tensor_set(&p.k, 0, 0, i, c, ra_tensor_get(&p.k, 0, 0, i, c) - 4.0);
            }
            double grown =
                ra_tensor_get(&after.lse, 0, 1, i, 0) - ra_tensor_get(&before.lse, 0, 1, i, 0);
            assert_true(fabs(grown - shift) < 2e-5);
        }
        assert_true(tensor_error(&before.out, &after.out) < 2e-5);
        answer_free(&before, false);
        answer_free(&after, false);
    }
    problem_free(&p);
}

/* P04: what stands in a padded row changes no bit elsewhere, and its own results are zero. */
static void nan_in_padding(void **state)
{
    (void)state;
    static const int32_t doc_id[] = {1, 1, 1, 0};
    ra_tensor *tensor;
    problem three, four;
    rng r = rng_of(support_seed());
    problem_create(&three, layer_of(2, 2, 8, RA_F32), 1, 3);
    problem_create(&four, three.layer, 1, 4);
    problem_set_docs(&four, doc_id);
    problem_fill_unit(&three, &r);
    const ra_tensor *source[] = {&three.q, &three.k, &three.v, &three.dout};
    ra_tensor *target[] = {&four.q, &four.k, &four.v, &four.dout};
    for (int t = 0; t < 4; t++) {
        tensor = target[t];
        tensor_fill(tensor, (double)NAN);
        for (int64_t head = 0; head < 2; head++) {
            for (int64_t i = 0; i < 3; i++) {
                memcpy(ra_tensor_at(tensor, 0, head, i), ra_tensor_at(source[t], 0, head, i),
                       8 * sizeof(float));
            }
        }
    }
    for (int ranks = 1; ranks <= 4;
         ranks++) { /* cut at the same positions; row 3 goes to the last */
        layout short_one = layout_contiguous(ranks, 3), long_one = short_one;
        int last = ranks - 1;
        if (long_one.run_count[last] == 0) {
            long_one.run_count[last] = 1;
            long_one.run[last][0] = (ra_run){3, 0};
        }
        long_one.run[last][0].count++;
        long_one.length[last]++;
        world_options o = {0};
        answer a, b;
        support_limit(60, "P04, %d ranks", ranks);
        world_run(&three, &short_one, &o, &a, NULL);
        world_run(&four, &long_one, &o, &b, NULL);
        const ra_tensor *x[] = {&a.out, &a.lse, &a.dq, &a.dk, &a.dv};
        const ra_tensor *y[] = {&b.out, &b.lse, &b.dq, &b.dk, &b.dv};
        for (int t = 0; t < 5; t++) {
            for (int64_t head = 0; head < 2; head++) {
                for (int64_t i = 0; i < 3; i++) {
                    assert_memory_equal(ra_tensor_at(x[t], 0, head, i),
                                        ra_tensor_at(y[t], 0, head, i),
                                        (size_t)x[t]->size[RA_CHAN] * sizeof(float));
                }
            }
        }
        check_padding_is_zero(&four, &long_one, &b, NULL);
        answer_free(&a, false);
        answer_free(&b, false);
    }
    problem_free(&three);
    problem_free(&four);
}

/* P05: the error does not grow with the number of ranks. */
static void error_by_ranks(void **state)
{
    (void)state;
    problem p;
    rng r = rng_of(support_seed());
    problem_create(&p, layer_of(2, 1, 64, RA_BF16), 1, 256);
    problem_fill_unit(&p, &r);
    reference ref;
    support_limit(120, "P05");
    reference_create(&ref, &p);
    double alone[4] = {0};
    for (int ranks = 1; ranks <= 8; ranks *= 2) {
        layout l = layout_contiguous(ranks, p.seq);
        world_options o = {0};
        answer a;
        world_run(&p, &l, &o, &a, NULL);
        reference_check(&ref, &p, &a, true);
        const double error[] = {
            tensor_error(&a.out, &ref.oracle.out), tensor_error(&a.dq, &ref.oracle.dq),
            tensor_error(&a.dk, &ref.oracle.dk), tensor_error(&a.dv, &ref.oracle.dv)};
        printf("P05: %d ranks: out %.2e, dq %.2e, dk %.2e, dv %.2e\n", ranks, error[0], error[1],
               error[2], error[3]);
        for (int t = 0; t < 4; t++) {
            alone[t] = ranks == 1 ? error[t] : alone[t];
            assert_true(error[t] <= 1.5 * alone[t]);
        }
        answer_free(&a, false);
    }
    reference_free(&ref);
    problem_free(&p);
}

static void check_sums(const problem *p, const layout *l, const answer *a, void *arg)
{
    (void)l;
    for (int64_t c = 0; c < p->layer.head_dim; c++) {
        double dv = 0, dout = 0;
        for (int64_t i = 0; i < p->seq; i++) {
            dv += ra_tensor_get(&a->dv, 0, 0, i, c);
            dout += ra_tensor_get(&p->dout, 0, 0, i, c);
        }
        assert_true(fabs(dv - dout) < 1e-5);
    }
    reference_check_tiny(arg, p, a);
}

/* P07: the backward uses the global lse: one remote key takes nearly all the weight. */
static void dominant_remote_key(void **state)
{
    (void)state;
    support_limit(60, "P07");
    problem p;
    rng r = rng_of(support_seed());
    problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, 4);
    tensor_fill_normal(&p.v, &r, 1.0);
    tensor_fill_normal(&p.dout, &r, 1.0);
    for (int64_t i = 0; i < 4; i++) {
        ra_tensor_set(&p.q, 0, 0, i, 0, 1.0);
    }
    ra_tensor_set(&p.k, 0, 0, 0, 0, 8.0);
    reference ref;
    reference_create(&ref, &p);
    probe_everywhere(&p, check_sums, &ref);
    reference_free(&ref);
    problem_free(&p);
}

/* P21: query head h reads KV head h / (q_heads / kv_heads). */
static void head_groups(void **state)
{
    (void)state;
    static const int heads[][2] = {{4, 2}, {2, 2}, {3, 1}, {8, 1}, {16, 1}, {6, 2}, {16, 2}};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        int ratio = heads[i][0] / heads[i][1];
        problem p;
        problem_create(&p, layer_of(heads[i][0], heads[i][1], 8, RA_F32), 1, 4);
        tensor_fill(&p.dout, 1.0);
        for (int64_t h = 0; h < heads[i][1]; h++) {
            for (int64_t j = 0; j < 4; j++) {
                for (int64_t c = 0; c < 8; c++) {
                    ra_tensor_set(&p.v, 0, h, j, c, (double)h + 1.0);
                }
            }
        }
        for (int ranks = 1; ranks <= 4; ranks++) {
            layout l = layout_zigzag(ranks, 4);
            world_options o = {0};
            answer a;
            support_limit(60, "P21, heads %d/%d, %d ranks", heads[i][0], heads[i][1], ranks);
            world_run(&p, &l, &o, &a, NULL);
            static const double dv[] = {25.0 / 12, 13.0 / 12, 7.0 / 12, 1.0 / 4};
            for (int64_t j = 0; j < 4; j++) {
                for (int64_t h = 0; h < heads[i][0]; h++) {
                    double want = (double)(h / ratio) + 1.0;
                    assert_true(fabs(ra_tensor_get(&a.out, 0, h, j, 3) - want) < 1e-5);
                }
                for (int64_t h = 0; h < heads[i][1]; h++) {
                    assert_true(fabs(ra_tensor_get(&a.dv, 0, h, j, 5) - ratio * dv[j]) < 1e-5);
                }
            }
            answer_free(&a, false);
        }
        problem_free(&p);
    }
}

/* P22: the scale is the caller's, on every level. */
static void scale_is_given(void **state)
{
    (void)state;
    static const float scales[] = {1.0f, 0.5f, 0.0625f, 2.0f, -1.0f, 0.3f};
    problem p;
    problem_create(&p, layer_of(1, 1, 64, RA_F32), 1, 1);
    ra_tensor_set(&p.q, 0, 0, 0, 1, 2.0);
    ra_tensor_set(&p.k, 0, 0, 0, 1, 2.0);
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        for (int level = 0; ra_cpu_level_name(level); level++) {
            for (int ranks = 1; ra_cpu_level_runs(level) && ranks <= 4; ranks++) {
                layout l = layout_contiguous(ranks, 1);
                world_options o = {.level = ra_cpu_level_name(level)};
                answer a;
                support_limit(60, "P22, scale %g, %s, %d ranks", (double)scales[i], o.level, ranks);
                p.layer.scale = scales[i];
                world_run(&p, &l, &o, &a, NULL);
                double lse = ra_tensor_get(&a.lse, 0, 0, 0, 0);
                if (lse != (double)(4.0f * scales[i])) {
                    fail_msg("%s: lse %.9g, expected %.9g", support_case(), lse,
                             (double)(4.0f * scales[i]));
                }
                answer_free(&a, false);
            }
        }
    }
    problem_free(&p);
}

/* P26: V the same memory as K: dk and dv are those of two copies. */
static void shared_key_and_value(void **state)
{
    (void)state;
    support_limit(60, "P26");
    problem p, alias;
    rng r = rng_of(support_seed());
    problem_create(&p, layer_of(2, 1, 8, RA_F32), 1, 12);
    problem_fill_unit(&p, &r);
    memcpy(p.v.data, p.k.data, (size_t)ra_tensor_count(&p.k) * sizeof(float));
    alias = p;
    alias.v = alias.k;
    probe_reference(&p, true);
    for (int ranks = 1; ranks <= 4; ranks++) {
        layout l = layout_zigzag(ranks, p.seq);
        world_options o = {0};
        answer a, b;
        world_run(&p, &l, &o, &a, NULL);
        world_run(&alias, &l, &o, &b, NULL);
        assert_true(answer_same_bits(&a, &b));
        answer_free(&a, false);
        answer_free(&b, false);
    }
    problem_free(&p);
}

/* P27: bf16 under a sliding mask with padding. */
static void sliding_bf16(void **state)
{
    (void)state;
    for (int turn = 0; turn < 100; turn++) {
        rng r = rng_of(support_seed() * 1000u + (uint64_t)turn);
        problem p;
        int64_t seq = rng_int(&r, 24, 40);
        ra_layer layer = layer_of(2, 1, 256, RA_BF16);
        layer.window = rng_int(&r, 2, seq - 1);
        problem_create(&p, layer, 2, seq);
        uint8_t pads[80] = {0};
        for (int64_t i = 0; i < 2 * seq; i++) {
            pads[i] = rng_chance(&r, 15);
        }
        problem_set_pads(&p, pads);
        problem_fill_unit(&p, &r);
        reference ref;
        support_limit(60, "P27, turn %d", turn);
        reference_create(&ref, &p);
        for (int ranks = 1; ranks <= 2; ranks++) {
            layout l = layout_contiguous(ranks, seq);
            world_options o = {0};
            answer a;
            world_run(&p, &l, &o, &a, NULL);
            reference_check(&ref, &p, &a, true);
            answer_free(&a, false);
        }
        reference_free(&ref);
        problem_free(&p);
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merge_of_empty_parts), cmocka_unit_test(padding_half),
        cmocka_unit_test(shifted_scores),       cmocka_unit_test(nan_in_padding),
        cmocka_unit_test(error_by_ranks),       cmocka_unit_test(dominant_remote_key),
        cmocka_unit_test(head_groups),          cmocka_unit_test(scale_is_given),
        cmocka_unit_test(shared_key_and_value), cmocka_unit_test(sliding_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
