/* The loops over worlds, and the closed form of mask probes. */
#include "support_probe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mathx.h"
#include "tensor/tensor.h"

static const double PROBE_TOLERANCE = 2e-6; /* f32 sums of a few reciprocals */

void probe_everywhere(const problem *p, probe_check check, void *arg)
{
    static const int ranks[] = {1, 2, 3, 4, 7, 8};
    char name[128];
    snprintf(name, sizeof name, "%s", support_case());
    rng r = rng_of(support_seed());
    int turn = 0;
    for (size_t i = 0; i < sizeof ranks / sizeof *ranks; i++) {
        for (int kind = 0; kind < LAYOUT_KINDS; kind++) {
            layout l = layout_kind(kind, ranks[i], p->seq, &r);
            for (int keep = 0; keep < 2; keep++) {
                world_options o = {.strides = (strides)(turn++ % STRIDES_COUNT)};
                o.ctx.keep_kv = keep == 1;
                o.ctx.no_overlap = turn % 2 == 1;
                support_limit(60, "%.100s, %d ranks, %s, keep %d", name, ranks[i], l.name, keep);
                answer a;
                world_run(p, &l, &o, &a, NULL);
                check(p, &l, &a, arg);
                answer_free(&a, false);
            }
        }
    }
    support_limit(60, "%s", name);
}

static void check_reference(const problem *p, const layout *l, const answer *a, void *arg)
{
    (void)l;
    reference_check(arg, p, a, true);
}

static void check_tiny(const problem *p, const layout *l, const answer *a, void *arg)
{
    (void)l;
    reference_check_tiny(arg, p, a);
}

void probe_reference(const problem *p, bool tiny)
{
    reference ref;
    reference_create(&ref, p);
    probe_everywhere(p, tiny ? check_tiny : check_reference, &ref);
    reference_free(&ref);
}

static void near(const problem *p, const layout *l, const char *what, int64_t row, int64_t pos,
                 double got, double want)
{
    bool same = got == want || fabs(got - want) <= PROBE_TOLERANCE * (1.0 + fabs(want));
    if (!same) {
        problem_print(p, l);
        fail_msg("%s: %s at row %lld, position %lld: %.9g, expected %.9g", support_case(), what,
                 (long long)row, (long long)pos, got, want);
    }
}

static void check_query(const problem *p, const layout *l, const answer *a, const int32_t *group,
                        int64_t row, int64_t i, int64_t n)
{
    double lse = n ? log((double)n) : -(double)INFINITY;
    for (int64_t head = 0; head < p->layer.q_heads; head++) {
        near(p, l, "lse", row, i, ra_tensor_get(&a->lse, row, head, i, 0), lse);
        for (int64_t j = 0; j < p->seq; j++) {
            bool seen = problem_allows(p, group, row, i, j);
            near(p, l, "out", row, i, ra_tensor_get(&a->out, row, head, i, j),
                 seen ? 1.0 / (double)n : 0.0);
            near(p, l, "dq", row, i, ra_tensor_get(&a->dq, row, head, i, j), 0.0);
        }
    }
}

void probe_check_mask(const problem *p, const layout *l, const answer *a, void *arg)
{
    const probe_figures none = {NULL, NULL};
    const probe_figures *figures = arg ? arg : &none;
    int32_t *group = problem_groups(p);
    double *dv = calloc((size_t)(p->rows * p->seq) + 1, sizeof *dv);
    assert_non_null(dv);
    for (int64_t row = 0; row < p->rows; row++) {
        for (int64_t i = 0; i < p->seq; i++) {
            int64_t n = problem_visible(p, row, i);
            if (figures->visible) {
                near(p, l, "visible keys", row, i, (double)n,
                     (double)figures->visible[row * p->seq + i]);
            }
            check_query(p, l, a, group, row, i, n);
            for (int64_t j = 0; j < p->seq && n > 0; j++) {
                dv[row * p->seq + j] += problem_allows(p, group, row, i, j) ? 1.0 / (double)n : 0.0;
            }
        }
    }
    double heads = (double)p->layer.q_heads / (double)p->layer.kv_heads;
    for (int64_t i = 0; i < p->rows * p->seq; i++) {
        double want = figures->dv ? figures->dv[i] : dv[i];
        for (int64_t head = 0; head < p->layer.kv_heads; head++) {
            int64_t row = i / p->seq, pos = i % p->seq;
            near(p, l, "dv", row, pos, ra_tensor_get(&a->dv, row, head, pos, 0), heads * want);
            near(p, l, "dk", row, pos, ra_tensor_get(&a->dk, row, head, pos, 0), 0.0);
        }
    }
    free(dv);
    free(group);
}

void probe_mask(problem *p, const int64_t *visible, const double *dv)
{
    probe_figures figures = {visible, dv};
    problem_fill_probe(p);
    probe_everywhere(p, probe_check_mask, &figures);
}

void probe_create(problem *p, int64_t seq, const int32_t *doc_id)
{
    problem_create(p, layer_of(2, 1, (int)ra_round_up(seq, 8), RA_F32), 1, seq);
    if (doc_id) {
        problem_set_docs(p, doc_id);
    }
}
