/*
 * Forward: folds the keys of a cover into the running softmax of its queries. For one tile of
 * queries and the heads that share a kv head, every key tile is packed once, then taken by blocks
 * of queries: scores, softmax, weighted values. Must not know instruction sets, nor what the mask
 * is made of: a query's keys are one interval.
 */
#include <math.h>
#include <string.h>

#include "backend/cpu/tile.h"
#include "base/alloc.h"

/* Byte offsets in a worker's scratch. */
typedef struct layout {
    int64_t reach;                /* ra_range [queries] */
    int64_t max, sum;             /* running softmax, float [rows] */
    int64_t q, o;                 /* tiles [rows, chan] */
    int64_t score, rest, weights; /* tiles [RA_QUERIES_MAX, RA_KEY_TILE] */
    int64_t k, v;                 /* panels of K transposed and of V */
    int64_t bytes;
} layout;

typedef struct fold_run {
    ra_cpu *cpu;
    const ra_fold_job *job;
    const ra_operands *operands;
    ra_query_items items;
    layout at;
    int64_t chan, chan_padded; /* to nr */
    int64_t tile_row;          /* floats of a row of q and o */
    int64_t k_stride, v_stride;
} fold_run;

enum { SCORE_ROW = RA_KEY_TILE + RA_TILE_GAP };

/* One worker at one item. */
typedef struct fold_tile {
    const fold_run *run;
    ra_query_item item;
    ra_range *reach;
    float *max, *sum;
    float *q, *o, *score, *weights, *k, *v;
    float *rest; /* of the scores, or NULL: f32 inputs leave no other error as large */
} fold_tile;

static layout plan_scratch(const fold_run *run)
{
    int64_t rows = ra_round_up(run->items.tiling.rows, run->operands->mr) * run->items.heads;
    layout at = {0};
    at.reach = ra_layout_add(&at.bytes, run->items.tiling.rows, sizeof(ra_range));
    at.max = ra_layout_add(&at.bytes, rows, sizeof(float));
    at.sum = ra_layout_add(&at.bytes, rows, sizeof(float));
    at.q = ra_layout_add(&at.bytes, rows * run->tile_row, sizeof(float));
    at.o = ra_layout_add(&at.bytes, rows * run->tile_row, sizeof(float));
    at.score = ra_layout_add(&at.bytes, RA_QUERIES_MAX * SCORE_ROW, sizeof(float));
    at.rest = ra_layout_add(&at.bytes, RA_QUERIES_MAX * SCORE_ROW, sizeof(float));
    at.weights = ra_layout_add(&at.bytes, RA_QUERIES_MAX * SCORE_ROW, sizeof(float));
    int64_t nr = run->cpu->level->nr;
    at.k = ra_layout_add(&at.bytes, RA_KEY_TILE / nr * run->k_stride, sizeof(float));
    at.v = ra_layout_add(&at.bytes, run->chan_padded / nr * run->v_stride, sizeof(float));
    return at;
}

static fold_tile open_tile(const fold_run *run, int64_t item, int worker)
{
    char *scratch = ra_cpu_scratch(run->cpu, worker);
    return (fold_tile){
        .run = run,
        .item = ra_query_item_at(&run->items, item, run->operands->mr),
        .reach = (void *)(scratch + run->at.reach),
        .max = (void *)(scratch + run->at.max),
        .sum = (void *)(scratch + run->at.sum),
        .q = (void *)(scratch + run->at.q),
        .o = (void *)(scratch + run->at.o),
        .score = (void *)(scratch + run->at.score),
        .rest = run->job->q.dtype == RA_F32 ? (void *)(scratch + run->at.rest) : NULL,
        .weights = (void *)(scratch + run->at.weights),
        .k = (void *)(scratch + run->at.k),
        .v = (void *)(scratch + run->at.v),
    };
}

/* Loads the queries, and where the row stands: from nothing, or as a softmax with maximum lse, sum
 * 1 and numerator acc. */
