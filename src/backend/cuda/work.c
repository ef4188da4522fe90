/*
 * Cuts the pieces of a cover into tiles and lists what each tile meets. Within a document reaches
 * only move forward, so the key pieces of a piece's tiles are found by a cursor that never moves
 * back, and the queries of a key tile by binary search in the reaches that are stored anyway. The
 * cost is that of the lists themselves, and of sorting them.
 */
#include "backend/cuda/work.h"

#include <stdlib.h>

#include "base/alloc.h"

/* The items of one query piece. */
typedef struct group {
    int64_t first, count;
    int32_t keys; /* of the longest */
} group;

/* Lists that grow, and where the reaches and items of each query piece are. */
typedef struct builder {
    const ra_cover *cover;
    ra_work *work;
    int64_t item_capacity, run_capacity, key_item_capacity, key_run_capacity;
    int64_t *reach_first; /* [q_count] */
    group *group;         /* [q_count] */
} builder;

static ra_status check_piece(const ra_piece *piece, const char *name)
{
    int64_t last = ra_max_i64(piece->pos + piece->count, piece->index + piece->count);
    if (last > INT32_MAX || piece->pos < INT32_MIN || piece->tensor_row > INT32_MAX) {
        return RA_FAIL(RA_E_UNSUPPORTED,
                       "%s: %lld positions from %lld at row %lld, index %lld; work lists hold less "
                       "than 2^31",
                       name, (long long)piece->count, (long long)piece->pos,
                       (long long)piece->tensor_row, (long long)piece->index);
    }
    return RA_OK;
}

static ra_status check_cover(const ra_cover *cover, int64_t *queries)
{
    *queries = 0;
    for (int64_t i = 0; i < cover->q_count; i++) {
        RA_TRY(check_piece(&cover->q[i], "queries"));
        *queries += cover->q[i].count;
    }
    for (int64_t i = 0; i < cover->k_count; i++) {
        RA_TRY(check_piece(&cover->k[i], "keys"));
    }
    if (*queries > INT32_MAX) {
        return RA_FAIL(RA_E_UNSUPPORTED, "queries: %lld in one hop, work lists hold less than 2^31",
                       (long long)*queries);
    }
    return RA_OK;
}

/* ---- reaches */

