/* What every test executable shares: seeded numbers that a run can replay, a time limit that turns
 * a hang into a failure with a name, and the command line. Must not know attention. */
#ifndef RA_TESTS_SUPPORT_H
#define RA_TESTS_SUPPORT_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

/* Deterministic numbers: the same seed gives the same sequence on every machine. */
typedef struct rng {
    uint64_t state;
} rng;

rng rng_of(uint64_t seed);
uint64_t rng_next(rng *r);
int64_t rng_int(rng *r, int64_t low, int64_t high); /* low..high, both included */
bool rng_chance(rng *r, int percent);
double rng_normal(rng *r);

/* Reads `--seed N` or RA_TEST_SEED, prints the seed, and arms the time limit for test set-up. Call
 * it first in main. */
void support_start(int argc, char **argv);
uint64_t support_seed(void);

/* Steps that a property test takes: RA_TEST_STEPS scales `steps` in percent, 100 by default. */
int64_t support_steps(int64_t steps);
/* RA_TEST_STEPS below 100, as under a sanitizer: repetitions may be thinned out. */
bool support_thin(void);
/* RA_TEST_SLOW=1 runs the slow half of a test; a test that leaves it out says so. */
bool support_slow(void);

/* Ends the process with a failure that names the case if it is not done within `seconds`; also for
 * what comes after it until the next call. Every multi-rank test sets one. */
void support_limit(int seconds, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *support_case(void); /* the name last given to support_limit */

double support_now(void); /* seconds, monotonic */

#endif
