/*
 * Plans a backward over a bounded workspace. Pairs of queries and keys are cut into blocks of 128
 * keys and one strip of queries; only blocks with an allowed pair exist. A slab is as many blocks,
 * for some KV heads, as the workspace holds: its probabilities and their gradients are computed and
 * written there, then multiplied into dq, dk and dv. Slabs follow each other on the stream, and in
 * one slab each tile of a result has one writer, so sums have one order. Plain host C, so that
 * plans are tested where there is no GPU. Must not know CUDA, dtypes or pointers to tensors.
 *
 * The lists hold one KV head's work; kernels enumerate heads, those of one unit side by side.
 */
#ifndef RA_BACKEND_CUDA_SLABS_H
#define RA_BACKEND_CUDA_SLABS_H

#include "backend/cuda/work.h"

enum {
    RA_BLOCK_ROWS = 128, /* queries and keys of a block in the workspace */
    RA_BLOCK_KEYS = 128,
    RA_STEP = 64,          /* depth of one step of a product, along keys or queries */
    RA_PRODUCT_CHAN = 256, /* channels of a tile of a result */
    RA_BLOCK_BYTES = 2 * RA_BLOCK_ROWS * RA_BLOCK_KEYS * 2, /* p and ds */
    RA_RUN_CHAN = 256, /* the head_dim whose scores are computed run after run */
};

/* Consecutive queries of one piece, for two units: two heads of a group and up to 128 queries, or,
 * where the group is odd, one head and up to 256. */
typedef struct ra_slab_strip {
    int32_t row, index, count; /* where they are in the query tensors */
    int32_t reach;             /* of the first, in ra_work.reach */
} ra_slab_strip;

/* At most 128 consecutive keys of one piece. */
typedef struct ra_slab_tile {
    int32_t source; /* RA_SOURCE_* */
    int32_t row, index, count;
    int32_t pos; /* position of the first */
    int32_t unused[3];
} ra_slab_tile;

typedef struct ra_slab_block {
    int32_t strip, tile;
} ra_slab_block;

/* Consecutive blocks of one strip, whose scores a pair of CTAs computes one after the other. */
typedef struct ra_slab_run {
    int32_t strip;
    int32_t first, count; /* blocks, counted from the slab's first */
    int32_t steps;        /* of 64 keys */
} ra_slab_run;

/* One strip of the sum of a key tile, for both CTAs of a pair. */
typedef struct ra_slab_ref {
    int32_t row, index; /* of the strip */
    int32_t strip;      /* counted from the slab's first */
    int32_t steps;      /* of 64 queries: of the first unit, and 256 times those of the second */
    int32_t block[2];   /* counted from the slab's first; -1: the CTA's tile sees no such query */
    int32_t unused[2];
} ra_slab_ref;

/* Nothing was added to the part before; nothing will be after this. */
enum { RA_SLAB_FRESH = 1, RA_SLAB_FINAL = 2 };

/* What a pair of CTAs sums up. Queries: dq of the two units of a strip; the terms are blocks. Keys:
 * dk or dv of two tiles; the terms are refs, the same for both CTAs if shared. A CTA of a pair
 * without a second tile gets tile -1; both CTAs have equally many steps. */
typedef struct ra_slab_output {
    int32_t keys; /* 0 or 1 */
    int32_t shared;
    int32_t steps;   /* of one unit (queries) or of all terms for one pair of units (keys) */
    int32_t part[2]; /* strip twice, or tiles */
    int32_t first[2], count[2]; /* terms: blocks counted from the slab's first, or refs */
    int32_t when[2];            /* RA_SLAB_*, of each part */
    int32_t unused;
} ra_slab_output;

/* Units are handed out in this order, longest first. */
typedef struct ra_slab_unit {
    int32_t output;
    int32_t part; /* queries: pair of heads * parts of chan + part; keys: (0 dk, 1 dv) likewise */
} ra_slab_unit;

typedef struct ra_slab {
    int32_t strip_first, strip_count; /* the strips of its blocks lie in this range */
    int32_t block_first, block_count;
    int32_t unit_first, unit_count; /* of one KV head */
    int32_t run_first, run_count;
} ra_slab;

/* What a plan depends on but for the cover. */
typedef struct ra_slab_layout {
    int q_heads, kv_heads, chan;
    int clusters; /* of two CTAs, that run at once */
    size_t workspace_bytes;
} ra_slab_layout;

typedef struct ra_slabs {
    int32_t kv_heads;    /* of one slab; divides those of the layer */
    int32_t units_heads; /* heads of a pair of units: 2, or 1 where the group is odd */
    double cost;         /* predicted, in steps of 64 x 128 x 256 on every SM */
    int64_t strip_count, tile_count, block_count, ref_count, output_count, unit_count, run_count,
        slab_count;
    ra_slab_strip *strip;
    ra_slab_tile *tile;
    ra_slab_block *block; /* slab after slab */
    ra_slab_ref *ref;
    ra_slab_output *output;
    ra_slab_unit *unit;
    ra_slab_run *run; /* none but for RA_RUN_CHAN; of a slab the longest first */
    ra_slab *slab;
    int64_t chunk_slabs; /* up to the last one that adds to the received chunk; 0 = none does */
} ra_slabs;

/* The work lists' host side is that of the same cover. RA_E_UNSUPPORTED if the workspace does not
 * hold one block of one KV head, or an index does not fit 32 bits. */
ra_status ra_slabs_build(const ra_cover *cover, const ra_work *work, const ra_slab_layout *layout,
                         ra_slabs *out);
void ra_slabs_free(ra_slabs *slabs);

#endif
