/*
 * Writes down the slabs that were chosen: their blocks, and what a pair of CTAs adds up. Tiles that
 * the same strips see are paired so that the queries are copied once for both; where that would
 * make too many steps for nothing, as in a narrow window, each tile walks its own strips.
 */
#include <stdlib.h>

#include "backend/cuda/slabs_build.h"
#include "base/alloc.h"

/* Two tiles are walked together if that makes at most so much more work. */
static const double shared_factor = 1.06;

static ra_status add_output(ra_slab_builder *b, ra_slab_output output)
{
    RA_TRY(RA_RESERVE(&b->out->output, &b->output_capacity, b->out->output_count + 1));
    b->out->output[b->out->output_count++] = output;
    return RA_OK;
}

static ra_status add_ref(ra_slab_builder *b, ra_slab_ref ref)
{
    RA_TRY(RA_RESERVE(&b->out->ref, &b->ref_capacity, b->out->ref_count + 1));
    b->out->ref[b->out->ref_count++] = ref;
    return RA_OK;
}

/* A block of a slab, to be sorted by tile. */
typedef struct entry {
    int32_t tile, strip, block; /* block: counted from the slab's first */
} entry;

static int compare_entry(const void *a, const void *b)
{
    const entry *left = a, *right = b;
    if (left->tile != right->tile) {
        return left->tile < right->tile ? -1 : 1;
    }
    return (left->strip > right->strip) - (left->strip < right->strip);
}

static ra_slab_ref ref_of(const ra_slab_builder *b, const ra_slab *slab, int32_t strip,
                          int32_t block0, int32_t block1)
{
    const ra_slab_strip *s = &b->out->strip[strip];
    bool even = b->out->units_heads == 2;
    int64_t first = ra_slab_steps(s->count);
    int64_t second = even ? first : ra_slab_steps(s->count - RA_BLOCK_ROWS);
    return (ra_slab_ref){
        .row = s->row,
        .index = s->index,
        .strip = strip - slab->strip_first,
        .steps = (int32_t)(first + 256 * second),
        .block = {block0, block1},
    };
}

static int64_t ref_steps(const ra_slab_ref *ref)
{
    return ref->steps % 256 + ref->steps / 256;
}

/* Both tiles' strips, merged; NULL, 0 for no second tile. */
static ra_status add_shared_refs(ra_slab_builder *b, const ra_slab *slab, const entry *x,
                                 int64_t nx, const entry *y, int64_t ny, int64_t *steps)
{
    *steps = 0;
    for (int64_t i = 0, j = 0; i < nx || j < ny;) {
        bool has_x = i < nx && (j >= ny || x[i].strip <= y[j].strip);
        bool has_y = j < ny && (i >= nx || y[j].strip <= x[i].strip);
        int32_t strip = has_x ? x[i].strip : y[j].strip;
        ra_slab_ref ref = ref_of(b, slab, strip, has_x ? x[i].block : -1, has_y ? y[j].block : -1);
        RA_TRY(add_ref(b, ref));
        *steps += ref_steps(&ref);
        i += has_x;
        j += has_y;
    }
    return RA_OK;
}

static ra_status add_own_refs(ra_slab_builder *b, const ra_slab *slab, const entry *x, int64_t nx,
                              int64_t *steps)
{
    *steps = 0;
    for (int64_t i = 0; i < nx; i++) {
        ra_slab_ref ref = ref_of(b, slab, x[i].strip, x[i].block, x[i].block);
        RA_TRY(add_ref(b, ref));
        *steps += ref_steps(&ref);
    }
    return RA_OK;
}

/* Steps that add nothing, at the end of the list, so that both CTAs have equally many. */
static ra_status pad_refs(ra_slab_builder *b, int64_t steps)
{
    for (ra_slab_ref ref = b->out->ref[b->out->ref_count - 1]; steps > 0;) {
        int64_t first = ra_min_i64(steps, 2), second = ra_min_i64(steps - first, 2);
        ref.block[0] = ref.block[1] = -1;
        ref.steps = (int32_t)(first + 256 * second);
        RA_TRY(add_ref(b, ref));
        steps -= first + second;
    }
    return RA_OK;
}

static int64_t entry_steps(const ra_slab_builder *b, const ra_slab *slab, const entry *x,
                           int64_t nx)
{
    int64_t steps = 0;
    for (int64_t i = 0; i < nx; i++) {
        ra_slab_ref ref = ref_of(b, slab, x[i].strip, 0, 0);
        steps += ref_steps(&ref);
    }
    return steps;
}

/* dk and dv of two tiles that do not see the same queries. The shorter list is written last, as
 * only the end of all refs can grow. */
