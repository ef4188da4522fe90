/*
 * Properties of plans, on integers alone: random steps, every rank's schedule, brute force over
 * pairs of tokens with the mask rule. a  every allowed pair is computed exactly once, in one hop of
 * one rank b  every pair of a full region is allowed c  the rows that travel are exactly those that
 * some query of the reader sees d  each needed row arrives exactly once, from its owner e  seen_by,
 * which routes gradients of keys, finds exactly the queries that see them f  every send has its
 * receive, range by range, at the same place in the order
 */
#include "support_random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "plan/cost.h"

enum { SEQ_MAX = 40, ROWS_MAX = 2, STEPS = 20000 };

/* A step, seen from everywhere. */
typedef struct case_plan {
    problem p;
    layout l;
    ra_shards shards;
    ra_tokens tokens;
    ra_pieces pieces;
    ra_mask mask;
    bool neighbourhood;
    ra_schedule schedule[PROBLEM_RANKS_MAX];
    ra_token token[ROWS_MAX * SEQ_MAX];
    int owner[SEQ_MAX];
    int64_t index[SEQ_MAX]; /* local index at the owner */
    uint8_t computed[ROWS_MAX * SEQ_MAX * SEQ_MAX];
} case_plan;

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            problem_print(&c->p, &c->l);                                                           \
            fail_msg("%s: %s", support_case(), #condition);                                        \
        }                                                                                          \
    } while (0)

static bool allows(const case_plan *c, int64_t row, int64_t query, int64_t key)
{
    return ra_mask_rule(&c->mask, c->token[row * c->p.seq + query], c->token[row * c->p.seq + key]);
}

static void build_tokens(case_plan *c)
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
        int32_t docs[ROWS_MAX * SEQ_MAX], types[ROWS_MAX * SEQ_MAX];
        uint8_t pads[ROWS_MAX * SEQ_MAX];
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

static void case_create(case_plan *c, rng *r)
{
    memset(c, 0, sizeof *c);
    int64_t seq = rng_int(r, 1, SEQ_MAX), rows = rng_chance(r, 70) ? 1 : ROWS_MAX;
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
    for (int rank = 0; rank < ranks; rank++) {
        ra_schedule_inputs in = {&c->tokens, &c->pieces, c->mask, rank, ranks, c->neighbourhood};
        EXPECT(ra_schedule_build(&in, &c->schedule[rank]) == RA_OK);
    }
}

static void case_free(case_plan *c)
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
static void fill_chunk(const case_plan *c, const ra_schedule *s, const ra_hop *hop, int64_t *chunk)
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
static void check_piece(const case_plan *c, const ra_piece *piece, int rank, const int64_t *chunk)
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
static void check_tile(case_plan *c, const ra_cover *cover, const ra_piece *q, int64_t begin,
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
            EXPECT(!full || allows(c, q->row, query, key));
            if (full || seen) {
                c->computed[(q->row * c->p.seq + query) * c->p.seq + key]++;
            }
        }
    }
}

static void check_seen_by(const case_plan *c, const ra_cover *cover, const ra_piece *q,
                          const ra_piece *k, rng *r)
{
    int64_t begin = k->pos + rng_int(r, 0, k->count - 1);
    int64_t end = rng_int(r, begin + 1, k->pos + k->count);
    ra_range seen = ra_cover_seen_by(cover, k, begin, end, q);
    for (int64_t query = q->pos; query < q->pos + q->count; query++) {
        bool sees = false;
        for (int64_t key = begin; key < end; key++) {
            sees = sees || allows(c, q->row, query, key);
        }
        EXPECT(sees == (query >= seen.begin && query < seen.end));
    }
}

static void check_hop(case_plan *c, int rank, const ra_schedule *s, const ra_hop *hop, rng *r)
{
    int64_t chunk[ROWS_MAX * SEQ_MAX];
    EXPECT(hop->chunk_rows <= c->p.rows * c->p.seq);
    fill_chunk(c, s, hop, chunk);
    const ra_cover *cover = &hop->cover;
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
}

