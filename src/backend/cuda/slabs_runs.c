/*
 * Cuts the blocks of a slab into runs, whose scores are computed by a pair of CTAs that keeps the
 * queries in registers. A strip is one run, unless the clusters would not end together: then all
 * strips, or the shortest that fill no round of clusters any more, are cut into equal parts. Must
 * not know how a run is computed.
 */
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/slabs_build.h"
#include "base/alloc.h"

/* What loading the queries costs. */
static const double start_steps = 1;
/* Runs that end so little later than the mean of the clusters are good enough. */
static const double good_end = 1.02;
enum { PARTS_MAX = 8 };

/* The runs at hand, the best so far, and scratch. */
typedef struct run_choice {
    ra_slab_run *strip; /* whole strips, the longest first */
    int64_t strip_count;
    ra_slab_run *run, *best;
    int64_t run_count, best_count;
    double best_end;
    ra_slab_size *size;
    double *load;
} run_choice;

/* Longest first. */
static int compare_run(const void *a, const void *b)
{
    const ra_slab_run *left = a, *right = b;
    if (left->steps != right->steps) {
        return left->steps > right->steps ? -1 : 1;
    }
    return (left->first > right->first) - (left->first < right->first);
}

static void sort_runs(ra_slab_run *run, int64_t count)
{
    qsort(run, (size_t)count, sizeof *run, compare_run);
}

/* Blocks [first, end) of the slab, of one strip. */
static ra_slab_run run_of(const ra_slab_builder *b, const ra_slab *slab, int64_t first, int64_t end)
{
    const ra_slab_block *block = b->out->block + slab->block_first;
    int64_t steps = 0;
    for (int64_t i = first; i < end; i++) {
        steps += ra_slab_steps(b->out->tile[block[i].tile].count);
    }
    return (ra_slab_run){
        .strip = block[first].strip,
        .first = (int32_t)first,
        .count = (int32_t)(end - first),
        .steps = (int32_t)steps,
    };
}

static void list_strips(const ra_slab_builder *b, const ra_slab *slab, run_choice *c)
{
    const ra_slab_block *block = b->out->block + slab->block_first;
    c->strip_count = 0;
    for (int64_t first = 0, end = 1; first < slab->block_count; first = end++) {
        while (end < slab->block_count && block[end].strip == block[first].strip) {
            end++;
        }
        c->strip[c->strip_count++] = run_of(b, slab, first, end);
    }
    sort_runs(c->strip, c->strip_count);
}

/* Cuts the strips behind the first `whole`. Runs have nearly one length, however long their strip
 * is. */
static void cut_strips(const ra_slab_builder *b, const ra_slab *slab, run_choice *c, int64_t whole,
                       int64_t parts)
{
    int64_t length = ra_ceil_div(c->strip[whole].count, parts);
    memcpy(c->run, c->strip, (size_t)whole * sizeof *c->run);
    c->run_count = whole;
    for (int64_t i = whole; i < c->strip_count; i++) {
        int64_t first = c->strip[i].first, count = c->strip[i].count;
        int64_t pieces = ra_ceil_div(count, length);
        for (int64_t j = 0; j < pieces; j++) {
            c->run[c->run_count++] =
                run_of(b, slab, first + count * j / pieces, first + count * (j + 1) / pieces);
        }
    }
    sort_runs(c->run, c->run_count);
}

/* Keeps the runs at hand if they end first. The result says whether they are good enough. */
static bool judge_runs(const ra_slab_builder *b, run_choice *c)
{
    int64_t units = (int64_t)b->out->kv_heads * b->pairs, clusters = b->layout->clusters;
    double mean = 0;
    for (int64_t i = 0; i < c->run_count; i++) {
        c->size[i] = (ra_slab_size){c->run[i].steps, units};
        mean += (c->run[i].steps + start_steps) * (double)units / (double)clusters;
    }
    double end = ra_slab_end(c->size, c->run_count, start_steps, c->load, clusters);
    if (c->best_count == 0 || end < c->best_end) {
        ra_slab_run *swap = c->best;
        c->best = c->run;
        c->run = swap;
        c->best_count = c->run_count;
        c->best_end = end;
    }
    return end <= good_end * mean;
}

static void choose_runs(const ra_slab_builder *b, const ra_slab *slab, run_choice *c)
{
    int64_t units = (int64_t)b->out->kv_heads * b->pairs, clusters = b->layout->clusters;
    list_strips(b, slab, c);
    int64_t whole = c->strip_count * units / clusters * clusters / units;
    c->best_count = 0;
    cut_strips(b, slab, c, 0, 1);
    bool good = judge_runs(b, c);
    for (int64_t parts = 2; parts <= PARTS_MAX && !good; parts++) {
        cut_strips(b, slab, c, 0, parts);
        good = judge_runs(b, c);
        if (!good && whole > 0 && whole < c->strip_count) {
            cut_strips(b, slab, c, whole, parts);
            good = judge_runs(b, c);
        }
    }
}

static ra_status add_runs(ra_slab_builder *b, run_choice *c)
{
    ra_slabs *out = b->out;
    for (int64_t i = 0; i < out->slab_count; i++) {
        ra_slab *slab = &out->slab[i];
        choose_runs(b, slab, c);
        RA_TRY(RA_RESERVE(&out->run, &b->run_capacity, out->run_count + c->best_count));
        memcpy(out->run + out->run_count, c->best, (size_t)c->best_count * sizeof *c->best);
        slab->run_first = (int32_t)out->run_count;
        slab->run_count = (int32_t)c->best_count;
        out->run_count += c->best_count;
    }
    return RA_OK;
}

ra_status ra_slab_runs(ra_slab_builder *b)
{
    run_choice c = {0};
    int64_t most = 0;
    for (int64_t i = 0; i < b->out->slab_count; i++) {
        most = ra_max_i64(most, b->out->slab[i].block_count);
    }
    ra_status status = RA_NEW(&c.strip, most);
    status = status ? status : RA_NEW(&c.run, most);
    status = status ? status : RA_NEW(&c.best, most);
    status = status ? status : RA_NEW(&c.size, most);
    status = status ? status : RA_NEW(&c.load, b->layout->clusters);
    status = status ? status : add_runs(b, &c);
    ra_free(c.strip);
    ra_free(c.run);
    ra_free(c.best);
    ra_free(c.size);
    ra_free(c.load);
    return status;
}
