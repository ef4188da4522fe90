/* A place in a message, for transports that move it piece by piece: what lies next, in as few
 * stretches as the blocks allow. Must not know whose memory it is or what is done with it. */
#ifndef RA_COMM_CURSOR_H
#define RA_COMM_CURSOR_H

#include "base/mathx.h"
#include "ringattn.h"

/* Byte `used` of row `row` of a block; starts as {.block = xfer->blocks}. */
typedef struct ra_cursor {
    const ra_block *block;
    int64_t row;
    size_t used;
} ra_cursor;

/* `rows` pieces of `width` bytes, `stride` bytes apart. */
typedef struct ra_stretch {
    char *data;
    size_t width, stride;
    int64_t rows;
} ra_stretch;

/* The next 1 to `most` bytes, whole rows of one block or a part of one row, and moves on. The
 * message holds at least `most` > 0 bytes more. */
static inline ra_stretch ra_cursor_take(ra_cursor *at, size_t most)
{
    for (;; at->block++) {
        const ra_block *b = at->block;
        bool joined = b->stride == b->width; /* rows without gaps between them are one */
        size_t width = joined ? b->width * (size_t)b->count : b->width;
        int64_t rows = joined ? 1 : b->count;
        if (width == 0 || at->row >= rows) {
            at->row = 0;
            continue;
        }
        ra_stretch s = {(char *)b->data + (size_t)at->row * b->stride + at->used, width, b->stride,
                        1};
        if (at->used == 0 && most >= width) {
            s.rows = ra_min_i64(rows - at->row, (int64_t)(most / width));
            at->row += s.rows;
            return s;
        }
        s.width = width - at->used < most ? width - at->used : most;
        at->used += s.width;
        if (at->used == width) {
            at->used = 0;
            at->row++;
        }
        return s;
    }
}

static inline size_t ra_stretch_bytes(const ra_stretch *s)
{
    return s->width * (size_t)s->rows;
}

#endif