/* Index of the first vision block of the row that ends behind pos. */
static int64_t first_block(const ra_tokens *tokens, int64_t row, int64_t pos)
{
    int64_t low = tokens->block_first[row], high = tokens->block_first[row + 1];
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (tokens->block[middle].end <= pos) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* All queries of one piece; a cursor follows the vision blocks. */
static void list_reaches(const ra_cover *cover, const ra_piece *q, ra_work_reach *out)
{
    if (q->first == q->last) {
        return; /* {0, 0} */
    }
    const ra_piece *last_key = &cover->k[q->last - 1];
    int64_t low = cover->k[q->first].pos, high = last_key->pos + last_key->count;
    bool vision = cover->mask.vision != RA_VISION_OFF;
    int64_t at = vision ? first_block(cover->tokens, q->row, q->pos) : 0;
    int64_t end = vision ? cover->tokens->block_first[q->row + 1] : 0;
    for (int64_t i = 0; i < q->count; i++) {
        int64_t pos = q->pos + i;
        ra_range block = {pos, pos};
        while (at < end && cover->tokens->block[at].end <= pos) {
            at++;
        }
        if (at < end && cover->tokens->block[at].begin <= pos) {
            block = cover->tokens->block[at];
        }
        ra_range reach = ra_mask_reach(&cover->mask, pos, block);
        out[i].begin = (int32_t)ra_clamp_i64(reach.begin, low, high);
        out[i].end = (int32_t)ra_clamp_i64(reach.end, low, high);
    }
}

/* ---- query tiles */

/* The run of one key piece that a tile sees; count 0 if none. first, last: reaches of the tile's
 * ends. */
static ra_work_run run_of(const ra_piece *k, ra_work_reach first, ra_work_reach last)
{
    int64_t low = k->pos, high = k->pos + k->count;
    int64_t begin = ra_clamp_i64(first.begin, low, high);
    int64_t end = ra_clamp_i64(last.end, low, high);
    int64_t full_begin = ra_clamp_i64(last.begin, low, high);
    int64_t full_end = ra_clamp_i64(first.end, low, high);
    if (full_end <= full_begin) {
        full_begin = full_end = end;
    }
    return (ra_work_run){
        .source = k->source,
        .row = (int32_t)k->tensor_row,
        .index = (int32_t)(k->index + begin - low),
        .count = (int32_t)ra_max_i64(0, end - begin),
        .pos = (int32_t)begin,
        .full_begin = (int32_t)(full_begin - begin),
        .full_end = (int32_t)(full_end - begin),
    };
}

static int32_t flags_of(const ra_piece *piece)
{
    return (piece->fresh ? RA_WORK_FRESH : 0) | (piece->final ? RA_WORK_FINAL : 0) |
           (piece->source == RA_SOURCE_CHUNK ? RA_WORK_CHUNK : 0);
}

static ra_status add_item(builder *b, const ra_piece *q, int64_t offset, int64_t reach,
                          int64_t *first_key)
{
    ra_work *w = b->work;
    int64_t count = ra_min_i64(w->q_tile, q->count - offset);
    ra_work_reach first = w->reach[reach], last = w->reach[reach + count - 1];
    ra_work_item item = {
        .row = (int32_t)q->tensor_row,
        .index = (int32_t)(q->index + offset),
        .count = (int32_t)count,
        .reach = (int32_t)reach,
        .run_first = (int32_t)w->run_count,
        .flags = flags_of(q),
    };
    while (*first_key < q->last &&
           b->cover->k[*first_key].pos + b->cover->k[*first_key].count <= first.begin) {
        ++*first_key;
    }
    for (int64_t i = *first_key; i < q->last && b->cover->k[i].pos < last.end; i++) {
        ra_work_run run = run_of(&b->cover->k[i], first, last);
        if (run.count > 0) {
            RA_TRY(RA_RESERVE(&w->run, &b->run_capacity, w->run_count + 1));
            w->run[w->run_count++] = run;
            item.keys += run.count;
            item.run_count++;
        }
    }
    RA_TRY(RA_RESERVE(&w->item, &b->item_capacity, w->item_count + 1));
    w->item[w->item_count++] = item;
    return RA_OK;
}

static ra_status list_items(builder *b)
{
    for (int64_t i = 0; i < b->cover->q_count; i++) {
        const ra_piece *q = &b->cover->q[i];
        int64_t first_key = q->first;
        list_reaches(b->cover, q, b->work->reach + b->reach_first[i]);
        b->group[i].first = b->work->item_count;
        for (int64_t offset = 0; offset < q->count; offset += b->work->q_tile) {
            RA_TRY(add_item(b, q, offset, b->reach_first[i] + offset, &first_key));
        }
        b->group[i].count = b->work->item_count - b->group[i].first;
    }
    return RA_OK;
}

/* ---- key tiles */

/* The first of `count` reaches whose end (by_end) or begin is at least `pos`; both only rise. */
static int64_t first_at_least(const ra_work_reach *reach, int64_t count, int64_t pos, bool by_end)
{
    int64_t low = 0, high = count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if ((by_end ? reach[middle].end : reach[middle].begin) >= pos) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/* The queries of one piece that see any of the keys [begin, end); count 0 if none. */
static ra_work_run key_run_of(const ra_piece *q, const ra_work_reach *reach, int64_t reach_first,
                              int64_t begin, int64_t end)
{
    int64_t low = first_at_least(reach, q->count, begin + 1, true);
    int64_t high = ra_max_i64(low, first_at_least(reach, q->count, end, false));
    int64_t full_low = ra_clamp_i64(first_at_least(reach, q->count, end, true), low, high);
    int64_t full_high = ra_clamp_i64(first_at_least(reach, q->count, begin + 1, false), low, high);
    if (full_high <= full_low) {
        full_low = full_high = high;
    }
    return (ra_work_run){
        .row = (int32_t)q->tensor_row,
        .index = (int32_t)(q->index + low),
        .count = (int32_t)(high - low),
        .pos = (int32_t)(q->pos + low),
        .full_begin = (int32_t)(full_low - low),
        .full_end = (int32_t)(full_high - low),
        .reach = (int32_t)(reach_first + low),
    };
}

static ra_work_reach last_reach(const builder *b, int64_t piece)
{
    return b->work->reach[b->reach_first[piece] + b->cover->q[piece].count - 1];
}

static ra_status add_key_item(builder *b, const ra_piece *k, int64_t offset, int64_t *first_query)
{
    ra_work *w = b->work;
    int64_t count = ra_min_i64(w->k_tile, k->count - offset);
    int64_t begin = k->pos + offset, end = begin + count;
    ra_work_item item = {
        .row = (int32_t)k->tensor_row,
        .index = (int32_t)(k->index + offset),
        .count = (int32_t)count,
        .reach = (int32_t)begin,
        .run_first = (int32_t)w->key_run_count,
        .flags = flags_of(k),
    };
    while (*first_query < k->last && last_reach(b, *first_query).end <= begin) {
        ++*first_query;
    }
    for (int64_t i = *first_query; i < k->last; i++) {
        int64_t reach_first = b->reach_first[i];
        const ra_work_reach *reach = w->reach + reach_first;
        if (reach->begin >= end) {
            break;
        }
        ra_work_run run = key_run_of(&b->cover->q[i], reach, reach_first, begin, end);
        if (run.count > 0) {
            RA_TRY(RA_RESERVE(&w->key_run, &b->key_run_capacity, w->key_run_count + 1));
            w->key_run[w->key_run_count++] = run;
            item.keys += run.count;
            item.run_count++;
        }
    }
    if (item.run_count > 0) { /* a key that nobody sees has no gradient */
        RA_TRY(RA_RESERVE(&w->key_item, &b->key_item_capacity, w->key_item_count + 1));
        w->key_item[w->key_item_count++] = item;
    }
    return RA_OK;
}

static ra_status list_key_items(builder *b)
{
    for (int64_t i = 0; i < b->cover->k_count; i++) {
        const ra_piece *k = &b->cover->k[i];
        int64_t first_query = k->first;
        for (int64_t offset = 0; offset < k->count; offset += b->work->k_tile) {
            RA_TRY(add_key_item(b, k, offset, &first_query));
        }
    }
    return RA_OK;
}

/* ---- order */

/* Longest first; ties in the order of the cover, which run_first keeps for items with runs and
 * (row, index) for the others. */
static int compare_item(const void *a, const void *b)
{
    const ra_work_item *left = a, *right = b;
    if (left->keys != right->keys) {
        return left->keys > right->keys ? -1 : 1;
    }
    if (left->run_first != right->run_first) {
        return left->run_first < right->run_first ? -1 : 1;
    }
    if (left->row != right->row) {
        return left->row < right->row ? -1 : 1;
    }
    return (left->index > right->index) - (left->index < right->index);
}

static void sort_items(ra_work_item *item, int64_t count)
{
    if (count > 0) {
        qsort(item, (size_t)count, sizeof *item, compare_item);
    }
}

static int compare_group(const void *a, const void *b)
{
    const group *left = a, *right = b;
    if (left->keys != right->keys) {
        return left->keys > right->keys ? -1 : 1;
    }
    return (left->first > right->first) - (left->first < right->first);
}

/* Items of a piece side by side, as they share its keys. */
static ra_status order_items(builder *b)
{
    ra_work *w = b->work;
    ra_work_item *item;
    int64_t pieces = b->cover->q_count, count = 0;
    RA_TRY(RA_NEW(&item, w->item_count));
    w->shortest = INT32_MAX;
    for (int64_t i = 0; i < pieces; i++) {
        group *g = &b->group[i];
        sort_items(w->item + g->first, g->count);
        if (g->count > 0) {
            g->keys = w->item[g->first].keys;
            w->longest = ra_max_i64(w->longest, g->keys);
            w->shortest = ra_min_i64(w->shortest, w->item[g->first + g->count - 1].keys);
        }
    }
    if (pieces > 0) {
        qsort(b->group, (size_t)pieces, sizeof *b->group, compare_group);
    }
    for (int64_t i = 0; i < pieces; i++) {
        for (int64_t j = 0; j < b->group[i].count; j++) {
            item[count++] = w->item[b->group[i].first + j];
        }
    }
    ra_free(w->item);
    w->item = item;
    return RA_OK;
}

/* ---- the whole */

static ra_status build(builder *b, int64_t queries)
{
    ra_work *w = b->work;
    RA_TRY(RA_NEW(&w->reach, queries));
    RA_TRY(RA_NEW(&b->reach_first, b->cover->q_count));
    RA_TRY(RA_NEW(&b->group, b->cover->q_count));
    w->reach_count = queries;
    for (int64_t i = 1; i < b->cover->q_count; i++) {
        b->reach_first[i] = b->reach_first[i - 1] + b->cover->q[i - 1].count;
    }
    RA_TRY(list_items(b));
    if (w->k_tile > 0) {
        RA_TRY(list_key_items(b));
    }
    if (w->run_count > INT32_MAX || w->key_run_count > INT32_MAX) {
        return RA_FAIL(RA_E_UNSUPPORTED, "runs: %lld and %lld, work lists hold less than 2^31",
                       (long long)w->run_count, (long long)w->key_run_count);
    }
    sort_items(w->key_item, w->key_item_count);
    return order_items(b);
}

ra_status ra_work_build(const ra_cover *cover, int32_t q_tile, int32_t k_tile, ra_work *out)
{
    int64_t queries;
    RA_CHECK(q_tile > 0 && k_tile >= 0);
    RA_TRY(check_cover(cover, &queries));
    *out = (ra_work){.q_tile = q_tile, .k_tile = k_tile};
    builder b = {.cover = cover, .work = out};
    ra_status status = build(&b, queries);
    ra_free(b.reach_first);
    ra_free(b.group);
    if (status) {
        ra_work_free(out);
    }
    return status;
}

void ra_work_free(ra_work *work)
{
    ra_free(work->item);
    ra_free(work->run);
    ra_free(work->key_item);
    ra_free(work->key_run);
    ra_free(work->reach);
    *work = (ra_work){0};
}