static void load_rows(const fold_tile *tile)
{
    const fold_run *run = tile->run;
    const ra_query_item *item = &tile->item;
    const ra_piece *piece = item->at.piece;
    for (int64_t i = 0; i < item->queries; i++) {
        tile->reach[i] = ra_cover_reach(run->job->cover, piece->row, item->at.begin + i);
    }
    memset(tile->o, 0, (size_t)(item->heads * item->pitch * run->tile_row) * sizeof *tile->o);
    for (int64_t h = 0; h < item->heads; h++) {
        int64_t row = h * item->pitch, head = item->head + h;
        ra_rows q = ra_tile_rows(&run->job->q, piece, head, item->at.begin, item->queries);
        run->operands->load(&q, item->pitch, tile->q + row * run->tile_row, run->tile_row);
        for (int64_t i = 0; i < item->pitch; i++) {
            tile->max[row + i] = -INFINITY;
            tile->sum[row + i] = 0;
        }
        if (piece->fresh) {
            continue;
        }
        for (int64_t i = 0; i < item->queries; i++) {
            float lse = *ra_tile_value(&run->job->lse, piece, head, item->at.begin + i);
            if (lse != -INFINITY) {
                ra_rows acc = ra_tile_rows(&run->job->acc, piece, head, item->at.begin + i, 1);
                memcpy(tile->o + (row + i) * run->tile_row, acc.data,
                       (size_t)run->chan * sizeof *tile->o);
                tile->max[row + i] = lse;
                tile->sum[row + i] = 1;
                if (run->job->lse_rest.data) { /* which then belongs to the sum */
                    float sum =
                        expf(*ra_tile_value(&run->job->lse_rest, piece, head, item->at.begin + i));
                    tile->sum[row + i] = sum;
                    run->cpu->level->scale(tile->o + (row + i) * run->tile_row, run->chan, sum);
                }
            }
        }
    }
}

/* Queries [first, first + count) of one head against the packed columns [base, ...) of the key tile
 * [begin, end). */
static void fold_block(const fold_tile *tile, int64_t head, int64_t first, int64_t count,
                       int64_t begin, int64_t end, int64_t base)
{
    const fold_run *run = tile->run;
    const ra_level *level = run->cpu->level;
    ra_range seen = ra_tile_columns(begin, end, tile->reach[first], tile->reach[first + count - 1]);
    if (seen.begin >= seen.end) {
        return;
    }
    int64_t panel = (seen.begin - base) / level->nr;
    int64_t column = base + panel * level->nr;
    int64_t width = ra_round_up(seen.end - column, level->nr);
    int64_t row = head * tile->item.pitch + first;
    ra_range keys[RA_QUERIES_MAX], blocks[RA_QUERIES_MAX];
    for (int64_t i = 0; i < count; i++) {
        keys[i] =
            ra_tile_columns(begin + column, end, tile->reach[first + i], tile->reach[first + i]);
    }
    ra_tile_blocks(keys, count, run->operands->mr, blocks);
    ra_product scores = {
        .mode = RA_PRODUCT_SET,
        .m = ra_round_up(count, run->operands->mr),
        .n = width,
        .k = run->chan,
        .a = tile->q + row * run->tile_row,
        .a_row = run->tile_row,
        .a_col = 1,
        .b = tile->k + panel * run->k_stride,
        .b_stride = run->k_stride,
        .b_row = level->nr,
        .c = tile->score,
        .c_row = SCORE_ROW,
        .rest = tile->rest,
        .columns = blocks,
    };
    run->operands->product(&scores);
    float keep[RA_QUERIES_MAX];
    ra_softmax softmax = {
        .rows = count,
        .n = width,
        .score = tile->score,
        .rest = tile->rest,
        .row = SCORE_ROW,
        .keys = keys,
        .scale = run->job->scale,
        .max = tile->max + row,
        .sum = tile->sum + row,
        .keep = keep,
    };
    level->softmax(&softmax);
    for (int64_t i = 0; i < count; i++) {
        if (keep[i] != 1) {
            level->scale(tile->o + (row + i) * run->tile_row, run->chan, keep[i]);
        }
    }
    const float *weights = tile->score;
    if (run->operands->narrow) {
        run->operands->narrow(tile->score, SCORE_ROW, scores.m, width, tile->weights);
        weights = tile->weights;
    }
    ra_product values = {
        .mode = RA_PRODUCT_ADD,
        .m = scores.m,
        .n = run->chan_padded,
        .k = seen.end - column,
        .a = weights,
        .a_row = SCORE_ROW,
        .a_col = 1,
        .b = tile->v + panel * level->nr / run->operands->depth * level->nr,
        .b_stride = run->v_stride,
        .b_row = level->nr,
        .c = tile->o + row * run->tile_row,
        .c_row = run->tile_row,
        .live = blocks,
        .k_first = column,
    };
    run->operands->product(&values);
}

/* The key tile [begin, end) of piece k. Columns are counted from its begin even where the first
 * ones are not needed, so that the bits of a row do not depend on the rows beside it. */
