/* Memory runs out at every allocation in turn, on one rank: while a backend, ctx or step is created
 * all ranks get the same RA_E_NOMEM (a rank without a backend is a rank that aborts); nobody hangs,
 * nothing leaks, nothing is written, and a ctx whose step failed still runs its older steps. */
#include "support_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS_MAX = 3, SITES_MAX = 400, TURNS = 12 };

typedef struct starved {
    problem p, larger;
    layout l, larger_layout;
    world_options o;
    int victim;
    long site;
    bool older_step; /* the larger step fails, then p's, created before, runs */
    rank_report reports[RANKS_MAX], late[RANKS_MAX];
    ra_alloc_probe probes[RANKS_MAX];
    bool no_result[RANKS_MAX], exhausted;
    uint64_t hash[RANKS_MAX];       /* of results that a rank called good; 0 = it did not */
    uint64_t clean_hash[RANKS_MAX]; /* of a run that no memory failed */
    answer got;
} starved;

static void arm(starved *w, int rank)
{
    if (rank == w->victim) {
        atomic_store(&w->probes[rank].fail_at, w->site);
    }
}

static void disarm(starved *w, int rank)
{
    if (rank == w->victim) {
        w->exhausted = atomic_exchange(&w->probes[rank].fail_at, 0) > 0;
    }
}

static bool attend(starved *w, int rank, ra_ctx *ctx, const ra_plan *plan, rank_report *report)
{
    rank_data data;
    ra_plan_info info = {.size = sizeof info};
    if (!report_keep(report, ra_plan_inspect(plan, &info), "inspect")) {
        ra_plan_inspect(plan, &info); /* concerns nobody else: the calls that follow work */
    }
    rank_data_create(&data, &w->p, &w->l, rank, STRIDES_BHSD, info.kept_seq, w->o.ctx.keep_kv);
    ra_forward_io forward = rank_data_forward(&data);
    ra_backward_io backward = rank_data_backward(&data);
    bool ran =
        report_keep(report, ra_attn_forward(ctx, plan, &forward, (ra_stream){NULL}), "forward");
    bool gone =
        ran &&
        report_keep(report, ra_attn_backward(ctx, plan, &backward, (ra_stream){NULL}), "backward");
    w->no_result[rank] = !gone && rank_data_no_result(&data, ran ? DATA_DQ : DATA_OUT, DATA_DV);
    if (gone) {
        w->hash[rank] = rank_data_hash(&data);
        rank_data_collect(&data, true, &w->got);
    }
    rank_data_free(&data);
    return gone;
}

/* An older step, then one that fails, then the older one's plan. */
static void run_older(starved *w, int rank, ra_ctx *ctx)
{
    ra_step *older = NULL, *newer = NULL;
    ra_step_desc desc = rank_desc(&w->p, &w->l, rank);
    ra_step_desc larger = rank_desc(&w->larger, &w->larger_layout, rank);
    if (report_keep(&w->late[rank], ra_step_create(ctx, &desc, &older), "older step")) {
        arm(w, rank);
        report_keep(&w->reports[rank], ra_step_create(ctx, &larger, &newer), "step");
        disarm(w, rank);
        attend(w, rank, ctx, ra_step_plan(older, 0), &w->late[rank]);
    }
    ra_step_free(newer);
    ra_step_free(older);
    rank_desc_free(&desc);
    rank_desc_free(&larger);
}

