/* The work lists of the CUDA backend against the mask rule, pair by pair: they are plain host code,
 * so they are tested where there is no GPU. */
#include <string.h>

#include "backend/cuda/work.h"
#include "base/alloc.h"
#include "support_cover.h"

typedef struct pairs {
    int64_t keys;
    uint8_t *seen; /* [q_total, k_total]: times an item lists the pair as allowed */
} pairs;

static pairs pairs_new(const cover_case *c)
{
    pairs p = {.keys = c->k_total};
    assert_int_equal(RA_NEW(&p.seen, c->q_total * c->k_total + 1), RA_OK);
    return p;
}

static int64_t find(const cover_token *token, int64_t total, int source, int64_t row, int64_t index)
{
    for (int64_t i = 0; i < total; i++) {
        if (token[i].source == source && token[i].tensor_row == row && token[i].index == index) {
            return i;
        }
    }
    fail_msg("%s: source %d, row %lld, index %lld is in no piece", support_case(), source,
             (long long)row, (long long)index);
    return -1;
}

static bool allows(const cover_case *c, int64_t query, int64_t key)
{
    const cover_token *q = &c->q_token[query], *k = &c->k_token[key];
    return q->row == k->row && ra_mask_rule(&c->cover.mask, q->token, k->token);
}

static bool in_reach(const ra_work_reach *reach, int64_t pos)
{
    return reach->begin <= pos && pos < reach->end;
}

/* ---- query tiles */

static void check_run(const cover_case *c, const ra_work *w, const ra_work_item *item, int64_t q0,
                      const ra_work_run *run, pairs *p)
{
    assert_in_range(run->count, 1, c->k_total);
    assert_true(0 <= run->full_begin && run->full_begin <= run->full_end &&
                run->full_end <= run->count);
    int64_t k0 = find(c->k_token, c->k_total, run->source, run->row, run->index);
    for (int32_t j = 0; j < run->count; j++) {
        const cover_token *k = &c->k_token[k0 + j];
        bool any = false, all = true;
        assert_int_equal(k->token.pos, run->pos + j);
        assert_int_equal(k->index, run->index + j);
        for (int32_t i = 0; i < item->count; i++) {
            bool inside = in_reach(&w->reach[item->reach + i], run->pos + j);
            p->seen[(q0 + i) * p->keys + k0 + j] += inside;
            any = any || inside;
            all = all && inside;
        }
        assert_true(any);
        bool full = run->full_begin <= j && j < run->full_end;
        assert_true(!full || all);
        /* All keys that every query sees are called full. */
        assert_true(full || !all);
    }
}

static int64_t piece_of(const ra_cover *cover, const ra_work_item *item)
{
    int64_t piece = 0, end = cover->q[0].count;
    while (item->reach >= end) {
        end += cover->q[++piece].count;
    }
    return piece;
}

/* Items of a piece lie side by side, longest first; pieces follow by their longest. */
static void check_order(const ra_cover *cover, const ra_work *w)
{
    int64_t seen = 0;
    int32_t lead = INT32_MAX, shortest = INT32_MAX;
    for (int64_t i = 0; i < w->item_count; i++) {
        int32_t keys = w->item[i].keys;
        if (i == 0 || piece_of(cover, &w->item[i]) != piece_of(cover, &w->item[i - 1])) {
            assert_true(keys <= lead);
            lead = keys;
            seen++;
        } else {
            assert_true(keys <= w->item[i - 1].keys);
        }
        shortest = keys < shortest ? keys : shortest;
    }
    assert_int_equal(seen, cover->q_count);
    if (w->item_count > 0) {
        assert_int_equal(w->longest, w->item[0].keys);
        assert_int_equal(w->shortest, shortest);
    }
}

