/* Granule by granule: the classic rule for jobs of very different lengths. */
#include "plan/balance.h"

#include <stdlib.h>

#include "base/alloc.h"
#include "base/mathx.h"

typedef struct job {
    double cost;
    int64_t granule;
} job;

/* A rank that may still take granules. */
typedef struct bin {
    double cost;
    int64_t taken, room; /* granules */
    int rank;
} bin;

static int compare_job(const void *a, const void *b)
{
    const job *left = a, *right = b;
    if (left->cost != right->cost) {
        return left->cost > right->cost ? -1 : 1;
    }
    return (left->granule > right->granule) - (left->granule < right->granule);
}

/* Equal costs, as of padding, go to the rank that has fewer granules. */
static bool is_before(const bin *a, const bin *b)
{
    if (a->cost != b->cost) {
        return a->cost < b->cost;
    }
    return a->taken != b->taken ? a->taken < b->taken : a->rank < b->rank;
}

/* Lets the first bin of a heap sink to its place. */
static void sink(bin *heap, int count)
{
    for (int at = 0;;) {
        int least = at;
        for (int child = 2 * at + 1; child <= 2 * at + 2 && child < count; child++) {
            least = is_before(&heap[child], &heap[least]) ? child : least;
        }
        if (least == at) {
            return;
        }
        bin moved = heap[at];
        heap[at] = heap[least];
        heap[least] = moved;
        at = least;
    }
}

ra_status ra_balance_greedy(const ra_granules *g, bool equal_tokens, int *owner)
{
    job *jobs = NULL;
    bin *heap = NULL;
    int bins = g->ranks;
    ra_status status = RA_NEW(&jobs, g->count);
    status = status ? status : RA_NEW(&heap, g->ranks);
    if (status) {
        goto done;
    }
    for (int64_t i = 0; i < g->count; i++) {
        jobs[i] = (job){g->before[i + 1] - g->before[i], i};
    }
    qsort(jobs, (size_t)g->count, sizeof *jobs, compare_job);
    for (int rank = 0; rank < g->ranks; rank++) { /* equal bins in order of rank are a heap */
        bool one_more = rank < g->count % g->ranks;
        heap[rank] =
            (bin){.room = equal_tokens ? g->count / g->ranks + one_more : g->count, .rank = rank};
    }
    for (int64_t i = 0; i < g->count; i++) {
        while (heap[0].room == 0) {
            heap[0] = heap[--bins];
            sink(heap, bins);
        }
        owner[jobs[i].granule] = heap[0].rank;
        heap[0].cost += jobs[i].cost;
        heap[0].taken++;
        heap[0].room--;
        sink(heap, bins);
    }
done:
    ra_free(jobs);
    ra_free(heap);
    return status;
}
