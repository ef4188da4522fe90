/* Tiles of pieces by arithmetic: a prefix sum over pieces and a search in it. */
#include "backend/cpu/tile.h"

#include "base/alloc.h"
#include "base/mathx.h"

/* Items a worker, at least, for the team to share them out evenly. */
enum { ITEMS_PER_WORKER = 8 };

ra_status ra_tiling_build(ra_tile_counts *memory, const ra_piece *pieces, int64_t piece_count,
                          int64_t rows, ra_tiling *out)
{
    RA_TRY(RA_RESERVE(&memory->first, &memory->capacity, piece_count + 1));
    int64_t tiles = 0;
    for (int64_t i = 0; i < piece_count; i++) {
        memory->first[i] = tiles;
        tiles += ra_ceil_div(pieces[i].count, rows);
    }
    memory->first[piece_count] = tiles;
    *out = (ra_tiling){pieces, piece_count, rows, tiles, memory->first};
    return RA_OK;
}

ra_piece_tile ra_tiling_at(const ra_tiling *tiling, int64_t tile)
{
    int64_t low = 0, high = tiling->piece_count;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (tiling->first[middle] <= tile) {
            low = middle;
        } else {
            high = middle;
        }
    }
    const ra_piece *piece = &tiling->piece[low];
    int64_t begin = piece->pos + (tile - tiling->first[low]) * tiling->rows;
    int64_t end = ra_min_i64(begin + tiling->rows, piece->pos + piece->count);
    return (ra_piece_tile){piece, begin, end};
}

bool ra_tile_before(const ra_cover *cover, const ra_piece *q, const ra_piece_tile *keys,
                    int64_t begin)
{
    const ra_piece *k = keys->piece;
    if (keys->begin > k->pos || keys->begin <= begin) {
        return keys->begin > begin;
    }
    return k > cover->k + q->first && k[-1].pos + k[-1].count > begin;
}

bool ra_tile_behind(const ra_cover *cover, const ra_piece *q, const ra_piece_tile *keys,
                    int64_t end)
{
    const ra_piece *k = keys->piece;
    if (keys->end < k->pos + k->count || keys->end >= end) {
        return keys->end < end;
    }
    return k + 1 < cover->k + q->last && k[1].pos < end;
}

ra_status ra_query_items_build(ra_cpu *cpu, const ra_cover *cover, int64_t q_heads,
                               int64_t kv_heads, int64_t blocks_max, ra_query_items *out)
{
    int64_t group = q_heads / kv_heads;
    int64_t heads = ra_ceil_div(group, ra_ceil_div(group, blocks_max));
    int64_t blocks = blocks_max / heads;
    /* Smaller tiles for a larger team are free to choose: no bit depends on the tile of a row. */
    int team = ra_team_size(cpu->team), wanted = team == 1 ? 1 : team * ITEMS_PER_WORKER;
    ra_query_items items = {.group = group, .heads = heads, .chunks = ra_ceil_div(group, heads)};
    do {
        int64_t rows = blocks * RA_QUERY_BLOCK;
        RA_TRY(ra_tiling_build(&cpu->tiles[0], cover->q, cover->q_count, rows, &items.tiling));
        items.count = items.tiling.tiles * kv_heads * items.chunks;
        blocks /= 2;
    } while (blocks > 0 && items.count < wanted);
    *out = items;
    return RA_OK;
}

ra_query_item ra_query_item_at(const ra_query_items *items, int64_t item, int64_t mr)
{
    /* Items of a kv head follow one another, so that its keys stay in the shared cache; among them
     * the last tiles, which see most under a causal mask, come first. */
    int64_t tile = items->tiling.tiles - 1 - item % items->tiling.tiles;
    int64_t chunk = item / items->tiling.tiles % items->chunks;
    int64_t kv_head = item / items->tiling.tiles / items->chunks;
    ra_piece_tile at = ra_tiling_at(&items->tiling, tile);
    return (ra_query_item){
        .at = at,
        .kv_head = kv_head,
        .head = kv_head * items->group + chunk * items->heads,
        .heads = ra_min_i64(items->heads, items->group - chunk * items->heads),
        .queries = at.end - at.begin,
        .pitch = ra_round_up(at.end - at.begin, mr),
    };
}
