/* Exact counts from pieces and covers: allowed pairs, tiles. Nothing here is estimated. */
#ifndef RA_PLAN_COST_H
#define RA_PLAN_COST_H

#include "plan/schedule.h"

enum { RA_COST_TILE = 64 }; /* queries and keys of a reported tile */

/* pairs[rank] += allowed (query, key) pairs a head of that rank's queries, for every rank. Linear
 * in pieces and image blocks. */
void ra_cost_pairs(const ra_cover *rule, const ra_pieces *pieces, int64_t *pairs);

/* cost[pos / align] += weight * allowed pairs a head of the queries at pos, over all rows. */
void ra_cost_positions(const ra_cover *rule, const ra_pieces *pieces, double weight, int64_t align,
                       double *cost);

/* Tiles of a cover that some query sees: wholly seen by all their queries, and others. */
void ra_cost_tiles(const ra_cover *cover, int64_t *full, int64_t *partial);

#endif
