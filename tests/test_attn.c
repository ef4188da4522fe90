/* The operation by its public calls: every path in every dtype against the tolerance, options that
 * must not change a bit, recomputation, several layers and steps of one ctx, and what is refused.
 */
#include "support_probe.h"
#include "support_random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS = 3 };

static void check_path(const problem *p, const layout *l, const char *path)
{
    world_options o = {0};
    reference ref;
    rank_report reports[PROBLEM_RANKS_MAX];
    reference_create(&ref, p);
    for (int keep = 0; keep < 2; keep++) {
        answer a;
        o.ctx.keep_kv = keep == 1;
        o.strides = (strides)((keep + p->layer.head_dim) % STRIDES_COUNT);
        world_run(p, l, &o, &a, reports);
        if (p->layer.dtype == RA_F32) {
            reference_check_tiny(&ref, p, &a);
        } else {
            reference_check(&ref, p, &a, true);
        }
        assert_string_equal(reports[0].info.path, path);
        assert_true(strlen(reports[0].info.reason) > 0);
        answer_free(&a, false);
    }
    reference_free(&ref);
}

/* Gemma-like data: scores with a deviation of sqrt(head_dim), scale 1. */
static void every_path(void **state)
{
    (void)state;
    static const ra_dtype dtypes[] = {RA_BF16, RA_F16, RA_F32};
    rng r = rng_of(support_seed());
    for (int i = 0; i < 3; i++) {
        for (int ranks = support_thin() ? 3 : 1; ranks <= (support_thin() ? 3 : 4); ranks++) {
            problem p;
            int32_t doc_id[2 * 90];
            for (int j = 0; j < 180; j++) {
                doc_id[j] = j % 90 < 50 ? 3 : j % 90 < 80 ? 9 : 0;
            }
            support_limit(120, "global, %s, %d ranks", ra_dtype_name(dtypes[i]), ranks);
            problem_create(&p, layer_of(4, 1, 512, dtypes[i]), 2, 90);
            problem_set_docs(&p, doc_id);
            problem_fill_gemma(&p, &r);
            layout zigzag = layout_zigzag(ranks, 90), contiguous = layout_contiguous(ranks, 90);
            check_path(&p, &zigzag, dtypes[i] == RA_F32 ? "general" : "global");
            problem_free(&p);

            support_limit(120, "sliding, %s, %d ranks", ra_dtype_name(dtypes[i]), ranks);
            problem_create(&p, layer_of(4, 2, 256, dtypes[i]), 2, 90);
            problem_set_docs(&p, doc_id);
            p.layer.window = 20;
            problem_fill_gemma(&p, &r);
            check_path(&p, &contiguous, "sliding");
            check_path(&p, &zigzag, ranks == 1 ? "sliding" : "general");
            problem_set_image(&p, 10, 70);
            p.layer.vision = RA_VISION_OVER_WINDOW;
            check_path(&p, &contiguous, "general");
            problem_free(&p);
        }
    }
}

/* Every level that runs here keeps the tolerance, with one thread and with three. */
static void every_level(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    for (int level = 0; ra_cpu_level_name(level); level++) {
        if (!ra_cpu_level_runs(level)) {
            printf("skip: level %s does not run on this machine\n", ra_cpu_level_name(level));
            continue;
        }
        for (int dtype = RA_F32; dtype <= RA_F16; dtype++) {
            problem p;
            reference ref;
            problem_create(&p, layer_of(2, 1, 128, (ra_dtype)dtype), 1, 150);
            random_metadata(&r, &p);
            problem_fill_unit(&p, &r);
            support_limit(60, "level %s, %s", ra_cpu_level_name(level),
                          ra_dtype_name((ra_dtype)dtype));
            reference_create(&ref, &p);
            layout l = layout_zigzag(2, p.seq);
            for (int threads = 1; threads <= 3; threads += 2) {
                world_options o = {.level = ra_cpu_level_name(level), .threads = threads};
                answer a, again;
                world_run(&p, &l, &o, &a, NULL);
                world_run(&p, &l, &o, &again, NULL);
                reference_check(&ref, &p, &a, true);
                assert_true(answer_same_bits(&a, &again));
                answer_free(&a, false);
                answer_free(&again, false);
            }
            reference_free(&ref);
            problem_free(&p);
        }
    }
}

/* Overlap, kept rows and strides change when and where, not what. */
static void options_keep_bits(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    for (int turn = 0; turn < (support_thin() ? 5 : 20); turn++) {
        problem p;
        ra_layer layer = layer_of(4, 2, 32, RA_BF16);
        random_mask(&r, 30, &layer);
        problem_create(&p, layer, 2, 77);
        random_metadata(&r, &p);
        problem_fill_unit(&p, &r);
        layout l = layout_kind(turn % LAYOUT_KINDS, 1 + turn % 5, p.seq, &r);
        answer first;
        for (int i = 0; i < 8; i++) {
            world_options o = {.strides = (strides)(i % STRIDES_COUNT)};
            answer a;
            o.ctx.keep_kv = i & 1;
            o.ctx.no_overlap = i & 2;
            support_limit(60, "options %d, turn %d, %s", i, turn, l.name);
            world_run(&p, &l, &o, &a, NULL);
            if (i == 0) {
                first = a;
                continue;
            }
            assert_true(answer_same_bits(&first, &a));
            answer_free(&a, false);
        }
        answer_free(&first, false);
        problem_free(&p);
    }
}

