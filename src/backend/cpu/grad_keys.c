/*
 * Backward, second pass: dk and dv by key tiles. A key tile is packed once, then every query that
 * sees it passes by, head by head of the group: dv += p^T dout, dk += ds^T q. Must not know
 * instruction sets.
 */
#include <math.h>
#include <string.h>

#include "backend/cpu/grad.h"

enum {
    KEYS = 64,    /* of a tile: K, V, dk and dv of the tile stay in the second cache */
    QUERIES = 48, /* that pass by at once */
    SCORE_ROW = KEYS + RA_TILE_GAP,
};

/* Byte offsets in a worker's scratch. */
typedef struct layout {
    int64_t reach;                /* ra_range [QUERIES] */
    int64_t q, dout;              /* tiles [QUERIES, chan] */
    int64_t q_rows, dout_rows;    /* the same as panels */
    int64_t score, dp;            /* tiles [QUERIES, KEYS] */
    int64_t k_columns, v_columns; /* panels of K and V transposed */
    int64_t dk, dv;               /* tiles [KEYS, chan] */
    int64_t bytes;
} layout;

typedef struct grad_pass {
    const ra_grad_run *run;
    ra_tiling tiling;
    layout at;
    int64_t columns_stride, rows_stride;
} grad_pass;

/* One worker at one item. */
typedef struct key_tile {
    const grad_pass *pass;
    ra_piece_tile at;
    int64_t kv_head;
    ra_range *reach;
    float *q, *dout, *q_rows, *dout_rows, *score, *dp, *k_columns, *v_columns, *dk, *dv;
} key_tile;

static layout plan_scratch(const grad_pass *pass)
{
    int64_t nr = pass->run->cpu->level->nr, tile_row = pass->run->tile_row;
    int64_t columns = KEYS / nr * pass->columns_stride;
    int64_t rows = pass->run->chan_padded / nr * pass->rows_stride;
    layout at = {0};
    at.reach = ra_layout_add(&at.bytes, QUERIES, sizeof(ra_range));
    at.q = ra_layout_add(&at.bytes, QUERIES * tile_row, sizeof(float));
    at.dout = ra_layout_add(&at.bytes, QUERIES * tile_row, sizeof(float));
    at.q_rows = ra_layout_add(&at.bytes, rows, sizeof(float));
    at.dout_rows = ra_layout_add(&at.bytes, rows, sizeof(float));
    at.score = ra_layout_add(&at.bytes, QUERIES * SCORE_ROW, sizeof(float));
    at.dp = ra_layout_add(&at.bytes, QUERIES * SCORE_ROW, sizeof(float));
    at.k_columns = ra_layout_add(&at.bytes, columns, sizeof(float));
    at.v_columns = ra_layout_add(&at.bytes, columns, sizeof(float));
    /* A product writes whole blocks of mr rows, so the last one may overhang. */
    at.dk = ra_layout_add(&at.bytes, (KEYS + RA_TILE_GAP) * tile_row, sizeof(float));
    at.dv = ra_layout_add(&at.bytes, (KEYS + RA_TILE_GAP) * tile_row, sizeof(float));
    return at;
}

static key_tile open_tile(const grad_pass *pass, int64_t item, int worker)
{
    char *scratch = ra_cpu_scratch(pass->run->cpu, worker);
    return (key_tile){
        .pass = pass,
        .at = ra_tiling_at(&pass->tiling, item % pass->tiling.tiles),
        .kv_head = item / pass->tiling.tiles,
        .reach = (void *)(scratch + pass->at.reach),
        .q = (void *)(scratch + pass->at.q),
        .dout = (void *)(scratch + pass->at.dout),
        .q_rows = (void *)(scratch + pass->at.q_rows),
        .dout_rows = (void *)(scratch + pass->at.dout_rows),
        .score = (void *)(scratch + pass->at.score),
        .dp = (void *)(scratch + pass->at.dp),
        .k_columns = (void *)(scratch + pass->at.k_columns),
        .v_columns = (void *)(scratch + pass->at.v_columns),
        .dk = (void *)(scratch + pass->at.dk),
        .dv = (void *)(scratch + pass->at.dv),
    };
}

/* to[keys, chan] += weights[queries, keys]^T rows[queries, chan], for `width` keys from `column`.
 */
static void add_transposed(const key_tile *tile, const float *weights, const float *rows,
                           int64_t queries, int64_t column, int64_t width, float *to)
{
    const ra_grad_run *run = tile->pass->run;
    ra_product product = {
        .mode = RA_PRODUCT_ADD,
        .m = width,
        .n = run->chan_padded,
        .k = queries,
        .a = weights,
        .a_row = 1,
        .a_col = SCORE_ROW,
        .b = rows,
        .b_stride = tile->pass->rows_stride,
        .c = to + column * run->tile_row,
        .c_row = run->tile_row,
    };
    run->cpu->level->product(&product);
}

