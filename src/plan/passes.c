/* Sorted lists of pieces are walked side by side; none is ever searched. */
#include "plan/passes.h"

#include "base/alloc.h"

static int64_t end_of(const ra_piece *piece)
{
    return piece->pos + piece->count;
}

static bool same_doc(const ra_piece *a, const ra_piece *b)
{
    return a->row == b->row && a->doc == b->doc;
}

static bool is_before(const ra_piece *a, const ra_piece *b)
{
    if (a->row != b->row) {
        return a->row < b->row;
    }
    return a->doc != b->doc ? a->doc < b->doc : a->pos < b->pos;
}

/* Are the rows of b the next ones behind those of a, wherever one looks? */
static bool continues(const ra_piece *a, const ra_piece *b)
{
    return same_doc(a, b) && a->source == b->source && end_of(a) == b->pos &&
           a->index + a->count == b->index && a->fresh == b->fresh && a->final == b->final;
}

static ra_status push(ra_piece_set *to, const ra_piece *piece)
{
    ra_piece *last = to->count > 0 ? &to->piece[to->count - 1] : NULL;
    if (last && continues(last, piece)) {
        last->count += piece->count;
        return RA_OK;
    }
    RA_TRY(RA_RESERVE(&to->piece, &to->capacity, to->count + 1));
    to->piece[to->count++] = *piece;
    return RA_OK;
}

/* Positions [begin, end) of a piece, if there are any. */
static ra_status push_part(ra_piece_set *to, const ra_piece *whole, int64_t begin, int64_t end)
{
    ra_piece part = *whole;
    part.pos = begin;
    part.count = end - begin;
    part.index += begin - whole->pos;
    return part.count > 0 ? push(to, &part) : RA_OK;
}

void ra_piece_set_free(ra_piece_set *set)
{
    ra_free(set->piece);
    *set = (ra_piece_set){0};
}

/* Takes the place of a cover's list, which may be as large as the plan: no byte too much. */
static ra_status replace(ra_piece_set *by, ra_piece **list, int64_t *count)
{
    if (by->count < by->capacity) {
        ra_piece *exact = NULL;
        RA_TRY(RA_NEW(&exact, by->count));
        for (int64_t i = 0; i < by->count; i++) {
            exact[i] = by->piece[i];
        }
        ra_free(by->piece);
        by->piece = exact;
    }
    ra_free(*list);
    *list = by->piece;
    *count = by->count;
    *by = (ra_piece_set){0};
    return RA_OK;
}

/* ---- rows without a partner */

/* The queries of a piece that see some key. Each key piece is seen by a range of them, and these
 * ranges only move forward. */
static ra_status push_seeing(ra_piece_set *to, const ra_cover *cover, const ra_piece *q)
{
    int64_t done = q->pos;
    for (int64_t j = q->first; j < q->last && done < end_of(q); j++) {
        const ra_piece *k = &cover->k[j];
        ra_range seeing = ra_cover_seen_by(cover, k, k->pos, end_of(k), q);
        RA_TRY(push_part(to, q, ra_max_i64(done, seeing.begin), seeing.end));
        done = ra_max_i64(done, seeing.end);
    }
    return RA_OK;
}

/* The keys of a piece that some query sees, likewise. */
static ra_status push_seen(ra_piece_set *to, const ra_cover *cover, const ra_piece *k)
{
    int64_t done = k->pos;
    for (int64_t i = k->first; i < k->last && done < end_of(k); i++) {
        const ra_piece *q = &cover->q[i];
        ra_tile seen = ra_cover_tile(cover, q, q->pos, end_of(q), k);
        RA_TRY(push_part(to, k, ra_max_i64(done, seen.begin), seen.end));
        done = ra_max_i64(done, seen.end);
    }
    return RA_OK;
}

ra_status ra_cover_trim(ra_cover *cover)
{
    ra_piece_set queries = {0}, keys = {0};
    ra_status status = RA_OK;
    for (int64_t i = 0; i < cover->q_count && !status; i++) {
        status = push_seeing(&queries, cover, &cover->q[i]);
    }
    status = status ? status : replace(&queries, &cover->q, &cover->q_count);
    if (!status) {
        ra_cover_link(cover);
    }
    for (int64_t i = 0; i < cover->k_count && !status; i++) {
        status = push_seen(&keys, cover, &cover->k[i]);
    }
    status = status ? status : replace(&keys, &cover->k, &cover->k_count);
    if (!status) {
        ra_cover_link(cover);
    }
    ra_piece_set_free(&queries);
    ra_piece_set_free(&keys);
    return status;
}

/* ---- first and last */

typedef enum mark { FRESH, FINAL } mark;

static void set_mark(ra_piece *piece, mark which, bool value)
{
    *(which == FRESH ? &piece->fresh : &piece->final) = value;
}

/* The same rows, cut at the ends of what others touch; marked are those that they do not. */
static ra_status cut(const ra_piece *pieces, int64_t count, const ra_piece_set *others, mark which,
                     ra_piece_set *to)
{
    int64_t at = 0;
    for (int64_t i = 0; i < count; i++) {
        ra_piece alone = pieces[i], shared = pieces[i];
        int64_t done = alone.pos, end = end_of(&alone);
        set_mark(&alone, which, true);
        set_mark(&shared, which, false);
        while (at < others->count &&
               (same_doc(&others->piece[at], &alone) ? end_of(&others->piece[at]) <= done
                                                     : is_before(&others->piece[at], &alone))) {
            at++;
        }
        for (int64_t j = at;
             j < others->count && same_doc(&others->piece[j], &alone) && others->piece[j].pos < end;
             j++) {
            int64_t begin = ra_max_i64(others->piece[j].pos, done);
            int64_t stop = ra_min_i64(end_of(&others->piece[j]), end);
            RA_TRY(push_part(to, &alone, done, begin));
            RA_TRY(push_part(to, &shared, begin, stop));
            done = stop;
        }
        RA_TRY(push_part(to, &alone, done, end));
    }
    return RA_OK;
}

