/*
 * Properties of the backward's passes, on integers alone: random steps, every rank's schedule.
 *   a  the order, and that every allowed pair is computed exactly once, in one pass of one rank
 *   b  every row's gradient is begun by the first pass that has it and ended by the last, but for
 *      rows that other ranks add to
 *   c  what other ranks give is added to sums that hold something, while no pass changes them
 */
#include "support_plan.h"

#include <stdio.h>
#include <stdlib.h>

enum { STEPS = 20000 };

/* Is anything of this rank that lies beside row i, in one tile with it, among the rows? Tiles are
 * counted from where a document's tokens begin to lie side by side in the row and in memory. */
static bool in_tile(const plan_case *c, int64_t i, const uint8_t *rows)
{
    int64_t first = i, pos = i % c->p.seq;
    while (first > i - pos && c->token[first - 1].doc == c->token[i].doc &&
           c->owner[first % c->p.seq - 1] == c->owner[pos] &&
           c->index[first % c->p.seq - 1] == c->index[first % c->p.seq] - 1) {
        first--;
    }
    first = i - (i - first) % c->tile;
    for (int64_t j = first; j < first + c->tile; j++) {
        bool beside = j < i - pos + c->p.seq && c->token[j].doc == c->token[i].doc &&
                      c->owner[j % c->p.seq] == c->owner[pos] &&
                      c->index[j % c->p.seq] - c->index[pos] == j - i;
        if (!beside || rows[j]) {
            return beside;
        }
    }
    return false;
}

/* Own rows that messages bring gradients back to, by position and, in whole tiles, as listed by
 * memory. */
static void check_returned(const plan_case *c, int rank, const uint8_t *key_state)
{
    const ra_schedule *s = &c->schedule[rank];
    uint8_t sent[PLAN_ROWS_MAX * PLAN_SEQ_MAX] = {0}, listed[PLAN_ROWS_MAX * PLAN_SEQ_MAX] = {0};
    int64_t rows = 0, named = 0;
    for (int l = 0; l < s->leg_count; l++) {
        const ra_message *send = &s->leg[l].send;
        for (int64_t i = 0; i < send->range_count; i++) {
            const ra_key_rows *range = &send->range[i];
            for (int64_t j = 0; j < range->count; j++) {
                sent[range->row * c->p.seq + range->pos + j] = 1;
            }
        }
    }
    for (int64_t i = 0; i < s->returned_count; i++) {
        const ra_local_rows *r = &s->returned[i];
        for (int64_t j = 0; j < r->count; j++) {
            listed[r->row * c->p.seq + r->index + j]++;
            named++;
        }
    }
    for (int64_t i = 0; i < c->p.rows * c->p.seq; i++) {
        bool mine = c->owner[i % c->p.seq] == rank && c->token[i].doc > 0;
        int64_t index = i - i % c->p.seq + c->index[i % c->p.seq];
        bool open = mine && in_tile(c, i, sent);
        EXPECT(key_state[i] == (!mine ? PLAN_UNSEEN : open ? PLAN_OPEN : PLAN_CLOSED));
        EXPECT(!mine || listed[index] == open);
        rows += open;
    }
    EXPECT(rows == named);
}

/* Half of hop 0, or nothing where few rows travel; the other hops; the rest of hop 0, if they do
 * not have it. */
static void check_order(const plan_case *c, const ra_schedule *s)
{
    int64_t queries[2] = {0};
    EXPECT(s->pass_count == (s->leg_count > 0 ? s->hop_count + 1 : 1));
    for (int i = 0; i < s->pass_count; i++) {
        EXPECT(s->pass[i].hop == (i < s->hop_count ? i : 0));
        for (int64_t j = 0; j < s->pass[i].cover->q_count; j++) {
            queries[i > 0] += s->pass[i].hop == 0 ? s->pass[i].cover->q[j].count : 0;
        }
    }
    int64_t first = c->neighbourhood ? 0 : (queries[0] + queries[1]) / 2;
    EXPECT(s->leg_count == 0 || queries[0] == first);
    EXPECT(s->joined == (s->leg_count > 0 && c->neighbourhood && c->joined));
    EXPECT(!s->joined || queries[1] == 0);
}

/* What comes home is added beside the computation of later hops: these must leave this rank's own
 * keys alone, up to the last one, behind which nothing is added but by the computation's order. */
