/*
 * Backward by key tiles. A key tile is packed once, then every query that sees it passes by, block
 * by block, head by head of the group: dv += p^T dout, dk += ds^T q, dq += ds k. Must not know
 * instruction sets.
 *
 * The scores are computed once, so dq rows are shared by the items of all key tiles that they see.
 * Each item adds its part to a block of dq after the item of the key tile before it has: the order
 * of the sum is the order of the keys, for any team. The first begins the sum, the last rounds it.
 * Items go through their queries from the last to the first. So under any mask those that run at
 * the same time come to a block in the order of their keys, one block apart, and hardly wait.
 */
#include <math.h>
#include <string.h>

#include "backend/cpu/ahead.h"
#include "backend/cpu/ending.h"
#include "backend/cpu/tile.h"
#include "base/alloc.h"
#include "base/mathx.h"
#include "plan/schedule.h"

enum {
    KEYS = RA_KEY_TILE,
    QUERIES = 48, /* of a block: half as many cost 5 %, twice as many gain nothing */
    SCORE_ROW = KEYS + RA_TILE_GAP,
};
_Static_assert(RA_SCHEDULE_TILE % KEYS == 0, "a plan's tiles are whole tiles");

/* Byte offsets in a worker's scratch. */
typedef struct layout {
    int64_t reach;                          /* ra_range [QUERIES] */
    int64_t q, dout, dq;                    /* tiles [QUERIES, chan] */
    int64_t q_rows, dout_rows;              /* the first two as B: panels, or the tiles */
    int64_t score, dp;                      /* tiles [QUERIES, KEYS] */
    int64_t score_rest, dp_rest;            /* the same */
    int64_t p_columns, ds_columns, ds_rows; /* p and ds as left operands, where they are narrower */
    int64_t k_columns, v_columns, k_rows;   /* panels of K and V transposed, and of K */
    int64_t dk, dv;                         /* tiles [KEYS, chan] */
    int64_t bytes;
} layout;

typedef struct grad_run {
    ra_cpu *cpu;
    const ra_grad_job *job;
    const ra_operands *operands;
    int64_t group, kv_heads;   /* query heads of a kv head */
    int64_t band;              /* kv heads whose key tiles take turns */
    int64_t chan, chan_padded; /* to nr */
    int64_t tile_row;          /* floats of a row of a tile of channels */
    int64_t columns_stride, q_stride, q_row, k_stride;
    ra_tiling keys, queries;
    layout at;
} grad_run;

/* One worker at one item. */
typedef struct key_tile {
    const grad_run *run;
    ra_piece_tile at;
    int64_t kv_head;
    const atomic_llong *before; /* progress of the key tile before, if they share queries */
    atomic_llong *progress;     /* dq of all blocks of lower number is done */
    ra_range *reach;
    float *q, *dout, *dq, *q_rows, *dout_rows, *score, *dp, *k_columns, *v_columns, *k_rows;
    float *dk, *dv;
    float *score_rest, *dp_rest; /* both NULL but for f32 inputs */
    float *p_columns, *ds_columns, *ds_rows;
    ra_ahead *ahead; /* rows that the next products ask for */
} key_tile;

/* A block of queries of one head. */
typedef struct query_block {
    const ra_piece *piece;
    int64_t head, pos, count;
    int64_t number;        /* ascending in the order in which items come to it */
    int64_t column, width; /* columns of the key tile that some row sees, width padded to nr */
    bool fresh, final;     /* nobody before this tile adds to dq, nobody after it will */
    /* Counted from column: what each row sees, what each mr rows see, which rows see mr keys. */
    ra_range keys[QUERIES], seen[QUERIES], seen_by[KEYS];
} query_block;

