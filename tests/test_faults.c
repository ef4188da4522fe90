/* One rank fails: it returns an error, sleeps past the deadline, aborts, or leaves, at every
 * exchange and gather it takes part in. Every other rank returns RA_E_COMM in time, with peer and
 * hop in the message; nothing leaks; the ctx accepts only ra_ctx_free. */
#include "support_world.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/comm.h"

enum { RANKS_MAX = 4, TIMEOUT_MS = 250, GRACE_SECONDS = 2 };

typedef enum fault { FAULT_NONE, FAULT_ERROR, FAULT_SLEEP, FAULT_ABORT, FAULT_KINDS } fault;
static const char *const fault_names[] = {"nothing", "an error", "a sleep", "an abort"};

typedef struct faulty faulty;

/* A rank's transport: the thread transport, until its time comes. */
typedef struct link {
    faulty *world;
    int rank, calls;
    ra_comm *inner;
} link;

struct faulty {
    problem p;
    layout l;
    world_options o;
    int victim;
    fault kind;
    int at; /* the victim's n-th call of its transport, from 1 */
    int64_t landing_bytes;
    link links[RANKS_MAX];
    rank_report reports[RANKS_MAX];
    double seconds[RANKS_MAX];      /* of the failing call */
    uint64_t hash[RANKS_MAX];       /* of results that a rank called good; 0 = it did not */
    uint64_t clean_hash[RANKS_MAX]; /* of a run without a fault */
    bool refused_after[RANKS_MAX], no_result[RANKS_MAX];
    ra_alloc_probe probes[RANKS_MAX];
};

static void sleep_ms(int ms)
{
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

/* Only a sleep must run into the time-out: a rank that a busy machine keeps waiting is no fault. */
static int patience_ms(const faulty *w)
{
    return w->kind == FAULT_SLEEP ? TIMEOUT_MS : 40 * TIMEOUT_MS;
}

static ra_status strike(link *k)
{
    const faulty *w = k->world;
    if (++k->calls != w->at || k->rank != w->victim) {
        return RA_OK;
    }
    switch (w->kind) {
    case FAULT_ERROR: return ra_fail(RA_E_COMM, "the network card caught fire");
    case FAULT_SLEEP: sleep_ms(2 * TIMEOUT_MS); return RA_OK;
    case FAULT_ABORT: ra_comm_abort(k->inner, "the job was cancelled"); return RA_OK;
    default: return RA_OK;
    }
}

static ra_status link_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    link *k = user;
    ra_status status = strike(k);
    return status ? status : ra_comm_exchange(k->inner, xfers, count, timeout_ms);
}

static ra_status link_gather(void *user, const void *mine, size_t bytes, void *all, int timeout_ms)
{
    link *k = user;
    ra_status status = strike(k);
    return status ? status : ra_comm_gather(k->inner, mine, bytes, all, timeout_ms);
}

static ra_status link_barrier(void *user, int timeout_ms)
{
    link *k = user;
    return ra_comm_gather(k->inner, NULL, 0, NULL, timeout_ms);
}

static void link_abort(void *user, const char *why)
{
    ra_comm_abort(((link *)user)->inner, why);
}

static void link_close(void *user)
{
    (void)user; /* the inner comm is closed by world_each */
}

static ra_status link_open(faulty *w, int rank, ra_comm *inner, ra_comm **out)
{
    w->links[rank] = (link){w, rank, 0, inner};
    const ra_comm_callbacks callbacks = {.size = sizeof callbacks,
                                         .user = &w->links[rank],
                                         .exchange = link_exchange,
                                         .gather = link_gather,
                                         .barrier = link_barrier,
                                         .abort = link_abort,
                                         .close = link_close};
    return ra_comm_open_custom(rank, w->l.ranks, &callbacks, out);
}

/* Times a call and keeps its failure. */
static bool timed(faulty *w, int rank, double start, ra_status status, const char *call)
{
    if (!report_keep(&w->reports[rank], status, call)) {
        w->seconds[rank] = support_now() - start;
        return false;
    }
    return true;
}

