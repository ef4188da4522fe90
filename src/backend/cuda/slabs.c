/*
 * Cuts a cover into strips, tiles and blocks, chooses slabs by predicted cost, and lists what each
 * slab adds up. Blocks are ordered by strip, or by bands of tiles and then by strip where a strip
 * alone would fill the workspace: a squarish slab adds to fewer tiles of results. Slabs are
 * consecutive blocks of that order, cut by dynamic programming.
 */
#include "backend/cuda/slabs_build.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "plan/schedule.h"

_Static_assert(RA_SCHEDULE_TILE % RA_BLOCK_KEYS == 0, "a plan's tiles are whole blocks");

enum { CUTS_MAX = 192 }; /* positions where a slab may end */

/* ---- strips, tiles and blocks */

static uint8_t when_of(const ra_piece *piece)
{
    return (uint8_t)((piece->fresh ? RA_SLAB_FRESH : 0) | (piece->final ? RA_SLAB_FINAL : 0));
}

static ra_status list_tiles(ra_slab_builder *b)
{
    const ra_cover *cover = b->cover;
    int64_t count = 0;
    RA_TRY(RA_NEW(&b->tile_first, cover->k_count + 1));
    for (int64_t i = 0; i < cover->k_count; i++) {
        b->tile_first[i] = (int32_t)count;
        count += ra_ceil_div(cover->k[i].count, RA_BLOCK_KEYS);
    }
    RA_TRY(RA_NEW(&b->out->tile, count));
    RA_TRY(RA_NEW(&b->tile_when, count));
    RA_TRY(RA_NEW(&b->tile_blocks, count));
    b->out->tile_count = count;
    for (int64_t i = 0; i < cover->k_count; i++) {
        const ra_piece *k = &cover->k[i];
        for (int64_t at = 0; at < k->count; at += RA_BLOCK_KEYS) {
            int64_t tile = b->tile_first[i] + at / RA_BLOCK_KEYS;
            b->tile_when[tile] = when_of(k);
            b->out->tile[tile] = (ra_slab_tile){
                .source = k->source,
                .row = (int32_t)k->tensor_row,
                .index = (int32_t)(k->index + at),
                .count = (int32_t)ra_min_i64(RA_BLOCK_KEYS, k->count - at),
                .pos = (int32_t)(k->pos + at),
            };
        }
    }
    return RA_OK;
}

/* The blocks of one strip that sees the positions [begin, end). */
static ra_status add_blocks(ra_slab_builder *b, const ra_piece *q, int64_t begin, int64_t end,
                            int64_t *first_key)
{
    const ra_cover *cover = b->cover;
    while (*first_key < q->last && cover->k[*first_key].pos + cover->k[*first_key].count <= begin) {
        ++*first_key;
    }
    for (int64_t i = *first_key; i < q->last && cover->k[i].pos < end; i++) {
        const ra_piece *k = &cover->k[i];
        int64_t low = ra_max_i64(begin - k->pos, 0), high = ra_min_i64(end - k->pos, k->count);
        int64_t last = low < high ? (high - 1) / RA_BLOCK_KEYS : -1;
        for (int64_t t = low / RA_BLOCK_KEYS; t <= last; t++) {
            RA_TRY(RA_RESERVE(&b->block, &b->block_capacity, b->block_count + 1));
            b->block[b->block_count++] =
                (ra_slab_block){(int32_t)b->out->strip_count, (int32_t)(b->tile_first[i] + t)};
            b->tile_blocks[b->tile_first[i] + t]++;
        }
    }
    return RA_OK;
}