/* Adds the marked ones of pieces that were cut by the set. A received chunk is nobody else's. */
static ra_status merge_marked(ra_piece_set *set, const ra_piece *pieces, int64_t count, mark which)
{
    ra_piece_set both = {0};
    ra_status status = RA_OK;
    int64_t at = 0;
    for (int64_t i = 0; i < count && !status; i++) {
        ra_piece piece = pieces[i];
        if (piece.source != RA_SOURCE_OWN || !(which == FRESH ? piece.fresh : piece.final)) {
            continue;
        }
        while (!status && at < set->count && is_before(&set->piece[at], &piece)) {
            status = push(&both, &set->piece[at++]);
        }
        piece.fresh = piece.final = false; /* so that neighbours are joined */
        status = status ? status : push(&both, &piece);
    }
    while (!status && at < set->count) {
        status = push(&both, &set->piece[at++]);
    }
    if (status) {
        ra_piece_set_free(&both);
        return status;
    }
    ra_piece_set_free(set);
    *set = both;
    return RA_OK;
}

ra_status ra_piece_set_add(ra_piece_set *set, const ra_piece *pieces, int64_t count)
{
    ra_piece_set parts = {0};
    ra_status status = cut(pieces, count, set, FRESH, &parts);
    status = status ? status : merge_marked(set, parts.piece, parts.count, FRESH);
    ra_piece_set_free(&parts);
    return status;
}

ra_status ra_piece_set_subtract(ra_piece_set *set, const ra_piece *pieces, int64_t count)
{
    ra_piece_set others = {0}, parts = {0}, left = {0};
    ra_status status = ra_piece_set_add(&others, pieces, count);
    status = status ? status : cut(set->piece, set->count, &others, FRESH, &parts);
    status = status ? status : merge_marked(&left, parts.piece, parts.count, FRESH);
    ra_piece_set_free(&others);
    ra_piece_set_free(&parts);
    if (status) {
        ra_piece_set_free(&left);
        return status;
    }
    ra_piece_set_free(set);
    *set = left;
    return RA_OK;
}

ra_status ra_piece_set_fill(ra_piece_set *set, const ra_piece_set *among, int64_t tile)
{
    ra_piece_set filled = {0};
    ra_status status = RA_OK;
    for (int64_t i = 0, k = 0; i < set->count && !status;) {
        RA_CHECK(k < among->count);
        const ra_piece *rows = &set->piece[i], *in = &among->piece[k];
        const ra_piece *last = filled.count > 0 ? &filled.piece[filled.count - 1] : NULL;
        if (!same_doc(in, rows) || end_of(in) <= rows->pos) {
            k++;
            continue;
        }
        int64_t before = ra_max_i64(0, rows->pos - in->pos);
        int64_t begin = in->pos + before / tile * tile;
        int64_t end = in->pos + ra_ceil_div(end_of(rows) - in->pos, tile) * tile;
        if (last && same_doc(last, in)) { /* both in one tile */
            begin = ra_max_i64(begin, end_of(last));
        }
        status = push_part(&filled, in, begin, ra_min_i64(end, end_of(in)));
        bool more = end_of(rows) > end_of(in);
        i += !more;
        k += more;
    }
    if (status) {
        ra_piece_set_free(&filled);
        return status;
    }
    ra_piece_set_free(set);
    *set = filled;
    return RA_OK;
}

/* One list of the covers, from the computation whose mark is certain on. touched: what marks none;
 * used up. */
static ra_status mark_list(ra_cover *const *covers, int count, bool keys, mark which,
                           ra_piece_set *touched)
{
    ra_status status = RA_OK;
    for (int i = 0; i < count && !status; i++) {
        ra_cover *cover = covers[which == FRESH ? i : count - 1 - i];
        ra_piece **list = keys ? &cover->k : &cover->q;
        int64_t *list_count = keys ? &cover->k_count : &cover->q_count;
        ra_piece_set parts = {0};
        status = cut(*list, *list_count, touched, which, &parts);
        status = status ? status : replace(&parts, list, list_count);
        status = status ? status : merge_marked(touched, *list, *list_count, which);
        ra_piece_set_free(&parts);
    }
    ra_piece_set_free(touched);
    return status;
}

ra_status ra_passes_mark(ra_cover *const *covers, int count, const ra_piece_set *begun,
                         const ra_piece_set *later)
{
    ra_piece_set touched = {0};
    for (int i = 0; i < count; i++) {
        RA_TRY(ra_cover_trim(covers[i]));
    }
    RA_TRY(ra_piece_set_add(&touched, later->piece, later->count));
    RA_TRY(mark_list(covers, count, true, FINAL, &touched));
    RA_TRY(ra_piece_set_add(&touched, begun->piece, begun->count));
    RA_TRY(mark_list(covers, count, true, FRESH, &touched));
    RA_TRY(mark_list(covers, count, false, FINAL, &touched));
    RA_TRY(mark_list(covers, count, false, FRESH, &touched));
    for (int i = 0; i < count; i++) {
        for (int64_t j = 0; j < covers[i]->k_count; j++) {
            ra_piece *k = &covers[i]->k[j];
            k->final = k->final && k->source == RA_SOURCE_OWN;
        }
        ra_cover_link(covers[i]);
    }
    return RA_OK;
}
