/*
 * Properties of the whole operation: random steps, layouts, ranks and options against the oracle.
 *   g  the ring equals the oracle for any rank count, layout and path
 *   h  the same inputs give the same bits, also in a ctx that has run other steps
 *   i  a rank without tokens, or with padding only, takes part
 *   j  NaN and Inf in one document, or in padding, never reach another row
 * Sizes are tiny, so that thousands of steps run; one in 50 crosses tiles. The tolerance is a fixed
 * one that rounding keeps by far and no mistake in the logic does. test_attn.c measures rounding.
 */
#include "support_random.h"
#include "support_world.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensor/tensor.h"

enum { SEQ_MAX = 48, SEQ_TILES = 300, RUNS = 12, STEPS = 20000 };
static const double TOLERANCE = 3e-5;

/* One step of a world. */
typedef struct run {
    problem p;
    int layer;
    layout l;
    answer got;
    strides strides;
    int same_as; /* an earlier run with the same inputs; -1 = none */
    int clean;   /* an earlier run that differs by NaN in document `poisoned` of row 0; -1 */
    int32_t poisoned;
} run;

typedef struct world {
    int ranks, layer_count, run_count;
    ra_layer layer[3];
    world_options options;
    run runs[RUNS];
    rank_report reports[PROBLEM_RANKS_MAX];
    int failed_run[PROBLEM_RANKS_MAX];
} world;

/* Rows of NaN and Inf where the predicate holds. */
static void poison_rows(problem *p, rng *r, bool pads, int32_t doc)
{
    ra_tensor *tensor[] = {&p->q, &p->k, &p->v, &p->dout};
    double value[] = {(double)NAN, (double)INFINITY, -(double)INFINITY};
    for (int64_t i = 0; i < p->rows * p->seq; i++) {
        int32_t id = p->doc_id ? p->doc_id[i] : 1;
        bool pad = id <= 0 || (p->is_pad && p->is_pad[i]);
        if (pads ? !pad : (pad || id != doc || i >= p->seq)) {
            continue;
        }
        for (int t = 0; t < 4; t++) {
            for (int64_t head = 0; head < tensor[t]->size[RA_HEAD]; head++) {
                ra_tensor_set(tensor[t], i / p->seq, head, i % p->seq,
                              rng_int(r, 0, p->layer.head_dim - 1), value[rng_int(r, 0, 2)]);
            }
        }
    }
}

static void problem_copy(problem *to, const problem *from)
{
    problem_create(to, from->layer, from->rows, from->seq);
    if (from->doc_id) {
        problem_set_docs(to, from->doc_id);
    }
    if (from->is_pad) {
        problem_set_pads(to, from->is_pad);
    }
    if (from->token_type) {
        problem_set_types(to, from->token_type);
    }
    const ra_tensor *source[] = {&from->q, &from->k, &from->v, &from->dout};
    ra_tensor *target[] = {&to->q, &to->k, &to->v, &to->dout};
    for (int i = 0; i < 4; i++) {
        memcpy(target[i]->data, source[i]->data,
               (size_t)ra_tensor_count(source[i]) * sizeof(float));
    }
}

static run *add_run(world *w)
{
    run *next = &w->runs[w->run_count++];
    memset(next, 0, sizeof *next);
    next->same_as = next->clean = -1;
    return next;
}

static void add_fresh(world *w, rng *r)
{
    run *a = add_run(w);
    a->layer = (int)rng_int(r, 0, w->layer_count - 1);
    int64_t seq = rng_int(r, 1, rng_chance(r, 10) ? 4 : rng_chance(r, 2) ? SEQ_TILES : SEQ_MAX);
    problem_create(&a->p, w->layer[a->layer], rng_chance(r, 75) ? 1 : 2, seq);
    random_metadata(r, &a->p);
    problem_fill_unit(&a->p, r);
    poison_rows(&a->p, r, true, 0);
    a->l = layout_kind((int)rng_int(r, 0, LAYOUT_KINDS - 1), w->ranks, seq, r);
    a->strides = (strides)rng_int(r, 0, STRIDES_COUNT - 1);
}

