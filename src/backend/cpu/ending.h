/* What becomes of one row of a gradient when a tile has computed its part: the sum is begun, added
 * to, or ended as a row of the result. Must not know what is computed. */
#ifndef RA_BACKEND_CPU_ENDING_H
#define RA_BACKEND_CPU_ENDING_H

#include "backend/cpu/tile.h"

/* Rows of one piece and head. */
typedef struct ra_ending {
    const ra_tensor *sums, *result;
    const ra_piece *piece;
    int64_t head;
    bool fresh, final; /* nothing was added before; nothing will be */
} ra_ending;

/* part is used up. */
static inline void ra_end_row(const ra_level *level, const ra_ending *to, int64_t pos, float *part)
{
    int64_t chan = to->sums->size[RA_CHAN];
    float *sum = ra_tile_value(to->sums, to->piece, to->head, pos);
    if (!to->fresh && !to->final) {
        level->add(sum, part, chan);
        return;
    }
    if (!to->fresh) {
        level->add(part, sum, chan);
    }
    const ra_tensor *t = to->final ? to->result : to->sums;
    level->store(part, chan, 1.0f, t->dtype, ra_tile_row(t, to->piece, to->head, pos));
}

#endif