/* Rows of one batch row and document that some piece of a hop is a partner of: a row without one
 * would keep what its memory held. */
static void check_partners(const case_plan *c, const ra_cover *cover, bool keys)
{
    const ra_piece *piece = keys ? cover->k : cover->q, *other = keys ? cover->q : cover->k;
    for (int64_t i = 0; i < (keys ? cover->k_count : cover->q_count); i++) {
        for (int64_t pos = piece[i].pos; pos < piece[i].pos + piece[i].count; pos++) {
            bool sees = false;
            for (int64_t j = piece[i].first; j < piece[i].last && !sees; j++) {
                for (int64_t at = other[j].pos; at < other[j].pos + other[j].count && !sees; at++) {
                    sees = allows(c, piece[i].row, keys ? at : pos, keys ? pos : at);
                }
            }
            EXPECT(sees);
        }
    }
}

enum life { UNSEEN, OPEN, CLOSED };

/* A row's state is started in the backward's first hop that has it, finished in the last. */
static void live(const case_plan *c, const ra_piece *piece, uint8_t *state)
{
    for (int64_t j = 0; j < piece->count; j++) {
        uint8_t *at = &state[piece->row * c->p.seq + piece->pos + j];
        EXPECT(*at == (piece->fresh ? UNSEEN : OPEN));
        *at = piece->final ? CLOSED : OPEN;
    }
}

/* Own rows that messages bring gradients back to, by position and as listed by memory. */
static void check_returned(const case_plan *c, int rank, const uint8_t *key_state)
{
    const ra_schedule *s = &c->schedule[rank];
    uint8_t sent[ROWS_MAX * SEQ_MAX] = {0}, listed[ROWS_MAX * SEQ_MAX] = {0};
    int64_t rows = 0, named = 0;
    for (int l = 0; l < s->leg_count; l++) {
        const ra_message *send = &s->leg[l].send;
        for (int64_t i = 0; i < send->range_count; i++) {
            const ra_key_rows *range = &send->range[i];
            for (int64_t j = 0; j < range->count; j++) {
                sent[range->row * c->p.seq + range->pos + j] = 1;
                listed[range->row * c->p.seq + range->index + j] = 1;
            }
        }
    }
    for (int64_t i = 0; i < s->returned_count; i++) {
        const ra_local_rows *r = &s->returned[i];
        for (int64_t j = 0; j < r->count; j++) {
            EXPECT(listed[r->row * c->p.seq + r->index + j] == 1);
            listed[r->row * c->p.seq + r->index + j] = 2;
            named++;
        }
    }
    for (int64_t i = 0; i < c->p.rows * c->p.seq; i++) {
        bool mine = c->owner[i % c->p.seq] == rank && c->token[i].doc > 0;
        EXPECT(key_state[i] == (!mine ? UNSEEN : sent[i] ? OPEN : CLOSED));
        EXPECT(listed[i] != 1);
        rows += sent[i];
    }
    EXPECT(rows == named);
}

static void check_life(const case_plan *c, int rank)
{
    const ra_schedule *s = &c->schedule[rank];
    uint8_t state[ROWS_MAX * SEQ_MAX] = {UNSEEN}, key_state[ROWS_MAX * SEQ_MAX] = {UNSEEN};
    bool resumes = false;
    for (int i = 0; i < s->hop_count; i++) {
        const ra_hop *hop = &s->hop[ra_schedule_backward_hop(s, i)];
        const ra_cover *cover = &hop->cover;
        int64_t chunk_rows = 0;
        check_partners(c, cover, false);
        check_partners(c, cover, true);
        for (int64_t j = 0; j < cover->q_count; j++) {
            const ra_piece *q = &cover->q[j];
            resumes = resumes || !q->fresh || !q->final;
            live(c, q, state);
        }
        for (int64_t j = 0; j < cover->k_count; j++) {
            const ra_piece *k = &cover->k[j];
            if (k->source == RA_SOURCE_OWN) {
                live(c, k, key_state);
            } else {
                EXPECT(k->fresh && !k->final);
                chunk_rows += k->count;
            }
        }
        EXPECT(chunk_rows == hop->chunk_rows);
    }
    EXPECT(s->resumes == resumes);
    for (int64_t i = 0; i < c->p.rows * c->p.seq; i++) {
        bool mine = c->owner[i % c->p.seq] == rank && c->token[i].doc > 0;
        EXPECT(state[i] == (mine ? CLOSED : UNSEEN));
    }
    check_returned(c, rank, key_state);
}

