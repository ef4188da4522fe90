/*
 * Backward, first pass: dq by query tiles, walking the same tiles as the forward. Turns scores and
 * dout.v into ds, block by block, and adds ds K. Must not know instruction sets.
 */
#include <math.h>
#include <string.h>

#include "backend/cpu/grad.h"

/* Byte offsets in a worker's scratch. */
typedef struct layout {
    int64_t reach;                        /* ra_range [queries] */
    int64_t q, dout, dq;                  /* tiles [rows, chan] */
    int64_t score, dp;                    /* tiles [RA_QUERY_BLOCK, RA_KEY_TILE] */
    int64_t k_columns, v_columns, k_rows; /* panels of K and V transposed, and of K */
    int64_t bytes;
} layout;

typedef struct grad_pass {
    const ra_grad_run *run;
    ra_query_items items;
    layout at;
    int64_t columns_stride, rows_stride;
} grad_pass;

enum { SCORE_ROW = RA_KEY_TILE + RA_TILE_GAP };

/* One worker at one item. */
typedef struct query_tile {
    const grad_pass *pass;
    ra_query_item item;
    ra_range *reach;
    float *q, *dout, *dq, *score, *dp, *k_columns, *v_columns, *k_rows;
} query_tile;

static layout plan_scratch(const grad_pass *pass)
{
    int64_t nr = pass->run->cpu->level->nr;
    int64_t chans = pass->items.tiling.rows * pass->items.heads * pass->run->tile_row;
    int64_t columns = RA_KEY_TILE / nr * pass->columns_stride;
    layout at = {0};
    at.reach = ra_layout_add(&at.bytes, pass->items.tiling.rows, sizeof(ra_range));
    at.q = ra_layout_add(&at.bytes, chans, sizeof(float));
    at.dout = ra_layout_add(&at.bytes, chans, sizeof(float));
    at.dq = ra_layout_add(&at.bytes, chans, sizeof(float));
    at.score = ra_layout_add(&at.bytes, RA_QUERY_BLOCK * SCORE_ROW, sizeof(float));
    at.dp = ra_layout_add(&at.bytes, RA_QUERY_BLOCK * SCORE_ROW, sizeof(float));
    at.k_columns = ra_layout_add(&at.bytes, columns, sizeof(float));
    at.v_columns = ra_layout_add(&at.bytes, columns, sizeof(float));
    at.k_rows =
        ra_layout_add(&at.bytes, pass->run->chan_padded / nr * pass->rows_stride, sizeof(float));
    return at;
}

static query_tile open_tile(const grad_pass *pass, int64_t item, int worker)
{
    char *scratch = ra_cpu_scratch(pass->run->cpu, worker);
    return (query_tile){
        .pass = pass,
        .item = ra_query_item_at(&pass->items, item, pass->run->cpu->level->mr),
        .reach = (void *)(scratch + pass->at.reach),
        .q = (void *)(scratch + pass->at.q),
        .dout = (void *)(scratch + pass->at.dout),
        .dq = (void *)(scratch + pass->at.dq),
        .score = (void *)(scratch + pass->at.score),
        .dp = (void *)(scratch + pass->at.dp),
        .k_columns = (void *)(scratch + pass->at.k_columns),
        .v_columns = (void *)(scratch + pass->at.v_columns),
        .k_rows = (void *)(scratch + pass->at.k_rows),
    };
}

static void load_rows(const query_tile *tile)
{
    const ra_grad_run *run = tile->pass->run;
    const ra_query_item *item = &tile->item;
    const ra_piece *piece = item->at.piece;
    for (int64_t i = 0; i < item->queries; i++) {
        tile->reach[i] = ra_cover_reach(run->job->cover, piece->row, item->at.begin + i);
    }
    memset(tile->dq, 0, (size_t)(item->heads * item->pitch * run->tile_row) * sizeof *tile->dq);
    for (int64_t h = 0; h < item->heads; h++) {
        int64_t at = h * item->pitch * run->tile_row, head = item->head + h;
        ra_grad_load(run, &run->job->q, piece, head, item->at.begin, item->queries, item->pitch,
                     tile->q + at);
        ra_grad_load(run, &run->job->dout, piece, head, item->at.begin, item->queries, item->pitch,
                     tile->dout + at);
    }
}

/* Queries [first, first + count) of one head against the packed columns [base, ...) of the key tile
 * [begin, end). */
