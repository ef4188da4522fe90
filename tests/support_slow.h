/* A rank whose exchanges and computations take longer, by chance or always, and a tally of what its
 * transport was asked to do. Must not change any byte. */
#ifndef RA_TESTS_SUPPORT_SLOW_H
#define RA_TESTS_SUPPORT_SLOW_H

#include "backend/backend.h"
#include "support_problem.h"

/* Operations in their order, folded into numbers: two ranks did the same if theirs are equal. */
typedef struct tally {
    int64_t operations;
    uint64_t kinds;                       /* of all operations */
    uint64_t sent[PROBLEM_RANKS_MAX];     /* to a peer: which operation, how many bytes */
    uint64_t received[PROBLEM_RANKS_MAX]; /* from a peer */
} tally;

typedef struct slow_comm {
    ra_comm *inner; /* borrowed; first, for support_relay.h */
    rng r;
    int chance_percent, delay_us; /* of an exchange: how often, how long at most */
    bool always_longest;
    tally tally;
} slow_comm;

/* The other members are set before. *out goes before s and inner. */
ra_status slow_comm_open(slow_comm *s, ra_comm *inner, ra_comm **out);

/* The same backend, whose folds and gradients begin late: a fifth of them by up to delay_us, drawn
 * anew on every thread. */
typedef struct slow_backend {
    ra_backend backend;
    ra_backend_ops ops;
} slow_backend;
void slow_backend_wrap(slow_backend *s, const ra_backend *inner);
void slow_backend_delay(int delay_us); /* of all, from now on */

#endif