/* c, d: what arrives is what is needed, once. */
static void check_needs(const case_plan *c, int reader)
{
    const ra_schedule *s = &c->schedule[reader];
    uint8_t arrived[ROWS_MAX * SEQ_MAX] = {0};
    int64_t rows = 0;
    for (int l = 0; l < s->leg_count; l++) {
        const ra_message *recv = &s->leg[l].recv;
        for (int64_t i = 0; i < recv->range_count; i++) {
            rows += recv->range[i].count;
            for (int64_t j = 0; j < recv->range[i].count; j++) {
                EXPECT(c->owner[recv->range[i].pos + j] == recv->peer);
                arrived[recv->range[i].row * c->p.seq + recv->range[i].pos + j]++;
            }
        }
    }
    EXPECT(rows == s->rows_received);
    for (int64_t row = 0; row < c->p.rows; row++) {
        for (int64_t key = 0; key < c->p.seq; key++) {
            bool needed = false;
            for (int64_t query = 0; query < c->p.seq && !needed; query++) {
                needed = c->owner[query] == reader && allows(c, row, query, key);
            }
            EXPECT(arrived[row * c->p.seq + key] == (needed && c->owner[key] != reader));
        }
    }
}

/* f: rank's sends are its readers' receives, and all ranks walk the same legs. */
static void check_sends(const case_plan *c, int rank)
{
    const ra_schedule *s = &c->schedule[rank];
    EXPECT(s->leg_count == c->schedule[0].leg_count && s->hop_count == c->schedule[0].hop_count);
    for (int l = 0; l < s->leg_count; l++) {
        const ra_leg *leg = &s->leg[l];
        const ra_message *send = &leg->send;
        const ra_leg *other = &c->schedule[send->peer].leg[l];
        EXPECT(leg->distance == other->distance);
        EXPECT(send->peer == (rank + leg->distance) % c->l.ranks && other->recv.peer == rank);
        EXPECT(send->range_count == other->recv.range_count);
        EXPECT(send->row_count == other->recv.row_count);
        EXPECT(leg->rows_max == other->rows_max && leg->rows_max >= send->row_count);
        EXPECT(leg->rows_max > 0);
        for (int64_t i = 0; i < send->range_count; i++) {
            const ra_key_rows *mine = &send->range[i], *theirs = &other->recv.range[i];
            EXPECT(mine->row == theirs->row && mine->pos == theirs->pos);
            EXPECT(mine->count == theirs->count && mine->doc == theirs->doc);
            for (int64_t j = 0; j < mine->count; j++) {
                EXPECT(c->owner[mine->pos + j] == rank);
                EXPECT(c->index[mine->pos + j] == mine->index + j);
            }
        }
    }
}

static void check_idle(const case_plan *c, int rank)
{
    ra_local_rows *idle = NULL;
    int64_t count = 0;
    uint8_t listed[ROWS_MAX * SEQ_MAX] = {0};
    int64_t length = c->l.length[rank];
    EXPECT(ra_pieces_idle(&c->pieces, &c->shards, c->p.rows, rank, &idle, &count) == RA_OK);
    for (int64_t i = 0; i < count; i++) {
        for (int64_t j = 0; j < idle[i].count; j++) {
            listed[idle[i].row * length + idle[i].index + j]++;
        }
    }
    for (int64_t i = 0; i < c->p.rows * c->p.seq; i++) {
        if (c->owner[i % c->p.seq] == rank) {
            int64_t at = i / c->p.seq * length + c->index[i % c->p.seq];
            EXPECT(listed[at] == (c->token[i].doc <= 0));
        }
    }
    ra_free(idle);
}

