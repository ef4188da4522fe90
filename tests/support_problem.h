/* A whole-sequence attention problem with its data, ways to fill it, ways to shard it, and the
 * reference answer. Must not run the ring: tests/support_world.h does. */
#ifndef RA_TESTS_SUPPORT_PROBLEM_H
#define RA_TESTS_SUPPORT_PROBLEM_H

#include "ringattn.h"
#include "support.h"

enum { PROBLEM_RANKS_MAX = 8, PROBLEM_RUNS_MAX = 64 };

/* Tensors are contiguous [rows, heads, seq, chan] in the layer's dtype. */
typedef struct problem {
    ra_layer layer;
    int64_t rows, seq;
    int32_t *doc_id, *token_type; /* [rows, seq] or NULL */
    uint8_t *is_pad;              /* [rows, seq] or NULL */
    ra_tensor q, k, v, dout;
} problem;

ra_layer layer_of(int q_heads, int kv_heads, int head_dim, ra_dtype dtype); /* causal, scale 1 */

/* Metadata NULL, tensors zero. */
void problem_create(problem *p, ra_layer layer, int64_t rows, int64_t seq);
void problem_free(problem *p);
/* Copies [rows, seq] values in. */
void problem_set_docs(problem *p, const int32_t *doc_id);
void problem_set_pads(problem *p, const uint8_t *is_pad);
void problem_set_types(problem *p, const int32_t *token_type);
/* Token type 1 on positions [begin, end) of every row. */
void problem_set_image(problem *p, int64_t begin, int64_t end);

void tensor_fill(const ra_tensor *t, double value);
void tensor_fill_normal(const ra_tensor *t, rng *r, double deviation);
/* Logits with standard deviation 1. */
void problem_fill_unit(problem *p, rng *r);
/* Gemma-like: q and k normed to a root mean square of 1 a channel, scale 1: logits near sqrt(D). */
void problem_fill_gemma(problem *p, rng *r);
/* Mask probe: q = k = 0, V[j] = e_j (head_dim >= seq), dout = 1. Row i of out is 1/n_i on exactly
 * the keys it sees, lse is ln n_i, dV[j] is the sum of 1/n_i over rows i that see j, dq = dk = 0.
 */
void problem_fill_probe(problem *p);

/* The metadata of the whole batch; borrowed from p. */
ra_step_desc problem_desc(const problem *p);
/* May (row, query) attend key? By ra_mask_allows on whole-row metadata. group: [rows, seq] from
 * problem_groups. */
bool problem_allows(const problem *p, const int32_t *group, int64_t row, int64_t query,
                    int64_t key);
int32_t *problem_groups(const problem *p);                             /* free() it */
int64_t problem_visible(const problem *p, int64_t row, int64_t query); /* n_i */

/* Which global positions each rank owns, in the order of its tokens. */
typedef struct layout {
    const char *name;
    int ranks;
    int run_count[PROBLEM_RANKS_MAX];
    ra_run run[PROBLEM_RANKS_MAX][PROBLEM_RUNS_MAX];
    int64_t length[PROBLEM_RANKS_MAX];
    bool implicit; /* contiguous shards that the step describes without runs */
} layout;

layout layout_contiguous(int ranks, int64_t seq);
layout layout_zigzag(int ranks, int64_t seq);
/* Contiguous in rank order with random cuts; shards may be empty. */
layout layout_cuts(int ranks, int64_t seq, rng *r);
/* Random runs dealt to random ranks in random order; shards may be empty. */
layout layout_uneven(int ranks, int64_t seq, rng *r);
enum { LAYOUT_KINDS = 4 };
layout layout_kind(int kind, int ranks, int64_t seq, rng *r);
/* The global position of each local token of a rank, [length]; free() it. */
int64_t *layout_positions(const layout *l, int rank);

/* Results of a run or of the reference over the whole batch: out, dq like q; dk, dv like k; lse
 * f32.
 */
typedef struct answer {
    ra_tensor out, lse, dq, dk, dv;
} answer;

/* Every element NaN. shared: in memory that forked processes share. */
void answer_create(answer *a, const problem *p, ra_dtype dtype, ra_dtype lse_dtype, bool shared);
void answer_free(answer *a, bool shared);
bool tensor_same_bits(const ra_tensor *a, const ra_tensor *b);
bool answer_same_bits(const answer *a, const answer *b);
double tensor_largest(const ra_tensor *t); /* largest finite magnitude, at least 1 */
double tensor_error(const ra_tensor *a, const ra_tensor *b); /* max |a - b|; NaN counts as Inf */

/* fp64 oracle and plain same-dtype computation of one problem: what the tolerance compares with. */
typedef struct reference {
    answer oracle, plain;
} reference;

void reference_create(reference *ref, const problem *p);
void reference_free(reference *ref);
/* Fails the test, naming tensor and case, unless `got` is within the tolerance. */
void reference_check(const reference *ref, const problem *p, const answer *got, bool backward);
/* The same, with room for the rounding of f32 sums where a tensor is so small, or so nearly zero,
 * that the plain computation makes no error by chance, and for f32, where two computations differ
 * by little more than luck. */
void reference_check_tiny(const reference *ref, const problem *p, const answer *got);

void problem_print(const problem *p, const layout *l); /* to stderr, to understand a failure */

#endif
