/* Random steps and what their computations cover. */
#include "support_plan.h"

#include <stdlib.h>

bool plan_allows(const plan_case *c, int64_t row, int64_t query, int64_t key)
{
    return ra_mask_rule(&c->mask, c->token[row * c->p.seq + query], c->token[row * c->p.seq + key]);
}

static void build_tokens(plan_case *c)
{
    ra_run *runs = NULL;
    int64_t run_capacity = 0, run_count = 0, capacity = 0, count = 0;
    ra_token_run *token_runs = NULL;
    int64_t counts[PROBLEM_RANKS_MAX];
    for (int rank = 0; rank < c->l.ranks; rank++) {
        for (int i = 0; i < c->l.run_count[rank]; i++) {
            assert_int_equal(RA_RESERVE(&runs, &run_capacity, run_count + 1), RA_OK);
            runs[run_count++] = c->l.run[rank][i];
        }
        int64_t *pos = layout_positions(&c->l, rank);
        int64_t length = c->l.length[rank];
        problem slice; /* the rank's metadata */
        problem_create(&slice, c->p.layer, c->p.rows, length);
        int32_t docs[PLAN_ROWS_MAX * PLAN_SEQ_MAX], types[PLAN_ROWS_MAX * PLAN_SEQ_MAX];
        uint8_t pads[PLAN_ROWS_MAX * PLAN_SEQ_MAX];
        for (int64_t i = 0; i < c->p.rows * length; i++) {
            int64_t from = i / length * c->p.seq + pos[i % length];
            docs[i] = c->p.doc_id ? c->p.doc_id[from] : 0;
            types[i] = c->p.token_type ? c->p.token_type[from] : 0;
            pads[i] = c->p.is_pad ? c->p.is_pad[from] : 0;
        }
        ra_step_desc desc = problem_desc(&slice);
        desc.doc_id = c->p.doc_id ? docs : NULL;
        desc.token_type = c->p.token_type ? types : NULL;
        desc.is_pad = c->p.is_pad ? pads : NULL;
        ra_token_run *own = NULL;
        assert_int_equal(ra_token_runs_encode(&desc, &own, &counts[rank]), RA_OK);
        assert_int_equal(RA_RESERVE(&token_runs, &capacity, count + counts[rank]), RA_OK);
        for (int64_t i = 0; i < counts[rank]; i++) {
            token_runs[count++] = own[i];
        }
        ra_free(own);
        problem_free(&slice);
        free(pos);
    }
    EXPECT(ra_shards_build(c->l.ranks, c->l.run_count, runs, &c->shards) == RA_OK);
    EXPECT(c->shards.seq == c->p.seq);
    EXPECT(ra_tokens_build(&c->shards, c->p.rows, counts, token_runs, &c->tokens) == RA_OK);
    ra_free(runs);
    ra_free(token_runs);
}

void plan_case_create(plan_case *c, rng *r)
{
    memset(c, 0, sizeof *c);
    int64_t seq = rng_int(r, 1, PLAN_SEQ_MAX), rows = rng_chance(r, 70) ? 1 : PLAN_ROWS_MAX;
    int ranks = (int)rng_int(r, 1, rng_chance(r, 90) ? 5 : PROBLEM_RANKS_MAX);
    ra_layer layer = layer_of(1, 1, 8, RA_F32);
    random_mask(r, seq, &layer);
    problem_create(&c->p, layer, rows, seq);
    random_metadata(r, &c->p);
    c->l = layout_kind((int)rng_int(r, 0, LAYOUT_KINDS - 1), ranks, seq, r);
    c->mask = ra_mask_of_layer(&layer);
    int32_t *group = problem_groups(&c->p);
    for (int64_t i = 0; i < rows * seq; i++) {
        int32_t doc = c->p.doc_id ? c->p.doc_id[i] : 1;
        bool pad = (c->p.is_pad && c->p.is_pad[i]) || doc <= 0;
        c->token[i] = (ra_token){i % seq, pad ? 0 : doc, group[i]};
    }
    free(group);
    for (int rank = 0; rank < ranks; rank++) {
        int64_t *pos = layout_positions(&c->l, rank);
        for (int64_t i = 0; i < c->l.length[rank]; i++) {
            c->owner[pos[i]] = rank;
            c->index[pos[i]] = i;
        }
        free(pos);
    }
    build_tokens(c);
    EXPECT(ra_pieces_build(&c->shards, &c->tokens, &c->pieces) == RA_OK);
    c->neighbourhood = c->shards.contiguous && layer.causal && c->mask.window > 0 &&
                       c->mask.vision == RA_VISION_OFF && rng_chance(r, 80);
    c->joined = rng_chance(r, 40);
    c->tile = rng_int(r, 1, 6);
    for (int rank = 0; rank < ranks; rank++) {
        ra_schedule_inputs in = {.tokens = &c->tokens,
                                 .pieces = &c->pieces,
                                 .mask = c->mask,
                                 .rank = rank,
                                 .rank_count = ranks,
                                 .neighbourhood = c->neighbourhood,
                                 .joined = c->joined,
                                 .tile = c->tile};
        EXPECT(ra_schedule_build(&in, &c->schedule[rank]) == RA_OK);
    }
}

