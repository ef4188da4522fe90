/* Partners of pieces, and the tiles that follow from them by arithmetic. */
#include "plan/cover.h"

#include <stdlib.h>

#include "base/alloc.h"

ra_range ra_cover_reach(const ra_cover *cover, int64_t row, int64_t pos)
{
    ra_range block = {pos, pos};
    if (cover->mask.vision != RA_VISION_OFF) {
        block = ra_tokens_block(cover->tokens, row, pos);
    }
    return ra_mask_reach(&cover->mask, pos, block);
}

/* Negative, zero or positive as the document of a stands before, at or after that of b. */
static int compare_doc(const ra_piece *a, const ra_piece *b)
{
    if (a->row != b->row) {
        return a->row < b->row ? -1 : 1;
    }
    return (a->doc > b->doc) - (a->doc < b->doc);
}

static int compare_piece(const void *a, const void *b)
{
    const ra_piece *left = a, *right = b;
    int doc = compare_doc(left, right);
    return doc ? doc : (left->pos > right->pos) - (left->pos < right->pos);
}

void ra_pieces_sort(ra_piece *pieces, int64_t count)
{
    if (count > 0) {
        qsort(pieces, (size_t)count, sizeof *pieces, compare_piece);
    }
}

/* The keys that any query of the piece sees: reaches of consecutive queries overlap, so their union
 * runs from the first one's begin to the last one's end. */
static ra_range reach_of_piece(const ra_cover *cover, const ra_piece *q)
{
    ra_range first = ra_cover_reach(cover, q->row, q->pos);
    ra_range last = ra_cover_reach(cover, q->row, q->pos + q->count - 1);
    return (ra_range){first.begin, last.end};
}

/* Both lists are sorted and both ends of a reach only move forward within a document, so two
 * cursors that never move back find all partners. */
void ra_cover_link(ra_cover *cover)
{
    int64_t first = 0, last = 0;
    for (int64_t k = 0; k < cover->k_count; k++) {
        cover->k[k].first = cover->k[k].last = 0;
    }
    for (int64_t i = 0; i < cover->q_count; i++) {
        ra_piece *q = &cover->q[i];
        ra_range reach = reach_of_piece(cover, q);
        while (first < cover->k_count) {
            const ra_piece *k = &cover->k[first];
            int doc = compare_doc(k, q);
            if (doc > 0 || (doc == 0 && k->pos + k->count > reach.begin)) {
                break;
            }
            first++;
        }
        last = ra_max_i64(last, first);
        while (last < cover->k_count && compare_doc(&cover->k[last], q) == 0 &&
               cover->k[last].pos < reach.end) {
            last++;
        }
        q->first = first;
        q->last = last;
    }
    /* The transpose: a key piece's partners are neighbours too. */
    int64_t begin = 0, end = 0;
    for (int64_t i = 0; i < cover->k_count; i++) {
        while (begin < cover->q_count && cover->q[begin].last <= i) {
            begin++;
        }
        end = ra_max_i64(end, begin);
        while (end < cover->q_count && cover->q[end].first <= i) {
            end++;
        }
        cover->k[i].first = begin;
        cover->k[i].last = end;
    }
}

void ra_cover_free(ra_cover *cover)
{
    ra_free(cover->q);
    ra_free(cover->k);
    *cover = (ra_cover){0};
}

ra_tile ra_cover_tile(const ra_cover *cover, const ra_piece *q, int64_t begin, int64_t end,
                      const ra_piece *k)
{
    ra_range first = ra_cover_reach(cover, q->row, begin);
    ra_range last = ra_cover_reach(cover, q->row, end - 1);
    int64_t low = k->pos, high = k->pos + k->count;
    ra_tile tile = {
        .begin = ra_clamp_i64(first.begin, low, high),
        .full_begin = ra_clamp_i64(last.begin, low, high),
        .full_end = ra_clamp_i64(first.end, low, high),
        .end = ra_clamp_i64(last.end, low, high),
    };
    if (tile.full_end <= tile.full_begin) { /* a narrow window: no key is seen by all */
        tile.full_begin = tile.full_end = tile.end;
    }
    return tile;
}

/* The first query of the piece whose reach ends behind `pos` (by_end) or begins behind it. */
static int64_t first_query_past(const ra_cover *cover, const ra_piece *q, int64_t pos, bool by_end)
{
    int64_t low = q->pos, high = q->pos + q->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        ra_range reach = ra_cover_reach(cover, q->row, middle);
        if ((by_end ? reach.end : reach.begin) > pos) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

ra_range ra_cover_seen_by(const ra_cover *cover, const ra_piece *k, int64_t begin, int64_t end,
                          const ra_piece *q)
{
    RA_CHECK(k->row == q->row && k->pos <= begin && end <= k->pos + k->count);
    (void)k;
    ra_range queries = {
        .begin = first_query_past(cover, q, begin, true),
        .end = first_query_past(cover, q, end - 1, false),
    };
    queries.end = ra_max_i64(queries.begin, queries.end);
    return queries;
}
