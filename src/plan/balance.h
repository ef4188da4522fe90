/* Ways to deal a row of granules to ranks so that costs are equal. A granule is the unit of
 * alignment: consecutive positions that stay together. Must not know what a cost is. */
#ifndef RA_PLAN_BALANCE_H
#define RA_PLAN_BALANCE_H

#include "base/status.h"

typedef struct ra_granules {
    int64_t count;
    const double *before; /* [count + 1] cost of the granules before one: never falls */
    double largest;       /* cost of one granule */
    int ranks;
} ra_granules;

/* All write owner[count]. m is the mean of a rank, g the largest granule. */

/* One run a rank, in rank order: no rank costs more than m plus the larger of g and m / 100. */
ra_status ra_balance_cut(const ra_granules *granules, int *owner);
/* Equal numbers of granules (or one more), at most 2 * ranks - 1 runs in all. If g is at most m /
 * 100, every share misses the mean of what was left by m / 50 at most, to the side that makes up
 * for those before, so no rank costs more than 1.03 m. */
ra_status ra_balance_peel(const ra_granules *granules, int *owner);
/* Exchanges granules of a deal until no rank costs more than good * m, or nothing helps. load:
 * [ranks] the costs of the ranks. */
ra_status ra_balance_repair(const ra_granules *granules, bool equal_tokens, double good,
                            double *load, int *owner);
/* The most expensive granule first, each to the cheapest rank; many runs. For granules so large
 * that where they stand cannot matter. */
ra_status ra_balance_greedy(const ra_granules *granules, bool equal_tokens, int *owner);

#endif
