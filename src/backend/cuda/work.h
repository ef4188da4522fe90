/*
 * Turns a cover into work lists for the GPU, once a step: tiles of queries, each with its runs of
 * keys, and for every query the interval of keys it may see. Plain host C, so that the lists are
 * tested where there is no GPU. Kernels never search: they walk these arrays. Must not know CUDA,
 * dtypes or pointers to tensors.
 *
 * The lists hold positions and indices of one batch row's sequence axis; heads are not in them:
 * every query head of the layer does the same items. Order of items: piece after piece, as those of
 * a piece share its keys; the pieces with the longest items first and longest first in a piece, so
 * that a persistent grid ends together. A launch enumerates (KV head outermost, item, query head of
 * the group innermost), which keeps what a KV head needs in L2.
 */
#ifndef RA_BACKEND_CUDA_WORK_H
#define RA_BACKEND_CUDA_WORK_H

#include <stdint.h>

#include "plan/cover.h"

enum {
    RA_WORK_FRESH = 1, /* start from nothing, not from (acc, lse) or sums */
    RA_WORK_FINAL = 2, /* store the result in its dtype */
    RA_WORK_CHUNK = 4, /* keys of RA_SOURCE_CHUNK */
};

/* At most `tile` consecutive queries of one piece (one document), and the keys that any of them
 * sees. */
typedef struct ra_work_item {
    int32_t row;   /* along the query tensors' row axis */
    int32_t index; /* of the first query along the sequence axis */
    int32_t count; /* queries, 1 .. tile */
    int32_t reach; /* of the first query in ra_work.reach; the others follow */
    int32_t run_first, run_count;
    int32_t flags; /* RA_WORK_* */
    int32_t keys;  /* sum of the runs' counts: the item's cost */
} ra_work_item;

/* Consecutive keys of one piece. reach compares with pos + offset in the run. */
typedef struct ra_work_run {
    int32_t source;            /* RA_SOURCE_* */
    int32_t row, index, count; /* where the keys are; count >= 1 */
    int32_t pos;               /* position of the first key */
    int32_t full_begin,
        full_end;  /* offsets in the run: keys that every query of the item sees; equal if none */
    int32_t reach; /* key runs only: of the first query in ra_work.reach */
} ra_work_run;

/* Keys [begin, end) by position that a query may see, inside its document. Clamped to the keys that
 * its piece meets, so that differences with positions of runs fit 32 bits; {0, 0} if it meets none.
 */
typedef struct ra_work_reach {
    int32_t begin, end;
} ra_work_reach;

/* The same for the backward's other axis: at most `tile` keys of one piece and the runs of queries
 * that see any of them. */
typedef struct ra_work {
    int32_t q_tile, k_tile; /* of items and of key items */
    int64_t item_count, run_count;
    int64_t longest, shortest; /* keys of query tiles */
    ra_work_item *item;        /* [item_count] */
    ra_work_run *run;          /* key runs, [run_count]; a query tile's runs lie side by side */
    int64_t key_item_count, key_run_count;
    ra_work_item *key_item; /* key tiles: row, index, count of keys; reach holds the position of
                               the first key; a tile that no query sees is not listed */
    ra_work_run *key_run;   /* query runs: row, index, count, pos of queries; source unused; full:
                               queries that see every key of the item */
    int64_t reach_count;
    ra_work_reach *reach; /* [reach_count] of all queries, piece after piece */
} ra_work;

/* q_tile queries an item; k_tile keys a key item, 0 for none (forward only). RA_E_UNSUPPORTED if an
 * index does not fit 32 bits. */
ra_status ra_work_build(const ra_cover *cover, int32_t q_tile, int32_t k_tile, ra_work *out);
void ra_work_free(ra_work *work);

#endif
