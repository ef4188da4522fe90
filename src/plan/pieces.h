/* Document spans cut at the ends of owned runs: the pieces of all ranks in one sorted list, from
 * which every rank reads who holds what. Must not know layers. */
#ifndef RA_PLAN_PIECES_H
#define RA_PLAN_PIECES_H

#include "plan/tokens.h"

typedef struct ra_owned_piece {
    int64_t row;
    int64_t pos, count; /* global positions */
    int64_t index;      /* of the first one along the owner's sequence axis */
    int32_t doc;
    int owner;
} ra_owned_piece;

/* Consecutive sequence rows of one batch row in a rank's tensors. */
typedef struct ra_local_rows {
    int64_t row, index, count;
} ra_local_rows;

typedef struct ra_pieces {
    int64_t count;
    ra_owned_piece *piece; /* [count] by (row, doc, pos) */
    int64_t *owned_first;  /* [rank count + 1] where a rank's part of `owned` begins */
    int64_t *owned;        /* [count] the pieces of rank 0, of rank 1, ..., each in their order */
} ra_pieces;

ra_status ra_pieces_build(const ra_shards *shards, const ra_tokens *tokens, ra_pieces *out);
void ra_pieces_free(ra_pieces *pieces);

/* The pieces of one row's document are neighbours: are these two of one? */
static inline bool ra_pieces_same_doc(const ra_owned_piece *a, const ra_owned_piece *b)
{
    return a->row == b->row && a->doc == b->doc;
}
/* The end of the group that begins at `first`. */
int64_t ra_pieces_group_end(const ra_pieces *pieces, int64_t first);

/* Sequence rows of `rank` that are in no piece. Free *out with ra_free. */
ra_status ra_pieces_idle(const ra_pieces *pieces, const ra_shards *shards, int64_t rows, int rank,
                         ra_local_rows **out, int64_t *count);

#endif