/* One ctx of two layer kinds; the steps of two batches at once, used in any order; every forward
 * twice before its backward, as recomputation does. */
typedef struct busy {
    problem p[2][2]; /* [step][layer] */
    layout l[2];
    answer got[2][2];
    ra_ctx_options options;
    rank_report reports[RANKS];
    bool same[RANKS];
} busy;

static bool recompute(busy *w, ra_ctx *ctx, const ra_step *step, int s, int layer, int rank)
{
    const ra_plan *plan = ra_step_plan(step, layer);
    const problem *p = &w->p[s][layer];
    ra_stream stream = {NULL};
    ra_plan_info info = {.size = sizeof info};
    rank_report *report = &w->reports[rank];
    report_keep(report, ra_plan_inspect(plan, &info), "inspect");
    rank_data data, second;
    rank_data_create(&data, p, &w->l[s], rank, STRIDES_BHSD, info.kept_seq, w->options.keep_kv);
    rank_data_create(&second, p, &w->l[s], rank, STRIDES_BHSD, info.kept_seq, w->options.keep_kv);
    ra_forward_io forward = rank_data_forward(&data), forward_again = rank_data_forward(&second);
    ra_backward_io backward = rank_data_backward(&data),
                   backward_again = rank_data_backward(&second);
    report_keep(report, ra_attn_forward(ctx, plan, &forward, stream), "forward");
    report_keep(report, ra_attn_forward(ctx, plan, &forward_again, stream), "forward again");
    report_keep(report, ra_attn_backward(ctx, plan, &backward_again, stream), "backward");
    report_keep(report, ra_attn_backward(ctx, plan, &backward, stream), "backward again");
    bool same = true;
    for (int i = DATA_OUT; i <= DATA_DV; i++) {
        same = same &&
               memcmp(data.tensor[i].memory, second.tensor[i].memory, data.tensor[i].bytes) == 0;
    }
    same = rank_data_collect(&data, true, &w->got[s][layer]) && same;
    rank_data_free(&data);
    rank_data_free(&second);
    return same;
}

static void busy_rank(int rank, ra_comm *comm, void *arg)
{
    busy *w = arg;
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step[2] = {NULL, NULL};
    rank_report *report = &w->reports[rank];
    const ra_layer layers[2] = {w->p[0][0].layer, w->p[0][1].layer};
    report_keep(report, ra_backend_open_cpu(1, NULL, &backend), "backend");
    report_keep(report, ra_ctx_create(backend, comm, layers, 2, &w->options, &ctx), "ctx");
    for (int s = 0; s < 2; s++) {
        ra_step_desc desc = rank_desc(&w->p[s][0], &w->l[s], rank);
        report_keep(report, ra_step_create(ctx, &desc, &step[s]), "step");
        rank_desc_free(&desc);
    }
    w->same[rank] = report->status == RA_OK;
    for (int i = 0; i < 8 && w->same[rank]; i++) { /* each of the four twice, interleaved */
        w->same[rank] = recompute(w, ctx, step[i * 3 / 2 % 2], i * 3 / 2 % 2, i % 2, rank);
    }
    w->same[rank] = w->same[rank] && !ra_step_plan(step[0], 2) && !ra_step_plan(step[0], -1);
    ra_step_free(step[0]);
    ra_step_free(step[1]);
    ra_ctx_free(ctx);
    ra_backend_close(backend);
}

static void one_ctx_many_steps(void **state)
{
    (void)state;
    for (int keep = 0; keep < 2; keep++) {
        busy w;
        memset(&w, 0, sizeof w);
        rng r = rng_of(support_seed());
        w.options = (ra_ctx_options){.size = sizeof w.options, .keep_kv = keep == 1};
        support_limit(60, "one ctx, many steps, keep %d", keep);
        for (int s = 0; s < 2; s++) {
            int64_t seq = s ? 90 : 31;
            w.l[s] = s ? layout_contiguous(RANKS, seq) : layout_uneven(RANKS, seq, &r);
            for (int layer = 0; layer < 2; layer++) {
                ra_layer kind = layer_of(4, layer ? 2 : 1, layer ? 16 : 32, RA_F32);
                kind.window = layer ? 7 : 0;
                problem_create(&w.p[s][layer], kind, 2, seq);
                problem_fill_unit(&w.p[s][layer], &r);
                answer_create(&w.got[s][layer], &w.p[s][layer], RA_F32, RA_F32, false);
            }
        }
        assert_true(world_each(RANKS, busy_rank, &w));
        for (int rank = 0; rank < RANKS; rank++) {
            if (w.reports[rank].status != RA_OK) {
                fail_msg("rank %d: %s: %s", rank, w.reports[rank].call, w.reports[rank].message);
            }
            assert_true(w.same[rank]);
        }
        for (int i = 0; i < 4; i++) {
            reference ref;
            reference_create(&ref, &w.p[i / 2][i % 2]);
            reference_check_tiny(&ref, &w.p[i / 2][i % 2], &w.got[i / 2][i % 2]);
            reference_free(&ref);
            answer_free(&w.got[i / 2][i % 2], false);
            problem_free(&w.p[i / 2][i % 2]);
        }
    }
}

