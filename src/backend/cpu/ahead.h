/*
 * Rows that are wanted soon, asked for a few at a time while a product runs: rows of a tensor lie
 * too far apart for the machine to see that they follow, and all at once they would hold up what is
 * being computed. Only a hint: changes no result. Must not know what the rows are.
 */
#ifndef RA_BACKEND_CPU_AHEAD_H
#define RA_BACKEND_CPU_AHEAD_H

#include "backend/cpu/level.h"

enum { RA_AHEAD_LISTS = 2, RA_CACHE_LINE = 64 };

/* Lists of equally many rows. */
typedef struct ra_ahead {
    struct {
        const char *row;
        int64_t stride, bytes;
    } list[RA_AHEAD_LISTS];
    int lists;
    int64_t rows; /* left to ask for, of every list */
    int64_t step; /* rows at a time */
} ra_ahead;

/* `rows` rows of each list to be added, within `times` calls of ra_ahead_step. */
static inline ra_ahead ra_ahead_of(int64_t rows, int64_t times)
{
    return (ra_ahead){.rows = rows, .step = (rows + times - 1) / times};
}

static inline void ra_ahead_add(ra_ahead *ahead, ra_rows rows)
{
    int64_t size = (int64_t)ra_dtype_bytes(rows.dtype);
    ahead->list[ahead->lists].row = rows.data;
    ahead->list[ahead->lists].stride = rows.stride * size;
    ahead->list[ahead->lists++].bytes = rows.chan * size;
}

static inline void ra_ahead_step(ra_ahead *ahead)
{
    for (int64_t n = ahead->step; n > 0 && ahead->rows > 0; n--, ahead->rows--) {
        for (int i = 0; i < ahead->lists; i++) {
            for (int64_t at = 0; at < ahead->list[i].bytes; at += RA_CACHE_LINE) {
                __builtin_prefetch(ahead->list[i].row + at, 0, 2);
            }
            ahead->list[i].row += ahead->list[i].stride;
        }
    }
}

/* A product, panel by panel, with a step between panels. */
static inline void ra_ahead_product(ra_ahead *ahead, const ra_operands *operands, ra_product p,
                                    int64_t nr)
{
    for (int64_t end = p.n; p.n_first < end; p.n_first += nr) {
        ra_ahead_step(ahead);
        p.n = p.n_first + nr;
        operands->product(&p);
    }
}

#endif