static ra_status add_apart(ra_slab_builder *b, const ra_slab *slab, const entry *x, int64_t nx,
                           const entry *y, int64_t ny)
{
    int64_t steps_x = entry_steps(b, slab, x, nx), steps_y = entry_steps(b, slab, y, ny), steps;
    bool swap = steps_x < steps_y;
    ra_slab_output output = {.keys = 1,
                             .part = {swap ? y->tile : x->tile, swap ? x->tile : y->tile}};
    int64_t longer = ra_max_i64(steps_x, steps_y), shorter = ra_min_i64(steps_x, steps_y);
    output.first[0] = (int32_t)b->out->ref_count;
    RA_TRY(add_own_refs(b, slab, swap ? y : x, swap ? ny : nx, &steps));
    output.first[1] = (int32_t)b->out->ref_count;
    output.count[0] = output.first[1] - output.first[0];
    RA_TRY(add_own_refs(b, slab, swap ? x : y, swap ? nx : ny, &steps));
    RA_TRY(pad_refs(b, longer - shorter));
    output.count[1] = (int32_t)b->out->ref_count - output.first[1];
    output.steps = (int32_t)(longer * b->pairs);
    return add_output(b, output);
}

static ra_status add_key_output(ra_slab_builder *b, const ra_slab *slab, const entry *x, int64_t nx,
                                const entry *y, int64_t ny)
{
    int64_t before = b->out->ref_count, steps;
    RA_TRY(add_shared_refs(b, slab, x, nx, y, ny, &steps));
    int64_t longer = ra_max_i64(entry_steps(b, slab, x, nx), ny ? entry_steps(b, slab, y, ny) : 0);
    if (ny > 0 && (double)steps > shared_factor * (double)longer) {
        b->out->ref_count = before;
        return add_apart(b, slab, x, nx, y, ny);
    }
    int32_t first = (int32_t)before, count = (int32_t)(b->out->ref_count - before);
    return add_output(b, (ra_slab_output){
                             .keys = 1,
                             .shared = 1,
                             .steps = (int32_t)(steps * b->pairs),
                             .part = {x->tile, ny ? y->tile : -1},
                             .first = {first, first},
                             .count = {count, count},
                         });
}

static int64_t same_tile(const entry *x, int64_t count)
{
    int64_t n = 0;
    while (n < count && x[n].tile == x->tile) {
        n++;
    }
    return n;
}

static ra_status add_key_outputs(ra_slab_builder *b, const ra_slab *slab, entry *x)
{
    const ra_slab_block *block = b->out->block + slab->block_first;
    int64_t count = slab->block_count;
    for (int64_t i = 0; i < count; i++) {
        x[i] = (entry){block[i].tile, block[i].strip, (int32_t)i};
    }
    qsort(x, (size_t)count, sizeof *x, compare_entry);
    for (int64_t at = 0; at < count;) {
        int64_t nx = same_tile(x + at, count - at);
        int64_t ny = same_tile(x + at + nx, count - at - nx);
        RA_TRY(add_key_output(b, slab, x + at, nx, x + at + nx, ny));
        at += nx + ny;
    }
    return RA_OK;
}

static ra_status add_query_output(ra_slab_builder *b, const ra_slab *slab, int32_t strip,
                                  int64_t first, int64_t count)
{
    int64_t steps = 0;
    for (int64_t i = first; i < first + count; i++) {
        steps += ra_slab_steps(b->out->tile[b->out->block[i].tile].count);
    }
    int32_t at = (int32_t)(first - slab->block_first);
    return add_output(b, (ra_slab_output){
                             .shared = 1,
                             .steps = (int32_t)steps,
                             .part = {strip, strip},
                             .first = {at, at},
                             .count = {(int32_t)count, (int32_t)count},
                         });
}

/* Smallest rank first; ties as they are listed. */
typedef struct ranked {
    int32_t rank, output;
} ranked;

static int compare_ranked(const void *a, const void *b)
{
    const ranked *left = a, *right = b;
    if (left->rank != right->rank) {
        return left->rank < right->rank ? -1 : 1;
    }
    return (left->output > right->output) - (left->output < right->output);
}

/* The last of the slab's blocks that an output adds. */
static int32_t last_block(const ra_slab_builder *b, const ra_slab_output *output)
{
    int32_t last = output->first[0] + output->count[0] - 1;
    if (output->keys) {
        const ra_slab_ref *ref = &b->out->ref[last];
        last = (int32_t)ra_max_i64(ref->block[0], ref->block[1]);
    }
    return last;
}

/* Longest first, so that all CTAs end together; but where memory is what limits, outputs that add
 * the same blocks come together, so that the second finds them in the cache. */