static layout plan_scratch(const grad_run *run)
{
    int64_t nr = run->cpu->level->nr, chans = QUERIES * run->tile_row;
    int64_t columns = KEYS / nr * run->columns_stride, panels = run->chan_padded / nr;
    /* A product writes whole blocks of mr rows, so the last one may overhang. */
    int64_t gradient = (KEYS + RA_TILE_GAP) * run->tile_row;
    layout at = {0};
    at.reach = ra_layout_add(&at.bytes, QUERIES, sizeof(ra_range));
    at.q = ra_layout_add(&at.bytes, chans, sizeof(float));
    at.dout = ra_layout_add(&at.bytes, chans, sizeof(float));
    at.dq = ra_layout_add(&at.bytes, chans, sizeof(float));
    if (run->operands->depth == 1) {
        at.q_rows = at.q;
        at.dout_rows = at.dout;
    } else {
        at.q_rows = ra_layout_add(&at.bytes, panels * run->q_stride, sizeof(float));
        at.dout_rows = ra_layout_add(&at.bytes, panels * run->q_stride, sizeof(float));
    }
    at.score = ra_layout_add(&at.bytes, QUERIES * SCORE_ROW, sizeof(float));
    at.dp = ra_layout_add(&at.bytes, QUERIES * SCORE_ROW, sizeof(float));
    at.score_rest = ra_layout_add(&at.bytes, QUERIES * SCORE_ROW, sizeof(float));
    at.dp_rest = ra_layout_add(&at.bytes, QUERIES * SCORE_ROW, sizeof(float));
    at.p_columns = ra_layout_add(&at.bytes, QUERIES * SCORE_ROW, sizeof(float));
    at.ds_columns = ra_layout_add(&at.bytes, QUERIES * SCORE_ROW, sizeof(float));
    at.ds_rows = ra_layout_add(&at.bytes, QUERIES * SCORE_ROW, sizeof(float));
    at.k_columns = ra_layout_add(&at.bytes, columns, sizeof(float));
    at.v_columns = ra_layout_add(&at.bytes, columns, sizeof(float));
    at.k_rows = ra_layout_add(&at.bytes, panels * run->k_stride, sizeof(float));
    at.dk = ra_layout_add(&at.bytes, gradient, sizeof(float));
    at.dv = ra_layout_add(&at.bytes, gradient, sizeof(float));
    return at;
}

/* By their pieces: may tile `tile - 1` and this one have a query in common? */
static bool follows(const ra_tiling *keys, int64_t tile)
{
    if (tile == 0) {
        return false;
    }
    const ra_piece *before = ra_tiling_at(keys, tile - 1).piece;
    const ra_piece *piece = ra_tiling_at(keys, tile).piece;
    return before->last > piece->first;
}

/* Items of a kv head follow one another, so that its queries stay in the shared cache. But as many
 * kv heads as there are workers take turns, as two items of one head would pass dq to and fro. */
static key_tile open_tile(const grad_run *run, int64_t item, int worker)
{
    char *scratch = ra_cpu_scratch(run->cpu, worker);
    int64_t band_items = run->band * run->keys.tiles, head = item / band_items * run->band;
    int64_t heads = ra_min_i64(run->band, run->kv_heads - head);
    int64_t tile = item % band_items / heads;
    bool exact = run->job->q.dtype == RA_F32, narrow = run->operands->narrow != NULL;
    return (key_tile){
        .run = run,
        .at = ra_tiling_at(&run->keys, tile),
        .kv_head = head + item % band_items % heads,
        .before = follows(&run->keys, tile) ? &run->cpu->progress[item - heads] : NULL,
        .progress = &run->cpu->progress[item],
        .reach = (void *)(scratch + run->at.reach),
        .q = (void *)(scratch + run->at.q),
        .dout = (void *)(scratch + run->at.dout),
        .dq = (void *)(scratch + run->at.dq),
        .q_rows = (void *)(scratch + run->at.q_rows),
        .dout_rows = (void *)(scratch + run->at.dout_rows),
        .score = (void *)(scratch + run->at.score),
        .dp = (void *)(scratch + run->at.dp),
        .k_columns = (void *)(scratch + run->at.k_columns),
        .v_columns = (void *)(scratch + run->at.v_columns),
        .k_rows = (void *)(scratch + run->at.k_rows),
        .dk = (void *)(scratch + run->at.dk),
        .dv = (void *)(scratch + run->at.dv),
        .p_columns = (void *)(scratch + (narrow ? run->at.p_columns : run->at.score)),
        .ds_columns = (void *)(scratch + (narrow ? run->at.ds_columns : run->at.dp)),
        .ds_rows = (void *)(scratch + (narrow ? run->at.ds_rows : run->at.dp)),
        .score_rest = exact ? (void *)(scratch + run->at.score_rest) : NULL,
        .dp_rest = exact ? (void *)(scratch + run->at.dp_rest) : NULL,
    };
}

