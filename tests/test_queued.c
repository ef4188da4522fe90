/*
 * Over a backend whose calls return before they are done, as on a device: whatever begins late, the
 * bits are those of a backend that does everything at once, also where gradients travel in the
 * middle of a computation. Calls follow each other without a wait, all scratch memory is NaN before
 * each, and gradients come home in as many pieces as it takes to use every place of the landing
 * again.
 */
#include <math.h>
#include <stdio.h>

#include "attn/ctx.h"
#include "support_queued.h"
#include "support_random.h"
#include "support_world.h"
#include "tensor/tensor.h"

enum { RANKS_MAX = 5, SEQ_MAX = 60, ROUNDS = 2, WORLDS = 150, DELAY_US = 300 };
static const double TOLERANCE = 3e-5;

typedef struct world {
    problem p;
    layout l;
    world_options o;
    int64_t landing_bytes;
    int64_t number;
    bool at_once;
    int64_t chunks[RANKS_MAX]; /* that were marked in the middle of a computation */
    answer got[ROUNDS];
    rank_report report[RANKS_MAX];
} world;

static ra_status spoil_scratch(const ra_ctx *ctx)
{
    ra_tensor scratch = ra_tensor_bhsd(ctx->scratch, RA_F32, 1, 1, 1,
                                       (int64_t)(ctx->scratch_bytes / sizeof(float)));
    return ctx->scratch ? ctx->backend->ops->fill(ctx->backend->self, &scratch, NAN) : RA_OK;
}

static bool call(ra_ctx *ctx, const ra_plan *plan, const rank_data *data, rank_report *report)
{
    ra_forward_io forward = rank_data_forward(data);
    ra_backward_io backward = rank_data_backward(data);
    ra_stream none = {NULL};
    return report_keep(report, spoil_scratch(ctx), "spoil") &&
           report_keep(report, ra_attn_forward(ctx, plan, &forward, none), "forward") &&
           report_keep(report, spoil_scratch(ctx), "spoil") &&
           report_keep(report, ra_attn_backward(ctx, plan, &backward, none), "backward");
}

static void call_rounds(world *w, int rank, ra_ctx *ctx, const ra_step *step, queued_backend *q)
{
    rank_report *report = &w->report[rank];
    rank_data data[ROUNDS];
    ra_plan_info info = {.size = sizeof info};
    const ra_plan *plan = ra_step_plan(step, 0);
    bool ran = report_keep(report, ra_plan_inspect(plan, &info), "inspect");
    for (int round = 0; round < ROUNDS; round++) {
        rank_data_create(&data[round], &w->p, &w->l, rank, STRIDES_BHSD, info.kept_seq,
                         w->o.ctx.keep_kv);
    }
    for (int round = 0; round < ROUNDS && ran; round++) {
        ran = call(ctx, plan, &data[round], report);
    }
    report_keep(report, queued_wait(q), "wait");
    for (int round = 0; round < ROUNDS; round++) {
        rank_data_collect(&data[round], true, &w->got[round]);
        rank_data_free(&data[round]);
    }
}

static void run_rank(int rank, ra_comm *comm, void *arg)
{
    world *w = arg;
    rank_report *report = &w->report[rank];
    ra_backend *inner = NULL;
    if (!report_keep(report, ra_backend_open_cpu(1, NULL, &inner), "backend")) {
        ra_comm_abort(comm, "a rank could not start");
        return;
    }
    queued_backend q;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_ctx_options options = w->o.ctx;
    ra_step_desc desc = rank_desc(&w->p, &w->l, rank);
    options.size = sizeof options;
    queued_open(&q, inner, DELAY_US, support_seed() + (uint64_t)(w->number * RANKS_MAX + rank));
    q.calls.at_once = q.additions.at_once = w->at_once;
    q.ops.landing_bytes = w->landing_bytes;
    q.ops.marks_chunk = w->o.joined;
    if (report_keep(report, ra_ctx_create(&q.backend, comm, &w->p.layer, 1, &options, &ctx),
                    "ctx") &&
        report_keep(report, ra_step_create(ctx, &desc, &step), "step")) {
        call_rounds(w, rank, ctx, step, &q);
    }
    /* What there is no room for is marked once more, behind all. */
    w->chunks[rank] = q.marked_again == 0 || w->landing_bytes > 0 ? q.chunks : -1;
    rank_desc_free(&desc);
    ra_step_free(step);
    ra_ctx_free(ctx);
    queued_close(&q);
    ra_backend_close(inner);
}

