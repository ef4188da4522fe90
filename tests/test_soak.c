/*
 * A long run: step after step on one ctx, and calls back to back, while exchanges and computations
 * are delayed at random. Memory stays what it was, every rank asks its transport for the same
 * operations in the same order, and no delay changes a bit. `make soak` runs 10,000 steps.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "support_random.h"
#include "support_slow.h"
#include "support_world.h"

enum { RANKS = 4, KINDS = 8, STEPS = 200, CALLS = 500, SEQ = 48, DELAY_US = 200 };

/* What one rank keeps. */
typedef struct seat {
    slow_comm comm;
    rank_data data[KINDS];
    ra_step_desc desc[KINDS];
    uint64_t hash[KINDS]; /* of the results of the first time, without delays */
    rank_report report;
    ra_alloc_probe probe;
    long long live_bytes; /* after every kind of step was there once */
} seat;

typedef struct world {
    problem p[KINDS];
    layout l[KINDS];
    int64_t steps;
    seat seats[RANKS];
    ra_ctx_options options;
    long resident[2]; /* pages: warm, at the end */
} world;

static long resident_pages(void)
{
    long all = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%ld %ld", &all, &resident) != 2) {
        resident = 0;
    }
    if (file) {
        fclose(file);
    }
    return resident;
}

/* Forward and backward; the bits of the first time are those of every time. */
static bool call(seat *s, ra_ctx *ctx, const ra_plan *plan, int kind, bool first)
{
    rank_data *data = &s->data[kind];
    ra_forward_io forward = rank_data_forward(data);
    ra_backward_io backward = rank_data_backward(data);
    if (!report_keep(&s->report, ra_attn_forward(ctx, plan, &forward, (ra_stream){0}), "forward") ||
        !report_keep(&s->report, ra_attn_backward(ctx, plan, &backward, (ra_stream){0}),
                     "backward")) {
        return false;
    }
    uint64_t hash = rank_data_hash(data);
    s->hash[kind] = first ? hash : s->hash[kind];
    return report_keep(&s->report, hash == s->hash[kind] ? RA_OK : RA_E_DEVICE, "bits");
}

static bool keeps_memory(seat *s, bool first)
{
    long long live = atomic_load(&s->probe.live_bytes);
    s->live_bytes = first ? live : s->live_bytes;
    return report_keep(&s->report, live == s->live_bytes ? RA_OK : RA_E_NOMEM, "memory");
}

static void run_steps(world *w, seat *s, ra_ctx *ctx, int rank)
{
    for (int64_t i = 0; i < w->steps && s->report.status == RA_OK; i++) {
        int kind = (int)(i % KINDS);
        ra_step *step = NULL;
        if (i == KINDS) {
            s->comm.delay_us = DELAY_US;
            slow_backend_delay(DELAY_US);
        }
        if (report_keep(&s->report, ra_step_create(ctx, &s->desc[kind], &step), "step")) {
            call(s, ctx, ra_step_plan(step, kind), kind, i < KINDS);
        }
        ra_step_free(step);
        if (kind == KINDS - 1 && s->report.status == RA_OK) {
            keeps_memory(s, i < KINDS);
            if (rank == 0 && i < 2 * KINDS) {
                w->resident[0] = resident_pages();
            }
        }
    }
}

/* One step; its calls follow each other at once. */
static void run_calls(world *w, seat *s, ra_ctx *ctx, int rank)
{
    ra_step *step = NULL;
    if (!report_keep(&s->report, ra_step_create(ctx, &s->desc[0], &step), "step")) {
        return;
    }
    for (int64_t i = 0; i < CALLS && s->report.status == RA_OK; i++) {
        if (i == 10 && rank == 0) {
            w->resident[0] = resident_pages();
        }
        if (call(s, ctx, ra_step_plan(step, 0), 0, i == 0)) {
            keeps_memory(s, i == 0);
        }
    }
    ra_step_free(step);
}

