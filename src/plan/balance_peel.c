/*
 * Equal numbers and equal costs at once. Among all windows of one rank's number of granules, some
 * cost at least the mean of what is left and some at most that; sliding from one kind to the other
 * changes the cost by a granule at a time, so a window between them costs the mean. It becomes a
 * rank's share, the row closes behind it, and what is left is dealt to the others in the same way.
 * Each share adds at most two cuts, so ranks own less than two runs on average; a causal document
 * ends up as a zigzag.
 */
#include "plan/balance.h"

#include <math.h>

#include "base/alloc.h"
#include "base/mathx.h"

/* Granules [begin, end) that nobody owns yet. */
typedef struct segment {
    int64_t begin, end;
    int64_t passed; /* granules of the segments before */
    double cost;    /* likewise */
} segment;

/* The row that is left, as if nothing had been between its segments. */
typedef struct rest {
    const ra_granules *g;
    segment *segment, *spare; /* the list, and memory for the next one */
    int64_t segment_count;
    int64_t count; /* granules */
    double cost;
} rest;

static void add_up(rest *r)
{
    r->count = 0;
    r->cost = 0;
    for (int64_t i = 0; i < r->segment_count; i++) {
        segment *s = &r->segment[i];
        s->passed = r->count;
        s->cost = r->cost;
        r->count += s->end - s->begin;
        r->cost += r->g->before[s->end] - r->g->before[s->begin];
    }
}

static double cost_before(const rest *r, int64_t at)
{
    int64_t low = 0, high = r->segment_count - 1;
    while (low < high) {
        int64_t middle = high - (high - low) / 2;
        if (r->segment[middle].passed <= at) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    const segment *s = &r->segment[low];
    return s->cost + r->g->before[s->begin + at - s->passed] - r->g->before[s->begin];
}

/* The search for a window of `length` granules that costs from low to high. */
typedef struct search {
    const rest *r;
    int64_t length;
    double low, high;
    int64_t best;   /* where the nearest window so far begins */
    double missing; /* what it costs too much or too little; 0 = found */
} search;

/* Negative, zero or positive as the window at `at` is too cheap, right or too expensive. */
static double try_window(search *s, int64_t at)
{
    double cost = cost_before(s->r, at + s->length) - cost_before(s->r, at);
    double off = cost < s->low ? cost - s->low : cost > s->high ? cost - s->high : 0;
    if (fabs(off) < s->missing) {
        s->missing = fabs(off);
        s->best = at;
    }
    return off;
}

/* Windows that begin in [from, to]: every `length`-th and the last, then between two of which one
 * is too cheap and the other too expensive. */
static bool find_between(search *s, int64_t from, int64_t to)
{
    int64_t a = from;
    double a_off = try_window(s, a);
    while (s->missing > 0 && a < to) {
        int64_t b = ra_min_i64(a + s->length, to);
        double b_off = try_window(s, b);
        if ((a_off < 0) != (b_off < 0)) {
            while (s->missing > 0 && b - a > 1) {
                int64_t middle = a + (b - a) / 2;
                if ((try_window(s, middle) < 0) == (a_off < 0)) {
                    a = middle;
                } else {
                    b = middle;
                }
            }
            break;
        }
        a = b;
        a_off = b_off;
    }
    return s->missing == 0;
}

/* In order of preference: at the end of a segment, which saves a cut; inside one; over gaps. */
static bool find_in_order(search *s)
{
    const rest *r = s->r;
    for (int inside = 0; inside < 2; inside++) {
        for (int64_t i = 0; i < r->segment_count; i++) {
            int64_t from = r->segment[i].passed;
            int64_t to = from + r->segment[i].end - r->segment[i].begin - s->length;
            if (to >= from && (inside ? find_between(s, from, to)
                                      : try_window(s, from) == 0 || try_window(s, to) == 0)) {
                return true;
            }
        }
    }
    return find_between(s, 0, r->count - s->length);
}

/* The begin of a window that costs `wanted`, or a little less if `below`, else a little more; if
 * granules are too large for that, whatever is nearest. */
static int64_t find_window(const rest *r, int64_t length, double wanted, bool below, double mean)
{
    search s = {.r = r, .length = length};
    for (int slack = 1; slack <= 4; slack *= 2) { /* half a percent of a mean, one, two */
        s.low = below ? wanted - mean * slack / 200 : wanted;
        s.high = below ? wanted : wanted + mean * slack / 200;
        s.missing = INFINITY;
        if (find_in_order(&s)) {
            return s.best;
        }
    }
    s.low = s.high = wanted;
    s.missing = INFINITY;
    for (int64_t at = 0; at + length <= r->count && s.missing > 0; at++) {
        try_window(&s, at);
    }
    return s.best;
}

/* Gives the window to a rank and closes the row behind it. */
static void take_window(rest *r, int64_t at, int64_t length, int rank, int *owner)
{
    segment *kept = r->spare;
    int64_t kept_count = 0;
    for (int64_t i = 0; i < r->segment_count; i++) {
        const segment *s = &r->segment[i];
        int64_t size = s->end - s->begin;
        int64_t first = s->begin + ra_clamp_i64(at - s->passed, 0, size);
        int64_t last = s->begin + ra_clamp_i64(at + length - s->passed, 0, size);
        for (int64_t taken = first; taken < last; taken++) {
            owner[taken] = rank;
        }
        if (s->begin < first) {
            kept[kept_count++] = (segment){s->begin, first, 0, 0};
        }
        if (last < s->end) {
            kept[kept_count++] = (segment){last, s->end, 0, 0};
        }
    }
    r->spare = r->segment;
    r->segment = kept;
    r->segment_count = kept_count;
    add_up(r);
}

ra_status ra_balance_peel(const ra_granules *g, int *owner)
{
    rest r = {.g = g, .segment_count = 1};
    double mean = g->before[g->count] / g->ranks, dealt = 0;
    ra_status status = RA_NEW(&r.segment, g->ranks + 1); /* each window adds one at most */
    status = status ? status : RA_NEW(&r.spare, g->ranks + 1);
    if (status) {
        goto done;
    }
    r.segment[0].end = g->count;
    add_up(&r);
    for (int rank = 0; rank < g->ranks && r.count > 0; rank++) {
        int64_t left = g->ranks - rank, length = ra_ceil_div(r.count, left);
        /* Ranks before that got too much or too little are made up for, so errors do not grow. */
        bool below = dealt > mean * rank;
        double wanted = r.cost / (double)left, before = r.cost;
        int64_t at = find_window(&r, length, wanted, below, mean);
        take_window(&r, at, length, rank, owner);
        dealt += before - r.cost;
    }
done:
    ra_free(r.segment);
    ra_free(r.spare);
    return status;
}
