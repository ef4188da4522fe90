/* Mask probes: q = k = 0 and unit values make every output row 1/n_i on exactly the keys it sees,
 * so a wrong mask, document, window or image block shows as a wrong figure. Figures are written
 * out. */
#include "support_probe.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "tensor/tensor.h"

/* P02: lse is the natural logarithm, per hop and after the merge. */
static void natural_logarithm(void **state)
{
    (void)state;
    static const int64_t visible[] = {8, 8, 8, 8, 8, 8, 8, 8};
    support_limit(60, "P02");
    problem p;
    probe_create(&p, 8, NULL);
    p.layer.causal = false;
    probe_mask(&p, visible, NULL);
    problem_free(&p);
}

/* P06, P29: dV of a causal sum, whatever the number of ranks. */
static void causal_gradient(void **state)
{
    (void)state;
    static const int64_t visible[] = {1, 2, 3, 4};
    static const double dv[] = {25.0 / 12, 13.0 / 12, 7.0 / 12, 1.0 / 4};
    support_limit(60, "P06");
    problem p;
    probe_create(&p, 4, NULL);
    probe_mask(&p, visible, dv);
    problem_free(&p);
}

/* P10: documents of odd lengths and padding. */
static void odd_documents(void **state)
{
    (void)state;
    static const int32_t doc_id[] = {1, 1, 1, 1, 2, 2, 2, 0, 0, 0};
    static const int64_t visible[] = {1, 2, 3, 4, 1, 2, 3, 0, 0, 0};
    support_limit(60, "P10");
    problem p;
    probe_create(&p, 10, doc_id);
    probe_mask(&p, visible, NULL);

    layout l = layout_contiguous(2, p.seq);
    world_options o = {0};
    answer first;
    rng r = rng_of(support_seed());
    problem_fill_unit(&p, &r);
    world_run(&p, &l, &o, &first, NULL);
    for (int i = 0; i < 100; i++) {
        support_limit(60, "P10, run %d", i);
        answer again;
        world_run(&p, &l, &o, &again, NULL);
        assert_true(answer_same_bits(&first, &again));
        answer_free(&again, false);
    }
    answer_free(&first, false);
    problem_free(&p);
}

/* P11: shards that hold padding only. */
static void padding_shards(void **state)
{
    (void)state;
    static const int32_t doc_id[] = {1, 1, 1, 0, 0, 0, 0, 0};
    static const int64_t visible[] = {1, 2, 3, 0, 0, 0, 0, 0};
    static const double dv[] = {11.0 / 6, 5.0 / 6, 1.0 / 3, 0, 0, 0, 0, 0};
    support_limit(60, "P11");
    problem p;
    probe_create(&p, 8, doc_id);
    probe_mask(&p, visible, dv);
    problem_free(&p);

    static const int64_t end[] = {9, 17, 25, 37, 45, 57}, storage[] = {12, 20, 28, 40, 48, 60};
    int32_t documents[60] = {0};
    int64_t counts[60] = {0};
    for (int d = 0; d < 6; d++) {
        int64_t begin = d ? storage[d - 1] : 0;
        for (int64_t pos = begin; pos < end[d]; pos++) {
            documents[pos] = d + 1;
            counts[pos] = pos - begin + 1;
        }
    }
    support_limit(60, "P11, padded storage");
    probe_create(&p, 60, documents);
    probe_mask(&p, counts, NULL);
    problem_free(&p);
}

/* P12: a document over two ranks; a padding map adds to the documents' padding. */
static void split_document(void **state)
{
    (void)state;
    static const int32_t doc_id[] = {1, 1, 1, 2, 2, 3, 3, 3};
    static const int64_t visible[] = {1, 2, 3, 1, 2, 1, 2, 3};
    static const uint8_t none[8] = {0}, one[8] = {0, 1, 0, 0, 0, 0, 0, 7};
    static const int64_t without[] = {1, 0, 2, 1, 2, 1, 2, 0};
    support_limit(60, "P12");
    problem p;
    probe_create(&p, 8, doc_id);
    probe_mask(&p, visible, NULL);
    problem_set_pads(&p, none);
    probe_mask(&p, visible, NULL);
    problem_set_pads(&p, one);
    probe_mask(&p, without, NULL);
    problem_free(&p);
}