void plan_case_free(plan_case *c)
{
    for (int rank = 0; rank < c->l.ranks; rank++) {
        ra_schedule_free(&c->schedule[rank]);
    }
    ra_pieces_free(&c->pieces);
    ra_tokens_free(&c->tokens);
    ra_shards_free(&c->shards);
    problem_free(&c->p);
}

/* Where each received row lies: chunk[index] = row * seq + pos, -1 = nothing arrives there. */
static void fill_chunk(const plan_case *c, const ra_schedule *s, const ra_hop *hop, int64_t *chunk)
{
    for (int64_t i = 0; i < hop->chunk_rows; i++) {
        chunk[i] = -1;
    }
    for (int l = hop->leg_first; l < hop->leg_first + hop->leg_count; l++) {
        const ra_message *recv = &s->leg[l].recv;
        for (int64_t i = 0; i < recv->range_count; i++) {
            for (int64_t j = 0; j < recv->range[i].count; j++) {
                int64_t at = recv->range[i].index + j;
                EXPECT(at >= 0 && at < hop->chunk_rows && chunk[at] == -1);
                chunk[at] = recv->range[i].row * c->p.seq + recv->range[i].pos + j;
            }
        }
    }
    for (int64_t i = 0; i < hop->chunk_rows; i++) {
        EXPECT(chunk[i] >= 0);
    }
}

/* Do the piece's tokens lie where it says? */
static void check_piece(const plan_case *c, const ra_piece *piece, int rank, const int64_t *chunk)
{
    for (int64_t i = 0; i < piece->count; i++) {
        int64_t pos = piece->pos + i;
        EXPECT(c->token[piece->row * c->p.seq + pos].doc == piece->doc && piece->doc > 0);
        if (piece->source == RA_SOURCE_CHUNK) {
            EXPECT(piece->tensor_row == 0);
            EXPECT(chunk[piece->index + i] == piece->row * c->p.seq + pos);
        } else {
            EXPECT(piece->tensor_row == piece->row);
            EXPECT(c->owner[pos] == rank && c->index[pos] == piece->index + i);
        }
    }
}

/* a, b: marks what one tile of queries computes with one key piece. */
static void check_tile(plan_case *c, const ra_cover *cover, const ra_piece *q, int64_t begin,
                       int64_t end, const ra_piece *k)
{
    ra_tile tile = ra_cover_tile(cover, q, begin, end, k);
    EXPECT(tile.begin <= tile.full_begin && tile.full_begin <= tile.full_end &&
           tile.full_end <= tile.end);
    EXPECT(tile.begin == tile.end || (tile.begin >= k->pos && tile.end <= k->pos + k->count));
    for (int64_t query = begin; query < end; query++) {
        ra_range reach = ra_cover_reach(cover, q->row, query);
        for (int64_t key = tile.begin; key < tile.end; key++) {
            bool full = key >= tile.full_begin && key < tile.full_end;
            bool seen = key >= reach.begin && key < reach.end;
            EXPECT(!full || plan_allows(c, q->row, query, key));
            if (full || seen) {
                c->computed[(q->row * c->p.seq + query) * c->p.seq + key]++;
            }
        }
    }
}

