/* Spans and owned runs, both sorted, to pieces. */
#include "plan/pieces.h"

#include <stdlib.h>

#include "base/alloc.h"

/* The owned run that holds a position. */
static int64_t run_of(const ra_shards *shards, int64_t pos)
{
    int64_t low = 0, high = shards->run_count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (shards->run[middle].start + shards->run[middle].count <= pos) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* A counting sort by owner. */
static ra_status list_owned(int rank_count, ra_pieces *pieces)
{
    int64_t *next = NULL;
    ra_status status = RA_NEW(&pieces->owned_first, rank_count + 1);
    status = status ? status : RA_NEW(&pieces->owned, pieces->count);
    status = status ? status : RA_NEW(&next, rank_count);
    if (status) {
        return status;
    }
    for (int64_t i = 0; i < pieces->count; i++) {
        pieces->owned_first[pieces->piece[i].owner + 1]++;
    }
    for (int rank = 0; rank < rank_count; rank++) {
        pieces->owned_first[rank + 1] += pieces->owned_first[rank];
        next[rank] = pieces->owned_first[rank];
    }
    for (int64_t i = 0; i < pieces->count; i++) {
        pieces->owned[next[pieces->piece[i].owner]++] = i;
    }
    ra_free(next);
    return RA_OK;
}

ra_status ra_pieces_build(const ra_shards *shards, const ra_tokens *tokens, ra_pieces *out)
{
    ra_pieces pieces = {0};
    int64_t capacity = 0;
    for (int64_t i = 0; i < tokens->span_count; i++) {
        const ra_doc_span *span = &tokens->span[i];
        int64_t pos = span->begin;
        for (int64_t r = run_of(shards, pos); pos < span->end; r++) {
            const ra_owned_run *run = &shards->run[r];
            int64_t end = ra_min_i64(span->end, run->start + run->count);
            ra_status status = RA_RESERVE(&pieces.piece, &capacity, pieces.count + 1);
            if (status) {
                ra_pieces_free(&pieces);
                return status;
            }
            pieces.piece[pieces.count++] = (ra_owned_piece){
                span->row, pos, end - pos, run->index + pos - run->start, span->doc, run->owner};
            pos = end;
        }
    }
    ra_status status = list_owned(shards->rank_count, &pieces);
    if (status) {
        ra_pieces_free(&pieces);
        return status;
    }
    *out = pieces;
    return RA_OK;
}

void ra_pieces_free(ra_pieces *pieces)
{
    ra_free(pieces->piece);
    ra_free(pieces->owned_first);
    ra_free(pieces->owned);
    *pieces = (ra_pieces){0};
}

int64_t ra_pieces_group_end(const ra_pieces *pieces, int64_t first)
{
    int64_t end = first;
    while (end < pieces->count && ra_pieces_same_doc(&pieces->piece[end], &pieces->piece[first])) {
        end++;
    }
    return end;
}

static int compare_memory(const void *a, const void *b)
{
    const ra_local_rows *left = a, *right = b;
    if (left->row != right->row) {
        return left->row < right->row ? -1 : 1;
    }
    return (left->index > right->index) - (left->index < right->index);
}

ra_status ra_pieces_idle(const ra_pieces *pieces, const ra_shards *shards, int64_t rows, int rank,
                         ra_local_rows **out, int64_t *count)
{
    ra_local_rows *busy = NULL, *idle = NULL;
    int64_t busy_count = 0, idle_count = 0, capacity = 0, at = 0;
    const int64_t *owned = pieces->owned + pieces->owned_first[rank];
    busy_count = pieces->owned_first[rank + 1] - pieces->owned_first[rank];
    ra_status status = RA_NEW(&busy, busy_count);
    if (status) {
        return status;
    }
    for (int64_t i = 0; i < busy_count; i++) {
        const ra_owned_piece *piece = &pieces->piece[owned[i]];
        busy[i] = (ra_local_rows){piece->row, piece->index, piece->count};
    }
    if (busy_count > 0) {
        qsort(busy, (size_t)busy_count, sizeof *busy, compare_memory);
    }
    for (int64_t row = 0; !status && row < rows; row++) {
        int64_t index = 0;
        while (!status && index < shards->length[rank]) {
            bool in_row = at < busy_count && busy[at].row == row;
            int64_t next = in_row ? busy[at].index : shards->length[rank];
            if (next > index) {
                status = RA_RESERVE(&idle, &capacity, idle_count + 1);
                if (!status) {
                    idle[idle_count++] = (ra_local_rows){row, index, next - index};
                }
            }
            index = in_row ? next + busy[at++].count : next;
        }
    }
    ra_free(busy);
    if (status) {
        ra_free(idle);
        return status;
    }
    *out = idle;
    *count = idle_count;
    return RA_OK;
}
