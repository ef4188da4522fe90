/* One run a rank: cut points between granules. The smallest possible maximum is found by bisection
 * on it; within that, cuts move to where ranks own equal numbers of granules. */
#include "plan/balance.h"

#include "base/alloc.h"
#include "base/mathx.h"

/* The farthest end such that the granules from `begin` to it cost at most `cap`. */
static int64_t farthest_end(const ra_granules *g, int64_t begin, double cap)
{
    int64_t low = begin, high = g->count;
    while (low < high) {
        int64_t middle = high - (high - low) / 2;
        if (g->before[middle] - g->before[begin] <= cap) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

/* The nearest begin such that the granules from it to `end` cost at most `cap`. */
static int64_t nearest_begin(const ra_granules *g, int64_t end, double cap)
{
    int64_t low = 0, high = end;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (g->before[end] - g->before[middle] <= cap) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

static bool fits(const ra_granules *g, double cap)
{
    int64_t end = 0;
    for (int rank = 0; rank < g->ranks; rank++) {
        end = farthest_end(g, end, cap);
    }
    return end == g->count;
}

static double smallest_cap(const ra_granules *g)
{
    enum { BISECTIONS = 50 };
    double mean = g->before[g->count] / g->ranks;
    double low = mean, high = (mean + g->largest) * (1 + 1e-12); /* fits: a rank takes its mean */
    for (int i = 0; i < BISECTIONS; i++) {
        double middle = low + (high - low) / 2;
        if (fits(g, middle)) {
            high = middle;
        } else {
            low = middle;
        }
    }
    return high;
}

/* Near the cut of equal costs, the one nearest to equal numbers: half a percent of a mean is given
 * for that. Where granules cost the same, the numbers are equal. */
static int64_t wanted_cut(const ra_granules *g, int rank)
{
    double mean = g->before[g->count] / g->ranks, cost = mean * rank, slack = mean / 200;
    int64_t even = (int64_t)((double)g->count * rank / g->ranks + 0.5);
    int64_t low = farthest_end(g, 0, cost - slack), high = farthest_end(g, 0, cost + slack);
    return ra_clamp_i64(even, low, high);
}

ra_status ra_balance_cut(const ra_granules *g, int *owner)
{
    int64_t *earliest = NULL, begin = 0;
    double mean = g->before[g->count] / g->ranks, cap = smallest_cap(g);
    cap = cap < mean * 1.01 ? mean * 1.01 : cap;
    RA_TRY(RA_NEW(&earliest, g->ranks + 1)); /* of each cut, so that the ranks behind it can fit */
    earliest[g->ranks] = g->count;
    for (int rank = g->ranks - 1; rank > 0; rank--) {
        earliest[rank] = nearest_begin(g, earliest[rank + 1], cap);
    }
    for (int rank = 0; rank < g->ranks; rank++) {
        int64_t end = rank + 1 < g->ranks ? wanted_cut(g, rank + 1) : g->count;
        end = ra_clamp_i64(end, ra_max_i64(begin, earliest[rank + 1]), farthest_end(g, begin, cap));
        for (; begin < end; begin++) {
            owner[begin] = rank;
        }
    }
    ra_free(earliest);
    return RA_OK;
}
