/* A sweep over the reader's own pieces: its queries on one side, keys of the others on the other.
 * What is neither its own nor seen is not touched, so that the needs of all readers together take
 * no longer than they are large. */
#include "plan/need.h"

/* Where the sweep stands in one document. */
typedef struct sweep {
    const ra_pieces *pieces;
    int reader;
    int64_t cursor; /* the first key piece that may hold something new */
    int64_t done;   /* keys before this position have been visited */
} sweep;

/* The first piece, from the cursor on, that reaches behind `begin`; the query piece itself does.
 * The cursor may be past it, where all keys up to there have been visited. */
static int64_t first_seen(const sweep *s, int64_t query, int64_t begin)
{
    int64_t first = ra_max_i64(query, s->cursor);
    while (first > s->cursor) {
        const ra_owned_piece *before = &s->pieces->piece[first - 1];
        if (!ra_pieces_same_doc(before, &s->pieces->piece[query]) ||
            before->pos + before->count <= begin) {
            break;
        }
        first--;
    }
    return first;
}

/* Visits what one query piece sees and no earlier one saw. */
static ra_status walk_piece(sweep *s, int64_t query, ra_range reach, ra_need_visit visit,
                            void *context)
{
    const ra_owned_piece *piece = s->pieces->piece;
    int64_t begin = ra_max_i64(reach.begin, s->done);
    s->cursor = first_seen(s, query, begin);
    while (s->cursor < s->pieces->count) {
        const ra_owned_piece *key = &piece[s->cursor];
        int64_t end = key->pos + key->count;
        if (!ra_pieces_same_doc(key, &piece[query]) || key->pos >= reach.end) {
            break;
        }
        int64_t from = ra_max_i64(key->pos, begin), to = ra_min_i64(end, reach.end);
        if (from < to && key->owner != s->reader) {
            RA_TRY(visit(context, key, from, to));
        }
        if (end > reach.end) {
            break; /* a later query may see the rest */
        }
        s->cursor++;
    }
    s->done = ra_max_i64(s->done, reach.end);
    return RA_OK;
}

ra_status ra_need_walk(const ra_cover *rule, const ra_pieces *pieces, int reader,
                       ra_need_visit visit, void *context)
{
    sweep s = {.pieces = pieces, .reader = reader};
    const ra_owned_piece *before = NULL;
    for (int64_t n = pieces->owned_first[reader]; n < pieces->owned_first[reader + 1]; n++) {
        int64_t query = pieces->owned[n];
        const ra_owned_piece *q = &pieces->piece[query];
        if (!before || !ra_pieces_same_doc(before, q)) {
            s.done = -RA_SEQ_MAX;
        }
        ra_range head = ra_cover_reach(rule, q->row, q->pos);
        ra_range tail = ra_cover_reach(rule, q->row, q->pos + q->count - 1);
        RA_TRY(walk_piece(&s, query, (ra_range){head.begin, tail.end}, visit, context));
        before = q;
    }
    return RA_OK;
}