static void grad_block(const query_tile *tile, int64_t head, int64_t first, int64_t count,
                       int64_t begin, int64_t end, int64_t base)
{
    const grad_pass *pass = tile->pass;
    const ra_grad_run *run = pass->run;
    const ra_level *level = run->cpu->level;
    ra_range seen = ra_tile_columns(begin, end, tile->reach[first], tile->reach[first + count - 1]);
    if (seen.begin >= seen.end) {
        return;
    }
    int64_t panel = (seen.begin - base) / level->nr;
    int64_t column = base + panel * level->nr;
    int64_t row = head * tile->item.pitch + first;
    ra_product scores = {
        .mode = RA_PRODUCT_SET,
        .m = ra_round_up(count, level->mr),
        .n = ra_round_up(seen.end - column, level->nr),
        .k = run->chan,
        .a = tile->q + row * run->tile_row,
        .a_row = run->tile_row,
        .a_col = 1,
        .b = tile->k_columns + panel * pass->columns_stride,
        .b_stride = pass->columns_stride,
        .c = tile->score,
        .c_row = SCORE_ROW,
    };
    level->product(&scores);
    ra_product dp = scores;
    dp.a = tile->dout + row * run->tile_row;
    dp.b = tile->v_columns + panel * pass->columns_stride;
    dp.c = tile->dp;
    level->product(&dp);
    const ra_piece *piece = tile->item.at.piece;
    for (int64_t i = 0; i < count; i++) {
        int64_t pos = tile->item.at.begin + first + i, q_head = tile->item.head + head;
        ra_range keys =
            ra_tile_columns(begin + column, end, tile->reach[first + i], tile->reach[first + i]);
        level->gradient(tile->score + i * SCORE_ROW, tile->dp + i * SCORE_ROW, scores.n, keys.begin,
                        keys.end, run->job->scale,
                        *ra_tile_value(&run->job->lse, piece, q_head, pos),
                        *ra_tile_value(&run->job->delta, piece, q_head, pos));
    }
    ra_product dq = {
        .mode = RA_PRODUCT_ADD,
        .m = scores.m,
        .n = run->chan_padded,
        .k = seen.end - column,
        .a = tile->dp,
        .a_row = SCORE_ROW,
        .a_col = 1,
        .b = tile->k_rows + panel * level->nr * level->nr,
        .b_stride = pass->rows_stride,
        .c = tile->dq + row * run->tile_row,
        .c_row = run->tile_row,
        .k_first = column,
    };
    level->product(&dq);
}

/* The key tile [begin, end) of piece k, its columns counted from begin as in the forward. */
static void grad_keys(const query_tile *tile, const ra_piece *k, int64_t begin, int64_t end)
{
    const grad_pass *pass = tile->pass;
    const ra_grad_job *job = pass->run->job;
    const ra_query_item *item = &tile->item;
    const ra_level *level = pass->run->cpu->level;
    ra_range seen = ra_tile_columns(begin, end, tile->reach[0], tile->reach[item->queries - 1]);
    if (seen.begin >= seen.end) {
        return;
    }
    int64_t base = seen.begin / level->nr * level->nr;
    int64_t pos = begin + base, count = seen.end - base;
    ra_rows keys = ra_tile_rows(&job->k[k->source], k, item->kv_head, pos, count);
    ra_rows values = ra_tile_rows(&job->v[k->source], k, item->kv_head, pos, count);
    level->pack_transposed(&keys, tile->k_columns, pass->columns_stride);
    level->pack_transposed(&values, tile->v_columns, pass->columns_stride);
    level->pack(&keys, tile->k_rows, pass->rows_stride);
    for (int64_t h = 0; h < item->heads; h++) {
        for (int64_t i = 0; i < item->queries; i += RA_QUERY_BLOCK) {
            int64_t queries = ra_min_i64(RA_QUERY_BLOCK, item->queries - i);
            grad_block(tile, h, i, queries, begin, end, base);
        }
    }
}

static void add_rows(const query_tile *tile)
{
    const ra_grad_run *run = tile->pass->run;
    const ra_query_item *item = &tile->item;
    const ra_piece *piece = item->at.piece;
    for (int64_t h = 0; h < item->heads; h++) {
        for (int64_t i = 0; i < item->queries; i++) {
            int64_t head = item->head + h, pos = item->at.begin + i;
            if (*ra_tile_value(&run->job->lse, piece, head, pos) == -INFINITY) {
                continue;
            }
            const float *from = tile->dq + (h * item->pitch + i) * run->tile_row;
            float *to = ra_tile_value(&run->job->dq, piece, head, pos);
            for (int64_t c = 0; c < run->chan; c++) {
                to[c] += from[c];
            }
        }
    }
}

static void grad_item(void *arg, int64_t number, int worker)
{
    const grad_pass *pass = arg;
    const ra_cover *cover = pass->run->job->cover;
    query_tile tile = open_tile(pass, number, worker);
    const ra_piece *piece = tile.item.at.piece;
    if (piece->first == piece->last) {
        return;
    }
    load_rows(&tile);
    int64_t reach_begin = tile.reach[0].begin, reach_end = tile.reach[tile.item.queries - 1].end;
    for (int64_t i = piece->first; i < piece->last; i++) {
        const ra_piece *k = &cover->k[i];
        int64_t end = ra_min_i64(k->pos + k->count, reach_end);
        int64_t skipped = ra_max_i64(0, reach_begin - k->pos) / RA_KEY_TILE;
        for (int64_t pos = k->pos + skipped * RA_KEY_TILE; pos < end; pos += RA_KEY_TILE) {
            grad_keys(&tile, k, pos, ra_min_i64(pos + RA_KEY_TILE, k->pos + k->count));
        }
    }
    add_rows(&tile);
}

ra_status ra_grad_queries(const ra_grad_run *run)
{
    ra_cpu *cpu = run->cpu;
    grad_pass pass = {.run = run};
    pass.columns_stride = run->chan * cpu->level->nr + RA_TILE_GAP;
    pass.rows_stride = RA_KEY_TILE * cpu->level->nr + RA_TILE_GAP;
    RA_TRY(ra_query_items_build(cpu, run->job->cover, run->q_heads, run->kv_heads, &pass.items));
    pass.at = plan_scratch(&pass);
    RA_TRY(ra_cpu_scratch_reserve(cpu, pass.at.bytes));
    ra_team_run(cpu->team, pass.items.count, grad_item, &pass);
    return RA_OK;
}
