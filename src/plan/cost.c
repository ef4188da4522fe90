/* Counting by cursors that only move forward, because reaches do. */
#include "plan/cost.h"

/* Walks along the tokens of one document: how many stand before a position. */
typedef struct counter {
    const ra_owned_piece *piece, *end;
    int64_t passed; /* tokens of the pieces that are left behind */
} counter;

static int64_t count_before(counter *c, int64_t pos)
{
    while (c->piece < c->end && c->piece->pos + c->piece->count <= pos) {
        c->passed += c->piece->count;
        c->piece++;
    }
    bool inside = c->piece < c->end && c->piece->pos < pos;
    return c->passed + (inside ? pos - c->piece->pos : 0);
}

typedef void (*visit_query)(void *context, const ra_owned_piece *piece, int64_t pos, int64_t pairs);

/* Visits every query with the number of keys that it sees. */
static void walk_queries(const ra_cover *rule, const ra_pieces *pieces, visit_query visit,
                         void *context)
{
    for (int64_t first = 0; first < pieces->count;) {
        int64_t end = ra_pieces_group_end(pieces, first);
        counter low = {&pieces->piece[first], pieces->piece + end, 0}, high = low;
        for (int64_t i = first; i < end; i++) {
            const ra_owned_piece *q = &pieces->piece[i];
            for (int64_t pos = q->pos; pos < q->pos + q->count; pos++) {
                ra_range reach = ra_cover_reach(rule, q->row, pos);
                visit(context, q, pos,
                      count_before(&high, reach.end) - count_before(&low, reach.begin));
            }
        }
        first = end;
    }
}

static void add_to_owner(void *context, const ra_owned_piece *piece, int64_t pos, int64_t pairs)
{
    (void)pos;
    ((int64_t *)context)[piece->owner] += pairs;
}

void ra_cost_pairs(const ra_cover *rule, const ra_pieces *pieces, int64_t *pairs)
{
    walk_queries(rule, pieces, add_to_owner, pairs);
}

typedef struct position_costs {
    double weight, *cost;
    int64_t align;
} position_costs;

static void add_to_position(void *context, const ra_owned_piece *piece, int64_t pos, int64_t pairs)
{
    (void)piece;
    const position_costs *to = context;
    to->cost[pos / to->align] += to->weight * (double)pairs;
}

void ra_cost_positions(const ra_cover *rule, const ra_pieces *pieces, double weight, int64_t align,
                       double *cost)
{
    walk_queries(rule, pieces, add_to_position, &(position_costs){weight, cost, align});
}

/* Tiles of one key piece that meet [begin, end), counted from the piece's first key. */
static int64_t tiles_between(int64_t begin, int64_t end)
{
    return begin < end ? ra_ceil_div(end, RA_COST_TILE) - begin / RA_COST_TILE : 0;
}

/* Those that lie wholly inside [begin, end) of a piece of `count` keys; its last tile may be short.
 */
static int64_t tiles_inside(int64_t begin, int64_t end, int64_t count)
{
    int64_t first = ra_ceil_div(begin, RA_COST_TILE);
    int64_t last = end == count ? ra_ceil_div(end, RA_COST_TILE) : end / RA_COST_TILE;
    return ra_max_i64(0, last - first);
}

void ra_cost_tiles(const ra_cover *cover, int64_t *full, int64_t *partial)
{
    for (int64_t i = 0; i < cover->q_count; i++) {
        const ra_piece *q = &cover->q[i];
        int64_t q_end = q->pos + q->count;
        for (int64_t begin = q->pos; begin < q_end; begin += RA_COST_TILE) {
            int64_t end = ra_min_i64(begin + RA_COST_TILE, q_end);
            for (int64_t j = q->first; j < q->last; j++) {
                const ra_piece *k = &cover->k[j];
                ra_tile tile = ra_cover_tile(cover, q, begin, end, k);
                int64_t met = tiles_between(tile.begin - k->pos, tile.end - k->pos);
                int64_t inside =
                    tiles_inside(tile.full_begin - k->pos, tile.full_end - k->pos, k->count);
                inside = ra_min_i64(inside, met);
                *full += inside;
                *partial += met - inside;
            }
        }
    }
}
