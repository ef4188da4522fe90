/* Covers with data, their fp64 answer pair by pair, and the comparison: what a test of a backend's
 * fold and grad needs. Every element that no piece names is NaN, inputs and outputs alike. Must not
 * know any backend. */
#ifndef RA_TESTS_SUPPORT_COVER_H
#define RA_TESTS_SUPPORT_COVER_H

#include "backend/backend.h"
#include "plan/passes.h"
#include "support.h"

/* One token of a piece, flattened. */
typedef struct cover_token {
    ra_token token;
    int64_t row, tensor_row, index;
    int source;
} cover_token;

typedef struct cover_case {
    int64_t q_heads, kv_heads, chan;
    ra_dtype dtype;
    float scale;
    ra_tokens *tokens;
    ra_cover cover;     /* every pair; each query piece fresh and final */
    ra_piece_set later; /* own keys that something else adds to behind the last computation */
    int64_t q_total, k_total;
    cover_token *q_token, *k_token;
    ra_tensor q, dout, k[RA_SOURCE_COUNT], v[RA_SOURCE_COUNT], lse, delta; /* inputs */
    /* [total, heads, chan] and [total, heads]: the answer. */
    double *out, *lse_want, *dq, *dk, *dv;
    double dq_f32, dk_f32, dv_f32; /* largest error of the same sums in plain f32 arithmetic */
} cover_case;

/* What is the same in every case of one test. */
typedef struct cover_shape {
    int64_t q_heads, kv_heads, chan;
    ra_dtype dtype;
    float scale;
} cover_shape;

/* Random rows, documents, padding, images, cuts of pieces and sources under a random mask. */
cover_case cover_random(rng *r, cover_shape shape, int64_t seq_max);
/* One document: `queries` positions whose last one is level with the last of `keys`. */
cover_case cover_pair(rng *r, cover_shape shape, ra_mask mask, int64_t queries, int64_t keys);
void cover_case_free(cover_case *c);

/* A cover with the key pieces that `keep` has a nonzero for; free its pieces with ra_cover_free.
 * Rows without a partner are in it: a fold takes them. */
ra_cover cover_part(const cover_case *c, const uint8_t *keep, bool fresh, bool final);
/* The computations of a backward: out[part] has the key pieces that keep[part * k_count + i] has a
 * nonzero for, keep NULL for all. */
void cover_passes(const cover_case *c, const uint8_t *keep, int parts, ra_cover *out);
/* The same cover with each query piece cut into pieces of `count` positions. */
ra_cover cover_cut_queries(const cover_case *c, int64_t count);

/* Jobs over `cover` with outputs and sums of their own, all NaN. The inputs are those of the case.
 */
ra_fold_job cover_fold_job(const cover_case *c, const ra_cover *cover);
ra_grad_job cover_grad_job(const cover_case *c, const ra_cover *cover);
void cover_fold_free(ra_fold_job *job);
void cover_grad_free(ra_grad_job *job);

/* Fail the test with the worst element unless results are near the answer, `tolerance` being
 * relative to the largest one, and all else is still NaN. Gradients may also be off by twice what
 * plain f32 arithmetic is: a query that sees one key has dout.v - delta = 0 exactly, and what is
 * left there grows with dout.v, scale and k, not with the gradient. */
void cover_check_fold(const cover_case *c, const ra_fold_job *job, double tolerance);
/* Behind the last computation of the backward: the results, and the sums of chunks and of what more
 * is added to. */
void cover_check_grad(const cover_case *c, const ra_grad_job *job, double tolerance);

/* Equal bytes in all of both tensors, which were made by the same call. */
bool cover_same_bits(const ra_tensor *a, const ra_tensor *b);
/* The same of all that two backwards leave to be used. */
bool cover_same_grads(const cover_case *c, const ra_grad_job *a, const ra_grad_job *b);

#endif