static void check_items(const cover_case *c, const ra_cover *cover, const ra_work *w, pairs *p)
{
    int64_t queries = 0;
    check_order(cover, w);
    for (int64_t i = 0; i < w->item_count; i++) {
        const ra_work_item *item = &w->item[i];
        int64_t keys = 0, q0 = find(c->q_token, c->q_total, RA_SOURCE_OWN, item->row, item->index);
        assert_in_range(item->count, 1, w->q_tile);
        assert_int_equal(item->flags & RA_WORK_FRESH ? 1 : 0, cover->q[0].fresh);
        assert_int_equal(item->flags & RA_WORK_FINAL ? 1 : 0, cover->q[0].final);
        for (int32_t j = 0; j < item->count; j++) {
            assert_int_equal(c->q_token[q0 + j].index, item->index + j);
            assert_int_equal(c->q_token[q0 + j].token.doc, c->q_token[q0].token.doc);
        }
        for (int32_t r = 0; r < item->run_count; r++) {
            assert_in_range(item->run_first + r, 0, w->run_count - 1);
            check_run(c, w, item, q0, &w->run[item->run_first + r], p);
            keys += w->run[item->run_first + r].count;
        }
        assert_int_equal(keys, item->keys);
        queries += item->count;
    }
    assert_int_equal(queries, c->q_total);
}

/* ---- key tiles */

static void check_key_run(const cover_case *c, const ra_work *w, const ra_work_item *item,
                          int64_t k0, const ra_work_run *run, pairs *p)
{
    assert_in_range(run->count, 1, c->q_total);
    assert_true(0 <= run->full_begin && run->full_begin <= run->full_end &&
                run->full_end <= run->count);
    int64_t q0 = find(c->q_token, c->q_total, RA_SOURCE_OWN, run->row, run->index);
    for (int32_t j = 0; j < run->count; j++) {
        bool any = false, all = true;
        const cover_token *q = &c->q_token[q0 + j];
        assert_int_equal(q->token.pos, run->pos + j);
        assert_int_equal(q->index, run->index + j);
        for (int32_t i = 0; i < item->count; i++) {
            bool inside = in_reach(&w->reach[run->reach + j], item->reach + i);
            p->seen[(q0 + j) * p->keys + k0 + i] += inside;
            any = any || inside;
            all = all && inside;
        }
        assert_true(any);
        assert_int_equal(run->full_begin <= j && j < run->full_end, all);
    }
}

static void check_key_items(const cover_case *c, const ra_work *w, pairs *p)
{
    for (int64_t i = 0; i < w->key_item_count; i++) {
        const ra_work_item *item = &w->key_item[i];
        int source = item->flags & RA_WORK_CHUNK ? RA_SOURCE_CHUNK : RA_SOURCE_OWN;
        int64_t queries = 0, k0 = find(c->k_token, c->k_total, source, item->row, item->index);
        assert_in_range(item->count, 1, w->k_tile);
        assert_true(item->run_count > 0);
        assert_int_equal(c->k_token[k0].token.pos, item->reach);
        assert_true(i == 0 || w->key_item[i - 1].keys >= item->keys);
        for (int32_t r = 0; r < item->run_count; r++) {
            assert_in_range(item->run_first + r, 0, w->key_run_count - 1);
            check_key_run(c, w, item, k0, &w->key_run[item->run_first + r], p);
            queries += w->key_run[item->run_first + r].count;
        }
        assert_int_equal(queries, item->keys);
    }
}

/* ---- cases */

static void check_pairs(const cover_case *c, const pairs *p, const char *which)
{
    for (int64_t i = 0; i < c->q_total; i++) {
        for (int64_t j = 0; j < c->k_total; j++) {
            if (p->seen[i * p->keys + j] != allows(c, i, j)) {
                fail_msg("%s, %s: query %lld, key %lld listed %d times, allowed %d", support_case(),
                         which, (long long)i, (long long)j, p->seen[i * p->keys + j],
                         allows(c, i, j));
            }
        }
    }
}

static void check_case(const cover_case *c, const ra_cover *cover, int32_t q_tile, int32_t k_tile)
{
    ra_work w = {0};
    pairs by_query = pairs_new(c), by_key = pairs_new(c);
    assert_int_equal(ra_work_build(cover, q_tile, k_tile, &w), RA_OK);
    check_items(c, cover, &w, &by_query);
    check_pairs(c, &by_query, "query tiles");
    if (k_tile > 0) {
        check_key_items(c, &w, &by_key);
        check_pairs(c, &by_key, "key tiles");
    } else {
        assert_int_equal(w.key_item_count, 0);
    }
    ra_work_free(&w);
    ra_free(by_query.seen);
    ra_free(by_key.seen);
}

