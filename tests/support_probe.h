/* Runs a problem with a known answer at every rank count, layout and way to keep K/V. Must not know
 * which answer is right: callers bring the figures. */
#ifndef RA_TESTS_SUPPORT_PROBE_H
#define RA_TESTS_SUPPORT_PROBE_H

#include "support_world.h"

typedef void (*probe_check)(const problem *p, const layout *l, const answer *a, void *arg);

/* Calls check with the results of every run: ranks 1, 2, 3, 4, 7, 8, four layouts, K/V kept and
 * not, overlapped and not, strides in turn. */
void probe_everywhere(const problem *p, probe_check check, void *arg);
/* The same against the oracle, by the tolerance. tiny: reference_check_tiny. */
void probe_reference(const problem *p, bool tiny);

/* Figures of a mask probe (problem_fill_probe). */
typedef struct probe_figures {
    const int64_t *visible; /* [rows * seq] n_i; NULL = count them by the rule */
    const double *dv;       /* [rows * seq] a query head's; NULL = sum them up */
} probe_figures;

/* probe_check of mask probes: out, lse and all gradients. arg: const probe_figures, or NULL. */
void probe_check_mask(const problem *p, const layout *l, const answer *a, void *arg);
/* A mask probe of q_heads 2, kv_heads 1 and f32 over metadata that `p` already has, everywhere. */
void probe_mask(problem *p, const int64_t *visible, const double *dv);

/* A problem of one row for mask probes: causal, f32, head_dim that holds seq. doc_id may be NULL.
 */
void probe_create(problem *p, int64_t seq, const int32_t *doc_id);

#endif