static void starved_rank(int rank, ra_comm *comm, void *arg)
{
    starved *w = arg;
    ra_alloc_probe *before = ra_alloc_watch(&w->probes[rank]);
    rank_report *report = &w->reports[rank];
    ra_backend *backend = NULL, planned = {0};
    ra_backend_ops ops;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_ctx_options options = w->o.ctx;
    options.size = sizeof options;
    options.timeout_ms = 5000;
    if (!w->older_step) {
        arm(w, rank);
    }
    if (!report_keep(report, ra_backend_open_cpu(1, NULL, &backend), "backend")) {
        ra_comm_abort(comm, ra_last_error());
    } else {
        planned = world_backend(&w->o, backend, &ops);
    }
    if (report_keep(report,
                    ra_ctx_create(backend ? &planned : NULL, comm, &w->p.layer, 1, &options, &ctx),
                    "ctx")) {
        if (w->older_step) {
            run_older(w, rank, ctx);
        } else {
            ra_step_desc desc = rank_desc(&w->p, &w->l, rank);
            if (report_keep(report, ra_step_create(ctx, &desc, &step), "step")) {
                attend(w, rank, ctx, ra_step_plan(step, 0), report);
            }
            rank_desc_free(&desc);
        }
    }
    if (!w->older_step) {
        disarm(w, rank);
    }
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_backend_close(backend);
    ra_alloc_watch(before);
}

static void starved_create(starved *w, int ranks, int turn)
{
    memset(w, 0, sizeof *w);
    rng r = rng_of(support_seed());
    ra_layer layer = layer_of(2, 1, 8, RA_F32);
    layer.window = turn % 2 ? 5 : 0;
    problem_create(&w->p, layer, 1, 13);
    problem_create(&w->larger, layer, 2, 61);
    problem_fill_unit(&w->p, &r);
    w->l = turn % 2 ? layout_contiguous(ranks, 13) : layout_zigzag(ranks, 13);
    w->larger_layout = turn % 2 ? layout_contiguous(ranks, 61) : layout_zigzag(ranks, 61);
    w->o.ctx.keep_kv = turn % 3 == 1;
    w->o.ctx.no_overlap = turn % 3 == 2;
    w->o.joined = turn >= TURNS / 2;
    w->victim = turn % ranks;
    answer_create(&w->got, &w->p, RA_F32, RA_F32, false);
}

static void starved_run(starved *w, const char *what)
{
    memset(w->reports, 0, sizeof w->reports);
    memset(w->late, 0, sizeof w->late);
    memset(w->probes, 0, sizeof w->probes);
    memset(w->hash, 0, sizeof w->hash);
    support_limit(20, "%s, allocation %ld of rank %d of %d, window %lld, keep %d, no_overlap %d",
                  what, w->site, w->victim, w->l.ranks, (long long)w->p.layer.window,
                  w->o.ctx.keep_kv, w->o.ctx.no_overlap);
    assert_true(world_each(w->l.ranks, starved_rank, w));
    for (int rank = 0; rank < w->l.ranks; rank++) {
        if (atomic_load(&w->probes[rank].live_bytes) != 0) {
            fail_msg("%s: rank %d leaks %lld bytes", support_case(), rank,
                     (long long)atomic_load(&w->probes[rank].live_bytes));
        }
    }
}

static void starved_free(starved *w)
{
    problem_free(&w->p);
    problem_free(&w->larger);
    answer_free(&w->got, false);
}

static void fail_report(int rank, const rank_report *r)
{
    fail_msg("%s: rank %d: %s in %s: %s", support_case(), rank, ra_status_name(r->status),
             r->call ? r->call : "nothing", r->message);
}

static void check_starved(const starved *w)
{
    const rank_report *own = &w->reports[w->victim];
    if (own->status == RA_E_NOMEM && strcmp(own->call, "inspect") == 0) {
        return;
    }
    if (own->status != RA_E_NOMEM) {
        fail_report(w->victim, own);
    }
    bool created = strcmp(own->call, "backend") == 0,
         collective = strcmp(own->call, "ctx") == 0 || strcmp(own->call, "step") == 0;
    for (int rank = 0; rank < w->l.ranks; rank++) {
        const rank_report *r = &w->reports[rank];
        /* Who has all that it needs may be done, and right: under the window only neighbours have
         * rows in common, and what a backward computes last nobody waits for. */
        bool apart = w->p.layer.window > 0 && abs(rank - w->victim) > 1;
        bool late = strcmp(own->call, "backward") == 0;
        if ((apart || late) && !created && !collective && r->status == RA_OK) {
            assert_true(w->hash[rank] == w->clean_hash[rank]);
            continue;
        }
        bool same = r->status == RA_E_NOMEM && strcmp(r->call, own->call) == 0 &&
                    strcmp(r->message, own->message) == 0;
        if (rank != w->victim && (collective ? !same : r->status != RA_E_COMM)) {
            fail_report(rank, r);
        }
        assert_true(created || collective || w->no_result[rank]);
    }
}

