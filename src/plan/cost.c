/* Counting by cursors that only move forward, because reaches do. Sums over runs of queries are
 * closed forms, so counting is linear in pieces and image blocks, not in tokens. */
#include "plan/cost.h"

/* Walks along the tokens of one document: how many stand before a position. */
typedef struct counter {
    const ra_owned_piece *piece, *end;
    int64_t passed; /* tokens of the pieces that are left behind */
} counter;

static void advance(counter *c, int64_t pos)
{
    while (c->piece < c->end && c->piece->pos + c->piece->count <= pos) {
        c->passed += c->piece->count;
        c->piece++;
    }
}

/* The sum, over `count` positions from `pos` on, of the tokens that stand before each. */
static int64_t sum_before(counter *c, int64_t pos, int64_t count)
{
    int64_t sum = 0;
    while (count > 0) {
        advance(c, pos);
        bool behind = c->piece == c->end, inside = !behind && c->piece->pos <= pos;
        int64_t to = behind ? pos + count : c->piece->pos + (inside ? c->piece->count : 0);
        int64_t step = ra_min_i64(count, to - pos);
        sum += step * c->passed;
        if (inside) {
            sum += step * (pos - c->piece->pos) + step * (step - 1) / 2;
        }
        pos += step;
        count -= step;
    }
    return sum;
}

/* The same over the ends of reaches: from `first` to `last` in `count` positions, which follow the
 * query or stand still, and change between the two once at most. */
static int64_t sum_along(counter *c, int64_t first, int64_t last, int64_t second, int64_t count)
{
    int64_t moves = last - first, rests = count - 1 - moves;
    if (second > first) { /* moves first */
        int64_t sum = sum_before(c, first, moves + 1);
        return sum + rests * sum_before(c, last, 1);
    }
    return rests * sum_before(c, first, 1) + sum_before(c, first, moves + 1);
}

/* Allowed pairs of the queries [begin, end) of one piece: text, or tokens of one image block, so
 * that each end of the reach changes its pace once at most (rule/mask_rule.h). */
static int64_t count_stretch(const ra_cover *rule, counter *low, counter *high, int64_t row,
                             int64_t begin, int64_t end)
{
    ra_range first = ra_cover_reach(rule, row, begin), last = ra_cover_reach(rule, row, end - 1);
    ra_range second = end - begin > 1 ? ra_cover_reach(rule, row, begin + 1) : first;
    return sum_along(high, first.end, last.end, second.end, end - begin) -
           sum_along(low, first.begin, last.begin, second.begin, end - begin);
}

/* Allowed pairs of the queries [begin, end) of one piece. */
static int64_t count_queries(const ra_cover *rule, counter *low, counter *high, int64_t row,
                             int64_t begin, int64_t end)
{
    int64_t pairs = 0;
    if (rule->mask.vision == RA_VISION_OFF) {
        return count_stretch(rule, low, high, row, begin, end);
    }
    int64_t block = ra_tokens_block_behind(rule->tokens, row, begin);
    while (begin < end) {
        int64_t to = end;
        if (block < rule->tokens->block_first[row + 1]) {
            const ra_range *next = &rule->tokens->block[block];
            bool inside = next->begin <= begin;
            to = ra_min_i64(end, inside ? next->end : next->begin);
            block += inside;
        }
        pairs += count_stretch(rule, low, high, row, begin, to);
        begin = to;
    }
    return pairs;
}

/* Visits the pieces of all documents with the two cursors of its document. */
typedef void (*visit_piece)(void *context, const ra_cover *rule, const ra_owned_piece *piece,
                            counter *low, counter *high);

static void walk_pieces(const ra_cover *rule, const ra_pieces *pieces, visit_piece visit,
                        void *context)
{
    for (int64_t first = 0; first < pieces->count;) {
        int64_t end = ra_pieces_group_end(pieces, first);
        counter low = {&pieces->piece[first], pieces->piece + end, 0}, high = low;
        for (int64_t i = first; i < end; i++) {
            visit(context, rule, &pieces->piece[i], &low, &high);
        }
        first = end;
    }
}

static void add_to_owner(void *context, const ra_cover *rule, const ra_owned_piece *piece,
                         counter *low, counter *high)
{
    int64_t *pairs = context;
    pairs[piece->owner] +=
        count_queries(rule, low, high, piece->row, piece->pos, piece->pos + piece->count);
}

void ra_cost_pairs(const ra_cover *rule, const ra_pieces *pieces, int64_t *pairs)
{
    walk_pieces(rule, pieces, add_to_owner, pairs);
}

typedef struct position_costs {
    double weight, *cost;
    int64_t align;
} position_costs;

static void add_to_positions(void *context, const ra_cover *rule, const ra_owned_piece *piece,
                             counter *low, counter *high)
{
    const position_costs *to = context;
    int64_t end = piece->pos + piece->count;
    for (int64_t begin = piece->pos; begin < end;) {
        int64_t granule = begin / to->align;
        int64_t last = ra_min_i64(end, (granule + 1) * to->align);
        int64_t pairs = count_queries(rule, low, high, piece->row, begin, last);
        to->cost[granule] += to->weight * (double)pairs;
        begin = last;
    }
}

void ra_cost_positions(const ra_cover *rule, const ra_pieces *pieces, double weight, int64_t align,
                       double *cost)
{
    walk_pieces(rule, pieces, add_to_positions, &(position_costs){weight, cost, align});
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