static ra_status add_strips(ra_slab_builder *b, const ra_piece *q, int64_t reach_first)
{
    ra_slabs *out = b->out;
    int64_t rows = RA_BLOCK_ROWS * 2 / out->units_heads, first_key = q->first;
    const ra_work_reach *reach = b->work->reach + reach_first;
    for (int64_t at = 0; at < q->count; at += rows) {
        int64_t count = ra_min_i64(rows, q->count - at), before = b->block_count;
        RA_TRY(add_blocks(b, q, reach[at].begin, reach[at + count - 1].end, &first_key));
        if (b->block_count > before) {
            RA_TRY(RA_RESERVE(&out->strip, &b->strip_capacity, out->strip_count + 1));
            RA_TRY(RA_RESERVE(&b->strip_when, &b->strip_when_capacity, out->strip_count + 1));
            b->strip_when[out->strip_count] = when_of(q);
            out->strip[out->strip_count++] = (ra_slab_strip){
                .row = (int32_t)q->tensor_row,
                .index = (int32_t)(q->index + at),
                .count = (int32_t)count,
                .reach = (int32_t)(reach_first + at),
            };
        }
    }
    return RA_OK;
}

static ra_status list_blocks(ra_slab_builder *b)
{
    int64_t reach = 0;
    for (int64_t i = 0; i < b->cover->q_count; i++) {
        const ra_piece *q = &b->cover->q[i];
        if (q->first < q->last) {
            RA_TRY(add_strips(b, q, reach));
        }
        reach += q->count;
    }
    RA_TRY(RA_NEW(&b->strip_block, b->out->strip_count + 1));
    for (int64_t i = 0, at = 0; i < b->out->strip_count; i++) {
        while (at < b->block_count && b->block[at].strip == i) {
            at++;
        }
        b->strip_block[i + 1] = (int32_t)at;
    }
    return RA_OK;
}

/* ---- the order of blocks */

static ra_status add_group(ra_slab_builder *b, ra_slab_group g)
{
    RA_TRY(RA_RESERVE(&b->groups, &b->group_capacity, b->group_count + 1));
    b->groups[b->group_count++] = g;
    return RA_OK;
}

/* Bands of `width` tiles; in each the strips that have blocks there. cursor: scratch a strip. */
static ra_status list_groups(ra_slab_builder *b, int32_t width, int32_t *cursor)
{
    int64_t bands = ra_ceil_div(b->out->tile_count, width);
    b->group_count = 0;
    for (int64_t i = 0; i < b->out->strip_count; i++) {
        cursor[i] = b->strip_block[i];
    }
    for (int64_t band = 0; band < bands; band++) {
        for (int64_t i = 0; i < b->out->strip_count; i++) {
            int32_t end = b->strip_block[i + 1];
            ra_slab_group g = {.strip = (int32_t)i, .band = (int32_t)band, .first = cursor[i]};
            while (cursor[i] < end && b->block[cursor[i]].tile / width == band) {
                g.steps += (int32_t)ra_slab_steps(b->out->tile[b->block[cursor[i]++].tile].count);
            }
            g.count = cursor[i] - g.first;
            if (g.count > 0) {
                RA_TRY(add_group(b, g));
            }
        }
    }
    return RA_OK;
}

/* ---- the choice of slabs */

static void tally_group(ra_slab_builder *b, const ra_slab_group *g, int32_t stamp, ra_slab_tally *t)
{
    for (int32_t i = g->first; i < g->first + g->count; i++) {
        int32_t tile = b->block[i].tile;
        if (b->tile_stamp[tile] != stamp) {
            b->tile_stamp[tile] = stamp;
            b->tile_refs[tile] = 0;
            t->tiles++;
            t->part_tiles++;
        }
        t->longest_tile = ra_max_i64(t->longest_tile, ++b->tile_refs[tile]);
        t->part_tiles -= b->tile_refs[tile] == b->tile_blocks[tile];
    }
    t->blocks += g->count;
    t->strips++;
    t->part_strips += ra_slab_part_of_strip(b, g);
    t->strip_steps += g->steps;
    t->longest_strip = ra_max_i64(t->longest_strip, g->steps);
}

/* A slab of the groups [from, to) after the best cut of those before, by each estimate. */
static void extend(ra_slab_builder *b, int64_t from, int64_t to, const ra_slab_tally *t, int kv)
{
    double more[RA_SLAB_ESTIMATES];
    ra_slab_costs(b, t, kv, more);
    for (int i = 0; i < RA_SLAB_ESTIMATES; i++) {
        double cost = b->cost[from][i] + more[i];
        if (b->cost[to][i] < 0 || cost < b->cost[to][i]) {
            b->cost[to][i] = cost;
            b->from[to][i] = (int32_t)from;
        }
    }
}