/* Rows that attend nothing (lse -inf) become zero: what they hold must not reach a product. */
static void load_rows(const key_tile *tile, const query_block *block)
{
    const grad_run *run = tile->run;
    const ra_tensor *tensors[] = {&run->job->q, &run->job->dout};
    float *tiles[] = {tile->q, tile->dout}, *panels[] = {tile->q_rows, tile->dout_rows};
    for (int t = 0; t < 2; t++) {
        ra_rows rows =
            ra_tile_rows(tensors[t], block->piece, block->head, block->pos, block->count);
        run->operands->load(&rows, ra_round_up(block->count, run->operands->mr), tiles[t],
                            run->tile_row);
        for (int64_t i = 0; i < block->count; i++) {
            float *row = tiles[t] + i * run->tile_row;
            if (*ra_tile_value(&run->job->lse, block->piece, block->head, block->pos + i) ==
                -INFINITY) {
                memset(row, 0, (size_t)run->chan * sizeof *row);
            }
        }
        if (panels[t] != tiles[t]) { /* words of two bf16 */
            ra_rows loaded = {
                .data = tiles[t],
                .dtype = RA_BF16,
                .stride = run->tile_row * run->operands->depth,
                .count = block->count,
                .chan = run->chan,
            };
            run->operands->pack(&loaded, panels[t], run->q_stride);
        }
    }
}

static void multiply(const key_tile *tile, const ra_product *product)
{
    ra_ahead_product(tile->ahead, tile->run->operands, *product, tile->run->cpu->level->nr);
}

/* Scores become p, dout.v becomes ds. */
static void weigh(const key_tile *tile, const query_block *block)
{
    const grad_run *run = tile->run;
    const ra_level *level = run->cpu->level;
    int64_t panel = block->column / level->nr, width = block->width;
    int64_t padded =
        ra_round_up(width, run->operands->mr); /* rows of dk and dv that blocks reach */
    ra_product scores = {
        .mode = RA_PRODUCT_SET,
        .m = ra_round_up(block->count, run->operands->mr),
        .n = width,
        .k = run->chan,
        .a = tile->q,
        .a_row = run->tile_row,
        .a_col = 1,
        .b = tile->k_columns + panel * run->columns_stride,
        .b_stride = run->columns_stride,
        .b_row = level->nr,
        .c = tile->score,
        .c_row = SCORE_ROW,
        .rest = tile->score_rest,
        .columns = block->seen,
    };
    multiply(tile, &scores);
    ra_product dp = scores;
    dp.a = tile->dout;
    dp.b = tile->v_columns + panel * run->columns_stride;
    dp.c = tile->dp;
    dp.rest = tile->dp_rest;
    multiply(tile, &dp);
    for (int64_t i = 0; i < block->count; i++) {
        int64_t pos = block->pos + i, at = i * SCORE_ROW;
        ra_gradient row = {
            .score = tile->score + at,
            .dp = tile->dp + at,
            .score_rest = tile->score_rest ? tile->score_rest + at : NULL,
            .dp_rest = tile->dp_rest ? tile->dp_rest + at : NULL,
            .scale = run->job->scale,
            .lse = *ra_tile_value(&run->job->lse, block->piece, block->head, pos),
            .delta = *ra_tile_value(&run->job->delta, block->piece, block->head, pos),
        };
        level->gradient(&row, width, block->keys[i].begin, block->keys[i].end);
        for (int64_t c = width; c < padded; c++) {
            row.score[c] = row.dp[c] = 0;
        }
    }
    if (run->operands->narrow) {
        const ra_operands *o = run->operands;
        o->narrow_transposed(tile->score, SCORE_ROW, block->count, padded, tile->p_columns);
        o->narrow_transposed(tile->dp, SCORE_ROW, block->count, padded, tile->ds_columns);
        o->narrow(tile->dp, SCORE_ROW, scores.m, width, tile->ds_rows);
    }
}