static void attend(faulty *w, int rank, ra_ctx *ctx, const ra_plan *plan)
{
    rank_data data;
    ra_plan_info info = {.size = sizeof info};
    ra_plan_inspect(plan, &info);
    rank_data_create(&data, &w->p, &w->l, rank, STRIDES_BHSD, info.kept_seq, w->o.ctx.keep_kv);
    ra_forward_io forward = rank_data_forward(&data);
    ra_backward_io backward = rank_data_backward(&data);
    double start = support_now();
    bool ran =
        timed(w, rank, start, ra_attn_forward(ctx, plan, &forward, (ra_stream){NULL}), "forward");
    bool gone = false;
    if (ran) {
        start = support_now();
        gone = timed(w, rank, start, ra_attn_backward(ctx, plan, &backward, (ra_stream){NULL}),
                     "backward");
    }
    if (gone) { /* whom the fault did not touch learns of it in the next call */
        w->hash[rank] = rank_data_hash(&data);
        start = support_now();
        if (w->kind != FAULT_NONE) {
            timed(w, rank, start, ra_attn_forward(ctx, plan, &forward, (ra_stream){NULL}),
                  "next forward");
        }
    }
    w->no_result[rank] =
        rank_data_no_result(&data, ran && !gone ? DATA_DQ : DATA_OUT, gone ? DATA_LSE : DATA_DV);
    w->refused_after[rank] = ra_ctx_status(ctx) != RA_OK &&
                             ra_attn_forward(ctx, plan, &forward, (ra_stream){NULL}) != RA_OK &&
                             ra_attn_backward(ctx, plan, &backward, (ra_stream){NULL}) != RA_OK;
    rank_data_free(&data);
}

static void faulty_rank(int rank, ra_comm *inner, void *arg)
{
    faulty *w = arg;
    ra_alloc_probe *before = ra_alloc_watch(&w->probes[rank]);
    ra_backend *backend = NULL;
    ra_comm *comm = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_ctx_options options = w->o.ctx;
    options.size = sizeof options;
    options.timeout_ms = patience_ms(w);
    report_keep(&w->reports[rank], ra_backend_open_cpu(1, NULL, &backend), "backend");
    report_keep(&w->reports[rank], link_open(w, rank, inner, &comm), "comm");
    ra_backend_ops ops;
    ra_backend landing = landing_backend(backend, w->landing_bytes, &ops);
    ops.marks_chunk = w->o.joined;
    double start = support_now();
    if (timed(w, rank, start, ra_ctx_create(&landing, comm, &w->p.layer, 1, &options, &ctx),
              "ctx")) {
        ra_step_desc desc = rank_desc(&w->p, &w->l, rank);
        start = support_now();
        if (timed(w, rank, start, ra_step_create(ctx, &desc, &step), "step")) {
            attend(w, rank, ctx, ra_step_plan(step, 0));
        }
        rank_desc_free(&desc);
    }
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_comm_close(comm);
    ra_backend_close(backend);
    ra_alloc_watch(before);
}

static void faulty_run(faulty *w)
{
    memset(w->reports, 0, sizeof w->reports);
    memset(w->probes, 0, sizeof w->probes);
    memset(w->hash, 0, sizeof w->hash);
    support_limit(20, "%s at call %d of rank %d of %d, keep %d, no_overlap %d, window %lld",
                  fault_names[w->kind], w->at, w->victim, w->l.ranks, w->o.ctx.keep_kv,
                  w->o.ctx.no_overlap, (long long)w->p.layer.window);
    assert_true(world_each(w->l.ranks, faulty_rank, w));
    for (int rank = 0; rank < w->l.ranks; rank++) {
        if (atomic_load(&w->probes[rank].live_bytes) != 0) {
            fail_msg("%s: rank %d leaks %lld bytes", support_case(), rank,
                     (long long)atomic_load(&w->probes[rank].live_bytes));
        }
    }
}

