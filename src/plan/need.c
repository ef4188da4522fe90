/* A sweep over one document's pieces: queries of the reader on one side, keys of the others on the
 * other. */
#include "plan/need.h"

/* Visits what one query piece sees of [cursor, group end) behind `done`; returns how far it saw in
 * *done. */
static ra_status walk_piece(ra_range reach, const ra_pieces *pieces, int reader, int64_t *cursor,
                            int64_t group_end, int64_t *done, ra_need_visit visit, void *context)
{
    int64_t begin = ra_max_i64(reach.begin, *done);
    while (*cursor < group_end) {
        const ra_owned_piece *key = &pieces->piece[*cursor];
        int64_t end = key->pos + key->count;
        if (key->pos >= reach.end) {
            break;
        }
        int64_t from = ra_max_i64(key->pos, begin), to = ra_min_i64(end, reach.end);
        if (from < to && key->owner != reader) {
            RA_TRY(visit(context, key, from, to));
        }
        if (end > reach.end) {
            break; /* a later query may see the rest */
        }
        ++*cursor;
    }
    *done = ra_max_i64(*done, reach.end);
    return RA_OK;
}

ra_status ra_need_walk(const ra_cover *rule, const ra_pieces *pieces, int reader,
                       ra_need_visit visit, void *context)
{
    for (int64_t first = 0; first < pieces->count;) {
        int64_t group_end = ra_pieces_group_end(pieces, first);
        int64_t cursor = first, done = -RA_SEQ_MAX;
        for (int64_t i = first; i < group_end; i++) {
            const ra_owned_piece *q = &pieces->piece[i];
            if (q->owner == reader) {
                ra_range head = ra_cover_reach(rule, q->row, q->pos);
                ra_range tail = ra_cover_reach(rule, q->row, q->pos + q->count - 1);
                RA_TRY(walk_piece((ra_range){head.begin, tail.end}, pieces, reader, &cursor,
                                  group_end, &done, visit, context));
            }
        }
        first = group_end;
    }
    return RA_OK;
}