static void test_random(void **state)
{
    (void)state;
    static const int32_t tiles[][2] = {{64, 128}, {128, 128}, {1, 1}, {7, 5}, {16, 0}, {3, 64}};
    for (int64_t step = 0; step < support_steps(600); step++) {
        support_limit(60, "random covers, step %lld", (long long)step);
        rng r = rng_of(support_seed() + (uint64_t)step);
        cover_shape shape = {1, 1, 8, RA_F32, 1.0f};
        cover_case c = cover_random(&r, shape, rng_int(&r, 1, 300));
        const int32_t *tile = tiles[step % 6];
        if (c.cover.q_count > 0) {
            check_case(&c, &c.cover, tile[0], tile[1]);
            ra_cover cut = cover_cut_queries(&c, rng_int(&r, 1, 50));
            check_case(&c, &cut, tile[0], tile[1]);
            ra_cover_free(&cut);
        }
        cover_case_free(&c);
    }
}

/* The queries' last position is level with the keys' last, so the first may stand before key 0. */
static void test_edges(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 63, 64, 65, 127, 128, 129, 260};
    static const ra_mask masks[] = {{.causal = true},
                                    {.causal = false},
                                    {.causal = true, .window = 20},
                                    {.window = 40, .window_right = 9}};
    for (int i = 0; i < 8 * 8 * 4; i++) {
        support_limit(60, "edges, case %d", i);
        rng r = rng_of(support_seed());
        cover_shape shape = {1, 1, 8, RA_F32, 1.0f};
        cover_case c = cover_pair(&r, shape, masks[i % 4], sizes[i / 4 % 8], sizes[i / 32]);
        check_case(&c, &c.cover, 64, 128);
        check_case(&c, &c.cover, 128, 128);
        cover_case_free(&c);
    }
}

static void test_part(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    cover_shape shape = {1, 1, 8, RA_F32, 1.0f};
    support_limit(60, "a cover without keys");
    cover_case c = cover_pair(&r, shape, (ra_mask){.causal = true}, 100, 100);
    uint8_t nothing[8] = {0};
    assert_in_range(c.cover.k_count, 1, 8);
    ra_cover cover = cover_part(&c, nothing, false, true);
    ra_work w = {0};
    assert_int_equal(ra_work_build(&cover, 64, 128, &w), RA_OK);
    assert_int_equal(w.item_count, 2);
    assert_int_equal(w.run_count, 0);
    assert_int_equal(w.key_item_count, 0);
    assert_int_equal(w.item[0].flags, RA_WORK_FINAL);
    assert_int_equal(w.item[0].count + w.item[1].count, 100);
    assert_int_equal(w.reach[99].end, 0);
    ra_work_free(&w);
    ra_cover_free(&cover);
    cover_case_free(&c);
}

static void test_refused(void **state)
{
    (void)state;
    ra_piece far = {.pos = (int64_t)INT32_MAX - 5, .count = 10, .doc = 1};
    ra_cover cover = {.mask = {.causal = true}, .q_count = 1, .q = &far};
    ra_work w = {0};
    assert_int_equal(ra_work_build(&cover, 64, 0, &w), RA_E_UNSUPPORTED);
    assert_non_null(strstr(ra_last_error(), "2147483642"));
}

/* Any allocation that fails: a status, nothing lost. */
static void test_no_memory(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    cover_shape shape = {1, 1, 8, RA_F32, 1.0f};
    cover_case c = cover_pair(&r, shape, (ra_mask){.causal = true}, 300, 300);
    ra_status status = RA_E_NOMEM;
    int failures = 0;
    for (; status; failures++) {
        ra_work w = {0};
        ra_alloc_probe probe = {.fail_at = failures + 1};
        ra_alloc_watch(&probe);
        status = ra_work_build(&c.cover, 64, 128, &w);
        ra_work_free(&w);
        ra_alloc_watch(NULL);
        assert_true(status == RA_OK || status == RA_E_NOMEM);
        assert_int_equal(atomic_load(&probe.live_bytes), 0);
    }
    assert_in_range(failures, 6, 40);
    cover_case_free(&c);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),    cmocka_unit_test(test_edges),
        cmocka_unit_test(test_part),      cmocka_unit_test(test_refused),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
