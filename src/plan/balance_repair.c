/*
 * Few runs that do not quite balance: the busiest rank swaps one granule with the idlest, or gives
 * one away, such that both come as near to their mean as one exchange can bring them; again, until
 * the busiest is good enough. Each exchange adds a few runs, where dealing anew would cut all.
 */
#include "plan/balance.h"

#include <math.h>
#include <stdlib.h>

#include "base/alloc.h"

enum { EXCHANGES_PER_RANK = 4, NOTHING = -1 };
static const int64_t STEPS_MAX = (int64_t)1 << 27; /* granules looked at, over all exchanges */

typedef struct item {
    double cost;
    int64_t granule; /* or NOTHING, which costs nothing */
} item;

static int compare_item(const void *a, const void *b)
{
    const item *left = a, *right = b;
    if (left->cost != right->cost) {
        return left->cost < right->cost ? -1 : 1;
    }
    return (left->granule > right->granule) - (left->granule < right->granule);
}

/* The granules of a rank, cheapest first; NOTHING among them if it may also take or give alone. */
static int64_t list_items(const ra_granules *g, const int *owner, int rank, bool nothing, item *out)
{
    int64_t count = 0;
    for (int64_t i = 0; i < g->count; i++) {
        if (owner[i] == rank) {
            out[count++] = (item){g->before[i + 1] - g->before[i], i};
        }
    }
    if (nothing) {
        out[count++] = (item){0, NOTHING};
    }
    if (count > 0) {
        qsort(out, (size_t)count, sizeof *out, compare_item);
    }
    return count;
}

/* The pair whose costs differ most nearly by `wanted`. Returns by how much they differ. */
static double find_pair(const item *from, int64_t from_count, const item *to, int64_t to_count,
                        double wanted, int64_t *give, int64_t *take)
{
    double best = 0, off = INFINITY;
    for (int64_t i = 0, j = 0; i < from_count; i++) {
        while (j + 1 < to_count && from[i].cost - to[j + 1].cost >= wanted) {
            j++;
        }
        for (int64_t at = j; at < to_count && at <= j + 1; at++) {
            double moved = from[i].cost - to[at].cost;
            if (fabs(moved - wanted) < off) {
                off = fabs(moved - wanted);
                best = moved;
                *give = from[i].granule;
                *take = to[at].granule;
            }
        }
    }
    return best;
}

static void find_extremes(const double *load, int ranks, int *busiest, int *idlest)
{
    *busiest = *idlest = 0;
    for (int rank = 1; rank < ranks; rank++) {
        *busiest = load[rank] > load[*busiest] ? rank : *busiest;
        *idlest = load[rank] < load[*idlest] ? rank : *idlest;
    }
}

ra_status ra_balance_repair(const ra_granules *g, bool equal_tokens, double good, double *load,
                            int *owner)
{
    item *from = NULL, *to = NULL;
    double mean = g->before[g->count] / g->ranks;
    ra_status status = RA_NEW(&from, g->count + 1);
    status = status ? status : RA_NEW(&to, g->count + 1);
    for (int64_t n = 0;
         !status && n < (int64_t)EXCHANGES_PER_RANK * g->ranks && n * g->count < STEPS_MAX; n++) {
        int busiest, idlest;
        int64_t give = NOTHING, take = NOTHING;
        find_extremes(load, g->ranks, &busiest, &idlest);
        double gap = load[busiest] - load[idlest];
        if (load[busiest] <= good * mean) {
            break;
        }
        int64_t from_count = list_items(g, owner, busiest, false, from);
        int64_t to_count = list_items(g, owner, idlest, !equal_tokens, to);
        double moved = find_pair(from, from_count, to, to_count, gap / 2, &give, &take);
        if (give == NOTHING || moved <= 0 || moved >= gap) {
            break; /* nothing would become better */
        }
        owner[give] = idlest;
        if (take != NOTHING) {
            owner[take] = busiest;
        }
        load[busiest] -= moved;
        load[idlest] += moved;
    }
    ra_free(from);
    ra_free(to);
    return status;
}