static void run_rank(int rank, ra_comm *inner, void *arg)
{
    world *w = arg;
    seat *s = &w->seats[rank];
    ra_backend *backend = NULL;
    ra_comm *comm = NULL;
    ra_ctx *ctx = NULL;
    slow_backend slow;
    ra_layer layers[KINDS];
    ra_alloc_probe *before = ra_alloc_watch(&s->probe);
    s->comm = (slow_comm){.r = rng_of(support_seed() + (uint64_t)rank), .chance_percent = 20};
    for (int kind = 0; kind < KINDS; kind++) {
        layers[kind] = w->p[kind].layer;
    }
    if (report_keep(&s->report, slow_comm_open(&s->comm, inner, &comm), "comm") &&
        report_keep(&s->report, ra_backend_open_cpu(1, NULL, &backend), "backend")) {
        slow_backend_wrap(&slow, backend);
        if (report_keep(&s->report,
                        ra_ctx_create(&slow.backend, comm, layers, KINDS, &w->options, &ctx),
                        "ctx")) {
            (w->steps > 0 ? run_steps : run_calls)(w, s, ctx, rank);
        }
    }
    if (s->report.status) {
        ra_comm_abort(inner, s->report.message);
    }
    ra_ctx_free(ctx);
    ra_backend_close(backend);
    ra_comm_close(comm);
    ra_alloc_watch(before);
}

static void world_create(world *w, rng *r)
{
    memset(w, 0, sizeof *w);
    w->options = (ra_ctx_options){.size = sizeof w->options};
    for (int kind = 0; kind < KINDS; kind++) {
        ra_layer layer = layer_of(2, 1, 16, kind % 2 ? RA_BF16 : RA_F32);
        random_mask(r, SEQ, &layer);
        problem_create(&w->p[kind], layer, 1 + kind % 2, SEQ - kind);
        random_metadata(r, &w->p[kind]);
        problem_fill_unit(&w->p[kind], r);
        w->l[kind] = layout_kind(kind % LAYOUT_KINDS, RANKS, SEQ - kind, r);
        for (int rank = 0; rank < RANKS; rank++) {
            seat *s = &w->seats[rank];
            rank_data_create(&s->data[kind], &w->p[kind], &w->l[kind], rank, STRIDES_BHSD, 0,
                             false);
            s->desc[kind] = rank_desc(&w->p[kind], &w->l[kind], rank);
        }
    }
}

static void world_free(world *w)
{
    for (int kind = 0; kind < KINDS; kind++) {
        for (int rank = 0; rank < RANKS; rank++) {
            rank_data_free(&w->seats[rank].data[kind]);
            rank_desc_free(&w->seats[rank].desc[kind]);
        }
        problem_free(&w->p[kind]);
    }
}

/* Every rank the same operations; every send the receive of its peer, operation by operation. */
static void check_tallies(const world *w)
{
    const tally *first = &w->seats[0].comm.tally;
    for (int rank = 0; rank < RANKS; rank++) {
        const tally *t = &w->seats[rank].comm.tally;
        assert_int_equal(t->operations, first->operations);
        assert_true(t->kinds == first->kinds);
        for (int peer = 0; peer < RANKS; peer++) {
            assert_true(t->sent[peer] == w->seats[peer].comm.tally.received[rank]);
        }
    }
}

static void run_world(int64_t steps, bool no_overlap)
{
    static world w;
    rng r = rng_of(support_seed());
    world_create(&w, &r);
    w.steps = steps;
    w.options.no_overlap = no_overlap;
    slow_backend_delay(0);
    assert_true(world_each(RANKS, run_rank, &w));
    w.resident[1] = resident_pages();
    for (int rank = 0; rank < RANKS; rank++) {
        const rank_report *report = &w.seats[rank].report;
        if (report->status) {
            fail_msg("%s: rank %d: %s: %s", support_case(), rank, report->call, report->message);
        }
        assert_true(atomic_load(&w.seats[rank].probe.live_bytes) == 0);
    }
    check_tallies(&w);
    assert_true(w.seats[0].comm.tally.operations > (steps ? steps : CALLS));
    long grown = (w.resident[1] - w.resident[0]) * (sysconf(_SC_PAGESIZE) / 1024);
    print_message("%lld operations a rank; resident memory grew by %ld KiB\n",
                  (long long)w.seats[0].comm.tally.operations, grown);
    if (support_thin()) {
        print_message("SKIPPED: resident memory, which a sanitizer keeps\n");
    } else {
        assert_true(grown < 2048);
    }
    world_free(&w);
}

static void many_steps(void **state)
{
    (void)state;
    int64_t steps = support_steps(STEPS);
    support_limit(60 + (int)steps / 10, "%lld steps", (long long)steps);
    run_world(steps, false);
}

static void steps_without_overlap(void **state)
{
    (void)state;
    support_limit(120, "steps without overlap");
    run_world(2 * KINDS, true);
}

static void calls_back_to_back(void **state)
{
    (void)state;
    support_limit(120, "%d calls", CALLS);
    run_world(0, false);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_steps),
        cmocka_unit_test(steps_without_overlap),
        cmocka_unit_test(calls_back_to_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
