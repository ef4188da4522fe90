/* Random steps and the schedules of all their ranks, to be compared with brute force over tokens.
 */
#ifndef RA_TEST_SUPPORT_PLAN_H
#define RA_TEST_SUPPORT_PLAN_H

#include "support_random.h"

#include <string.h>

#include "base/alloc.h"
#include "plan/schedule.h"

enum { PLAN_SEQ_MAX = 40, PLAN_ROWS_MAX = 2 };

/* A step, seen from everywhere. */
typedef struct plan_case {
    problem p;
    layout l;
    ra_shards shards;
    ra_tokens tokens;
    ra_pieces pieces;
    ra_mask mask;
    bool neighbourhood, joined;
    int64_t tile;
    ra_schedule schedule[PROBLEM_RANKS_MAX];
    ra_token token[PLAN_ROWS_MAX * PLAN_SEQ_MAX];
    int owner[PLAN_SEQ_MAX];
    int64_t index[PLAN_SEQ_MAX]; /* local index at the owner */
    uint8_t computed[PLAN_ROWS_MAX * PLAN_SEQ_MAX * PLAN_SEQ_MAX];
} plan_case;

/* Prints the step if it fails. */
#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            problem_print(&c->p, &c->l);                                                           \
            fail_msg("%s: %s", support_case(), #condition);                                        \
        }                                                                                          \
    } while (0)

void plan_case_create(plan_case *c, rng *r);
void plan_case_free(plan_case *c);
bool plan_allows(const plan_case *c, int64_t row, int64_t query, int64_t key);

/* One computation of a hop: where its rows lie, that every row has a partner, and each pair that it
 * computes, which goes to computed. */
void plan_check_cover(plan_case *c, int rank, const ra_hop *hop, const ra_cover *cover, rng *r);
/* Every allowed pair was computed once. Returns how many there are. */
int64_t plan_check_computed(const plan_case *c);

/* What became of a row's sums. */
enum { PLAN_UNSEEN, PLAN_OPEN, PLAN_CLOSED };
/* A row's state is started by the first computation that has it, finished by the last. */
void plan_live(const plan_case *c, const ra_piece *piece, uint8_t *state);
/* Every query of this rank is finished, and nothing else was begun. */
void plan_check_finished(const plan_case *c, int rank, const uint8_t *state);

#endif