static void check_seen_by(const plan_case *c, const ra_cover *cover, const ra_piece *q,
                          const ra_piece *k, rng *r)
{
    int64_t begin = k->pos + rng_int(r, 0, k->count - 1);
    int64_t end = rng_int(r, begin + 1, k->pos + k->count);
    ra_range seen = ra_cover_seen_by(cover, k, begin, end, q);
    for (int64_t query = q->pos; query < q->pos + q->count; query++) {
        bool sees = false;
        for (int64_t key = begin; key < end; key++) {
            sees = sees || plan_allows(c, q->row, query, key);
        }
        EXPECT(sees == (query >= seen.begin && query < seen.end));
    }
}

/* Rows of one batch row and document that some piece of a hop is a partner of: a row without one
 * would keep what its memory held. */
static void check_partners(const plan_case *c, const ra_cover *cover, bool keys)
{
    const ra_piece *piece = keys ? cover->k : cover->q, *other = keys ? cover->q : cover->k;
    for (int64_t i = 0; i < (keys ? cover->k_count : cover->q_count); i++) {
        for (int64_t pos = piece[i].pos; pos < piece[i].pos + piece[i].count; pos++) {
            bool sees = false;
            for (int64_t j = piece[i].first; j < piece[i].last && !sees; j++) {
                for (int64_t at = other[j].pos; at < other[j].pos + other[j].count && !sees; at++) {
                    sees = plan_allows(c, piece[i].row, keys ? at : pos, keys ? pos : at);
                }
            }
            EXPECT(sees);
        }
    }
}

void plan_check_cover(plan_case *c, int rank, const ra_hop *hop, const ra_cover *cover, rng *r)
{
    int64_t chunk[PLAN_ROWS_MAX * PLAN_SEQ_MAX];
    EXPECT(hop->chunk_rows <= c->p.rows * c->p.seq);
    fill_chunk(c, &c->schedule[rank], hop, chunk);
    for (int64_t i = 0; i < cover->k_count; i++) {
        check_piece(c, &cover->k[i], rank, chunk);
    }
    for (int64_t i = 0; i < cover->q_count; i++) {
        const ra_piece *q = &cover->q[i];
        EXPECT(q->source == RA_SOURCE_OWN);
        check_piece(c, q, rank, chunk);
        int64_t height = rng_chance(r, 50) ? rng_int(r, 1, 9) : q->count;
        for (int64_t j = q->first; j < q->last; j++) {
            const ra_piece *k = &cover->k[j];
            EXPECT(k->row == q->row && k->doc == q->doc);
            EXPECT(cover->k[j].first <= i && i < cover->k[j].last);
            check_seen_by(c, cover, q, k, r);
            for (int64_t begin = q->pos; begin < q->pos + q->count; begin += height) {
                check_tile(c, cover, q, begin, ra_min_i64(begin + height, q->pos + q->count), k);
            }
        }
    }
    check_partners(c, cover, false);
    check_partners(c, cover, true);
}

int64_t plan_check_computed(const plan_case *c)
{
    int64_t pairs = 0;
    for (int64_t i = 0; i < c->p.rows * c->p.seq * c->p.seq; i++) {
        int64_t row = i / c->p.seq / c->p.seq, query = i / c->p.seq % c->p.seq;
        bool allowed = plan_allows(c, row, query, i % c->p.seq);
        pairs += allowed;
        EXPECT(c->computed[i] == allowed);
    }
    return pairs;
}

void plan_live(const plan_case *c, const ra_piece *piece, uint8_t *state)
{
    for (int64_t j = 0; j < piece->count; j++) {
        uint8_t *at = &state[piece->row * c->p.seq + piece->pos + j];
        EXPECT(*at == (piece->fresh ? PLAN_UNSEEN : PLAN_OPEN));
        *at = piece->final ? PLAN_CLOSED : PLAN_OPEN;
    }
}

void plan_check_finished(const plan_case *c, int rank, const uint8_t *state)
{
    for (int64_t i = 0; i < c->p.rows * c->p.seq; i++) {
        bool mine = c->owner[i % c->p.seq] == rank && c->token[i].doc > 0;
        EXPECT(state[i] == (mine ? PLAN_CLOSED : PLAN_UNSEEN));
    }
}