static void check_failure(const faulty *w)
{
    char victim[32];
    snprintf(victim, sizeof victim, "rank %d", w->victim);
    for (int rank = 0; rank < w->l.ranks; rank++) {
        const rank_report *r = &w->reports[rank];
        bool in_call = r->call && strstr(r->call, "ward");
        bool named = rank == w->victim || w->kind == FAULT_SLEEP || strstr(r->message, victim);
        bool placed = !in_call || strstr(r->message, "hop");
        bool in_time = w->seconds[rank] < TIMEOUT_MS * 1e-3 + GRACE_SECONDS;
        if (r->status != RA_E_COMM || !named || !placed || !in_time ||
            !strstr(r->message, "rank")) {
            if (rank == w->victim && r->status == RA_E_COMM) {
                continue; /* its own words */
            }
            fail_msg("%s: rank %d: %s in %s after %.2f s: %s", support_case(), rank,
                     ra_status_name(r->status), r->call ? r->call : "nothing", w->seconds[rank],
                     r->message);
        }
        assert_true(w->hash[rank] == 0 || w->hash[rank] == w->clean_hash[rank]);
        if (in_call) {
            assert_true(w->no_result[rank]);
            assert_true(w->refused_after[rank]);
        }
    }
}

static void faulty_create(faulty *w, int ranks, int turn)
{
    memset(w, 0, sizeof *w);
    bool pieces = turn >= 9; /* gradients come home in more pieces than there are places for */
    int64_t seq = pieces ? 40 : 12;
    ra_layer layer = layer_of(2, 1, 8, RA_F32);
    layer.window = turn % 3 == 2 ? seq / 2 : 0; /* the sliding path, with its halo */
    layer.causal = turn % 3 != 1;
    w->landing_bytes = pieces ? 1 : 0;
    problem_create(&w->p, layer, 1, seq);
    rng r = rng_of(support_seed());
    problem_fill_unit(&w->p, &r);
    w->l =
        layer.causal && !layer.window ? layout_zigzag(ranks, seq) : layout_contiguous(ranks, seq);
    w->o.ctx.keep_kv = turn % 2 == 1;
    w->o.ctx.no_overlap = turn / 2 % 2 == 1;
    w->o.joined = turn > 2;
}

/* Every call of the transport, every kind of fault. */
static void every_call(void **state)
{
    (void)state;
    int worlds = 0;
    for (int turn = 0; turn < 12; turn++) {
        int ranks = 2 + turn % 3;
        faulty w;
        faulty_create(&w, ranks, turn);
        w.victim = turn % ranks;
        faulty_run(&w);
        for (int rank = 0; rank < ranks; rank++) {
            if (w.reports[rank].status != RA_OK) {
                fail_msg("%s: rank %d: %s", support_case(), rank, w.reports[rank].message);
            }
        }
        memcpy(w.clean_hash, w.hash, sizeof w.hash);
        int calls = w.links[w.victim].calls;
        assert_true(calls > 6);
        for (w.at = 1; w.at <= calls; w.at++) {
            for (int kind = FAULT_ERROR; kind < FAULT_KINDS; kind++) {
                if (kind == FAULT_SLEEP && w.at % 4 != turn % 4 && !support_slow()) {
                    continue; /* a quarter of them, they take their time */
                }
                w.kind = (fault)kind;
                faulty_run(&w);
                check_failure(&w);
                worlds++;
            }
        }
        problem_free(&w.p);
    }
    printf("%d worlds with a fault\n", worlds);
}

/* Ranks without tokens come to every call of the transport, too, and nobody to one more. */
static void as_many_calls(void **state)
{
    (void)state;
    for (int turn = 0; turn < 24; turn++) {
        faulty w;
        faulty_create(&w, RANKS_MAX, turn);
        ra_layer layer = w.p.layer;
        problem_free(&w.p);
        problem_create(&w.p, layer, 1, RANKS_MAX - 1);
        w.l = layout_contiguous(RANKS_MAX, RANKS_MAX - 1);
        w.o.joined = turn >= 12;
        w.landing_bytes = 0;
        faulty_run(&w);
        for (int rank = 0; rank < RANKS_MAX; rank++) {
            if (w.reports[rank].status != RA_OK) {
                fail_msg("%s: rank %d: %s", support_case(), rank, w.reports[rank].message);
            }
            assert_int_equal(w.links[rank].calls, w.links[0].calls);
        }
        problem_free(&w.p);
    }
}

/* A rank that never comes to the forward, and closes. */
typedef struct leaver {
    problem p;
    layout l;
    rank_report reports[RANKS_MAX];
} leaver;