/* Cuts all groups into slabs of at most `blocks`: costs and where slabs begin, of every end; costs
 * are negative where none can end, which at the last is so if one group is longer. */
static void cut(ra_slab_builder *b, int kv, int64_t blocks)
{
    int64_t n = b->group_count, unit = ra_ceil_div(n, CUTS_MAX);
    for (int64_t i = 0; i <= n; i++) {
        b->cost[i][0] = b->cost[i][1] = i ? -1 : 0;
    }
    for (int64_t i = 0; i < b->out->tile_count; i++) {
        b->tile_stamp[i] = -1;
    }
    if (n == 0) {
        return;
    }
    if (unit * (b->block_count / n + 1) > blocks / 2) {
        unit = 1;
    }
    /* Where nothing is played a cut that costs more than the best one needs no end. */
    bool limited = b->block_count > RA_SLAB_PLAY_MAX && b->out->cost > 0;
    double limit = limited ? b->out->cost * kv / b->layout->kv_heads : INFINITY;
    for (int64_t from = 0; from < n; from++) {
        ra_slab_tally t = {0};
        double before = fmin(b->cost[from][0], b->cost[from][1]);
        for (int64_t to = from; before >= 0 && before < limit && to < n; to++) {
            const ra_slab_group *g = &b->groups[to];
            bool wide = g->strip - b->groups[from].strip >= blocks; /* masks are a strip's */
            if (g->band != b->groups[from].band || t.blocks + g->count > blocks || wide) {
                break;
            }
            tally_group(b, g, (int32_t)from, &t);
            if ((to + 1) % unit == 0 || to + 1 == n || b->groups[to + 1].band != g->band) {
                extend(b, from, to + 1, &t, kv);
            }
        }
    }
}

/* The ends of the slabs that cut found, first to last. */
static void list_ends(ra_slab_builder *b, int estimate)
{
    int32_t count = 0;
    for (int64_t at = b->group_count; at > 0; at = b->from[at][estimate]) {
        b->end[count++] = (int32_t)at;
    }
    for (int32_t i = 0; i < count / 2; i++) {
        int32_t swap = b->end[i];
        b->end[i] = b->end[count - 1 - i];
        b->end[count - 1 - i] = swap;
    }
    b->end_count = count;
}

/* Keeps the cuts of the groups that are the best so far. */
static ra_status try_cut(ra_slab_builder *b, int32_t width, int kv, int64_t blocks)
{
    cut(b, kv, blocks);
    for (int i = 0; i < RA_SLAB_ESTIMATES && b->cost[b->group_count][i] >= 0; i++) {
        double cost = b->cost[b->group_count][i];
        list_ends(b, i);
        if (b->block_count <= RA_SLAB_PLAY_MAX) {
            RA_TRY(ra_slab_play(b, kv, &cost));
        }
        cost *= (double)b->layout->kv_heads / kv;
        if (b->out->cost == 0 || cost < b->out->cost) {
            b->out->cost = cost;
            b->out->kv_heads = kv;
            b->best_width = width;
            b->best_count = b->end_count;
            memcpy(b->best, b->end, (size_t)b->end_count * sizeof *b->end);
        }
    }
    return RA_OK;
}

static bool one_slab(const ra_slab_builder *b)
{
    return b->best_count == 1 && b->out->kv_heads == b->layout->kv_heads;
}

static ra_status try_width(ra_slab_builder *b, int32_t width, int64_t slots, int32_t *cursor)
{
    int heads = b->layout->kv_heads;
    RA_TRY(list_groups(b, width, cursor));
    for (int kv = heads; kv >= 1 && !one_slab(b); kv--) {
        int64_t blocks = slots / ((int64_t)kv * b->pairs * 2);
        if (heads % kv == 0 && blocks > 0) {
            RA_TRY(try_cut(b, width, kv, blocks));
        }
    }
    return RA_OK;
}

