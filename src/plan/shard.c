/* Run lists of ranks to one sorted map of the row. */
#include "plan/shard.h"

#include <stdlib.h>

#include "base/alloc.h"

static int compare_start(const void *a, const void *b)
{
    const ra_owned_run *left = a, *right = b;
    return (left->start > right->start) - (left->start < right->start);
}

/* Runs that continue each other in the row and in one rank's memory become one. */
static void merge_neighbours(ra_shards *shards)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < shards->run_count; i++) {
        ra_owned_run *last = kept > 0 ? &shards->run[kept - 1] : NULL;
        const ra_owned_run *next = &shards->run[i];
        if (last && last->owner == next->owner && last->start + last->count == next->start &&
            last->index + last->count == next->index) {
            last->count += next->count;
        } else {
            shards->run[kept++] = *next;
        }
    }
    shards->run_count = kept;
}

static ra_status check_map(const ra_shards *shards)
{
    int64_t covered = 0;
    for (int64_t i = 0; i < shards->run_count; i++) {
        const ra_owned_run *run = &shards->run[i];
        if (run->start > covered) {
            return RA_FAIL(RA_E_MISMATCH,
                           "runs: nobody owns positions %lld to %lld, expected every position once",
                           (long long)covered, (long long)run->start - 1);
        }
        if (run->start < covered) {
            return RA_FAIL(RA_E_MISMATCH,
                           "runs: ranks %d and %d both own position %lld, expected one owner",
                           shards->run[i - 1].owner, run->owner, (long long)run->start);
        }
        covered = run->start + run->count;
    }
    return RA_OK;
}

static bool is_contiguous(const ra_shards *shards)
{
    for (int64_t i = 1; i < shards->run_count; i++) {
        if (shards->run[i].owner <= shards->run[i - 1].owner) {
            return false;
        }
    }
    return true;
}

ra_status ra_shards_build(int rank_count, const int *run_counts, const ra_run *runs, ra_shards *out)
{
    ra_shards shards = {.rank_count = rank_count};
    int64_t total = 0, given = 0;
    for (int rank = 0; rank < rank_count; rank++) {
        total += run_counts[rank];
    }
    ra_status status = RA_NEW(&shards.length, rank_count);
    if (!status) {
        status = RA_NEW(&shards.run, total);
    }
    if (status) {
        goto done;
    }
    for (int rank = 0; rank < rank_count; rank++) {
        for (int i = 0; i < run_counts[rank]; i++, given++) {
            ra_run run = runs[given];
            if (run.count > 0) {
                shards.run[shards.run_count++] =
                    (ra_owned_run){run.start, run.count, shards.length[rank], rank};
                shards.length[rank] += run.count;
                shards.seq += run.count;
            }
        }
    }
    if (shards.run_count > 0) {
        qsort(shards.run, (size_t)shards.run_count, sizeof *shards.run, compare_start);
    }
    status = check_map(&shards);
    if (!status) {
        merge_neighbours(&shards);
        shards.contiguous = is_contiguous(&shards);
        *out = shards;
        return RA_OK;
    }
done:
    ra_shards_free(&shards);
    return status;
}

void ra_shards_free(ra_shards *shards)
{
    ra_free(shards->length);
    ra_free(shards->run);
    *shards = (ra_shards){0};
}