static void check_additions(const plan_case *c, const ra_schedule *s, const ra_pass *pass)
{
    for (int64_t j = 0; j < pass->cover->k_count; j++) {
        EXPECT(pass->hop < 2 || pass->cover->k[j].source == RA_SOURCE_CHUNK);
    }
    EXPECT(!c->neighbourhood || s->hop_count <= 2);
}

/* What the rows that a hop's gradients come home to hold by then: a first pass, or zeros. */
static void check_begun(const plan_case *c, const ra_schedule *s, int hop, const uint8_t *key_state)
{
    for (int l = s->hop[hop].leg_first; l < s->hop[hop].leg_first + s->hop[hop].leg_count; l++) {
        const ra_message *send = &s->leg[l].send;
        for (int64_t i = 0; i < send->range_count; i++) {
            const ra_key_rows *range = &send->range[i];
            for (int64_t j = 0; j < range->count; j++) {
                EXPECT(key_state[range->row * c->p.seq + range->pos + j] == PLAN_OPEN);
            }
        }
    }
}

/* Rows that begin as zero are as if a computation had touched them, by position. */
static void begin_empty(const plan_case *c, int rank, uint8_t *key_state)
{
    const ra_schedule *s = &c->schedule[rank];
    for (int64_t i = 0; i < c->p.rows * c->p.seq; i++) {
        int64_t row = i / c->p.seq, index = c->index[i % c->p.seq];
        for (int64_t j = 0; j < s->empty_count && c->owner[i % c->p.seq] == rank; j++) {
            const ra_local_rows *r = &s->empty[j];
            if (r->row == row && index >= r->index && index < r->index + r->count) {
                EXPECT(key_state[i] == PLAN_UNSEEN);
                key_state[i] = PLAN_OPEN;
            }
        }
    }
}

static void check_backward(plan_case *c, int rank, rng *r)
{
    const ra_schedule *s = &c->schedule[rank];
    uint8_t state[PLAN_ROWS_MAX * PLAN_SEQ_MAX] = {PLAN_UNSEEN},
                                  key_state[PLAN_ROWS_MAX * PLAN_SEQ_MAX] = {PLAN_UNSEEN};
    check_order(c, s);
    begin_empty(c, rank, key_state);
    for (int i = 0; i < s->pass_count; i++) {
        const ra_hop *hop = &s->hop[s->pass[i].hop];
        const ra_cover *cover = s->pass[i].cover;
        int64_t chunk_rows = 0;
        plan_check_cover(c, rank, hop, cover, r);
        check_additions(c, s, &s->pass[i]);
        if (i > 0 && i + 1 < s->hop_count) { /* comes home before the last pass */
            check_begun(c, s, i, key_state);
        }
        for (int64_t j = 0; j < cover->q_count; j++) {
            plan_live(c, &cover->q[j], state);
        }
        for (int64_t j = 0; j < cover->k_count; j++) {
            const ra_piece *k = &cover->k[j];
            if (k->source == RA_SOURCE_OWN) {
                plan_live(c, k, key_state);
            } else {
                EXPECT(k->fresh && !k->final);
                chunk_rows += k->count;
            }
        }
        EXPECT(chunk_rows == hop->chunk_rows);
    }
    plan_check_finished(c, rank, state);
    check_returned(c, rank, key_state);
}

static void every_step(void **state)
{
    (void)state;
    plan_case *c = malloc(sizeof *c);
    assert_non_null(c);
    int64_t steps = support_steps(STEPS), pairs = 0, halved = 0, empty = 0, joined = 0;
    for (int64_t step = 0; step < steps; step++) {
        support_limit(60, "passes step %lld of seed %llu", (long long)step,
                      (unsigned long long)support_seed());
        rng r = rng_of(support_seed() * 1000003u + (uint64_t)step);
        plan_case_create(c, &r);
        for (int rank = 0; rank < c->l.ranks; rank++) {
            const ra_schedule *s = &c->schedule[rank];
            check_backward(c, rank, &r);
            halved += s->pass_count > 1 && s->pass[0].cover->q_count > 0;
            empty += s->empty_count > 0;
            joined += s->joined;
        }
        pairs += plan_check_computed(c);
        plan_case_free(c);
    }
    printf(
        "%lld steps, %lld allowed pairs; on %lld ranks hop 0 was halved, on %lld joined with hop "
        "1, on %lld sums began as zero\n",
        (long long)steps, (long long)pairs, (long long)halved, (long long)joined, (long long)empty);
    assert_true(steps < STEPS || (halved > 0 && joined > 0 && empty > 0));
    free(c);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_step)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
