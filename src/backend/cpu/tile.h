/* Cuts the pieces of a cover into the tiles that fold and grad hand out to the team. Must not know
 * what is computed on a tile. */
#ifndef RA_BACKEND_CPU_TILE_H
#define RA_BACKEND_CPU_TILE_H

#include "backend/cpu/cpu.h"

enum {
    /* Queries are computed in blocks of one head, small enough that their scores stay in the first
     * cache: 24 or, where products are faster, 48. */
    RA_QUERY_BLOCK = 24,
    RA_QUERIES_MAX = 2 * RA_QUERY_BLOCK,
    /* Blocks of 24 of a tile over all its heads: as many as share one packed key tile. */
    RA_BLOCKS_MAX = 64,
    /* Keys of a tile; a multiple of every level's nr. */
    RA_KEY_TILE = 128,
    /* Floats between the rows of a tile beyond its columns, so that rows a power of two apart do
     * not fall into one cache set; also room for a block of mr columns to overhang. */
    RA_TILE_GAP = 16,
};

/* Pieces cut into tiles of `rows` positions, the last one of a piece being shorter. */
typedef struct ra_tiling {
    const ra_piece *piece;
    int64_t piece_count, rows, tiles;
    const int64_t *first; /* [piece_count + 1] tiles before a piece; borrowed */
} ra_tiling;

ra_status ra_tiling_build(ra_tile_counts *memory, const ra_piece *pieces, int64_t piece_count,
                          int64_t rows, ra_tiling *out);

/* Positions [begin, end) of a piece. */
typedef struct ra_piece_tile {
    const ra_piece *piece;
    int64_t begin, end;
} ra_piece_tile;
ra_piece_tile ra_tiling_at(const ra_tiling *tiling, int64_t tile);

/* Do queries of piece q whose reach begins at `begin` see a key before this key tile? */
bool ra_tile_before(const ra_cover *cover, const ra_piece *q, const ra_piece_tile *keys,
                    int64_t begin);
/* And, where it ends at `end`, one behind it? */
bool ra_tile_behind(const ra_cover *cover, const ra_piece *q, const ra_piece_tile *keys,
                    int64_t end);

/* A computation by query tiles: an item is a tile, a kv head and some query heads that read it. */
typedef struct ra_query_items {
    ra_tiling tiling;
    int64_t group;  /* query heads of a kv head */
    int64_t heads;  /* of an item, at most */
    int64_t chunks; /* items that the group takes */
    int64_t count;
} ra_query_items;
ra_status ra_query_items_build(ra_cpu *cpu, const ra_cover *cover, int64_t q_heads,
                               int64_t kv_heads, int64_t blocks_max, ra_query_items *out);

typedef struct ra_query_item {
    ra_piece_tile at;
    int64_t kv_head, head, heads; /* query heads [head, head + heads) */
    int64_t queries;              /* at.end - at.begin */
    int64_t pitch;                /* rows of a head in scratch: queries rounded up to mr */
} ra_query_item;
ra_query_item ra_query_item_at(const ra_query_items *items, int64_t item, int64_t mr);

/* The part of a key tile [begin, end) that queries with these reaches see, in columns from begin.
 * Reaches only move forward, so those of the first and the last query bound it. */
static inline ra_range ra_tile_columns(int64_t begin, int64_t end, ra_range first, ra_range last)
{
    ra_range columns = {
        ra_clamp_i64(first.begin - begin, 0, end - begin),
        ra_clamp_i64(last.end - begin, 0, end - begin),
    };
    return columns;
}

/* What each of `count` rows sees to what each block of mr rows does. */
static inline void ra_tile_blocks(const ra_range *rows, int64_t count, int64_t mr, ra_range *blocks)
{
    for (int64_t i = 0; i < count; i += mr) {
        blocks[i / mr] = (ra_range){rows[i].begin, rows[ra_min_i64(i + mr, count) - 1].end};
    }
}

/* The same the other way round: the rows that see some of the mr columns of each block, for the
 * blocks of `width` columns. */
static inline void ra_tile_seen_by(const ra_range *rows, int64_t count, int64_t mr, int64_t width,
                                   ra_range *blocks)
{
    ra_range seen = {0, 0};
    for (int64_t column = 0; column < width; column += mr) {
        while (seen.begin < count && rows[seen.begin].end <= column) {
            seen.begin++;
        }
        while (seen.end < count && rows[seen.end].begin < column + mr) {
            seen.end++;
        }
        blocks[column / mr] = seen;
    }
}

/* Rows [pos, pos + count) of a piece in tensor t. */
static inline ra_rows ra_tile_rows(const ra_tensor *t, const ra_piece *piece, int64_t head,
                                   int64_t pos, int64_t count)
{
    ra_rows rows = {
        .data = ra_tensor_at(t, piece->tensor_row, head, piece->index + pos - piece->pos),
        .dtype = t->dtype,
        .stride = t->stride[RA_SEQ],
        .count = count,
        .chan = t->size[RA_CHAN],
    };
    return rows;
}

static inline void *ra_tile_row(const ra_tensor *t, const ra_piece *piece, int64_t head,
                                int64_t pos)
{
    return ra_tensor_at(t, piece->tensor_row, head, piece->index + pos - piece->pos);
}

/* The same of an f32 tensor, such as one value of [B, H, S, 1]. */
static inline float *ra_tile_value(const ra_tensor *t, const ra_piece *piece, int64_t head,
                                   int64_t pos)
{
    return ra_tile_row(t, piece, head, pos);
}

/* The next array of `count` elements in a scratch layout that is `*bytes` long so far. */
static inline int64_t ra_layout_add(int64_t *bytes, int64_t count, size_t size)
{
    int64_t offset = *bytes;
    *bytes = ra_round_up(offset + count * (int64_t)size, 64);
    return offset;
}

#endif
