/*
 * Between the parts of the plan of slabs: what slabs.c chose and slabs_lists.c and slabs_runs.c
 * write down. Private to them.
 */
#ifndef RA_BACKEND_CUDA_SLABS_BUILD_H
#define RA_BACKEND_CUDA_SLABS_BUILD_H

#include "backend/cuda/slabs.h"
#include "base/mathx.h"

/* Consecutive blocks of one strip in one band. */
typedef struct ra_slab_group {
    int32_t strip, band, first, count;
    int32_t steps; /* of one unit of queries, all its blocks */
} ra_slab_group;

enum { RA_SLAB_ESTIMATES = 2 }; /* of what a cut costs */

typedef struct ra_slab_builder {
    const ra_cover *cover;
    const ra_work *work;
    const ra_slab_layout *layout;
    ra_slabs *out;
    int pairs, parts; /* of units of a KV head; of channels */
    int64_t strip_capacity, block_capacity, ref_capacity, output_capacity, unit_capacity,
        run_capacity, slab_capacity;
    int32_t *tile_first;  /* [k_count] */
    ra_slab_block *block; /* by strip and tile; out->block is by slab */
    int64_t block_count;
    int32_t *strip_block;            /* [strip_count + 1] */
    uint8_t *strip_when, *tile_when; /* RA_SLAB_* that their pieces allow */
    int64_t strip_when_capacity;
    ra_slab_group *groups;
    int64_t group_count, group_capacity;
    int32_t *tile_blocks;               /* of all slabs together, [tile_count] */
    int32_t *tile_stamp, *tile_refs;    /* scratch, likewise */
    double (*cost)[RA_SLAB_ESTIMATES];  /* scratch, [group_count + 1] */
    int32_t (*from)[RA_SLAB_ESTIMATES]; /* scratch, likewise */
    int32_t *end;                       /* of each slab in groups; of the cut at hand */
    int32_t end_count;
    int32_t *best; /* likewise; of the best cut so far, over groups of this width in tiles */
    int32_t best_count, best_width;
} ra_slab_builder;

/* Of one unit, over so many queries or keys. */
static inline int64_t ra_slab_steps(int64_t count)
{
    return ra_ceil_div(ra_clamp_i64(count, 0, RA_BLOCK_ROWS), RA_STEP);
}

/* What the cost of a slab depends on. */
typedef struct ra_slab_tally {
    int64_t blocks, strips, tiles, strip_steps, longest_strip, longest_tile;
    int64_t part_strips, part_tiles; /* those that other slabs add to, too */
} ra_slab_tally;

/* Does another group, of another band, hold blocks of this one's strip? */
static inline bool ra_slab_part_of_strip(const ra_slab_builder *b, const ra_slab_group *g)
{
    return g->count < b->strip_block[g->strip + 1] - b->strip_block[g->strip];
}

/* Predicted, in steps. */
void ra_slab_costs(const ra_slab_builder *b, const ra_slab_tally *t, int kv_heads,
                   double cost[RA_SLAB_ESTIMATES]);
/* Is adding up bound by memory and not by products? */
bool ra_slab_memory_bound(const ra_slab_builder *b, const ra_slab_tally *t, int kv_heads);

/* How many units take how many steps. */
typedef struct ra_slab_size {
    double steps;
    int64_t units;
} ra_slab_size;

/* When the last of these units ends, each `more` steps longer: longest first, each to the cluster
 * that is free first. Sorts them. load: scratch, [clusters]. */
double ra_slab_end(ra_slab_size *size, int64_t count, double more, double *load, int64_t clusters);

/* The cost of all slabs of the cut at hand, by playing the units through in their order. Takes time
 * for every unit, so for no more blocks than RA_SLAB_PLAY_MAX. */
enum { RA_SLAB_PLAY_MAX = 1 << 15 };
ra_status ra_slab_play(ra_slab_builder *b, int kv_heads, double *cost);

/* The blocks, outputs, refs and units of every slab chosen. */
ra_status ra_slab_lists(ra_slab_builder *b);
/* Then their runs. */
ra_status ra_slab_runs(ra_slab_builder *b);

#endif