static void world_create(world *w, int64_t number)
{
    rng r = rng_of(support_seed() * 1000003u + (uint64_t)number);
    int64_t seq = rng_int(&r, 1, SEQ_MAX);
    int ranks = (int)rng_int(&r, 2, RANKS_MAX);
    *w = (world){.number = number};
    int kind = (int)rng_int(&r, 0, LAYOUT_KINDS - 1);
    ra_layer layer = layer_of(2, 1, 8, RA_F32);
    random_mask(&r, seq, &layer);
    w->o.joined = rng_chance(&r, 50);
    if (w->o.joined && rng_chance(&r, 80)) { /* where there is something to join */
        layer = layer_of(2, 1, 8, RA_F32);
        layer.window = rng_int(&r, 1, seq);
        kind = rng_chance(&r, 50) ? 0 : 2;
    }
    problem_create(&w->p, layer, rng_int(&r, 1, 2), seq);
    random_metadata(&r, &w->p);
    problem_fill_unit(&w->p, &r);
    w->l = layout_kind(kind, ranks, seq, &r);
    w->o.ctx.keep_kv = rng_chance(&r, 40);
    w->o.ctx.no_overlap = rng_chance(&r, 25);
    w->landing_bytes = rng_chance(&r, 30) ? 0 : rng_int(&r, 1, 2000);
    for (int round = 0; round < ROUNDS; round++) {
        answer_create(&w->got[round], &w->p, RA_F32, RA_F32, false);
    }
}

static void check_reports(const world *w, int64_t *chunks)
{
    for (int rank = 0; rank < w->l.ranks; rank++) {
        const rank_report *report = &w->report[rank];
        assert_true(w->chunks[rank] >= 0);
        *chunks += w->chunks[rank];
        if (report->status != RA_OK) {
            fail_msg("%s: rank %d: %s: %s", support_case(), rank, report->call, report->message);
        }
    }
}

static void check_rounds(const world *w, const answer *want)
{
    for (int round = 0; round < ROUNDS; round++) {
        if (!answer_same_bits(&w->got[round], want)) {
            problem_print(&w->p, &w->l);
            fail_msg("%s: round %d differs, landing %lld, keep %d, no_overlap %d", support_case(),
                     round, (long long)w->landing_bytes, w->o.ctx.keep_kv, w->o.ctx.no_overlap);
        }
    }
}

/* Sums that are taken in two parts are rounded otherwise. */
static void check_near(const answer *got, const answer *want)
{
    const ra_tensor *const a[] = {&got->out, &got->lse, &got->dq, &got->dk, &got->dv};
    const ra_tensor *const b[] = {&want->out, &want->lse, &want->dq, &want->dk, &want->dv};
    for (int i = 0; i < 5; i++) {
        double error = tensor_error(a[i], b[i]), largest = tensor_largest(b[i]);
        if (!(error <= TOLERANCE * largest)) {
            fail_msg("%s: tensor %d: error %.3g of %.3g", support_case(), i, error, largest);
        }
    }
}

/* What calls that are done when they return give. Where the plan joins computations the wrapper
 * takes them in two parts, so that bits are its own. */
static void run_at_once(world *w, answer *want)
{
    int64_t chunks = 0;
    world_run(&w->p, &w->l, &w->o, want, NULL);
    if (w->o.joined) {
        w->at_once = true;
        assert_true(world_each(w->l.ranks, run_rank, w));
        check_reports(w, &chunks);
        check_near(&w->got[0], want);
        answer_free(want, false);
        *want = w->got[0];
        answer_create(&w->got[0], &w->p, RA_F32, RA_F32, false);
        w->at_once = false;
    }
}

static void late_calls_keep_bits(void **state)
{
    (void)state;
    int64_t worlds = support_steps(WORLDS), chunks = 0;
    for (int64_t number = 0; number < worlds; number++) {
        static world w;
        answer want;
        support_limit(60, "queued world %lld of seed %llu", (long long)number,
                      (unsigned long long)support_seed());
        world_create(&w, number);
        run_at_once(&w, &want);
        assert_true(world_each(w.l.ranks, run_rank, &w));
        check_reports(&w, &chunks);
        check_rounds(&w, &want);
        for (int round = 0; round < ROUNDS; round++) {
            answer_free(&w.got[round], false);
        }
        answer_free(&want, false);
        problem_free(&w.p);
    }
    printf("%lld worlds; %lld chunks marked early\n", (long long)worlds, (long long)chunks);
    assert_true(worlds < WORLDS || chunks > 0);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(late_calls_keep_bits)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
