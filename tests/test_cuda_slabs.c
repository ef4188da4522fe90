/* The plan of slabs of the CUDA backend: every allowed pair is in one block, each slab fits the
 * workspace, and each result of a slab has one writer that adds every block once. The steps of the
 * lists are walked here as the kernels walk them. */
#include <string.h>

#include "backend/cuda/slabs.h"
#include "base/alloc.h"
#include "base/mathx.h"
#include "support_cover.h"

typedef struct plan {
    const cover_case *c;
    const ra_cover *cover;
    ra_work work;
    ra_slab_layout layout;
    ra_slabs slabs;
    int pairs, parts;
} plan;

static plan plan_new(const cover_case *c, const ra_cover *cover, ra_slab_layout layout)
{
    plan p = {.c = c, .cover = cover, .layout = layout};
    assert_int_equal(ra_work_build(cover, 64, 0, &p.work), RA_OK);
    if (ra_slabs_build(cover, &p.work, &layout, &p.slabs)) {
        fail_msg("%s: %s", support_case(), ra_last_error());
    }
    int group = layout.q_heads / layout.kv_heads;
    assert_int_equal(p.slabs.units_heads, group % 2 ? 1 : 2);
    p.pairs = group / p.slabs.units_heads;
    p.parts = (layout.chan + 255) / 256;
    return p;
}

