/*
 * What one computation covers: query pieces against key pieces. A piece is a run of tokens of ONE
 * document that lie side by side both in the row and in memory, so no tile ever mixes documents or
 * holds padding. Because the keys that a query may see are one interval (rule/mask_rule.h), the key
 * pieces that a query piece meets are neighbours in the sorted list, and the other way round: the
 * cover stores two numbers a piece, never a list of pairs. A tile of queries and its runs of keys
 * follow by arithmetic: the pieces are the run-length code of the tile lists.
 */
#ifndef RA_PLAN_COVER_H
#define RA_PLAN_COVER_H

#include "plan/tokens.h"

/* Where a key piece's rows are: the rank's own tensors, or the received chunk. */
enum { RA_SOURCE_OWN, RA_SOURCE_CHUNK, RA_SOURCE_COUNT };

typedef struct ra_piece {
    int64_t row;         /* of the batch, for documents and vision blocks */
    int64_t pos, count;  /* global positions [pos, pos + count) */
    int64_t index;       /* of the first token along the tensor's sequence axis */
    int64_t first, last; /* partners [first, last) in the other list; equal if none */
    int64_t tensor_row;  /* index along the tensor's row axis: `row`, or 0 in a chunk */
    int32_t doc;
    int16_t source; /* keys: RA_SOURCE_*; queries: RA_SOURCE_OWN */
    bool fresh;     /* no earlier computation of this step touched these rows */
    bool final;     /* no later one will, nor what comes from other ranks; never of a chunk */
} ra_piece;

typedef struct ra_cover {
    const ra_tokens *tokens; /* for vision blocks; borrowed */
    ra_mask mask;
    int64_t q_count, k_count;
    ra_piece *q, *k; /* both by (row, doc, pos) */
} ra_cover;

/* Sets first and last of every piece. Query pieces without partner stay, with first == last. */
void ra_cover_link(ra_cover *cover);
void ra_cover_free(ra_cover *cover);

/* Key positions of one key piece for the query positions [begin, end) of one query piece. All four
 * lie in the key piece: [begin, full_begin) and [full_end, end) need ra_mask_reach per query,
 * [full_begin, full_end) is seen by every query. */
typedef struct ra_tile {
    int64_t begin, full_begin, full_end, end;
} ra_tile;
ra_tile ra_cover_tile(const ra_cover *cover, const ra_piece *q, int64_t begin, int64_t end,
                      const ra_piece *k);

/* The query positions of one query piece that see any of the key positions [begin, end) of a key
 * piece: a range in the query piece, empty if none. */
ra_range ra_cover_seen_by(const ra_cover *cover, const ra_piece *k, int64_t begin, int64_t end,
                          const ra_piece *q);

/* ra_mask_reach with the vision block looked up. */
ra_range ra_cover_reach(const ra_cover *cover, int64_t row, int64_t pos);

/* Sorts by (row, doc, pos). */
void ra_pieces_sort(ra_piece *pieces, int64_t count);

#endif