static ra_status add_units(ra_slab_builder *b, ra_slab *slab, int64_t first, bool together,
                           ranked *order)
{
    ra_slabs *out = b->out;
    int64_t count = out->output_count - first;
    for (int64_t i = 0; i < count; i++) {
        const ra_slab_output *output = &out->output[first + i];
        order[i] =
            (ranked){together ? last_block(b, output) : -output->steps, (int32_t)(first + i)};
    }
    qsort(order, (size_t)count, sizeof *order, compare_ranked);
    slab->unit_first = (int32_t)out->unit_count;
    for (int64_t i = 0; i < count; i++) {
        int parts = (out->output[order[i].output].keys ? 2 : b->pairs) * b->parts;
        RA_TRY(RA_RESERVE(&out->unit, &b->unit_capacity, out->unit_count + parts));
        for (int part = 0; part < parts; part++) {
            out->unit[out->unit_count++] = (ra_slab_unit){order[i].output, part};
        }
    }
    slab->unit_count = (int32_t)(out->unit_count - slab->unit_first);
    return RA_OK;
}

static bool memory_bound(const ra_slab_builder *b, const ra_slab *slab, int64_t first_output)
{
    ra_slab_tally t = {.blocks = slab->block_count};
    for (int64_t i = first_output; i < b->out->output_count; i++) {
        const ra_slab_output *output = &b->out->output[i];
        if (output->keys) {
            t.tiles += 1 + (output->part[1] >= 0);
            t.longest_tile = ra_max_i64(t.longest_tile, output->steps / (4 * b->pairs));
        } else {
            t.strips++;
            t.strip_steps += output->steps;
            t.longest_strip = ra_max_i64(t.longest_strip, output->steps);
        }
    }
    return ra_slab_memory_bound(b, &t, b->out->kv_heads);
}

static ra_status add_slab(ra_slab_builder *b, int64_t from, int64_t to, entry *entries,
                          ranked *order)
{
    ra_slabs *out = b->out;
    ra_slab slab = {
        .strip_first = b->groups[from].strip,
        .strip_count = b->groups[to - 1].strip + 1 - b->groups[from].strip,
        .block_first = (int32_t)out->block_count,
    };
    int64_t first_output = out->output_count;
    for (int64_t i = from; i < to; i++) {
        const ra_slab_group *g = &b->groups[i];
        int64_t first = out->block_count;
        for (int32_t j = 0; j < g->count; j++) {
            out->block[out->block_count++] = b->block[g->first + j];
        }
        RA_TRY(add_query_output(b, &slab, g->strip, first, g->count));
    }
    slab.block_count = (int32_t)(out->block_count - slab.block_first);
    RA_TRY(add_key_outputs(b, &slab, entries));
    bool together = memory_bound(b, &slab, first_output);
    RA_TRY(add_units(b, &slab, first_output, together, order));
    RA_TRY(RA_RESERVE(&out->slab, &b->slab_capacity, out->slab_count + 1));
    out->slab[out->slab_count++] = slab;
    return RA_OK;
}

/* The first and the last slab of every part, as far as its piece allows. */
static void mark_parts(ra_slab_builder *b, ra_slab_output **strip_last, ra_slab_output **tile_last)
{
    ra_slabs *out = b->out;
    for (int64_t i = 0; i < out->output_count; i++) {
        ra_slab_output *output = &out->output[i];
        ra_slab_output **last = output->keys ? tile_last : strip_last;
        const uint8_t *allowed = output->keys ? b->tile_when : b->strip_when;
        for (int part = 0; part < 2; part++) {
            int32_t at = output->part[part];
            if (at < 0 || (part == 1 && !output->keys)) {
                continue;
            }
            if (last[at]) {
                int32_t *when = last[at]->when;
                when[output->keys && last[at]->part[0] != at] &= ~RA_SLAB_FINAL;
            }
            output->when[part] = allowed[at] & (last[at] ? RA_SLAB_FINAL : ~0);
            last[at] = output;
        }
    }
    for (int64_t i = 0; i < out->output_count; i++) { /* a strip is both parts */
        ra_slab_output *output = &out->output[i];
        output->when[1] = output->keys ? output->when[1] : output->when[0];
    }
}

static ra_status mark(ra_slab_builder *b)
{
    ra_slab_output **strip_last = NULL, **tile_last = NULL;
    ra_status status = RA_NEW(&strip_last, b->out->strip_count);
    status = status ? status : RA_NEW(&tile_last, b->out->tile_count);
    if (!status) {
        mark_parts(b, strip_last, tile_last);
    }
    ra_free(strip_last);
    ra_free(tile_last);
    return status;
}

ra_status ra_slab_lists(ra_slab_builder *b)
{
    entry *entries = NULL;
    ranked *order = NULL;
    ra_status status = RA_NEW(&entries, b->block_count);
    status = status ? status : RA_NEW(&order, 2 * b->block_count);
    status = status ? status : RA_NEW(&b->out->block, b->block_count);
    for (int32_t i = 0; i < b->best_count && !status; i++) {
        status = add_slab(b, i ? b->best[i - 1] : 0, b->best[i], entries, order);
    }
    ra_free(entries);
    ra_free(order);
    return status ? status : mark(b);
}
