/*
 * `ringattn bench`: forward and backward of Gemma 4's two layer kinds on one rank, in FLOP/s on the
 * allowed pairs and as a share of the FMA peak measured beside each. Must not time what is wrong.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mathx.h"
#include "cli/bench_problem.h"
#include "cli/commands.h"
#include "cli/peak.h"
#include "cli/progress.h"
#include "cli/report.h"
#include "cli/setup.h"
#include "cli/world.h"

typedef struct kind {
    int head_dim, q_heads, kv_heads;
    bool causal;
    int64_t window, seq;
} kind;

static const kind kinds[] = {
    {512, 8, 1, false, 0, 2048},
    {256, 8, 4, false, 0, 2048},
    {512, 8, 1, true, 0, 4096},
    {256, 8, 4, true, 1024, 8192},
};
/* A kind is two rows: f32 and bf16. */
enum { ROW_COUNT = 2 * sizeof kinds / sizeof kinds[0], FORWARD = 0, BACKWARD = 1 };

typedef struct timing {
    double seconds, rate;           /* of one call; FLOP/s */
    double peak_before, peak_after; /* FLOP/s */
} timing;

typedef struct bench {
    const ra_args *args;
    ra_case c; /* layer and length only */
    ra_bench_problem problem;
    char name[64], level[32];
    double worst;
    timing timing[2];
} bench;

/* Against the higher peak: other processes only ever slow it down. */
static double peak_of(const timing *t)
{
    return fmax(t->peak_before, t->peak_after);
}

static double ratio_of(const timing *t)
{
    return t->rate / peak_of(t);
}

static ra_status call(const bench *b, const ra_setup *setup, int operation)
{
    const ra_bench_problem *p = &b->problem;
    if (operation == FORWARD) {
        ra_forward_io io = {.size = sizeof io, .q = p->q, .k = p->k, .v = p->v};
        io.out = p->result[RA_RESULT_OUT];
        io.lse = p->result[RA_RESULT_LSE];
        return ra_attn_forward(setup->ctx, setup->plan, &io, (ra_stream){0});
    }
    ra_backward_io io = {.size = sizeof io, .q = p->q, .k = p->k, .v = p->v, .dout = p->dout};
    io.out = p->result[RA_RESULT_OUT];
    io.lse = p->result[RA_RESULT_LSE];
    io.dq = p->result[RA_RESULT_DQ];
    io.dk = p->result[RA_RESULT_DK];
    io.dv = p->result[RA_RESULT_DV];
    return ra_attn_backward(setup->ctx, setup->plan, &io, (ra_stream){0});
}

/* The fastest call: other processes only ever slow one down. */
static ra_status time_operation(bench *b, const ra_setup *setup, int threads, int operation)
{
    const int64_t least_ns = 500 * 1000 * 1000, long_ns = 4 * least_ns;
    const int64_t least_calls = 3; /* of which one is undisturbed, unless they are long */
    double flops = operation == FORWARD ? setup->info.flops_forward : setup->info.flops_backward;
    timing *t = &b->timing[operation];
    t->peak_before = ra_peak_measure(b->level, b->c.layer.dtype, threads);
    int64_t elapsed = 0, fastest = INT64_MAX;
    for (int64_t calls = 0; elapsed < least_ns || (calls < least_calls && elapsed < long_ns);
         calls++) {
        int64_t begin = ra_clock_ns();
        RA_TRY(call(b, setup, operation));
        int64_t took = ra_clock_ns() - begin;
        fastest = ra_min_i64(fastest, took);
        elapsed += took;
    }
    t->peak_after = ra_peak_measure(b->level, b->c.layer.dtype, threads);
    t->seconds = (double)fastest * 1e-9;
    t->rate = flops / t->seconds;
    return RA_OK;
}

static ra_status run_rank(ra_comm *comm, void *user)
{
    bench *b = user;
    int threads = b->args->threads ? b->args->threads : ra_cpu_count();
    ra_run whole = {0, b->c.seq};
    ra_deal deal = {b->c.seq, 1, &whole};
    ra_ctx_options options = {.size = sizeof options};
    ra_setup setup;
    RA_TRY(ra_setup_open(&b->c, b->args, &deal, &options, comm, &setup));
    snprintf(b->level, sizeof b->level, "%s", ra_backend_level(setup.backend));
    /* The first calls also warm the caches and are those that are checked. */
    ra_status status;
    if ((status = call(b, &setup, FORWARD)) || (status = call(b, &setup, BACKWARD)) ||
        (status = ra_bench_problem_check(&b->problem, &b->worst)) || b->worst > 1 ||
        (status = time_operation(b, &setup, threads, FORWARD))) {
        goto done;
    }
    status = time_operation(b, &setup, threads, BACKWARD);
done:
    ra_setup_close(&setup);
    return status;
}

static ra_status run_problem(bench *b)
{
    RA_TRY(ra_bench_problem_create(&b->c.layer, b->c.seq, &b->problem));
    ra_status status = ra_world_run(RA_DEVICE_CPU, 1, run_rank, b);
    ra_bench_problem_free(&b->problem);
    return status;
}

static void print_text(const bench *b)
{
    printf("%-27s", b->name);
    if (b->worst > 1) {
        printf("  WRONG: error %.3g times what rounding explains; not timed\n", b->worst);
        return;
    }
    for (int operation = FORWARD; operation <= BACKWARD; operation++) {
        const timing *t = &b->timing[operation];
        printf(" %9.2f %8.1f %6.3f", t->seconds * 1e3, t->rate * 1e-9, ratio_of(t));
    }
    printf(" %9.1f\n", peak_of(&b->timing[BACKWARD]) * 1e-9);
    fflush(stdout);
}

