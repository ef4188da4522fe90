/*
 * Properties of plans, on integers alone: random steps, every rank's schedule, brute force over
 * pairs of tokens with the mask rule. a  every allowed pair is computed exactly once each way, in
 * one hop of one rank b  every pair of a full region is allowed c  the rows that travel are exactly
 * those that some query of the reader sees d  each needed row arrives exactly once, from its owner
 * e  seen_by, which routes gradients of keys, finds exactly the queries that see them f  every send
 * has its receive, range by range, at the same place in the order
 */
#include "support_plan.h"

#include <stdio.h>
#include <stdlib.h>

#include "plan/cost.h"

enum { STEPS = 20000 };

static void check_forward(plan_case *c, int rank, rng *r)
{
    const ra_schedule *s = &c->schedule[rank];
    uint8_t state[PLAN_ROWS_MAX * PLAN_SEQ_MAX] = {PLAN_UNSEEN};
    bool resumes = false;
    int64_t kept = 0;
    for (int h = 0; h < s->hop_count; h++) {
        const ra_hop *hop = &s->hop[h];
        EXPECT(hop->chunk_rows == 0 || hop->kept_index == kept);
        kept += hop->chunk_rows;
        plan_check_cover(c, rank, hop, &hop->cover, r);
        for (int64_t j = 0; j < hop->cover.q_count; j++) {
            const ra_piece *q = &hop->cover.q[j];
            resumes = resumes || !q->fresh || !q->final;
            plan_live(c, q, state);
        }
    }
    EXPECT(kept == s->rows_received);
    EXPECT(s->resumes == resumes);
    plan_check_finished(c, rank, state);
}

/* c, d: what arrives is what is needed, once. */
static void check_needs(const plan_case *c, int reader)
{
    const ra_schedule *s = &c->schedule[reader];
    uint8_t arrived[PLAN_ROWS_MAX * PLAN_SEQ_MAX] = {0};
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
                needed = c->owner[query] == reader && plan_allows(c, row, query, key);
            }
            EXPECT(arrived[row * c->p.seq + key] == (needed && c->owner[key] != reader));
        }
    }
}

/* f: rank's sends are its readers' receives, and all ranks walk the same legs. */
static void check_sends(const plan_case *c, int rank)
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

static void check_idle(const plan_case *c, int rank)
{
    ra_local_rows *idle = NULL;
    int64_t count = 0;
    uint8_t listed[PLAN_ROWS_MAX * PLAN_SEQ_MAX] = {0};
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
static void check_cost(const plan_case *c)
{
    const ra_cover rule = {.tokens = &c->tokens, .mask = c->mask};
    int64_t counted[PROBLEM_RANKS_MAX] = {0}, brute[PROBLEM_RANKS_MAX] = {0};
    ra_cost_pairs(&rule, &c->pieces, counted);
    for (int64_t i = 0; i < c->p.rows * c->p.seq * c->p.seq; i++) {
        int64_t row = i / c->p.seq / c->p.seq, query = i / c->p.seq % c->p.seq;
        brute[c->owner[query]] += plan_allows(c, row, query, i % c->p.seq);
    }
    for (int rank = 0; rank < c->l.ranks; rank++) {
        EXPECT(counted[rank] == brute[rank]);
    }
}

/* The largest distance behind of any needed row, and the closed form where it holds. */
static void check_prior(const plan_case *c)
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
    plan_case *c = malloc(sizeof *c);
    assert_non_null(c);
    int64_t steps = support_steps(STEPS), pairs = 0, rows = 0, near = 0;
    for (int64_t step = 0; step < steps; step++) {
        support_limit(60, "plan step %lld of seed %llu", (long long)step,
                      (unsigned long long)support_seed());
        rng r = rng_of(support_seed() * 1000003u + (uint64_t)step);
        plan_case_create(c, &r);
        for (int rank = 0; rank < c->l.ranks; rank++) {
            check_forward(c, rank, &r);
            check_needs(c, rank);
            check_sends(c, rank);
            check_idle(c, rank);
            rows += c->schedule[rank].rows_received;
        }
        check_prior(c);
        check_cost(c);
        pairs += plan_check_computed(c);
        near += c->neighbourhood;
        plan_case_free(c);
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
