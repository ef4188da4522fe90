/* The mask rule: hand-counted cases of the predicate, its interval form proven equal to it on every
 * pair of small rows, vision numbering, and what a layer may not ask for. */
#include "rule/mask_rule.h"

#include <math.h>
#include <string.h>

#include "rule/layer.h"
#include "support.h"

static ra_layer sample_layer(bool causal, int64_t window, ra_vision vision)
{
    return (ra_layer){.size = sizeof(ra_layer),
                      .q_heads = 4,
                      .kv_heads = 2,
                      .head_dim = 64,
                      .dtype = RA_F32,
                      .scale = 1.0f,
                      .causal = causal,
                      .window = window,
                      .vision = vision};
}

static void assert_counts(const ra_layer *layer, const int32_t *doc, const int32_t *type,
                          const int *expected)
{
    enum { SEQ = 8 };
    static const int32_t one[SEQ] = {1, 1, 1, 1, 1, 1, 1, 1}, text[SEQ] = {0};
    int32_t group[SEQ];
    assert_int_equal(ra_vision_groups(type ? type : text, 1, SEQ, group), RA_OK);
    doc = doc ? doc : one;
    for (int i = 0; i < SEQ; i++) {
        int count = 0;
        for (int j = 0; j < SEQ; j++) {
            count += ra_mask_allows(layer, (ra_token){i, doc[i], group[i]},
                                    (ra_token){j, doc[j], group[j]});
        }
        if (count != expected[i]) {
            fail_msg("query %d sees %d keys, expected %d", i, count, expected[i]);
        }
    }
}

static void predicate_counts(void **state)
{
    (void)state;
    const int32_t docs[8] = {1, 1, 1, 2, 2, 3, 3, 3}, pads[8] = {1, 1, 1, 1, 2, 2, -1, 0};
    const int32_t again[8] = {7, 7, 3, 3, 7, 7, 0, 7};
    const int32_t image[8] = {0, 1, 1, 1, 1, 1, 1, 0}, edge[8] = {0, 0, 0, 1, 1, 0, 0, 0};
    ra_layer causal = sample_layer(true, 0, RA_VISION_OFF),
             all = sample_layer(false, 0, RA_VISION_OFF);
    ra_layer sliding = sample_layer(true, 4, RA_VISION_OFF),
             one = sample_layer(true, 1, RA_VISION_OFF);
    ra_layer within = sample_layer(true, 4, RA_VISION_WITHIN_WINDOW);
    ra_layer over = sample_layer(true, 4, RA_VISION_OVER_WINDOW);
    ra_layer global = sample_layer(true, 0, RA_VISION_OVER_WINDOW);
    assert_counts(&causal, NULL, NULL, (int[]){1, 2, 3, 4, 5, 6, 7, 8});
    assert_counts(&all, NULL, NULL, (int[]){8, 8, 8, 8, 8, 8, 8, 8});
    assert_counts(&sliding, NULL, NULL, (int[]){1, 2, 3, 4, 4, 4, 4, 4});
    assert_counts(&one, NULL, NULL, (int[]){1, 1, 1, 1, 1, 1, 1, 1});
    assert_counts(&causal, docs, NULL, (int[]){1, 2, 3, 1, 2, 1, 2, 3});
    assert_counts(&causal, pads, NULL, (int[]){1, 2, 3, 4, 1, 2, 0, 0});
    assert_counts(&causal, again, NULL, (int[]){1, 2, 1, 2, 3, 4, 0, 5});
    assert_counts(&within, NULL, image, (int[]){1, 7, 7, 7, 6, 5, 4, 4});
    assert_counts(&over, NULL, image, (int[]){1, 7, 7, 7, 6, 6, 6, 4});
    assert_counts(&global, NULL, image, (int[]){1, 2, 3, 4, 5, 6, 7, 8});
    assert_counts(&within, NULL, edge, (int[]){1, 2, 3, 5, 4, 4, 4, 4});
    assert_counts(&over, docs, edge, (int[]){1, 2, 3, 2, 2, 1, 2, 3});
    ra_layer band = sample_layer(false, 2, RA_VISION_OFF);
    band.window_right = 3;
    assert_counts(&band, NULL, NULL, (int[]){3, 4, 4, 4, 4, 4, 3, 2});
}

/* Every layout of vision tokens in a row of SEQ, as bits. */
enum { SEQ = 8 };

static ra_range block_at(uint32_t layout, int64_t pos)
{
    ra_range block = {pos, pos};
    if (layout >> pos & 1u) {
        while (block.begin > 0 && (layout >> (block.begin - 1) & 1u)) {
            block.begin--;
        }
        while (block.end < SEQ && (layout >> block.end & 1u)) {
            block.end++;
        }
    }
    return block;
}

static int64_t assert_interval_is_predicate(const ra_mask *mask, uint32_t layout)
{
    int32_t type[SEQ], group[SEQ];
    ra_range before = {-RA_SEQ_MAX, -RA_SEQ_MAX};
    for (int i = 0; i < SEQ; i++) {
        type[i] = (int32_t)(layout >> i & 1u);
    }
    assert_int_equal(ra_vision_groups(type, 1, SEQ, group), RA_OK);
    for (int64_t i = 0; i < SEQ; i++) {
        ra_range reach = ra_mask_reach(mask, i, block_at(layout, i));
        assert_true(reach.begin <= i && i < reach.end);
        assert_true(reach.begin >= before.begin && reach.end >= before.end);
        before = reach;
        for (int64_t j = 0; j < SEQ; j++) {
            bool inside = reach.begin <= j && j < reach.end;
            if (inside !=
                ra_mask_rule(mask, (ra_token){i, 1, group[i]}, (ra_token){j, 1, group[j]})) {
                fail_msg("causal %d window %lld right %lld vision %d layout %x: query %lld key "
                         "%lld: interval says %d",
                         mask->causal, (long long)mask->window, (long long)mask->window_right,
                         (int)mask->vision, layout, (long long)i, (long long)j, inside);
            }
        }
    }
    return (int64_t)SEQ * SEQ;
}