/* Reported pairs are counted pairs. */
static void check_cost(const case_plan *c)
{
    const ra_cover rule = {.tokens = &c->tokens, .mask = c->mask};
    int64_t counted[PROBLEM_RANKS_MAX] = {0}, brute[PROBLEM_RANKS_MAX] = {0};
    ra_cost_pairs(&rule, &c->pieces, counted);
    for (int64_t i = 0; i < c->p.rows * c->p.seq * c->p.seq; i++) {
        int64_t row = i / c->p.seq / c->p.seq, query = i / c->p.seq % c->p.seq;
        brute[c->owner[query]] += allows(c, row, query, i % c->p.seq);
    }
    for (int rank = 0; rank < c->l.ranks; rank++) {
        EXPECT(counted[rank] == brute[rank]);
    }
}

/* The largest distance behind of any needed row, and the closed form where it holds. */
static void check_prior(const case_plan *c)
{
    int prior = 0;
    for (int rank = 0; rank < c->l.ranks; rank++) {
        const ra_schedule *s = &c->schedule[rank];
        for (int l = 0; l < s->leg_count; l++) {
            int behind = rank - s->leg[l].recv.peer;
            if (s->leg[l].recv.row_count > 0 && behind > prior) {
                prior = behind;
            }
        }
        EXPECT(s->n_prior == c->schedule[0].n_prior);
    }
    EXPECT(c->schedule[0].n_prior == prior);
    bool plain = !c->p.doc_id && !c->p.is_pad && c->p.layer.causal && !c->mask.vision &&
                 c->mask.window_right == 0 && strcmp(c->l.name, "contiguous") == 0;
    if (plain && c->p.seq % c->l.ranks == 0) {
        int64_t shard = c->p.seq / c->l.ranks, most = c->l.ranks - 1;
        int64_t reach = ra_ceil_div(ra_max_i64(c->mask.window - 1, 0), shard);
        EXPECT(prior == (c->mask.window ? ra_min_i64(most, reach) : most));
    }
}

static void every_step(void **state)
{
    (void)state;
    case_plan *c = malloc(sizeof *c);
    assert_non_null(c);
    int64_t steps = support_steps(STEPS), pairs = 0, rows = 0, near = 0;
    for (int64_t step = 0; step < steps; step++) {
        support_limit(60, "plan step %lld of seed %llu", (long long)step,
                      (unsigned long long)support_seed());
        rng r = rng_of(support_seed() * 1000003u + (uint64_t)step);
        case_create(c, &r);
        for (int rank = 0; rank < c->l.ranks; rank++) {
            const ra_schedule *s = &c->schedule[rank];
            int64_t kept = 0;
            for (int h = 0; h < s->hop_count; h++) {
                EXPECT(s->hop[h].chunk_rows == 0 || s->hop[h].kept_index == kept);
                kept += s->hop[h].chunk_rows;
                check_hop(c, rank, s, &s->hop[h], &r);
            }
            EXPECT(kept == s->rows_received);
            check_life(c, rank);
            check_needs(c, rank);
            check_sends(c, rank);
            check_idle(c, rank);
            rows += s->rows_received;
        }
        check_prior(c);
        check_cost(c);
        for (int64_t i = 0; i < c->p.rows * c->p.seq * c->p.seq; i++) {
            int64_t row = i / c->p.seq / c->p.seq, query = i / c->p.seq % c->p.seq;
            bool allowed = allows(c, row, query, i % c->p.seq);
            pairs += allowed;
            EXPECT(c->computed[i] == allowed);
        }
        near += c->neighbourhood;
        case_free(c);
    }
    printf("%lld steps (%lld neighbourhoods), %lld allowed pairs, %lld rows received\n",
           (long long)steps, (long long)near, (long long)pairs, (long long)rows);
    free(c);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_step)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