/* to[keys, chan] += weights[queries, keys]^T rows[queries, chan]. */
static void add_transposed(const key_tile *tile, const query_block *block, const float *weights,
                           const float *rows, float *to)
{
    const grad_run *run = tile->run;
    const int64_t by_row = run->operands->transposed_row;
    ra_product product = {
        .mode = RA_PRODUCT_ADD,
        .m = ra_round_up(block->width, run->operands->mr),
        .n = run->chan_padded,
        .k = block->count,
        .a = weights,
        .a_row = by_row ? by_row : 1,
        .a_col = by_row ? 1 : SCORE_ROW,
        .b = rows,
        .b_stride = run->q_stride,
        .b_row = run->q_row,
        .c = to + block->column * run->tile_row,
        .c_row = run->tile_row,
        .live = block->seen_by,
    };
    multiply(tile, &product);
}

/* The rows that the block's part of dq goes to, unless another worker is still to write them. */
static ra_ahead sums_ahead(const key_tile *tile, const query_block *b)
{
    const grad_run *run = tile->run;
    const ra_tensor *to = b->fresh && b->final ? &run->job->to.dq : &run->job->dq;
    ra_ahead ahead = ra_ahead_of(b->count, run->chan_padded / run->cpu->level->nr);
    if (!tile->before || atomic_load_explicit(tile->before, memory_order_acquire) > b->number) {
        ra_ahead_add(&ahead, ra_tile_rows(to, b->piece, b->head, b->pos, b->count));
    }
    return ahead;
}

/* dq += ds K, in this item's turn. A row that attends nothing gets zero, whatever the keys hold. */
static void add_queries(const key_tile *tile, const query_block *block)
{
    const grad_run *run = tile->run;
    const ra_level *level = run->cpu->level;
    ra_product product = {
        .mode = RA_PRODUCT_SET,
        .m = ra_round_up(block->count, run->operands->mr),
        .n = run->chan_padded,
        .k = block->width,
        .a = tile->ds_rows,
        .a_row = SCORE_ROW,
        .a_col = 1,
        .b = tile->k_rows + block->column / run->operands->depth * level->nr,
        .b_stride = run->k_stride,
        .b_row = level->nr,
        .c = tile->dq,
        .c_row = run->tile_row,
        .live = block->seen,
        .k_first = block->column,
    };
    *tile->ahead = sums_ahead(tile, block);
    multiply(tile, &product);
    const ra_ending to = {&run->job->dq, &run->job->to.dq, block->piece,
                          block->head,   block->fresh,     block->final};
    if (tile->before) {
        ra_team_await(tile->before, block->number + 1);
    }
    for (int64_t i = 0; i < block->count; i++) {
        float *row = tile->dq + i * run->tile_row;
        if (*ra_tile_value(&run->job->lse, block->piece, block->head, block->pos + i) ==
            -INFINITY) {
            memset(row, 0, (size_t)run->chan * sizeof *row);
        }
        ra_end_row(level, &to, block->pos + i, row);
    }
}

/* The part of the key tile that the block sees; false if it sees nothing. */
static bool find_keys(const key_tile *tile, query_block *block)
{
    const ra_level *level = tile->run->cpu->level;
    int64_t mr = tile->run->operands->mr;
    int64_t begin = tile->at.begin, end = tile->at.end, last = block->count - 1;
    ra_range seen = ra_tile_columns(begin, end, tile->reach[0], tile->reach[last]);
    block->column = seen.begin / level->nr * level->nr;
    block->width = ra_round_up(seen.end - block->column, level->nr);
    for (int64_t i = 0; i < block->count; i++) {
        ra_range reach = tile->reach[i];
        block->keys[i] = ra_tile_columns(begin + block->column, end, reach, reach);
    }
    ra_tile_blocks(block->keys, block->count, mr, block->seen);
    ra_tile_seen_by(block->keys, block->count, mr, block->width, block->seen_by);
    return seen.begin < seen.end;
}