static void leave(int rank, ra_comm *comm, void *arg)
{
    leaver *w = arg;
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_ctx_options options = {.size = sizeof options, .timeout_ms = TIMEOUT_MS};
    ra_step_desc desc = rank_desc(&w->p, &w->l, rank);
    ra_backend_open_cpu(1, NULL, &backend);
    ra_ctx_create(backend, comm, &w->p.layer, 1, &options, &ctx);
    ra_step_create(ctx, &desc, &step);
    if (rank > 0) {
        rank_data data;
        rank_data_create(&data, &w->p, &w->l, rank, STRIDES_BHSD, 0, false);
        ra_forward_io forward = rank_data_forward(&data);
        report_keep(&w->reports[rank],
                    ra_attn_forward(ctx, ra_step_plan(step, 0), &forward, (ra_stream){NULL}),
                    "forward");
        rank_data_free(&data);
    }
    rank_desc_free(&desc);
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_backend_close(backend);
}

static void rank_that_leaves(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= RANKS_MAX; ranks++) {
        leaver w;
        memset(&w, 0, sizeof w);
        support_limit(20, "rank 0 of %d leaves", ranks);
        problem_create(&w.p, layer_of(1, 1, 8, RA_F32), 1, 16);
        w.l = layout_contiguous(ranks, 16);
        double start = support_now();
        assert_true(world_each(ranks, leave, &w));
        assert_true(support_now() - start < TIMEOUT_MS * 1e-3 + GRACE_SECONDS);
        for (int rank = 1; rank < ranks; rank++) {
            assert_int_equal(w.reports[rank].status, RA_E_COMM);
            assert_non_null(strstr(w.reports[rank].message, "hop"));
        }
        problem_free(&w.p);
    }
}

/* ra_comm_abort from another thread at any moment: every rank returns, with a result or RA_E_COMM.
 */
typedef struct cancelled {
    faulty world;
    answer got;
    pthread_mutex_t lock;
    ra_comm *comm; /* of rank 0, while it may be aborted */
    bool done;
    int wait_us;
} cancelled;

static void cancel_rank(int rank, ra_comm *comm, void *arg)
{
    cancelled *c = arg;
    if (rank == 0) {
        pthread_mutex_lock(&c->lock);
        c->comm = comm;
        pthread_mutex_unlock(&c->lock);
    }
    rank_run(comm, &c->world.p, &c->world.l, &c->world.o, rank, &c->got, &c->world.reports[rank]);
    if (rank == 0) {
        pthread_mutex_lock(&c->lock);
        c->comm = NULL;
        c->done = true;
        pthread_mutex_unlock(&c->lock);
    }
}

static void *canceller(void *arg)
{
    cancelled *c = arg;
    bool done = false;
    struct timespec t = {0, (long)c->wait_us * 1000};
    nanosleep(&t, NULL);
    while (!done) {
        pthread_mutex_lock(&c->lock);
        done = c->done || c->comm;
        if (c->comm) {
            ra_comm_abort(c->comm, "cancelled from outside");
            ra_comm_abort(c->comm, "and again");
        }
        pthread_mutex_unlock(&c->lock);
    }
    return NULL;
}

static void abort_from_outside(void **state)
{
    (void)state;
    int stopped = 0;
    for (int i = 0; i < 150; i++) {
        cancelled c = {.wait_us = i * 10};
        pthread_t thread;
        faulty_create(&c.world, 2 + i % 3, i);
        c.world.o.ctx.timeout_ms = 5000;
        support_limit(20, "abort after %d us", c.wait_us);
        answer_create(&c.got, &c.world.p, RA_F32, RA_F32, false);
        pthread_mutex_init(&c.lock, NULL);
        assert_int_equal(pthread_create(&thread, NULL, canceller, &c), 0);
        assert_true(world_each(c.world.l.ranks, cancel_rank, &c));
        pthread_join(thread, NULL);
        pthread_mutex_destroy(&c.lock);
        for (int rank = 0; rank < c.world.l.ranks; rank++) {
            ra_status status = c.world.reports[rank].status;
            assert_true(status == RA_OK || status == RA_E_COMM);
            stopped += status == RA_E_COMM;
        }
        answer_free(&c.got, false);
        problem_free(&c.world.p);
    }
    printf("%d ranks stopped\n", stopped);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_call),
        cmocka_unit_test(as_many_calls),
        cmocka_unit_test(rank_that_leaves),
        cmocka_unit_test(abort_from_outside),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