static void try_options(const world_options *o, ra_status status, const char *call,
                        const char *word)
{
    problem p;
    rng r = rng_of(support_seed());
    rank_report reports[PROBLEM_RANKS_MAX];
    answer a;
    problem_create(&p, layer_of(2, 1, 16, RA_F32), 1, 24);
    problem_fill_unit(&p, &r);
    layout l = layout_contiguous(RANKS, p.seq);
    support_limit(30, "%s in %s", ra_status_name(status), call);
    answer_create(&a, &p, RA_F32, RA_F32, false);
    world_try(&p, &l, o, &a, reports);
    for (int rank = 0; rank < RANKS; rank++) {
        if (reports[rank].status != status ||
            (status != RA_OK &&
             (strcmp(reports[rank].call, call) != 0 || !strstr(reports[rank].message, word)))) {
            fail_msg("%s: rank %d: %s: %s", support_case(), rank,
                     ra_status_name(reports[rank].status), reports[rank].message);
        }
    }
    answer_free(&a, false);
    problem_free(&p);
}

/* scratch_bytes_max is exact: what the plan states is enough, a byte less is refused on all ranks.
 */
static void scratch_limit(void **state)
{
    (void)state;
    problem p;
    rank_report reports[PROBLEM_RANKS_MAX];
    world_options o = {.ctx = {.plan_only = true}};
    layout l = layout_contiguous(RANKS, 24);
    answer a;
    uint64_t most = 0;
    problem_create(&p, layer_of(2, 1, 16, RA_F32), 1, 24);
    support_limit(30, "scratch limit");
    world_run(&p, &l, &o, &a, reports);
    for (int rank = 0; rank < RANKS; rank++) {
        const ra_plan_info *info = &reports[rank].info;
        most = info->scratch_forward_bytes > most ? info->scratch_forward_bytes : most;
        most = info->scratch_backward_bytes > most ? info->scratch_backward_bytes : most;
    }
    assert_true(most > 0);
    answer_free(&a, false);
    problem_free(&p);
    o.ctx.plan_only = false;
    o.ctx.scratch_bytes_max = (size_t)most;
    try_options(&o, RA_OK, "", "");
    o.ctx.scratch_bytes_max--;
    try_options(&o, RA_E_NOMEM, "step", "scratch");
}

/* Calls that a ctx was not created for. */
typedef struct refusal {
    ra_ctx_options options;
    ra_status status[RANKS], other_plan[RANKS];
} refusal;

static void refuse(int rank, ra_comm *comm, void *arg)
{
    refusal *w = arg;
    problem p;
    layout l = layout_contiguous(RANKS, 6);
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    rank_data data;
    ra_layer layer = layer_of(1, 1, 8, RA_F32);
    problem_create(&p, layer, 1, 6);
    ra_step_desc desc = rank_desc(&p, &l, rank);
    ra_backend_open_cpu(1, NULL, &backend);
    ra_ctx_create(backend, comm, &layer, 1, &w->options, &ctx);
    ra_step_create(ctx, &desc, &step);
    rank_data_create(&data, &p, &l, rank, STRIDES_BHSD, 0, false);
    ra_forward_io forward = rank_data_forward(&data);
    ra_backward_io backward = rank_data_backward(&data);
    ra_stream stream = {NULL};
    w->status[rank] = w->options.plan_only
                          ? ra_attn_forward(ctx, ra_step_plan(step, 0), &forward, stream)
                          : ra_attn_backward(ctx, ra_step_plan(step, 0), &backward, stream);
    w->other_plan[rank] = ra_attn_forward(ctx, NULL, &forward, stream);
    rank_data_free(&data);
    rank_desc_free(&desc);
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_backend_close(backend);
    problem_free(&p);
}

static void calls_refused(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        refusal w = {.options = {.size = sizeof w.options}};
        w.options.plan_only = i == 0;
        w.options.forward_only = i == 1;
        support_limit(30, i ? "backward of a forward_only ctx" : "forward of a plan_only ctx");
        assert_true(world_each(RANKS, refuse, &w));
        for (int rank = 0; rank < RANKS; rank++) {
            assert_int_equal(w.status[rank], RA_E_ARG);
            assert_int_not_equal(w.other_plan[rank], RA_OK);
        }
    }
    ra_step_free(NULL);
    ra_ctx_free(NULL);
    ra_comm_close(NULL);
    ra_backend_close(NULL);
    ra_trace_free(NULL);
    assert_null(ra_step_plan(NULL, 0));
    assert_int_equal(ra_plan_inspect(NULL, NULL), RA_E_ARG);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_path),        cmocka_unit_test(every_level),
        cmocka_unit_test(options_keep_bits), cmocka_unit_test(one_ctx_many_steps),
        cmocka_unit_test(scratch_limit),     cmocka_unit_test(calls_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