static void every_allocation(void **state)
{
    (void)state;
    int sites = 0;
    for (int turn = 0; turn < TURNS; turn++) {
        starved w;
        starved_create(&w, 1 + turn % RANKS_MAX, turn);
        starved_run(&w, "enough memory");
        memcpy(w.clean_hash, w.hash, sizeof w.hash);
        for (w.site = 1;; w.site++) {
            assert_true(w.site < SITES_MAX);
            starved_run(&w, "out of memory");
            if (w.exhausted) {
                break; /* fewer allocations than that: the run was clean */
            }
            check_starved(&w);
            sites++;
        }
        for (int rank = 0; rank < w.l.ranks; rank++) {
            if (w.reports[rank].status != RA_OK) {
                fail_report(rank, &w.reports[rank]);
            }
        }
        starved_free(&w);
    }
    printf("%d allocations failed in turn\n", sites);
}

/* The older step runs, and right, whatever failed while a newer one was made. */
static void check_older(const starved *w, const reference *ref)
{
    for (int rank = 0; rank < w->l.ranks; rank++) {
        if (w->late[rank].status != RA_OK) {
            fail_report(rank, &w->late[rank]);
        }
    }
    reference_check_tiny(ref, &w->p, &w->got);
}

static void older_steps_survive(void **state)
{
    (void)state;
    int sites = 0;
    for (int turn = 0; turn < TURNS; turn++) {
        starved w;
        reference ref;
        starved_create(&w, 1 + turn % RANKS_MAX, turn);
        w.older_step = true;
        reference_create(&ref, &w.p);
        for (w.site = 1;; w.site++) {
            assert_true(w.site < SITES_MAX);
            starved_run(&w, "older step");
            for (int rank = 0; rank < w.l.ranks; rank++) {
                ra_status want = w.exhausted ? RA_OK : RA_E_NOMEM;
                if (w.reports[rank].status != want) {
                    fail_report(rank, &w.reports[rank]);
                }
            }
            check_older(&w, &ref);
            if (w.exhausted) {
                break;
            }
            sites++;
        }
        reference_free(&ref);
        starved_free(&w);
    }
    printf("%d allocations failed in turn\n", sites);
}

/* The thread transport itself. */
static void transport(void **state)
{
    (void)state;
    ra_alloc_probe probe;
    support_limit(20, "opening a transport without memory");
    for (long site = 1;; site++) {
        ra_comm *comm[RANKS_MAX] = {NULL};
        memset(&probe, 0, sizeof probe);
        ra_alloc_probe *before = ra_alloc_watch(&probe);
        atomic_store(&probe.fail_at, site);
        ra_status status = ra_comm_open_threads(RANKS_MAX, comm);
        bool exhausted = atomic_exchange(&probe.fail_at, 0) > 0;
        for (int rank = 0; rank < RANKS_MAX; rank++) {
            assert_true((status == RA_OK) == (comm[rank] != NULL));
            ra_comm_close(comm[rank]);
        }
        ra_alloc_watch(before);
        assert_int_equal(status, exhausted ? RA_OK : RA_E_NOMEM);
        assert_true(atomic_load(&probe.live_bytes) == 0);
        if (exhausted) {
            break;
        }
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_allocation),
        cmocka_unit_test(older_steps_survive),
        cmocka_unit_test(transport),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