static void add_variant(world *w, rng *r, int of)
{
    bool poison = rng_chance(r, 50);
    run *a = add_run(w);
    const run *base = &w->runs[of];
    problem_copy(&a->p, &base->p);
    a->layer = base->layer;
    a->l = base->l;
    a->strides = (strides)rng_int(r, 0, STRIDES_COUNT - 1);
    if (poison) {
        int64_t at = rng_int(r, 0, base->p.seq - 1);
        a->poisoned = base->p.doc_id ? base->p.doc_id[at] : 1;
        a->clean = of;
        poison_rows(&a->p, r, false, a->poisoned);
    } else {
        a->same_as = of;
    }
}

static void world_create(world *w, rng *r)
{
    static const int heads[][2] = {{1, 1}, {2, 1}, {4, 2}, {3, 3}, {3, 1}};
    memset(w, 0, sizeof *w);
    w->ranks = (int)rng_int(r, 1, rng_chance(r, 90) ? 4 : PROBLEM_RANKS_MAX);
    w->layer_count = (int)rng_int(r, 1, 3);
    for (int i = 0; i < w->layer_count; i++) {
        const int *h = heads[rng_int(r, 0, 4)];
        w->layer[i] = layer_of(h[0], h[1], rng_chance(r, 80) ? 8 : 16, RA_F32);
        random_mask(r, SEQ_MAX / 2, &w->layer[i]);
    }
    w->options.ctx.keep_kv = rng_chance(r, 40);
    w->options.ctx.no_overlap = rng_chance(r, 40);
    w->options.ctx.forward_only = rng_chance(r, 5);
    w->options.joined = rng_chance(r, 40);
    w->options.threads = rng_chance(r, 95) ? 1 : 2;
    int level = 0;
    for (int i = 0; ra_cpu_level_name(i); i++) {
        level = ra_cpu_level_runs(i) && rng_chance(r, 60) ? i : level;
    }
    w->options.level = ra_cpu_level_name(level);
    while (w->run_count < RUNS) {
        add_fresh(w, r);
        if (w->run_count < RUNS && rng_chance(r, 40)) {
            add_variant(w, r, w->run_count - 1);
        }
    }
    for (int i = 0; i < w->run_count; i++) {
        answer_create(&w->runs[i].got, &w->runs[i].p, RA_F32, RA_F32, false);
    }
}

static void world_free(world *w)
{
    for (int i = 0; i < w->run_count; i++) {
        problem_free(&w->runs[i].p);
        answer_free(&w->runs[i].got, false);
    }
}

static void run_rank(int rank, ra_comm *comm, void *arg)
{
    world *w = arg;
    rank_report *report = &w->reports[rank];
    ra_backend *backend = NULL, planned;
    ra_backend_ops ops;
    ra_ctx *ctx = NULL;
    ra_ctx_options options = w->options.ctx;
    options.size = sizeof options;
    if (report_keep(report, ra_backend_open_cpu(w->options.threads, w->options.level, &backend),
                    "backend") &&
        (planned = world_backend(&w->options, backend, &ops),
         report_keep(report,
                     ra_ctx_create(&planned, comm, w->layer, w->layer_count, &options, &ctx),
                     "ctx"))) {
        for (int i = 0; i < w->run_count && report->status == RA_OK; i++) {
            run *a = &w->runs[i];
            world_options own = w->options;
            own.strides = a->strides;
            w->failed_run[rank] = i;
            rank_step(ctx, comm, a->layer, &a->p, &a->l, &own, rank, &a->got, report);
        }
    }
    ra_ctx_free(ctx);
    ra_backend_close(backend);
}

static void close_to(const run *a, const char *name, const ra_tensor *got, const ra_tensor *want)
{
    double largest = tensor_largest(want), error = tensor_error(got, want);
    if (!(error <= TOLERANCE * largest)) {
        problem_print(&a->p, &a->l);
        fail_msg("%s: %s: error %.3g of %.3g", support_case(), name, error, largest);
    }
}