/* The `count` queries from `pos` on of one head, whose reaches are known. */
static void grad_head(const key_tile *tile, const ra_piece *piece, int64_t head, int64_t pos,
                      int64_t count)
{
    const grad_pass *pass = tile->pass;
    const ra_grad_run *run = pass->run;
    const ra_level *level = run->cpu->level;
    ra_range seen =
        ra_tile_columns(tile->at.begin, tile->at.end, tile->reach[0], tile->reach[count - 1]);
    if (seen.begin >= seen.end) {
        return;
    }
    int64_t row_end = ra_round_up(count, level->mr);
    ra_grad_load(run, &run->job->q, piece, head, pos, count, row_end, tile->q);
    ra_grad_load(run, &run->job->dout, piece, head, pos, count, row_end, tile->dout);
    ra_rows q = {tile->q, RA_F32, run->tile_row, count, run->chan};
    ra_rows dout = {tile->dout, RA_F32, run->tile_row, count, run->chan};
    level->pack(&q, tile->q_rows, pass->rows_stride);
    level->pack(&dout, tile->dout_rows, pass->rows_stride);

    int64_t panel = seen.begin / level->nr, column = panel * level->nr;
    int64_t width = ra_round_up(seen.end - column, level->nr);
    ra_product scores = {
        .mode = RA_PRODUCT_SET,
        .m = row_end,
        .n = width,
        .k = run->chan,
        .a = tile->q,
        .a_row = run->tile_row,
        .a_col = 1,
        .b = tile->k_columns + panel * pass->columns_stride,
        .b_stride = pass->columns_stride,
        .c = tile->score,
        .c_row = SCORE_ROW,
    };
    level->product(&scores);
    ra_product dp = scores;
    dp.a = tile->dout;
    dp.b = tile->v_columns + panel * pass->columns_stride;
    dp.c = tile->dp;
    level->product(&dp);

    int64_t width_rows = ra_round_up(width, level->mr);
    for (int64_t i = 0; i < count; i++) {
        float *score_row = tile->score + i * SCORE_ROW, *dp_row = tile->dp + i * SCORE_ROW;
        ra_range keys =
            ra_tile_columns(tile->at.begin + column, tile->at.end, tile->reach[i], tile->reach[i]);
        level->gradient(score_row, dp_row, width, keys.begin, keys.end, run->job->scale,
                        *ra_tile_value(&run->job->lse, piece, head, pos + i),
                        *ra_tile_value(&run->job->delta, piece, head, pos + i));
        for (int64_t c = width; c < width_rows; c++) {
            score_row[c] = dp_row[c] = 0; /* a row of dk beyond, which others own */
        }
    }
    add_transposed(tile, tile->score, tile->dout_rows, count, column, width_rows, tile->dv);
    add_transposed(tile, tile->dp, tile->q_rows, count, column, width_rows, tile->dk);
}

static void grad_piece(const key_tile *tile, const ra_piece *q)
{
    const ra_grad_run *run = tile->pass->run;
    const ra_cover *cover = run->job->cover;
    int64_t group = run->q_heads / run->kv_heads;
    ra_range queries = ra_cover_seen_by(cover, tile->at.piece, tile->at.begin, tile->at.end, q);
    for (int64_t pos = queries.begin; pos < queries.end; pos += QUERIES) {
        int64_t count = ra_min_i64(QUERIES, queries.end - pos);
        for (int64_t i = 0; i < count; i++) {
            tile->reach[i] = ra_cover_reach(cover, q->row, pos + i);
        }
        for (int64_t h = 0; h < group; h++) {
            grad_head(tile, q, tile->kv_head * group + h, pos, count);
        }
    }
}

static void add_rows(const key_tile *tile, const ra_tensor *t, const float *from)
{
    const ra_grad_run *run = tile->pass->run;
    for (int64_t pos = tile->at.begin; pos < tile->at.end; pos++, from += run->tile_row) {
        float *to = ra_tile_value(t, tile->at.piece, tile->kv_head, pos);
        for (int64_t c = 0; c < run->chan; c++) {
            to[c] += from[c];
        }
    }
}

static void grad_item(void *arg, int64_t item, int worker)
{
    const grad_pass *pass = arg;
    const ra_grad_run *run = pass->run;
    const ra_grad_job *job = run->job;
    key_tile tile = open_tile(pass, item, worker);
    const ra_piece *piece = tile.at.piece;
    if (piece->first == piece->last) {
        return;
    }
    int64_t count = tile.at.end - tile.at.begin;
    ra_rows k = ra_tile_rows(&job->k[piece->source], piece, tile.kv_head, tile.at.begin, count);
    ra_rows v = ra_tile_rows(&job->v[piece->source], piece, tile.kv_head, tile.at.begin, count);
    run->cpu->level->pack_transposed(&k, tile.k_columns, pass->columns_stride);
    run->cpu->level->pack_transposed(&v, tile.v_columns, pass->columns_stride);
    size_t bytes = (size_t)((KEYS + RA_TILE_GAP) * run->tile_row) * sizeof(float);
    memset(tile.dk, 0, bytes);
    memset(tile.dv, 0, bytes);
    for (int64_t i = piece->first; i < piece->last; i++) {
        grad_piece(&tile, &job->cover->q[i]);
    }
    add_rows(&tile, &job->dk[piece->source], tile.dk);
    add_rows(&tile, &job->dv[piece->source], tile.dv);
}

ra_status ra_grad_keys(const ra_grad_run *run)
{
    ra_cpu *cpu = run->cpu;
    const ra_cover *cover = run->job->cover;
    RA_CHECK(KEYS % cpu->level->nr == 0 && QUERIES % cpu->level->mr == 0 &&
             cpu->level->mr <= RA_TILE_GAP);
    grad_pass pass = {.run = run};
    pass.columns_stride = run->chan * cpu->level->nr + RA_TILE_GAP;
    pass.rows_stride = QUERIES * cpu->level->nr + RA_TILE_GAP;
    RA_TRY(ra_tiling_build(cpu, cover->k, cover->k_count, KEYS, &pass.tiling));
    pass.at = plan_scratch(&pass);
    RA_TRY(ra_cpu_scratch_reserve(cpu, pass.at.bytes));
    ra_team_run(cpu->team, pass.tiling.tiles * run->kv_heads, grad_item, &pass);
    return RA_OK;
}