/* An id that returns is the same document; ids need not be ordered; batch rows are apart. */
static void returning_document(void **state)
{
    (void)state;
    static const int32_t doc_id[] = {7, 7, 3, 3, 7, 7, 3, 3, 3, 3, 3, 3, 3, 7, 7, 7};
    static const int64_t visible[] = {1, 2, 1, 2, 3, 4, 3, 4, 1, 2, 3, 4, 5, 1, 2, 3};
    support_limit(60, "returning document");
    problem p;
    problem_create(&p, layer_of(2, 1, 8, RA_F32), 2, 8);
    problem_set_docs(&p, doc_id);
    probe_mask(&p, visible, NULL);
    problem_free(&p);
}

/* P16: the window counts the query itself. */
static void window_edges(void **state)
{
    (void)state;
    static const int64_t four[] = {1, 2, 3, 4, 4, 4, 4, 4}, one[] = {1, 1, 1, 1, 1, 1, 1, 1};
    support_limit(60, "P16");
    problem p;
    probe_create(&p, 8, NULL);
    p.layer.window = 4;
    probe_mask(&p, four, NULL);
    p.layer.window = 1;
    probe_mask(&p, one, NULL);
    problem_free(&p);
    for (int64_t window = 2; window <= 20;
         window++) { /* L, L + 1, L + 2 of every rank count, > S */
        int64_t visible[16];
        support_limit(60, "P16, window %lld", (long long)window);
        probe_create(&p, 16, NULL);
        p.layer.window = window;
        for (int64_t i = 0; i < 16; i++) {
            visible[i] = i + 1 < window ? i + 1 : window;
        }
        probe_mask(&p, visible, NULL);
        problem_free(&p);
    }
}

/* Distances are differences of positions: padding or another document between does not shorten
 * them.
 */
static void window_over_gaps(void **state)
{
    (void)state;
    static const int32_t doc_id[] = {1, 1, 0, 2, 1, 0, 0, 1, 1};
    static const int64_t visible[] = {1, 2, 0, 1, 2, 0, 0, 2, 2};
    support_limit(60, "window over gaps");
    problem p;
    probe_create(&p, 9, doc_id);
    p.layer.window = 4;
    probe_mask(&p, visible, NULL);
    problem_free(&p);
}

/* P17: no path, layout, kernel level or building block loses the window. */
static void window_everywhere(void **state)
{
    (void)state;
    support_limit(60, "P17");
    problem p;
    probe_create(&p, 16, NULL);
    p.layer.window = 4;
    int64_t visible[16];
    for (int64_t i = 0; i < 16; i++) {
        visible[i] = i < 4 ? i + 1 : 4;
    }
    probe_figures figures = {visible, NULL};
    problem_fill_probe(&p);
    rng r = rng_of(support_seed());
    for (int level = 0; ra_cpu_level_name(level); level++) {
        if (!ra_cpu_level_runs(level)) {
            printf("skip: level %s does not run on this machine\n", ra_cpu_level_name(level));
            continue;
        }
        for (int kind = 0; kind < LAYOUT_KINDS; kind++) {
            layout l = layout_kind(kind, 2, p.seq, &r);
            world_options o = {.level = ra_cpu_level_name(level)};
            answer a;
            support_limit(60, "P17, %s, %s", o.level, l.name);
            world_run(&p, &l, &o, &a, NULL);
            probe_check_mask(&p, &l, &a, &figures);
            answer_free(&a, false);
        }
    }
    answer a;
    ra_backend *backend = NULL;
    const int32_t cu[] = {0, 16};
    ra_varlen lens = {.size = sizeof lens, .cu_q = cu, .cu_k = cu, .segments = 1};
    answer_create(&a, &p, RA_F32, RA_F32, false);
    ra_forward_io io = {
        .size = sizeof io, .q = p.q, .k = p.k, .v = p.v, .out = a.out, .lse = a.lse};
    support_limit(60, "P17, varlen");
    assert_int_equal(ra_backend_open_cpu(1, NULL, &backend), RA_OK);
    assert_int_equal(ra_varlen_forward(backend, &p.layer, &lens, &io), RA_OK);
    for (int64_t i = 0; i < 16; i++) {
        assert_true(fabs(ra_tensor_get(&a.lse, 0, 0, i, 0) - log((double)visible[i])) < 1e-6);
    }
    ra_backend_close(backend);
    answer_free(&a, false);
    problem_free(&p);
}

