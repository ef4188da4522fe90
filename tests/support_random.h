/* Random steps for the property tests: layer kinds, documents, padding and images of every sort.
 * Must not know shards or results. */
#ifndef RA_TESTS_SUPPORT_RANDOM_H
#define RA_TESTS_SUPPORT_RANDOM_H

#include "support_problem.h"

/* Mask, window and vision rule at random; heads, head_dim and dtype stay as they are. */
void random_mask(rng *r, int64_t seq, ra_layer *layer);
/* Documents (reused ids, padding ids), a padding map and token types, each there or not. */
void random_metadata(rng *r, problem *p);

#endif