/* g, i: the run against the oracle. */
static void check_oracle(const world *w, const run *a)
{
    const problem *p = &a->p;
    answer want;
    ra_step_desc desc = problem_desc(p);
    answer_create(&want, p, RA_F64, RA_F64, false);
    ra_forward_io forward = {
        .size = sizeof forward, .q = p->q, .k = p->k, .v = p->v, .out = want.out, .lse = want.lse};
    ra_backward_io backward = {.size = sizeof backward,
                               .q = p->q,
                               .k = p->k,
                               .v = p->v,
                               .dout = p->dout,
                               .dq = want.dq,
                               .dk = want.dk,
                               .dv = want.dv};
    assert_int_equal(ra_oracle_forward(&desc, &p->layer, &forward), RA_OK);
    close_to(a, "out", &a->got.out, &want.out);
    close_to(a, "lse", &a->got.lse, &want.lse);
    if (!w->options.ctx.forward_only) {
        assert_int_equal(ra_oracle_backward(&desc, &p->layer, &backward), RA_OK);
        close_to(a, "dq", &a->got.dq, &want.dq);
        close_to(a, "dk", &a->got.dk, &want.dk);
        close_to(a, "dv", &a->got.dv, &want.dv);
    }
    answer_free(&want, false);
}

/* j: rows of other documents have the bits of the clean run. */
static void check_isolation(const run *a, const run *clean)
{
    const ra_tensor *mine[] = {&a->got.out, &a->got.lse, &a->got.dq, &a->got.dk, &a->got.dv};
    const ra_tensor *theirs[] = {&clean->got.out, &clean->got.lse, &clean->got.dq, &clean->got.dk,
                                 &clean->got.dv};
    for (int64_t i = 0; i < a->p.rows * a->p.seq; i++) {
        int32_t id = a->p.doc_id ? a->p.doc_id[i] : 1;
        if (id == a->poisoned && i < a->p.seq) {
            continue;
        }
        for (int t = 0; t < 5; t++) {
            size_t bytes = (size_t)mine[t]->size[RA_CHAN] * sizeof(float);
            for (int64_t head = 0; head < mine[t]->size[RA_HEAD]; head++) {
                const void *x = ra_tensor_at(mine[t], i / a->p.seq, head, i % a->p.seq);
                const void *y = ra_tensor_at(theirs[t], i / a->p.seq, head, i % a->p.seq);
                if (memcmp(x, y, bytes) != 0) {
                    problem_print(&a->p, &a->l);
                    fail_msg("%s: tensor %d, row %lld differs by NaN in document %d",
                             support_case(), t, (long long)i, a->poisoned);
                }
            }
        }
    }
}

static void check_world(const world *w)
{
    for (int rank = 0; rank < w->ranks; rank++) {
        const rank_report *report = &w->reports[rank];
        if (report->status != RA_OK) {
            const run *a = &w->runs[w->failed_run[rank]];
            problem_print(&a->p, &a->l);
            fail_msg("%s: rank %d, run %d: %s: %s", support_case(), rank, w->failed_run[rank],
                     report->call, report->message);
        }
    }
    for (int i = 0; i < w->run_count; i++) {
        const run *a = &w->runs[i];
        if (a->clean >= 0) {
            check_isolation(a, &w->runs[a->clean]);
        } else if (a->same_as >= 0) {
            if (!answer_same_bits(&a->got, &w->runs[a->same_as].got)) {
                problem_print(&a->p, &a->l);
                fail_msg("%s: run %d differs from run %d", support_case(), i, a->same_as);
            }
        } else {
            check_oracle(w, a);
        }
    }
}

static void every_step(void **state)
{
    (void)state;
    world *w = malloc(sizeof *w);
    assert_non_null(w);
    int64_t steps = support_steps(STEPS), done = 0, rank_steps = 0;
    double start = support_now();
    for (int64_t i = 0; done < steps; i++) {
        support_limit(60, "ring world %lld of seed %llu", (long long)i,
                      (unsigned long long)support_seed());
        rng r = rng_of(support_seed() * 1000003u + (uint64_t)i);
        world_create(w, &r);
        assert_true(world_each(w->ranks, run_rank, w));
        check_world(w);
        done += w->run_count;
        rank_steps += (int64_t)w->run_count * w->ranks;
        world_free(w);
    }
    printf("%lld steps, %lld of single ranks, %.1f s\n", (long long)done, (long long)rank_steps,
           support_now() - start);
    free(w);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_step)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
