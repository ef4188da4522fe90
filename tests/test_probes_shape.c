/* Probes of sizes and dtypes: lengths that ranks do not divide, tile edges, every head_dim, halves.
 */
#include "support_probe.h"

#include <stdio.h>
#include <stdlib.h>

/* P15: lengths that ranks do not divide, and fewer tokens than ranks. */
static void length_not_divisible(void **state)
{
    (void)state;
    static const int64_t lengths[] = {1, 2, 3, 5, 7};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        problem p;
        rng r = rng_of(support_seed() + i);
        support_limit(60, "P15, %lld tokens", (long long)lengths[i]);
        problem_create(&p, layer_of(4, 2, 16, RA_F32), 2, lengths[i]);
        problem_fill_unit(&p, &r);
        probe_reference(&p, true);
        problem_free(&p);
    }
}

static void long_odd_length(void **state)
{
    (void)state;
    problem p;
    rng r = rng_of(support_seed());
    world_options o = {0};
    layout one = layout_contiguous(1, 2999), four = layout_contiguous(4, 2999);
    answer a, b;
    support_limit(120, "P15, 2999 tokens");
    problem_create(&p, layer_of(1, 1, 16, RA_F32), 1, 2999);
    problem_fill_unit(&p, &r);
    world_run(&p, &one, &o, &a, NULL);
    world_run(&p, &four, &o, &b, NULL);
    assert_int_equal(four.length[0], 750);
    assert_int_equal(four.length[3], 749);
    assert_true(tensor_error(&a.out, &b.out) < 1e-5);
    assert_true(tensor_error(&a.lse, &b.lse) < 1e-5);
    assert_true(tensor_error(&a.dq, &b.dq) < 1e-5);
    assert_true(tensor_error(&a.dk, &b.dk) < 1e-4);
    assert_true(tensor_error(&a.dv, &b.dv) < 1e-4);
    answer_free(&a, false);
    answer_free(&b, false);
    problem_free(&p);
}

/* Two ranks own `queries` and `keys` tokens and see all of each other. */
static void edge_case(int head_dim, int64_t queries, int64_t keys, ra_dtype dtype)
{
    problem p;
    rng r = rng_of(support_seed() + (uint64_t)(queries * 1000 + keys));
    problem_create(&p, layer_of(2, 1, head_dim, dtype), 1, queries + keys);
    p.layer.causal = (queries + keys) % 3 == 0;
    p.layer.scale = 0.5f;
    problem_fill_unit(&p, &r);
    layout l = layout_contiguous(2, p.seq);
    l.run[0][0] = (ra_run){0, queries};
    l.run[1][0] = (ra_run){queries, keys};
    l.run_count[0] = l.run_count[1] = 1;
    l.length[0] = queries;
    l.length[1] = keys;
    world_options o = {.strides = (strides)(keys % STRIDES_COUNT)};
    o.ctx.keep_kv = queries % 2 == 0;
    reference ref;
    answer a;
    support_limit(60, "P30, head_dim %d, %lld and %lld tokens, %s", head_dim, (long long)queries,
                  (long long)keys, ra_dtype_name(dtype));
    reference_create(&ref, &p);
    world_run(&p, &l, &o, &a, NULL);
    if (p.seq < 64 || dtype == RA_F32) {
        reference_check_tiny(&ref, &p, &a);
    } else {
        reference_check(&ref, &p, &a, true);
    }
    answer_free(&a, false);
    reference_free(&ref);
    problem_free(&p);
}

/* P30: tile edges, for queries and keys independently, at every head_dim. */
static void tile_edges(void **state)
{
    (void)state;
    static const int64_t edges[] = {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
    static const int dims[] = {8, 16, 64, 80, 96, 128, 192, 256, 320, 512};
    static const ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F16};
    enum { EDGES = sizeof edges / sizeof *edges };
    size_t thin = support_thin() ? 5 : 1;
    int turn = 0;
    for (size_t d = 0; d < sizeof dims / sizeof *dims; d++) {
        for (size_t i = 0; i < EDGES; i++) {
            for (size_t j = 0; j < EDGES; j++) {
                int64_t tokens = edges[i] + edges[j];
                bool slow = tokens * tokens * dims[d] > 700000; /* thinned out unless asked for */
                bool taken = slow ? (i + j * 3 + d) % 11 == 0 : (i * 7 + j * 5 + d) % thin == 0;
                if (taken || support_slow()) {
                    edge_case(dims[d], edges[i], edges[j], dtypes[turn++ % 3]);
                }
            }
        }
    }
    printf("%d pairs of lengths\n", turn);
    if (!support_slow()) {
        printf("skip: most large pairs; RA_TEST_SLOW=1 runs them all\n");
    }
}

/* P09: halves come back as halves, within the tolerance of their dtype. */
static void every_dtype(void **state)
{
    (void)state;
    static const ra_dtype dtypes[] = {RA_F16, RA_BF16, RA_F32};
    for (int i = 0; i < 3; i++) {
        problem p;
        rng r = rng_of(support_seed());
        support_limit(60, "P09, %s", ra_dtype_name(dtypes[i]));
        problem_create(&p, layer_of(2, 1, 64, dtypes[i]), 1, 48);
        problem_fill_unit(&p, &r);
        probe_reference(&p, false);
        problem_free(&p);
        support_limit(60, "P09, %s, logits near 16", ra_dtype_name(dtypes[i]));
        problem_create(&p, layer_of(2, 1, 256, dtypes[i]), 1, 48);
        problem_fill_gemma(&p, &r);
        probe_reference(&p, dtypes[i] == RA_F32);
        problem_free(&p);
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(length_not_divisible),
        cmocka_unit_test(long_odd_length),
        cmocka_unit_test(tile_edges),
        cmocka_unit_test(every_dtype),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