static void fold_keys(const fold_tile *tile, const ra_piece *k, int64_t begin, int64_t end)
{
    const fold_run *run = tile->run;
    const ra_query_item *item = &tile->item;
    const ra_level *level = run->cpu->level;
    ra_range seen = ra_tile_columns(begin, end, tile->reach[0], tile->reach[item->queries - 1]);
    if (seen.begin >= seen.end) {
        return;
    }
    int64_t base = seen.begin / level->nr * level->nr;
    int64_t pos = begin + base, count = seen.end - base;
    ra_rows keys = ra_tile_rows(&run->job->k[k->source], k, item->kv_head, pos, count);
    ra_rows values = ra_tile_rows(&run->job->v[k->source], k, item->kv_head, pos, count);
    run->operands->pack_transposed(&keys, tile->k, run->k_stride);
    run->operands->pack(&values, tile->v, run->v_stride);
    for (int64_t h = 0; h < item->heads; h++) {
        for (int64_t i = 0; i < item->queries; i += run->operands->queries) {
            int64_t queries = ra_min_i64(run->operands->queries, item->queries - i);
            fold_block(tile, h, i, queries, begin, end, base);
        }
    }
}

static void store_rows(const fold_tile *tile)
{
    const fold_run *run = tile->run;
    const ra_query_item *item = &tile->item;
    const ra_piece *piece = item->at.piece;
    const ra_tensor *to = piece->final ? &run->job->out : &run->job->acc;
    for (int64_t h = 0; h < item->heads; h++) {
        for (int64_t i = 0; i < item->queries; i++) {
            int64_t row = h * item->pitch + i, head = item->head + h, pos = item->at.begin + i;
            float *o = tile->o + row * run->tile_row, sum = tile->sum[row];
            bool empty = sum == 0;
            if (empty) { /* whatever the keys that it does not see hold */
                memset(o, 0, (size_t)run->chan * sizeof *o);
            }
            run->cpu->level->store(o, run->chan, empty ? 0.0f : 1.0f / sum, to->dtype,
                                   ra_tile_row(to, piece, head, pos));
            float lse = empty ? -INFINITY : tile->max[row] + logf(sum);
            *ra_tile_value(&run->job->lse, piece, head, pos) = lse;
            if (run->job->lse_rest.data && !piece->final) {
                *ra_tile_value(&run->job->lse_rest, piece, head, pos) =
                    empty ? 0 : tile->max[row] - lse + logf(sum);
            }
        }
    }
}

static void fold_item(void *arg, int64_t number, int worker)
{
    const fold_run *run = arg;
    const ra_cover *cover = run->job->cover;
    fold_tile tile = open_tile(run, number, worker);
    const ra_piece *piece = tile.item.at.piece;
    if (piece->first == piece->last && !piece->fresh && !piece->final) {
        return;
    }
    load_rows(&tile);
    int64_t reach_begin = tile.reach[0].begin, reach_end = tile.reach[tile.item.queries - 1].end;
    for (int64_t i = piece->first; i < piece->last; i++) {
        const ra_piece *k = &cover->k[i];
        int64_t end = ra_min_i64(k->pos + k->count, reach_end);
        int64_t skipped = ra_max_i64(0, reach_begin - k->pos) / RA_KEY_TILE;
        for (int64_t pos = k->pos + skipped * RA_KEY_TILE; pos < end; pos += RA_KEY_TILE) {
            fold_keys(&tile, k, pos, ra_min_i64(pos + RA_KEY_TILE, k->pos + k->count));
        }
    }
    store_rows(&tile);
}

static int64_t kv_heads(const ra_tensor k[RA_SOURCE_COUNT], int64_t q_heads)
{
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        if (k[i].data) {
            return k[i].size[RA_HEAD];
        }
    }
    return q_heads; /* no keys at all */
}

ra_status ra_cpu_fold(ra_cpu *cpu, const ra_fold_job *job)
{
    const ra_level *level = cpu->level;
    fold_run run = {.cpu = cpu, .job = job, .chan = job->q.size[RA_CHAN]};
    run.operands = ra_level_operands(level, job->q.dtype);
    RA_CHECK(RA_KEY_TILE % level->nr == 0 && run.operands->queries <= RA_QUERIES_MAX &&
             run.operands->queries % run.operands->mr == 0);
    run.chan_padded = ra_round_up(run.chan, level->nr);
    run.tile_row = run.chan_padded + RA_TILE_GAP;
    run.k_stride = ra_round_up(run.chan, RA_DEPTH_STEP) * level->nr + RA_TILE_GAP;
    run.v_stride = RA_KEY_TILE * level->nr + RA_TILE_GAP;
    int64_t q_heads = job->q.size[RA_HEAD];
    int64_t blocks = ra_min_i64(RA_BLOCKS_MAX, run.operands->tile_channels / run.chan);
    RA_TRY(ra_query_items_build(cpu, job->cover, q_heads, kv_heads(job->k, q_heads), blocks,
                                &run.items));
    run.at = plan_scratch(&run);
    RA_TRY(ra_cpu_scratch_reserve(cpu, run.at.bytes));
    ra_team_run(cpu->team, run.items.count, fold_item, &run);
    return RA_OK;
}
