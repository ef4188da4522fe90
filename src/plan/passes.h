/*
 * Cuts the covers of consecutive computations where rows differ in whether a computation touches
 * them, and whether it is the first or the last that does: so that a result is begun without being
 * zeroed, ended without being copied, and only rows that several computations touch are kept
 * between them. Must not know ranks, tensors or what is computed.
 */
#ifndef RA_PLAN_PASSES_H
#define RA_PLAN_PASSES_H

#include "plan/cover.h"

/* Rows as pieces that do not overlap, by (row, doc, pos). */
typedef struct ra_piece_set {
    ra_piece *piece;
    int64_t count, capacity;
} ra_piece_set;

/* Adds sorted pieces; they may overlap those that are there. */
ra_status ra_piece_set_add(ra_piece_set *set, const ra_piece *pieces, int64_t count);
/* Takes the rows of sorted pieces out. */
ra_status ra_piece_set_subtract(ra_piece_set *set, const ra_piece *pieces, int64_t count);
/* Takes in the rest of their tiles of `tile` rows: counted from where each piece of a larger set
 * begins, which holds all rows of this one. */
ra_status ra_piece_set_fill(ra_piece_set *set, const ra_piece_set *among, int64_t tile);
void ra_piece_set_free(ra_piece_set *set);

/* Drops every row that has no partner, in a cover that is linked, and links what is left. */
ra_status ra_cover_trim(ra_cover *cover);

/* Trims the covers, of computations in this order, and sets fresh and final of all pieces. Rows of
 * a received chunk are fresh and never final: they have one computation, and another owner. begun:
 * own keys whose sums hold something before; later: own keys that something else adds to
 * afterwards. */
ra_status ra_passes_mark(ra_cover *const *covers, int count, const ra_piece_set *begun,
                         const ra_piece_set *later);

#endif