static void plan_free(plan *p)
{
    ra_work_free(&p->work);
    ra_slabs_free(&p->slabs);
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

/* ---- pairs */

static void count_block(const plan *p, const ra_slab_block *block, uint8_t *seen)
{
    const cover_case *c = p->c;
    const ra_slab_strip *strip = &p->slabs.strip[block->strip];
    const ra_slab_tile *tile = &p->slabs.tile[block->tile];
    int64_t q0 = find(c->q_token, c->q_total, RA_SOURCE_OWN, strip->row, strip->index);
    int64_t k0 = find(c->k_token, c->k_total, tile->source, tile->row, tile->index);
    assert_in_range(strip->count, 1, 256 / p->slabs.units_heads);
    assert_in_range(tile->count, 1, RA_BLOCK_KEYS);
    for (int32_t i = 0; i < strip->count; i++) {
        const ra_work_reach *reach = &p->work.reach[strip->reach + i];
        for (int32_t j = 0; j < tile->count; j++) {
            int32_t pos = tile->pos + j;
            assert_int_equal(c->k_token[k0 + j].token.pos, pos);
            bool inside = reach->begin <= pos && pos < reach->end;
            seen[(q0 + i) * c->k_total + k0 + j] += inside;
        }
    }
}

static void check_pairs(const plan *p)
{
    const cover_case *c = p->c;
    uint8_t *seen = NULL;
    assert_int_equal(RA_NEW(&seen, c->q_total * c->k_total + 1), RA_OK);
    for (int64_t i = 0; i < p->slabs.block_count; i++) {
        count_block(p, &p->slabs.block[i], seen);
    }
    for (int64_t i = 0; i < c->q_total; i++) {
        for (int64_t j = 0; j < c->k_total; j++) {
            const cover_token *q = &c->q_token[i], *k = &c->k_token[j];
            bool allowed = q->row == k->row && ra_mask_rule(&c->cover.mask, q->token, k->token);
            if (seen[i * c->k_total + j] != allowed) {
                fail_msg("%s: query %lld, key %lld in %d blocks, allowed %d", support_case(),
                         (long long)i, (long long)j, seen[i * c->k_total + j], allowed);
            }
        }
    }
    ra_free(seen);
}

/* ---- one slab */

/* By which outputs each block was added; blocks counted from the slab's first. */
typedef struct tallies {
    uint8_t *query, *key;
    uint8_t *strip, *tile; /* written by how many outputs */
} tallies;

static void check_query_output(const plan *p, const ra_slab *slab, const ra_slab_output *output,
                               const tallies *t)
{
    int32_t steps = 0;
    assert_int_equal(output->part[0], output->part[1]);
    assert_int_equal(output->first[0], output->first[1]);
    assert_int_equal(output->count[0], output->count[1]);
    t->strip[output->part[0]]++;
    for (int32_t i = output->first[0]; i < output->first[0] + output->count[0]; i++) {
        assert_in_range(i, 0, slab->block_count - 1);
        const ra_slab_block *block = &p->slabs.block[slab->block_first + i];
        assert_int_equal(block->strip, output->part[0]);
        t->query[i]++;
        steps += (p->slabs.tile[block->tile].count + 63) / 64;
    }
    assert_int_equal(steps, output->steps);
}

/* What one CTA adds to its tile; the result is the number of its steps. */
static int32_t check_refs(const plan *p, const ra_slab *slab, const ra_slab_output *output, int cta,
                          const tallies *t)
{
    int32_t steps = 0;
    for (int32_t i = output->first[cta]; i < output->first[cta] + output->count[cta]; i++) {
        const ra_slab_ref *ref = &p->slabs.ref[i];
        assert_in_range(ref->strip, 0, slab->strip_count - 1);
        const ra_slab_strip *strip = &p->slabs.strip[slab->strip_first + ref->strip];
        assert_int_equal(ref->row, strip->row);
        assert_int_equal(ref->index, strip->index);
        int32_t unit[2] = {ref->steps % 256, ref->steps / 256};
        steps += (unit[0] + unit[1]) * p->pairs;
        assert_in_range(unit[0], 0, 2);
        assert_in_range(unit[1], 0, 2);
        int32_t block = ref->block[cta];
        if (block >= 0) {
            assert_in_range(block, 0, slab->block_count - 1);
            t->key[block]++;
            assert_int_equal(p->slabs.block[slab->block_first + block].tile, output->part[cta]);
            assert_int_equal(p->slabs.block[slab->block_first + block].strip,
                             ref->strip + slab->strip_first);
            bool even = p->slabs.units_heads == 2;
            assert_int_equal(unit[0], (ra_min_i64(strip->count, 128) + 63) / 64);
            assert_int_equal(unit[1],
                             even ? unit[0] : (ra_max_i64(strip->count - 128, 0) + 63) / 64);
        }
    }
    return steps;
}

static void check_key_output(const plan *p, const ra_slab *slab, const ra_slab_output *output,
                             const tallies *t)
{
    assert_int_equal(check_refs(p, slab, output, 0, t), output->steps);
    assert_int_equal(check_refs(p, slab, output, 1, t), output->steps);
    t->tile[output->part[0]]++;
    if (output->part[1] >= 0) {
        t->tile[output->part[1]]++;
    } else {
        assert_true(output->shared);
    }
    if (output->shared) {
        assert_int_equal(output->first[0], output->first[1]);
        assert_int_equal(output->count[0], output->count[1]);
    }
}

/* Each output once, its parts in order. */
static void check_units(const plan *p, const ra_slab *slab, const tallies *t)
{
    for (int32_t i = slab->unit_first; i < slab->unit_first + slab->unit_count;) {
        const ra_slab_output *output = &p->slabs.output[p->slabs.unit[i].output];
        assert_true(output->steps > 0);
        int parts = (output->keys ? 2 : p->pairs) * p->parts;
        for (int part = 0; part < parts; part++, i++) {
            assert_in_range(i, slab->unit_first, slab->unit_first + slab->unit_count - 1);
            assert_ptr_equal(&p->slabs.output[p->slabs.unit[i].output], output);
            assert_int_equal(p->slabs.unit[i].part, part);
        }
        if (output->keys) {
            check_key_output(p, slab, output, t);
        } else {
            check_query_output(p, slab, output, t);
        }
    }
}

/* Consecutive blocks of one strip, each block in one run, the longest first. */
static void check_runs(const plan *p, const ra_slab *slab)
{
    uint8_t *seen = NULL;
    if (p->layout.chan != RA_RUN_CHAN) {
        assert_int_equal(slab->run_count, 0);
        return;
    }
    assert_int_equal(RA_NEW(&seen, slab->block_count), RA_OK);
    for (int32_t i = 0; i < slab->run_count; i++) {
        const ra_slab_run *run = &p->slabs.run[slab->run_first + i];
        int32_t steps = 0;
        assert_true(run->count > 0);
        assert_true(i == 0 || run->steps <= run[-1].steps);
        for (int32_t j = run->first; j < run->first + run->count; j++) {
            assert_in_range(j, 0, slab->block_count - 1);
            const ra_slab_block *block = &p->slabs.block[slab->block_first + j];
            assert_int_equal(block->strip, run->strip);
            steps += (p->slabs.tile[block->tile].count + 63) / 64;
            seen[j]++;
        }
        assert_int_equal(steps, run->steps);
    }
    for (int32_t i = 0; i < slab->block_count; i++) {
        assert_int_equal(seen[i], 1);
    }
    ra_free(seen);
}

/* Does it add to the received chunk? */
static bool check_slab(const plan *p, const ra_slab *slab)
{
    tallies t;
    bool chunk = false;
    int64_t units = (int64_t)p->slabs.kv_heads * p->pairs * 2;
    assert_true((uint64_t)(slab->block_count * units * RA_BLOCK_BYTES) <=
                p->layout.workspace_bytes);
    assert_int_equal(RA_NEW(&t.query, slab->block_count), RA_OK);
    assert_int_equal(RA_NEW(&t.key, slab->block_count), RA_OK);
    assert_int_equal(RA_NEW(&t.strip, p->slabs.strip_count), RA_OK);
    assert_int_equal(RA_NEW(&t.tile, p->slabs.tile_count), RA_OK);
    check_units(p, slab, &t);
    check_runs(p, slab);
    for (int32_t i = 0; i < slab->block_count; i++) {
        const ra_slab_block *block = &p->slabs.block[slab->block_first + i];
        assert_in_range(block->strip, slab->strip_first, slab->strip_first + slab->strip_count - 1);
        assert_int_equal(t.query[i], 1);
        assert_int_equal(t.key[i], 1);
        assert_int_equal(t.strip[block->strip], 1);
        assert_int_equal(t.tile[block->tile], 1);
        chunk = chunk || p->slabs.tile[block->tile].source == RA_SOURCE_CHUNK;
    }
    ra_free(t.query);
    ra_free(t.key);
    ra_free(t.strip);
    ra_free(t.tile);
    return chunk;
}

/* What the piece of these rows says. */
static int32_t marks_of(const ra_piece *piece, int64_t count, int source, int64_t row,
                        int64_t index)
{
    for (int64_t i = 0; i < count; i++) {
        if (piece[i].source == source && piece[i].tensor_row == row && piece[i].index <= index &&
            index < piece[i].index + piece[i].count) {
            return (piece[i].fresh ? RA_SLAB_FRESH : 0) | (piece[i].final ? RA_SLAB_FINAL : 0);
        }
    }
    fail_msg("%s: row %lld, index %lld is in no piece", support_case(), (long long)row,
             (long long)index);
    return 0;
}

static int32_t marks_of_part(const plan *p, bool keys, int32_t part)
{
    if (keys) {
        const ra_slab_tile *tile = &p->slabs.tile[part];
        return marks_of(p->cover->k, p->cover->k_count, tile->source, tile->row, tile->index);
    }
    const ra_slab_strip *strip = &p->slabs.strip[part];
    return marks_of(p->cover->q, p->cover->q_count, RA_SOURCE_OWN, strip->row, strip->index);
}

/* The first slab that adds to a part of a fresh piece is marked, and the last to one of a final
 * piece. Every part has a slab if every row has a partner. */
static void check_marks(const plan *p, bool trimmed)
{
    const ra_slabs *slabs = &p->slabs;
    for (int keys = 0; keys < 2; keys++) {
        int64_t parts = keys ? slabs->tile_count : slabs->strip_count;
        const int32_t **last = NULL; /* marks of the last slab so far */
        assert_int_equal(RA_NEW(&last, parts + 1), RA_OK);
        for (int64_t i = 0; i < slabs->output_count; i++) {
            const ra_slab_output *output = &slabs->output[i];
            for (int cta = 0; output->keys == keys && cta < (keys ? 2 : 1); cta++) {
                int32_t part = output->part[cta];
                if (part < 0) {
                    continue;
                }
                int32_t fresh = last[part] ? 0 : marks_of_part(p, keys, part) & RA_SLAB_FRESH;
                assert_int_equal(output->when[cta] & RA_SLAB_FRESH, fresh);
                assert_true(!last[part] || !(*last[part] & RA_SLAB_FINAL));
                last[part] = &output->when[cta];
            }
            assert_true(keys || output->keys || output->when[0] == output->when[1]);
        }
        for (int64_t part = 0; part < parts; part++) {
            assert_true(last[part] || (keys && !trimmed));
            if (last[part]) {
                assert_int_equal(*last[part] & RA_SLAB_FINAL,
                                 marks_of_part(p, keys, (int32_t)part) & RA_SLAB_FINAL);
            }
        }
        ra_free(last);
    }
}

static void check_plan(const plan *p, bool trimmed)
{
    int64_t blocks = 0, runs = 0, chunk = 0;
    check_pairs(p);
    for (int64_t i = 0; i < p->slabs.slab_count; i++) {
        assert_int_equal(p->slabs.slab[i].block_first, blocks);
        assert_int_equal(p->slabs.slab[i].run_first, runs);
        chunk = check_slab(p, &p->slabs.slab[i]) ? i + 1 : chunk;
        blocks += p->slabs.slab[i].block_count;
        runs += p->slabs.slab[i].run_count;
    }
    assert_int_equal(runs, p->slabs.run_count);
    assert_int_equal(blocks, p->slabs.block_count);
    assert_int_equal(chunk, p->slabs.chunk_slabs);
    check_marks(p, trimmed);
}

/* ---- cases */

static ra_slab_layout random_layout(rng *r)
{
    static const int heads[][2] = {{2, 1}, {4, 2}, {1, 1}, {8, 1}, {3, 1}, {2, 2}, {12, 4}};
    const int *h = heads[rng_int(r, 0, 6)];
    int group = h[0] / h[1], units = group % 2 ? 2 * group : group;
    int64_t blocks = rng_int(r, 1, rng_chance(r, 50) ? 3 : 40);
    return (ra_slab_layout){
        .q_heads = h[0],
        .kv_heads = h[1],
        .chan = rng_chance(r, 50) ? 512 : 256,
        .clusters = rng_chance(r, 50) ? 66 : 2,
        .workspace_bytes = (size_t)(blocks * units * RA_BLOCK_BYTES),
    };
}

static void test_random(void **state)
{
    (void)state;
    for (int64_t step = 0; step < support_steps(400); step++) {
        support_limit(60, "random covers, step %lld", (long long)step);
        rng r = rng_of(support_seed() + (uint64_t)step);
        cover_shape shape = {1, 1, 8, RA_F32, 1.0f};
        cover_case c = cover_random(&r, shape, rng_int(&r, 1, 900));
        plan p = plan_new(&c, &c.cover, random_layout(&r));
        check_plan(&p, false);
        plan_free(&p);
        ra_cover whole;
        cover_passes(&c, NULL, 1, &whole);
        p = plan_new(&c, &whole, random_layout(&r));
        check_plan(&p, true);
        plan_free(&p);
        ra_cover_free(&whole);
        cover_case_free(&c);
    }
}

static void test_masks(void **state)
{
    (void)state;
    static const ra_mask masks[] = {{.causal = true},
                                    {.causal = false},
                                    {.causal = true, .window = 200},
                                    {.window = 40, .window_right = 9}};
    for (int i = 0; i < 60; i++) {
        support_limit(60, "masks, case %d", i);
        rng r = rng_of(support_seed() + (uint64_t)i);
        cover_shape shape = {1, 1, 8, RA_F32, 1.0f};
        cover_case c =
            cover_pair(&r, shape, masks[i % 4], rng_int(&r, 1, 1500), rng_int(&r, 1, 1500));
        plan p = plan_new(&c, &c.cover, random_layout(&r));
        check_plan(&p, false);
        plan_free(&p);
        cover_case_free(&c);
    }
}

/* Strips are cut only where clusters would idle: 8 strips of 8 blocks. */
static void test_runs(void **state)
{
    (void)state;
    static const int counts[][3] = {
        {66, 64, 2}, {3, 12, 16}, {2, 8, 16}}; /* clusters, runs, steps */
    rng r = rng_of(support_seed());
    cover_shape shape = {1, 1, 8, RA_F32, 1.0f};
    support_limit(60, "runs");
    cover_case c = cover_pair(&r, shape, (ra_mask){.causal = false}, 1024, 1024);
    for (int i = 0; i < 3; i++) {
        plan p =
            plan_new(&c, &c.cover, (ra_slab_layout){2, 1, 256, counts[i][0], 128 * RA_BLOCK_BYTES});
        check_plan(&p, false);
        assert_int_equal(p.slabs.slab_count, 1);
        assert_int_equal(p.slabs.run_count, counts[i][1]);
        assert_int_equal(p.slabs.run[0].steps, counts[i][2]);
        plan_free(&p);
    }
    cover_case_free(&c);
}

/* A workspace for one KV head and a bit more: slabs of a head each, whose sums stay in registers,
 * and not slabs of parts of two heads, whose sums would go through memory. */
static void test_whole_heads(void **state)
{
    (void)state;
    ra_piece q = {.count = 8192, .last = 1}, k = {.count = 8192};
    ra_cover cover = {.q_count = 1, .k_count = 1, .q = &q, .k = &k};
    ra_slab_layout layout = {32, 16, 256, 66, (size_t)544 << 20};
    ra_work work = {0};
    ra_slabs slabs = {0};
    support_limit(60, "whole heads");
    ra_cover_link(&cover);
    assert_int_equal(ra_work_build(&cover, 64, 0, &work), RA_OK);
    assert_int_equal(ra_slabs_build(&cover, &work, &layout, &slabs), RA_OK);
    assert_int_equal(slabs.kv_heads, 1);
    assert_int_equal(slabs.slab_count, 1);
    ra_slabs_free(&slabs);
    ra_work_free(&work);
}

static void test_nothing(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    cover_shape shape = {1, 1, 8, RA_F32, 1.0f};
    support_limit(60, "a cover without keys");
    cover_case c = cover_pair(&r, shape, (ra_mask){.causal = true}, 100, 100);
    uint8_t nothing[8] = {0};
    ra_cover cover = cover_part(&c, nothing, false, true);
    plan p = plan_new(&c, &cover, random_layout(&r));
    assert_int_equal(p.slabs.slab_count, 0);
    assert_int_equal(p.slabs.block_count, 0);
    plan_free(&p);
    ra_cover_free(&cover);
    cover_case_free(&c);
}

static void test_refused(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    cover_shape shape = {1, 1, 8, RA_F32, 1.0f};
    support_limit(60, "a small workspace");
    cover_case c = cover_pair(&r, shape, (ra_mask){.causal = true}, 100, 100);
    ra_work work = {0};
    ra_slabs slabs = {0};
    ra_slab_layout layout = {8, 1, 512, 66, 8 * RA_BLOCK_BYTES - 1};
    assert_int_equal(ra_work_build(&c.cover, 64, 0, &work), RA_OK);
    assert_int_equal(ra_slabs_build(&c.cover, &work, &layout, &slabs), RA_E_UNSUPPORTED);
    assert_non_null(strstr(ra_last_error(), "524287"));
    ra_work_free(&work);
    cover_case_free(&c);
}

/* Any allocation that fails: a status, nothing lost. */
static void test_no_memory(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    cover_shape shape = {1, 1, 8, RA_F32, 1.0f};
    support_limit(60, "no memory");
    cover_case c = cover_pair(&r, shape, (ra_mask){.causal = true}, 700, 700);
    ra_work work = {0};
    ra_slab_layout layout = {4, 2, 256, 66, 200 * RA_BLOCK_BYTES};
    assert_int_equal(ra_work_build(&c.cover, 64, 0, &work), RA_OK);
    ra_status status = RA_E_NOMEM;
    int failures = 0;
    for (; status; failures++) {
        ra_slabs slabs = {0};
        ra_alloc_probe probe = {.fail_at = failures + 1};
        ra_alloc_watch(&probe);
        status = ra_slabs_build(&c.cover, &work, &layout, &slabs);
        ra_slabs_free(&slabs);
        ra_alloc_watch(NULL);
        assert_true(status == RA_OK || status == RA_E_NOMEM);
        assert_int_equal(atomic_load(&probe.live_bytes), 0);
    }
    assert_in_range(failures, 12, 80);
    ra_work_free(&work);
    cover_case_free(&c);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random),    cmocka_unit_test(test_masks),
        cmocka_unit_test(test_runs),      cmocka_unit_test(test_whole_heads),
        cmocka_unit_test(test_nothing),   cmocka_unit_test(test_refused),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
