/*
 * What a slab costs, in steps: products of 64 x 128 x 256 on every SM at once. The constants are
 * measurements on one H200; they choose among plans and promise nothing.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "backend/cuda/slabs_build.h"
#include "base/alloc.h"

enum {
    EPILOGUE_STEPS = 4, /* adding a tile of a result */
    LAUNCH_STEPS = 16,  /* both kernels of a slab */
};

/* A step takes 1024 clocks; in that time memory moves about so much. */
static const double bytes_a_step = 2.7e6;
static const double gemm_factor = 1.08;
/* What products do not hide of sums that go through memory. */
static const double sums_factor = 0.5;
/* How much of a shorter unit the estimates add for an uneven end. None is right for every shape, so
 * each is tried, and what comes out is compared by playing the launches through. */
static const double unevenness[RA_SLAB_ESTIMATES] = {0.25, 1.0};

/* Units of two sizes, the longer first, each to whoever is free: when the last one ends. */
static double two_sizes(double long_count, double longer, double short_count, double shorter,
                        int64_t clusters)
{
    double m = (double)clusters, rounds = floor(long_count / m);
    double late = long_count - rounds * m, early = m - late, best = 0;
    for (int which = 0; which < 2; which++) {
        double base = (rounds + which) * longer, end = base;
        double sure = floor(short_count / m - which * longer / shorter) - 2; /* turns, too few */
        if (which == 1 && late == 0) {
            break;
        }
        end += sure > 0 ? sure * shorter : 0;
        for (double took = 0; took < short_count; end += shorter) {
            double of_early = (double)(int64_t)((end + shorter - rounds * longer) / shorter + 1e-6);
            double of_late =
                (double)(int64_t)((end + shorter - (rounds + 1) * longer) / shorter + 1e-6);
            took = early * of_early + late * (of_late > 0 ? of_late : 0);
        }
        end = late > 0 && end < (rounds + 1) * longer ? (rounds + 1) * longer : end;
        best = which == 0 || end < best ? end : best;
    }
    return best;
}

/* Steps until the last cluster has added its last unit: these, and the share of a shorter unit that
 * an uneven end costs, but not fewer than the longest unit has. */
typedef struct gemm_time {
    double steps, shorter, least;
} gemm_time;

static double gemm_steps(const gemm_time *time, double uneven)
{
    double steps = time->steps + uneven * time->shorter;
    return steps > time->least ? steps : time->least;
}

static gemm_time gemm_cost(const ra_slab_builder *b, const ra_slab_tally *t, int kv_heads)
{
    double tiles = (double)ra_ceil_div(t->tiles, 2), strips = (double)t->strips;
    double query = (double)t->strip_steps / strips + EPILOGUE_STEPS;
    double key = (double)t->blocks / (2 * tiles) * 4 * b->pairs + EPILOGUE_STEPS;
    double query_units = strips * b->pairs * kv_heads * b->parts;
    double key_units = tiles * 2 * kv_heads * b->parts;
    double longest =
        EPILOGUE_STEPS + (double)ra_max_i64(t->longest_strip, t->longest_tile * 4 * b->pairs);
    bool even = (double)t->longest_strip * strips <= 1.2 * (double)t->strip_steps &&
                (double)t->longest_tile * (double)t->tiles <= 1.2 * (double)t->blocks;
    if (even) {
        int clusters = b->layout->clusters;
        double steps = query > key ? two_sizes(query_units, query, key_units, key, clusters)
                                   : two_sizes(key_units, key, query_units, query, clusters);
        return (gemm_time){steps, 0, 0};
    }
    double mean = (query_units * query + key_units * key) / b->layout->clusters;
    return (gemm_time){mean, query < key ? query : key, longest};
}

static double score_cost(const ra_slab_builder *b, const ra_slab_tally *t, int kv_heads)
{
    double chunks = (double)ra_ceil_div(b->layout->chan, RA_STEP);
    int64_t units = ra_ceil_div(t->blocks, 2) * b->pairs * kv_heads;
    double steps = (double)ra_ceil_div(units, b->layout->clusters) * (2.4 * chunks + 2);
    double memory = 2.0 * b->pairs * kv_heads * (double)t->blocks * RA_BLOCK_BYTES / bytes_a_step;
    return steps > memory ? steps : memory;
}

/* Reading and writing the sums of so many strips and tiles. */
static double sums_memory(const ra_slab_builder *b, int64_t strips, int64_t tiles, int kv_heads)
{
    double outputs = (double)(strips * b->pairs + tiles) * kv_heads * b->parts;
    return outputs * 2 * 2 * RA_BLOCK_ROWS * RA_PRODUCT_CHAN * sizeof(float) / bytes_a_step;
}

/* What memory alone takes: ds is read twice, p once, results are read and written. */
static double gemm_memory(const ra_slab_builder *b, const ra_slab_tally *t, int kv_heads)
{
    double blocks = 2.0 * b->pairs * kv_heads * (double)t->blocks * RA_BLOCK_BYTES * 1.5;
    return blocks / bytes_a_step + sums_memory(b, t->strips, t->tiles + 1, kv_heads);
}

