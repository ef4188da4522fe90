/* The sums of a trace: exchanges that are made slow show as exposed communication, hidden as far as
 * there is something to compute, and every nanosecond of a call is somewhere. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/trace.h"
#include "comm/comm.h"
#include "support_slow.h"
#include "support_world.h"

enum { RANKS = 3, DELAY_MS = 40 };

typedef struct traced {
    problem p;
    layout l;
    world_options o;
    answer a;
    rank_report reports[RANKS];
    slow_comm comm[RANKS];
} traced;

static void run_rank(int rank, ra_comm *inner, void *arg)
{
    traced *t = arg;
    ra_comm *comm = NULL;
    t->comm[rank] =
        (slow_comm){.chance_percent = 100, .delay_us = DELAY_MS * 1000, .always_longest = true};
    if (report_keep(&t->reports[rank], slow_comm_open(&t->comm[rank], inner, &comm), "comm")) {
        rank_run(comm, &t->p, &t->l, &t->o, rank, &t->a, &t->reports[rank]);
    }
    ra_comm_close(comm);
}

static ra_trace_summary sums_of(const ra_trace *trace, int rank)
{
    ra_trace_summary s = {.size = sizeof s};
    assert_int_equal(ra_trace_summarize(trace, rank, &s), RA_OK);
    return s;
}

static void slow_exchanges(void **state)
{
    (void)state;
    for (int overlap = 0; overlap < 2; overlap++) {
        traced t = {.o = {.ctx = {.no_overlap = !overlap}}};
        rng r = rng_of(support_seed());
        support_limit(60, "slow exchanges, overlap %d", overlap);
        problem_create(&t.p, layer_of(2, 1, 64, RA_F32), 1, 96);
        problem_fill_unit(&t.p, &r);
        t.l = layout_zigzag(RANKS, t.p.seq);
        answer_create(&t.a, &t.p, RA_F32, RA_F32, false);
        assert_int_equal(ra_trace_create(1000, &t.o.ctx.trace), RA_OK);
        assert_true(world_each(RANKS, run_rank, &t));
        /* 2 hops bring rows in each call, and 2 exchanges or more take sums home. */
        for (int rank = 0; rank < RANKS; rank++) {
            assert_int_equal(t.reports[rank].status, RA_OK);
            ra_trace_summary s = sums_of(t.o.ctx.trace, rank);
            assert_true(s.exchange >= 6 * DELAY_MS * 1e-3);
            /* There is next to nothing to hide them behind. */
            assert_true(s.exposed >= 4 * DELAY_MS * 1e-3);
            assert_true(s.compute > 0 && s.idle >= 0);
            assert_true(s.wall >= s.compute + s.exposed);
            assert_true(fabs(s.wall - s.compute - s.exposed - s.idle) < 1e-9);
            assert_true(overlap || s.exposed >= s.exchange - 1e-3);
            assert_true(s.wall == sums_of(t.o.ctx.trace, 0).wall && s.lost == 0);
        }
        assert_true(sums_of(t.o.ctx.trace, RANKS).compute == 0); /* no such rank */
        ra_trace_free(t.o.ctx.trace);
        answer_free(&t.a, false);
        problem_free(&t.p);
    }
}

/* Two ranks' calls overlap in time; the wall time counts each moment once. */
static void calls_that_overlap(void **state)
{
    (void)state;
    ra_trace *trace = NULL;
    assert_int_equal(ra_trace_create(4, &trace), RA_OK);
    assert_true(sums_of(trace, 0).wall == 0);
    int64_t begin = ra_trace_begin(trace);
    ra_trace_end(trace, begin, "forgotten: the ring holds four", RA_LANE_COMPUTE, 0, 0);
    ra_trace_end(trace, begin - 300000000, "call", RA_LANE_CALL, 0, 0);
    ra_trace_end(trace, begin - 200000000, "call", RA_LANE_CALL, 1, 0);
    ra_trace_end(trace, begin - 100000000, "compute", RA_LANE_COMPUTE, 0, 0);
    ra_trace_end(trace, begin - 50000000, "wait", RA_LANE_WAIT, 1, 0);
    ra_trace_summary zero = sums_of(trace, 0), one = sums_of(trace, 1);
    double spent = (double)(ra_trace_begin(trace) - begin) * 1e-9;
    assert_true(zero.wall >= 0.3 && zero.wall <= 0.3 + spent && one.wall == zero.wall);
    assert_true(zero.compute >= 0.1 && zero.compute <= 0.1 + spent && zero.exposed == 0);
    assert_true(one.exposed >= 0.05 && one.exposed <= 0.05 + spent && one.compute == 0);
    assert_true(fabs(one.idle - (one.wall - one.exposed)) < 1e-9);
    assert_true(zero.lost == 1 && one.lost == 1);
    ra_trace_free(trace);
}

static void bad_arguments(void **state)
{
    (void)state;
    ra_trace *trace = NULL;
    ra_trace_summary s = {.size = 1};
    assert_int_equal(ra_trace_create(4, &trace), RA_OK);
    assert_int_equal(ra_trace_summarize(trace, 0, &s), RA_E_ARG);
    assert_non_null(strstr(ra_last_error(), "out.size"));
    assert_int_equal(ra_trace_summarize(trace, 0, NULL), RA_E_ARG);
    assert_int_equal(ra_trace_summarize(NULL, 0, &s), RA_E_ARG);
    ra_trace_free(trace);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(slow_exchanges),
        cmocka_unit_test(calls_that_overlap),
        cmocka_unit_test(bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