static void interval_equals_predicate_on_every_pair(void **state)
{
    (void)state;
    static const int64_t windows[] = {0, 1, 2, 3, 4, 7, 8, 9, RA_SEQ_MAX, INT64_MAX};
    int64_t pairs = 0;
    for (int causal = 0; causal < 2; causal++) {
        for (int left = 0; left < 10; left++) {
            for (int right = 0; right < 10; right++) {
                for (int vision = RA_VISION_OFF; vision <= RA_VISION_WITHIN_WINDOW; vision++) {
                    ra_layer layer = sample_layer(causal, windows[left], (ra_vision)vision);
                    layer.window_right = windows[right];
                    ra_mask mask = ra_mask_of_layer(&layer);
                    for (uint32_t layout = 0; layout < 1u << SEQ; layout++) {
                        pairs += assert_interval_is_predicate(&mask, layout);
                    }
                }
            }
        }
    }
    print_message("%lld pairs\n", (long long)pairs);
}

static void vision_numbers_run_over_the_row(void **state)
{
    (void)state;
    const int32_t type[] = {1, 2, 0, 1, 3, 2, 2, -1, /* next row */ 0, 1, 0, 1, 1, 0, 0, 2};
    const int32_t expected[] = {0, 0, -1, 1, -1, 2, 2, -1, -1, 0, -1, 1, 1, -1, -1, 2};
    int32_t group[16];
    assert_int_equal(ra_vision_groups(type, 2, 8, group), RA_OK);
    assert_memory_equal(group, expected, sizeof expected);
    /* A block does not continue from one row into the next. */
    const int32_t edge[] = {0, 1, 1, 0};
    assert_int_equal(ra_vision_groups(edge, 2, 2, group), RA_OK);
    assert_memory_equal(group, ((int32_t[]){-1, 0, 0, -1}), 4 * sizeof *group);
    memcpy(group, type, sizeof type); /* in place */
    assert_int_equal(ra_vision_groups(group, 2, 8, group), RA_OK);
    assert_memory_equal(group, expected, sizeof expected);
    assert_int_equal(ra_vision_groups(NULL, 2, 0, NULL), RA_OK);
    assert_int_equal(ra_vision_groups(NULL, 1, 1, group), RA_E_ARG);
    assert_int_equal(ra_vision_groups(type, 1, 1, NULL), RA_E_ARG);
    assert_int_equal(ra_vision_groups(type, -1, 1, group), RA_E_ARG);
    assert_int_equal(ra_vision_groups(type, 1, -1, group), RA_E_ARG);
}

static void assert_refused(ra_layer layer, ra_status status, const char *part)
{
    assert_int_equal(ra_layer_check(&layer), status);
    if (!strstr(ra_last_error(), part)) {
        fail_msg("message \"%s\" does not name \"%s\"", ra_last_error(), part);
    }
}

static void layers_are_checked(void **state)
{
    (void)state;
    ra_layer good = sample_layer(true, 1024, RA_VISION_WITHIN_WINDOW), l;
    assert_int_equal(ra_layer_check(&good), RA_OK);
    assert_int_equal(ra_layer_check(NULL), RA_E_ARG);
    for (int dim = -8; dim <= 600; dim++) {
        l = good;
        l.head_dim = dim;
        assert_int_equal(ra_layer_check(&l),
                         dim >= 8 && dim <= 512 && dim % 8 == 0 ? RA_OK : RA_E_ARG);
    }
#define REFUSED(member, value, status, part)                                                       \
    l = good, l.member = (value), assert_refused(l, (status), (part))
    REFUSED(size, 0, RA_E_ARG, "layer.size: 0");
    REFUSED(q_heads, 0, RA_E_ARG, "layer.q_heads: 0");
    REFUSED(q_heads, 1026, RA_E_ARG, "layer.q_heads: 1026");
    REFUSED(kv_heads, -1, RA_E_ARG, "layer.kv_heads: -1");
    REFUSED(kv_heads, 3, RA_E_SHAPE, "layer.kv_heads, 3");
    REFUSED(dtype, RA_F64, RA_E_ARG, "f64");
    REFUSED(dtype, (ra_dtype)0, RA_E_ARG, "layer.dtype: 0");
    REFUSED(scale, NAN, RA_E_ARG, "layer.scale: nan");
    REFUSED(scale, INFINITY, RA_E_ARG, "layer.scale: inf");
    REFUSED(window, -1, RA_E_ARG, "layer.window: -1");
    REFUSED(window_right, -7, RA_E_ARG, "layer.window_right: -7");
    REFUSED(vision, (ra_vision)3, RA_E_ARG, "layer.vision: 3");
    REFUSED(dropout, 0.1f, RA_E_UNSUPPORTED, "layer.dropout: 0.1, expected 0");
    REFUSED(dropout, NAN, RA_E_UNSUPPORTED, "layer.dropout: nan");
    REFUSED(softcap, 30, RA_E_UNSUPPORTED, "layer.softcap: 30, expected 0");
    l = good, l.dropout = 0.5f, l.softcap = 30;
    assert_refused(l, RA_E_UNSUPPORTED, "layer.dropout: 0.5, layer.softcap: 30");
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(predicate_counts),
        cmocka_unit_test(interval_equals_predicate_on_every_pair),
        cmocka_unit_test(vision_numbers_run_over_the_row),
        cmocka_unit_test(layers_are_checked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
