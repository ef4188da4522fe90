/* Runs of global positions: the two classic ways to deal a row, and what runs do to arrays: whole
 * rows become a rank's slice and back. Must not know what the arrays hold. */
#include <string.h>

#include "base/mathx.h"
#include "base/status.h"

/* The part-th of `parts` pieces of seq: the first seq mod parts pieces hold one position more. */
static ra_run piece_of(int64_t seq, int64_t parts, int64_t part)
{
    int64_t base = seq / parts, extra = seq % parts;
    return (ra_run){part * base + ra_min_i64(part, extra), base + (part < extra ? 1 : 0)};
}

/* Positions that no rank of that size could own have no runs. */
static bool has_runs(int rank, int size, int64_t seq)
{
    return rank >= 0 && rank < size && seq >= 0;
}

int ra_runs_contiguous(int rank, int size, int64_t seq, ra_run out[1])
{
    if (!has_runs(rank, size, seq)) {
        return 0;
    }
    out[0] = piece_of(seq, size, rank);
    return out[0].count > 0 ? 1 : 0;
}

int ra_runs_zigzag(int rank, int size, int64_t seq, ra_run out[2])
{
    int count = 0;
    if (!has_runs(rank, size, seq)) {
        return 0;
    }
    ra_run head = piece_of(seq, 2 * (int64_t)size, rank);
    ra_run tail = piece_of(seq, 2 * (int64_t)size, 2 * (int64_t)size - 1 - rank);
    if (head.count > 0) {
        out[count++] = head;
    }
    if (tail.count > 0) {
        out[count++] = tail;
    }
    return count;
}

int64_t ra_runs_positions(const ra_run *runs, int64_t run_count, int64_t *out)
{
    int64_t count = 0;
    for (int64_t i = 0; runs && i < run_count; i++) {
        for (int64_t j = 0; out && j < runs[i].count; j++) {
            out[count + j] = runs[i].start + j;
        }
        count += ra_max_i64(0, runs[i].count);
    }
    return count;
}

/* A copy of nothing becomes one of no rows. */
static ra_status check_copy(const ra_run *runs, int64_t run_count, const void *from, int64_t *outer,
                            int64_t seq, size_t width, const void *to)
{
    size_t bytes;
    if (run_count < 0 || *outer < 0 || seq < 0) {
        return RA_FAIL(RA_E_ARG, "run_count, outer, seq: %lld, %lld, %lld, expected 0 or more",
                       (long long)run_count, (long long)*outer, (long long)seq);
    }
    if (run_count > 0 && !runs) {
        return RA_FAIL(RA_E_ARG, "runs: NULL, expected %lld of them", (long long)run_count);
    }
    if (__builtin_mul_overflow(*outer, seq, &bytes) ||
        __builtin_mul_overflow(bytes, width, &bytes)) {
        return RA_FAIL(RA_E_ARG, "outer, seq, width: %lld x %lld x %zu bytes, more than memory has",
                       (long long)*outer, (long long)seq, width);
    }
    bool moves = false;
    for (int64_t i = 0; i < run_count; i++) {
        if (runs[i].start < 0 || runs[i].count < 0 || runs[i].start > seq ||
            runs[i].count > seq - runs[i].start) {
            return RA_FAIL(RA_E_ARG, "runs[%lld]: %lld + %lld, expected positions of [0, %lld)",
                           (long long)i, (long long)runs[i].start, (long long)runs[i].count,
                           (long long)seq);
        }
        moves = moves || (bytes > 0 && runs[i].count > 0);
    }
    if (moves && (!from || !to)) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", from ? "destination" : "source");
    }
    *outer = moves ? *outer : 0;
    return RA_OK;
}

ra_status ra_runs_take(const ra_run *runs, int64_t run_count, const void *whole, int64_t outer,
                       int64_t seq, size_t width, void *slice)
{
    RA_TRY(check_copy(runs, run_count, whole, &outer, seq, width, slice));
    char *to = slice;
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t i = 0; i < run_count; i++) {
            size_t bytes = (size_t)runs[i].count * width;
            if (bytes > 0) {
                memcpy(to, (const char *)whole + (size_t)(o * seq + runs[i].start) * width, bytes);
                to += bytes;
            }
        }
    }
    return RA_OK;
}

ra_status ra_runs_put(const ra_run *runs, int64_t run_count, const void *slice, int64_t outer,
                      int64_t seq, size_t width, void *whole)
{
    RA_TRY(check_copy(runs, run_count, slice, &outer, seq, width, whole));
    const char *from = slice;
    for (int64_t o = 0; o < outer; o++) {
        for (int64_t i = 0; i < run_count; i++) {
            size_t bytes = (size_t)runs[i].count * width;
            if (bytes > 0) {
                memcpy((char *)whole + (size_t)(o * seq + runs[i].start) * width, from, bytes);
                from += bytes;
            }
        }
    }
    return RA_OK;
}