static double whole_cost(const ra_slab_builder *b, const ra_slab_tally *t, int kv_heads,
                         double steps)
{
    double memory = gemm_memory(b, t, kv_heads);
    double sums = sums_memory(b, t->part_strips, t->part_tiles, kv_heads);
    double products = steps * gemm_factor + sums * sums_factor;
    return score_cost(b, t, kv_heads) + (products > memory ? products : memory) + LAUNCH_STEPS;
}

void ra_slab_costs(const ra_slab_builder *b, const ra_slab_tally *t, int kv_heads,
                   double cost[RA_SLAB_ESTIMATES])
{
    gemm_time gemm = gemm_cost(b, t, kv_heads);
    for (int i = 0; i < RA_SLAB_ESTIMATES; i++) {
        cost[i] = whole_cost(b, t, kv_heads, gemm_steps(&gemm, unevenness[i]));
    }
}

bool ra_slab_memory_bound(const ra_slab_builder *b, const ra_slab_tally *t, int kv_heads)
{
    gemm_time gemm = gemm_cost(b, t, kv_heads);
    return gemm_memory(b, t, kv_heads) > gemm_steps(&gemm, 0) * gemm_factor;
}

/* ---- the units of a cut, played through */

static int compare_size(const void *a, const void *b)
{
    double left = ((const ra_slab_size *)a)->steps, right = ((const ra_slab_size *)b)->steps;
    return (left < right) - (left > right);
}

/* The first of a heap has the least load; it got more. */
static void sink(double *load, int64_t count)
{
    for (int64_t at = 0;;) {
        int64_t child = 2 * at + 1;
        if (child + 1 < count && load[child + 1] < load[child]) {
            child++;
        }
        if (child >= count || load[at] <= load[child]) {
            return;
        }
        double swap = load[at];
        load[at] = load[child];
        load[child] = swap;
        at = child;
    }
}

double ra_slab_end(ra_slab_size *size, int64_t count, double more, double *load, int64_t clusters)
{
    double end = 0;
    qsort(size, (size_t)count, sizeof *size, compare_size);
    for (int64_t i = 0; i < clusters; i++) {
        load[i] = 0;
    }
    for (int64_t i = 0; i < count; i++) {
        for (int64_t unit = 0; unit < size[i].units; unit++) {
            load[0] += size[i].steps + more;
            end = load[0] > end ? load[0] : end;
            sink(load, clusters);
        }
    }
    return end;
}

/* The sizes in groups [from, to), and what else the cost needs. */
static int64_t sizes_of(ra_slab_builder *b, int32_t from, int32_t to, int kv_heads,
                        ra_slab_size *size, ra_slab_tally *t)
{
    int64_t count = 0, low = b->out->tile_count, high = 0;
    for (int32_t i = from; i < to; i++) {
        const ra_slab_group *g = &b->groups[i];
        int64_t steps = 0;
        for (int32_t j = g->first; j < g->first + g->count; j++) {
            int32_t tile = b->block[j].tile;
            steps += ra_slab_steps(b->out->tile[tile].count);
            b->tile_refs[tile]++;
            low = ra_min_i64(low, tile);
            high = ra_max_i64(high, tile + 1);
        }
        size[count++] = (ra_slab_size){(double)steps, (int64_t)b->pairs * kv_heads * b->parts};
        t->blocks += g->count;
        t->strips++;
        t->part_strips += ra_slab_part_of_strip(b, g);
    }
    int64_t open = 0; /* refs of a tile that has no partner yet */
    for (int64_t tile = low; tile < high; tile++) {
        int64_t refs = b->tile_refs[tile];
        b->tile_refs[tile] = 0;
        t->tiles += refs > 0;
        t->part_tiles += refs > 0 && refs < b->tile_blocks[tile];
        bool last = tile + 1 == high;
        if (refs > 0 && open == 0 && !last) {
            open = refs;
        } else if (refs > 0) {
            double steps = 4.0 * b->pairs * (double)ra_max_i64(refs, open);
            size[count++] = (ra_slab_size){steps, 2 * (int64_t)kv_heads * b->parts};
            open = 0;
        }
    }
    return count;
}

ra_status ra_slab_play(ra_slab_builder *b, int kv_heads, double *cost)
{
    ra_slab_size *size = NULL;
    double *load = NULL;
    RA_TRY(RA_NEW(&size, b->group_count + b->out->tile_count));
    ra_status status = RA_NEW(&load, b->layout->clusters);
    if (!status) {
        *cost = 0;
        memset(b->tile_refs, 0, (size_t)b->out->tile_count * sizeof *b->tile_refs);
        for (int32_t i = 0; i < b->end_count; i++) {
            ra_slab_tally t = {0};
            int64_t count = sizes_of(b, i ? b->end[i - 1] : 0, b->end[i], kv_heads, size, &t);
            double steps = ra_slab_end(size, count, EPILOGUE_STEPS, load, b->layout->clusters);
            *cost += whole_cost(b, &t, kv_heads, steps);
        }
    }
    ra_free(size);
    ra_free(load);
    return status;
}
