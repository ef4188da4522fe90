/* Which global positions each rank owns: a list of runs a rank. Turns every rank's runs into one
 * checked map. Must not know documents. */
#ifndef RA_PLAN_SHARD_H
#define RA_PLAN_SHARD_H

#include "base/status.h"
#include "rule/mask_rule.h"

/* One run in the map of the whole row, with where it lies in its owner's tensors. */
typedef struct ra_owned_run {
    int64_t start, count; /* global positions */
    int64_t index;        /* of the first one along the owner's sequence axis */
    int owner;
} ra_owned_run;

typedef struct ra_shards {
    int rank_count;
    int64_t seq;     /* positions of a row, over all ranks */
    int64_t *length; /* [rank_count] positions of a rank */
    int64_t run_count;
    ra_owned_run *run; /* [run_count], empty runs left out, ascending start: no gap, no overlap */
    bool contiguous;   /* rank r owns one run, before that of rank r + 1 */
} ra_shards;

/* runs: those of rank 0, then of rank 1, ...; run_counts [rank_count]. RA_E_MISMATCH names the
 * positions that two ranks claim or nobody does. */
ra_status ra_shards_build(int rank_count, const int *run_counts, const ra_run *runs,
                          ra_shards *out);
void ra_shards_free(ra_shards *shards);

#endif