static void grad_block(const key_tile *tile, query_block *block)
{
    if (!find_keys(tile, block)) {
        return;
    }
    const ra_cover *cover = tile->run->job->cover;
    int64_t begin = tile->reach[0].begin, end = tile->reach[block->count - 1].end;
    block->fresh = block->piece->fresh && !ra_tile_before(cover, block->piece, &tile->at, begin);
    block->final = block->piece->final && !ra_tile_behind(cover, block->piece, &tile->at, end);
    load_rows(tile, block);
    weigh(tile, block);
    add_transposed(tile, block, tile->p_columns, tile->dout_rows, tile->dv);
    add_transposed(tile, block, tile->ds_columns, tile->q_rows, tile->dk);
    add_queries(tile, block);
}

/* Has the products of one block ask for the rows of the next. */
static ra_ahead look_ahead(const grad_run *run, const query_block *b)
{
    ra_ahead ahead = ra_ahead_of(b->count, 2 * run->chan_padded / run->cpu->level->nr);
    ra_ahead_add(&ahead, ra_tile_rows(&run->job->q, b->piece, b->head, b->pos, b->count));
    ra_ahead_add(&ahead, ra_tile_rows(&run->job->dout, b->piece, b->head, b->pos, b->count));
    return ahead;
}

/* Block i of a query piece, one head. */
static query_block block_at(const key_tile *tile, int64_t piece, int64_t i, int64_t head)
{
    const grad_run *run = tile->run;
    const ra_piece *q = &run->job->cover->q[piece];
    int64_t after = run->queries.tiles - 1 - (run->queries.first[piece] + i);
    query_block block = {.piece = q, .pos = q->pos + i * QUERIES};
    block.count = ra_min_i64(QUERIES, q->pos + q->count - block.pos);
    block.head = tile->kv_head * run->group + head;
    block.number = after * run->group + head;
    return block;
}

/* Query piece `piece`. Blocks are counted from its begin, so that every key tile meets the same. */
static void grad_piece(const key_tile *tile, int64_t piece)
{
    const grad_run *run = tile->run;
    const ra_cover *cover = run->job->cover;
    const ra_piece *q = &cover->q[piece];
    ra_range queries = ra_cover_seen_by(cover, tile->at.piece, tile->at.begin, tile->at.end, q);
    if (queries.begin >= queries.end) {
        return;
    }
    int64_t begin = (queries.begin - q->pos) / QUERIES;
    for (int64_t i = (queries.end - 1 - q->pos) / QUERIES; i >= begin; i--) {
        query_block next = block_at(tile, piece, i, 0);
        for (int64_t j = 0; j < next.count; j++) {
            tile->reach[j] = ra_cover_reach(cover, q->row, next.pos + j);
        }
        for (int64_t h = 0; h < run->group; h++) {
            query_block block = next;
            bool last = h + 1 == run->group;
            *tile->ahead = (ra_ahead){0};
            if (!last || i > begin) {
                next = block_at(tile, piece, last ? i - 1 : i, last ? 0 : h + 1);
                *tile->ahead = look_ahead(run, &next);
            }
            atomic_store_explicit(tile->progress, block.number, memory_order_release);
            grad_block(tile, &block);
        }
    }
}

static void add_keys(const key_tile *tile, const ra_tensor *sums, const ra_tensor *result,
                     float *from)
{
    const ra_piece *piece = tile->at.piece;
    const ra_ending to = {sums, result, piece, tile->kv_head, piece->fresh, piece->final};
    for (int64_t pos = tile->at.begin; pos < tile->at.end; pos++, from += tile->run->tile_row) {
        ra_end_row(tile->run->cpu->level, &to, pos, from);
    }
}