/* P18: an image block longer than the window, under both rules and on a global layer. */
static void long_image(void **state)
{
    (void)state;
    static const int64_t within[] = {1, 7, 7, 7, 6, 5, 4, 4}, over[] = {1, 7, 7, 7, 6, 6, 6, 4},
                         global[] = {1, 2, 3, 4, 5, 6, 7, 8};
    support_limit(60, "P18");
    problem p;
    probe_create(&p, 8, NULL);
    problem_set_image(&p, 1, 7);
    p.layer.window = 4;
    p.layer.vision = RA_VISION_WITHIN_WINDOW;
    probe_mask(&p, within, NULL);
    p.layer.vision = RA_VISION_OVER_WINDOW;
    probe_mask(&p, over, NULL);
    p.layer.window = 0;
    probe_mask(&p, global, NULL);
    problem_free(&p);
}

/* P19: an image block over a shard edge. */
static void image_over_edge(void **state)
{
    (void)state;
    static const int64_t visible[] = {1, 2, 3, 5, 4, 4, 4, 4};
    static const double dv[] = {61.0 / 30, 77.0 / 60, 31.0 / 30, 19.0 / 20,
                                6.0 / 5,   3.0 / 4,   1.0 / 2,   1.0 / 4};
    support_limit(60, "P19");
    problem p;
    probe_create(&p, 8, NULL);
    problem_set_image(&p, 3, 5);
    p.layer.window = 4;
    p.layer.vision = RA_VISION_OVER_WINDOW;
    probe_mask(&p, visible, dv);
    problem_free(&p);
}

/* P20: a vision rule without token types is causal, token types without a rule too; and images
 * never reach over documents. */
static void vision_without_metadata(void **state)
{
    (void)state;
    static const int64_t visible[] = {1, 2, 3, 4, 4, 4, 4, 4};
    static const int32_t doc_id[] = {1, 1, 1, 1, 2, 2, 2, 2};
    static const int64_t apart[] = {1, 4, 4, 4, 3, 3, 3, 4};
    support_limit(60, "P20");
    problem p;
    probe_create(&p, 8, NULL);
    p.layer.window = 4;
    p.layer.vision = RA_VISION_OVER_WINDOW;
    probe_mask(&p, visible, NULL);
    problem_set_image(&p, 1, 7);
    p.layer.vision = RA_VISION_OFF;
    probe_mask(&p, visible, NULL);
    p.layer.vision = RA_VISION_OVER_WINDOW;
    problem_set_docs(&p, doc_id);
    probe_mask(&p, apart, NULL);
    problem_free(&p);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(natural_logarithm), cmocka_unit_test(causal_gradient),
        cmocka_unit_test(odd_documents),     cmocka_unit_test(padding_shards),
        cmocka_unit_test(split_document),    cmocka_unit_test(returning_document),
        cmocka_unit_test(window_edges),      cmocka_unit_test(window_over_gaps),
        cmocka_unit_test(window_everywhere), cmocka_unit_test(long_image),
        cmocka_unit_test(image_over_edge),   cmocka_unit_test(vision_without_metadata),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