static json_t *timing_json(const timing *t)
{
    return json_pack("{s:o, s:o, s:o, s:o, s:o}", "seconds", ra_json_number(t->seconds), "gflops",
                     ra_json_number(t->rate * 1e-9), "ratio", ra_json_number(ratio_of(t)),
                     "peak_before_gflops", ra_json_number(t->peak_before * 1e-9),
                     "peak_after_gflops", ra_json_number(t->peak_after * 1e-9));
}

static json_t *bench_json(const bench *b)
{
    const ra_layer *layer = &b->c.layer;
    int threads = b->args->threads ? b->args->threads : ra_cpu_count();
    json_t *object = json_pack(
        "{s:s, s:i, s:i, s:i, s:b, s:I, s:I, s:s, s:s, s:i, s:b, s:o}", "name", b->name, "head_dim",
        layer->head_dim, "q_heads", layer->q_heads, "kv_heads", layer->kv_heads, "causal",
        (int)layer->causal, "window", (json_int_t)layer->window, "seq", (json_int_t)b->c.seq,
        "dtype", ra_dtype_name(layer->dtype), "level", b->level, "threads", threads, "pass",
        (int)(b->worst <= 1), "error_share", ra_json_number(b->worst));
    if (b->worst <= 1) {
        json_object_set_new(object, "forward", timing_json(&b->timing[FORWARD]));
        json_object_set_new(object, "backward", timing_json(&b->timing[BACKWARD]));
    }
    return object;
}

static void describe(const ra_args *args, const kind *k, ra_dtype dtype, bench *out)
{
    *out = (bench){.args = args};
    out->c = (ra_case){.path = "bench", .name = "bench", .rows = 1, .seq = k->seq};
    if (args->quick) {
        out->c.seq = ra_min_i64(k->seq, 2048);
    }
    out->c.layer = (ra_layer){
        .size = sizeof out->c.layer,
        .q_heads = k->q_heads,
        .kv_heads = k->kv_heads,
        .head_dim = k->head_dim,
        .dtype = dtype,
        .scale = (float)(1 / sqrt(k->head_dim)),
        .causal = k->causal,
        .window = k->window,
    };
    char mask[24];
    snprintf(mask, sizeof mask, "%s", k->causal ? "causal" : "full");
    if (k->window) {
        snprintf(mask, sizeof mask, "window%lld", (long long)k->window);
    }
    snprintf(out->name, sizeof out->name, "d%d %d/%d %s s%lld %s", k->head_dim, k->q_heads,
             k->kv_heads, mask, (long long)out->c.seq, ra_dtype_name(dtype));
}

/* Row `index` of the table; false if it is not wanted. */
static bool choose_row(const ra_args *args, int index, bench *out)
{
    describe(args, &kinds[index / 2], index % 2 ? RA_BF16 : RA_F32, out);
    return !args->only || strstr(out->name, args->only);
}

static ra_status run_row(bench *b, json_t *list, bool *pass)
{
    RA_TRY(run_problem(b));
    *pass = *pass && b->worst <= 1;
    if (!b->args->json) {
        print_text(b);
    } else if (json_array_append_new(list, bench_json(b)) != 0) {
        return RA_FAIL(RA_E_NOMEM, "bench: JSON output: allocation failed");
    }
    return RA_OK;
}

static ra_status count_rows(const ra_args *args, int *count)
{
    bench b;
    *count = 0;
    for (int i = 0; i < ROW_COUNT; i++) {
        *count += choose_row(args, i, &b);
    }
    if (*count == 0) {
        return RA_FAIL(RA_E_ARG, "--only: \"%.64s\", expected a part of a row's name, see --list",
                       args->only);
    }
    return RA_OK;
}

static ra_status run_rows(const ra_args *args, json_t *list, bool *pass)
{
    ra_progress progress;
    ra_status status = RA_OK;
    int count;
    bench b;
    RA_TRY(count_rows(args, &count));
    if (!args->json) {
        printf("%-27s    fwd ms  GFLOP/s  ratio    bwd ms  GFLOP/s  ratio      peak\n", "");
    }
    /* As text, every row that appears shows progress enough. */
    ra_progress_begin(&progress, "bench", count);
    for (int i = 0; i < ROW_COUNT && !status; i++) {
        if (!choose_row(args, i, &b)) {
            continue;
        }
        status = run_row(&b, list, pass);
        if (args->json) {
            ra_progress_add(&progress, 1);
        }
    }
    ra_progress_end(&progress);
    return status;
}

static int list_rows(const ra_args *args)
{
    bench b;
    for (int i = 0; i < ROW_COUNT; i++) {
        if (choose_row(args, i, &b)) {
            puts(b.name);
        }
    }
    return RA_EXIT_OK;
}

int ra_command_bench(const ra_args *args)
{
    if (args->list) {
        return list_rows(args);
    }
    bool pass = true;
    json_t *list = json_array();
    ra_status status = run_rows(args, list, &pass);
    if (!status && args->json) {
        status = ra_json_print(json_incref(list));
    }
    if (status) {
        ra_error_print();
    }
    json_decref(list);
    return status ? ra_exit_of(status) : pass ? RA_EXIT_OK : RA_EXIT_DIFFERS;
}