static void pack_keys(const key_tile *tile)
{
    const grad_run *run = tile->run;
    const ra_piece *piece = tile->at.piece;
    int64_t count = tile->at.end - tile->at.begin;
    ra_rows k =
        ra_tile_rows(&run->job->k[piece->source], piece, tile->kv_head, tile->at.begin, count);
    ra_rows v =
        ra_tile_rows(&run->job->v[piece->source], piece, tile->kv_head, tile->at.begin, count);
    run->operands->pack_transposed(&k, tile->k_columns, run->columns_stride);
    run->operands->pack_transposed(&v, tile->v_columns, run->columns_stride);
    run->operands->pack(&k, tile->k_rows, run->k_stride);
}

static void grad_item(void *arg, int64_t item, int worker)
{
    const grad_run *run = arg;
    const ra_grad_job *job = run->job;
    ra_ahead ahead = {0};
    key_tile tile = open_tile(run, item, worker);
    tile.ahead = &ahead;
    const ra_piece *piece = tile.at.piece;
    if (piece->first < piece->last) {
        pack_keys(&tile);
        size_t bytes = (size_t)((KEYS + RA_TILE_GAP) * run->tile_row) * sizeof(float);
        memset(tile.dk, 0, bytes);
        memset(tile.dv, 0, bytes);
        for (int64_t i = piece->last - 1; i >= piece->first; i--) {
            grad_piece(&tile, i);
        }
        add_keys(&tile, &job->dk[piece->source], &job->to.dk, tile.dk);
        add_keys(&tile, &job->dv[piece->source], &job->to.dv, tile.dv);
    }
    atomic_store_explicit(tile.progress, INT64_MAX, memory_order_release);
}

ra_status ra_cpu_grad(ra_cpu *cpu, const ra_grad_job *job)
{
    const ra_level *level = cpu->level;
    const ra_cover *cover = job->cover;
    grad_run run = {.cpu = cpu, .job = job, .chan = job->q.size[RA_CHAN]};
    run.operands = ra_level_operands(level, job->q.dtype);
    RA_CHECK(KEYS % level->nr == 0 && QUERIES % run.operands->mr == 0 &&
             run.operands->mr <= RA_TILE_GAP && QUERIES <= 2 * RA_DEPTH_STEP);
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        if (job->k[i].data) {
            run.kv_heads = job->k[i].size[RA_HEAD];
        }
    }
    if (run.kv_heads == 0) {
        return RA_OK; /* no keys: nothing to add */
    }
    run.group = job->q.size[RA_HEAD] / run.kv_heads;
    run.band = ra_min_i64(ra_team_size(cpu->team), run.kv_heads);
    run.chan_padded = ra_round_up(run.chan, level->nr);
    run.tile_row = run.chan_padded + RA_TILE_GAP;
    run.columns_stride = ra_round_up(run.chan, RA_DEPTH_STEP) * level->nr + RA_TILE_GAP;
    bool as_loaded = run.operands->depth == 1; /* rows of queries are B as they are A */
    run.q_stride = as_loaded ? level->nr : QUERIES * level->nr + RA_TILE_GAP;
    run.q_row = as_loaded ? run.tile_row : level->nr;
    run.k_stride = KEYS * level->nr + RA_TILE_GAP;
    run.at = plan_scratch(&run);
    RA_TRY(ra_tiling_build(&cpu->tiles[0], cover->k, cover->k_count, KEYS, &run.keys));
    RA_TRY(ra_tiling_build(&cpu->tiles[1], cover->q, cover->q_count, QUERIES, &run.queries));
    int64_t items = run.keys.tiles * run.kv_heads;
    RA_TRY(RA_RESERVE(&cpu->progress, &cpu->progress_capacity, items));
    RA_TRY(ra_cpu_scratch_reserve(cpu, run.at.bytes));
    for (int64_t i = 0; i < items; i++) {
        atomic_store_explicit(&cpu->progress[i], 0, memory_order_relaxed);
    }
    ra_team_run(cpu->team, items, grad_item, &run);
    return RA_OK;
}