static ra_status choose(ra_slab_builder *b, int32_t *cursor)
{
    int64_t slots = (int64_t)(b->layout->workspace_bytes / RA_BLOCK_BYTES), longest = 0;
    for (int64_t i = 0; i < b->out->strip_count; i++) {
        longest = ra_max_i64(longest, b->strip_block[i + 1] - b->strip_block[i]);
    }
    int64_t all = ra_max_i64(1, b->out->tile_count);
    for (int64_t width = all; width >= 1; width = width > 64 ? 64 : width / 2) {
        bool useful = width < longest && width >= 16 && !one_slab(b);
        if (width == all || useful || b->best_count == 0) {
            RA_TRY(try_width(b, (int32_t)width, slots, cursor));
        }
    }
    if (b->best_count == 0) {
        return RA_FAIL(RA_E_UNSUPPORTED,
                       "workspace: %zu bytes, expected room for one block of %d query heads",
                       b->layout->workspace_bytes, b->layout->q_heads / b->layout->kv_heads);
    }
    return list_groups(b, b->best_width, cursor);
}

/* ---- the whole */

static int64_t count_chunk_slabs(const ra_slabs *slabs)
{
    int64_t count = slabs->slab_count;
    for (; count > 0; count--) {
        const ra_slab *slab = &slabs->slab[count - 1];
        for (int32_t i = 0; i < slab->block_count; i++) {
            if (slabs->tile[slabs->block[slab->block_first + i].tile].source == RA_SOURCE_CHUNK) {
                return count;
            }
        }
    }
    return 0;
}

static ra_status build(ra_slab_builder *b, int32_t **cursor)
{
    RA_TRY(list_tiles(b));
    RA_TRY(list_blocks(b));
    if (b->block_count == 0) {
        return RA_OK;
    }
    if (b->block_count > INT32_MAX / 64) {
        return RA_FAIL(RA_E_UNSUPPORTED, "blocks: %lld, slabs hold less than 2^25",
                       (long long)b->block_count);
    }
    RA_TRY(RA_NEW(cursor, b->out->strip_count));
    RA_TRY(RA_NEW(&b->tile_stamp, b->out->tile_count));
    RA_TRY(RA_NEW(&b->tile_refs, b->out->tile_count));
    RA_TRY(RA_NEW(&b->cost, b->block_count + 1));
    RA_TRY(RA_NEW(&b->from, b->block_count + 1));
    RA_TRY(RA_NEW(&b->end, b->block_count));
    RA_TRY(RA_NEW(&b->best, b->block_count));
    RA_TRY(choose(b, *cursor));
    RA_TRY(ra_slab_lists(b));
    b->out->chunk_slabs = count_chunk_slabs(b->out);
    return b->layout->chan == RA_RUN_CHAN ? ra_slab_runs(b) : RA_OK;
}

ra_status ra_slabs_build(const ra_cover *cover, const ra_work *work, const ra_slab_layout *layout,
                         ra_slabs *out)
{
    int group_heads = layout->q_heads / layout->kv_heads;
    int32_t *cursor = NULL;
    *out = (ra_slabs){.units_heads = group_heads % 2 ? 1 : 2};
    ra_slab_builder b = {
        .cover = cover,
        .work = work,
        .layout = layout,
        .out = out,
        .pairs = group_heads / out->units_heads,
        .parts = (layout->chan + RA_PRODUCT_CHAN - 1) / RA_PRODUCT_CHAN,
    };
    ra_status status = build(&b, &cursor);
    void *scratch[] = {b.tile_first, b.block,       b.strip_block, b.strip_when, b.tile_when,
                       b.groups,     b.tile_blocks, b.tile_stamp,  b.tile_refs,  b.cost,
                       b.from,       b.end,         b.best,        cursor};
    for (size_t i = 0; i < sizeof scratch / sizeof *scratch; i++) {
        ra_free(scratch[i]);
    }
    if (status) {
        ra_slabs_free(out);
    }
    return status;
}

void ra_slabs_free(ra_slabs *slabs)
{
    ra_free(slabs->strip);
    ra_free(slabs->tile);
    ra_free(slabs->block);
    ra_free(slabs->ref);
    ra_free(slabs->output);
    ra_free(slabs->unit);
    ra_free(slabs->run);
    ra_free(slabs->slab);
    *slabs = (ra_slabs){0};
}
