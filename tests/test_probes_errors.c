/* What bad input gets: a status and a sentence on every rank, nothing sent, nothing written, and no
 * rank that waits. */
#include "support_world.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RANKS_MAX = 4 };

/* A world in which ranks may lie. */
typedef struct liars {
    int ranks;
    ra_layer layer[RANKS_MAX];
    int layer_count[RANKS_MAX];
    ra_ctx_options options[RANKS_MAX];
    problem p;
    layout l[RANKS_MAX];
    void (*spoil)(rank_data *data, ra_forward_io *forward, ra_backward_io *backward);
    int spoiler;                    /* the rank that spoils; -1 = all */
    bool spoil_backward;            /* forward first, unspoilt */
    pthread_barrier_t forward_done; /* no rank may spoil its backward under another's forward */
    rank_report reports[RANKS_MAX];
    uint64_t bytes[RANKS_MAX]; /* sent before the failing call returned, by it */
    bool no_result[RANKS_MAX], refused_after[RANKS_MAX];
} liars;

static void liars_create(liars *w, int ranks, int64_t seq)
{
    memset(w, 0, sizeof *w);
    w->ranks = ranks;
    problem_create(&w->p, layer_of(4, 2, 16, RA_F32), 1, seq);
    for (int rank = 0; rank < ranks; rank++) {
        w->layer[rank] = w->p.layer;
        w->layer_count[rank] = 1;
        w->options[rank] = (ra_ctx_options){.size = sizeof w->options[rank], .timeout_ms = 5000};
        w->l[rank] = layout_contiguous(ranks, seq);
    }
    w->spoiler = -1;
}

static void attend(liars *w, int rank, ra_ctx *ctx, ra_comm *comm, const ra_plan *plan)
{
    rank_report *report = &w->reports[rank];
    rank_data data;
    rank_data_create(&data, &w->p, &w->l[rank], rank, STRIDES_BHSD, 0, false);
    ra_forward_io forward = rank_data_forward(&data), clean = forward;
    ra_backward_io backward = rank_data_backward(&data);
    if (w->spoil && (w->spoiler < 0 || w->spoiler == rank)) {
        w->spoil(&data, &forward, &backward);
    }
    ra_stream stream = {NULL};
    uint64_t before = ra_comm_bytes_sent(comm);
    if (w->spoil_backward) {
        bool ran = report_keep(report, ra_attn_forward(ctx, plan, &clean, stream), "clean forward");
        pthread_barrier_wait(&w->forward_done);
        if (ran) {
            before = ra_comm_bytes_sent(comm);
            report_keep(report, ra_attn_backward(ctx, plan, &backward, stream), "backward");
        }
    } else {
        report_keep(report, ra_attn_forward(ctx, plan, &forward, stream), "forward");
    }
    w->no_result[rank] =
        rank_data_no_result(&data, w->spoil_backward ? DATA_DQ : DATA_OUT, DATA_DV);
    w->bytes[rank] = ra_comm_bytes_sent(comm) - before;
    w->refused_after[rank] =
        ra_ctx_status(ctx) != RA_OK && ra_attn_forward(ctx, plan, &clean, stream) != RA_OK;
    rank_data_free(&data);
}

static void liar(int rank, ra_comm *comm, void *arg)
{
    liars *w = arg;
    rank_report *report = &w->reports[rank];
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_layer layers[2] = {w->layer[rank], w->layer[rank]};
    report_keep(report, ra_backend_open_cpu(1, NULL, &backend), "backend");
    if (report_keep(
            report,
            ra_ctx_create(backend, comm, layers, w->layer_count[rank], &w->options[rank], &ctx),
            "ctx")) {
        ra_step_desc desc = rank_desc(&w->p, &w->l[rank], rank);
        if (report_keep(report, ra_step_create(ctx, &desc, &step), "step")) {
            attend(w, rank, ctx, comm, ra_step_plan(step, 0));
        }
        rank_desc_free(&desc);
    }
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_backend_close(backend);
}

static void liars_run(liars *w, const char *name)
{
    support_limit(20, "%s, %d ranks", name, w->ranks);
    double start = support_now();
    assert_int_equal(pthread_barrier_init(&w->forward_done, NULL, (unsigned)w->ranks), 0);
    assert_true(world_each(w->ranks, liar, w));
    assert_true(support_now() - start < 15);
    pthread_barrier_destroy(&w->forward_done);
}

/* The same error in the same call on every rank, with `word` in the message. */
static void expect_same(liars *w, ra_status status, const char *call, const char *word)
{
    for (int rank = 0; rank < w->ranks; rank++) {
        const rank_report *report = &w->reports[rank];
        if (report->status != status || strcmp(report->call, call) != 0 ||
            !strstr(report->message, word)) {
            fail_msg("%s: rank %d: %s in %s: %s; expected %s in %s with \"%s\"", support_case(),
                     rank, ra_status_name(report->status), report->call ? report->call : "nothing",
                     report->message, ra_status_name(status), call, word);
        }
        assert_string_equal(report->message, w->reports[0].message);
    }
    problem_free(&w->p);
}

/* P08, P09: every rank passes the same bad tensor and says so itself, before anything is sent. */
static void expect_local(liars *w, ra_status status, const char *word)
{
    for (int rank = 0; rank < w->ranks; rank++) {
        const rank_report *report = &w->reports[rank];
        if (report->status != status || !strstr(report->message, word)) {
            fail_msg("%s: rank %d: %s: %s; expected %s with \"%s\"", support_case(), rank,
                     ra_status_name(report->status), report->message, ra_status_name(status), word);
        }
        assert_int_equal(w->bytes[rank], 0);
        assert_true(w->no_result[rank]);
        assert_true(w->refused_after[rank]);
    }
    problem_free(&w->p);
}

static void swap_axes(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->k = ra_tensor_bhsd(f->k.data, RA_F32, 1, f->k.size[RA_SEQ], f->k.size[RA_HEAD], 16);
    b->k = f->k;
}
static void other_seq(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->v.size[RA_SEQ]--;
    b->v.size[RA_SEQ]--;
}
static void other_heads(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->v.size[RA_HEAD] = b->v.size[RA_HEAD] = 1;
}
static void other_chan(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->v.size[RA_CHAN] = b->v.size[RA_CHAN] = 8;
}
static void other_rows(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->q.size[RA_ROW] = b->q.size[RA_ROW] = 2;
}
static void mixed_dtype(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->k.dtype = b->k.dtype = RA_BF16;
}
static void wide_lse(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->lse.dtype = b->lse.dtype = RA_BF16;
}
static void no_data(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->q.data = b->q.data = NULL;
}
static void misaligned(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->k.data = b->k.data = (char *)f->k.data + 1;
}
static void strided_channels(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->q.stride[RA_CHAN] = b->q.stride[RA_CHAN] = 2;
}
static void out_is_query(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->out.data = f->q.data;
    b->dq.data = b->q.data;
}
static void no_size(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->size = b->size = 0;
}

typedef struct bad_tensor {
    const char *name;
    void (*spoil)(rank_data *, ra_forward_io *, ra_backward_io *);
    ra_status status;
    const char *word;
} bad_tensor;

static const bad_tensor bad_tensors[] = {
    {"axes swapped", swap_axes, RA_E_SHAPE, "k"},
    {"another length", other_seq, RA_E_SHAPE, "v"},
    {"another head count", other_heads, RA_E_SHAPE, "v"},
    {"another head_dim", other_chan, RA_E_SHAPE, "v"},
    {"another row count", other_rows, RA_E_SHAPE, "q"},
    {"mixed dtypes", mixed_dtype, RA_E_SHAPE, "k"},
    {"lse in bf16", wide_lse, RA_E_SHAPE, "lse"},
    {"no data", no_data, RA_E_ARG, "q"},
    {"misaligned data", misaligned, RA_E_ARG, "k"},
    {"channels apart", strided_channels, RA_E_SHAPE, "q"},
    {"result over an input", out_is_query, RA_E_ARG, "q"},
    {"size not set", no_size, RA_E_ARG, "size"},
};

static void bad_tensors_on_all(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_tensors / sizeof *bad_tensors; i++) {
        for (int ranks = 1; ranks <= RANKS_MAX; ranks++) {
            for (int backward = 0; backward < 2; backward++) {
                liars w;
                char name[64];
                snprintf(name, sizeof name, "P08, %s, backward %d", bad_tensors[i].name, backward);
                liars_create(&w, ranks, 16);
                w.spoil = bad_tensors[i].spoil;
                w.spoil_backward = backward == 1;
                liars_run(&w, name);
                expect_local(&w, bad_tensors[i].status, bad_tensors[i].word);
            }
        }
    }
}

static void longer_query(rank_data *d, ra_forward_io *f, ra_backward_io *b)
{
    (void)d;
    f->q.size[RA_SEQ] += 2;
    b->q.size[RA_SEQ] += 2;
}

/* P14: one rank's tensor disagrees with its step: its own RA_E_SHAPE, RA_E_COMM for the others. */
static void bad_tensor_on_one(void **state)
{
    (void)state;
    for (int ranks = 2; ranks <= RANKS_MAX; ranks++) {
        for (int spoiler = 0; spoiler < ranks; spoiler++) {
            for (int backward = 0; backward < 2; backward++) {
                liars w;
                char word[32];
                liars_create(&w, ranks, 16);
                w.spoil = longer_query;
                w.spoiler = spoiler;
                w.spoil_backward = backward == 1;
                liars_run(&w, backward ? "P14, backward" : "P14, forward");
                snprintf(word, sizeof word, "rank %d", spoiler);
                for (int rank = 0; rank < ranks; rank++) {
                    const rank_report *report = &w.reports[rank];
                    ra_status want = rank == spoiler ? RA_E_SHAPE : RA_E_COMM;
                    if (report->status != want ||
                        (rank != spoiler &&
                         (!strstr(report->message, word) || !strstr(report->message, "hop")))) {
                        fail_msg("%s: rank %d of %d, rank %d is wrong: %s: %s", support_case(),
                                 rank, ranks, spoiler, ra_status_name(report->status),
                                 report->message);
                    }
                    assert_true(w.no_result[rank]);
                    assert_true(w.refused_after[rank]);
                }
                problem_free(&w.p);
            }
        }
    }
}

/* P22, P23 and other layers that nobody can run; one rank asks, all get the answer. */
static void layers_refused(void **state)
{
    (void)state;
    enum { SOFTCAP, DIM_ODD, DIM_LARGE, DIM_ZERO, RATIO, NAN_SCALE, WINDOW, VISION, SIZE, CASES };
    static const ra_status status[] = {RA_E_UNSUPPORTED, RA_E_ARG, RA_E_ARG, RA_E_ARG, RA_E_SHAPE,
                                       RA_E_ARG,         RA_E_ARG, RA_E_ARG, RA_E_ARG};
    static const char *const word[] = {"softcap", "head_dim", "head_dim", "head_dim", "heads",
                                       "scale",   "window",   "vision",   "size"};
    for (int what = 0; what < CASES; what++) {
        for (int all = 0; all < 2; all++) {
            for (int ranks = 1; ranks <= 3; ranks++) {
                liars w;
                liars_create(&w, ranks, 16);
                for (int rank = all ? 0 : ranks - 1; rank < ranks; rank++) {
                    ra_layer *layer = &w.layer[rank];
                    switch (what) {
                    case SOFTCAP:
                        layer->softcap = 30.0f;
                        layer->dropout = 0.1f;
                        break;
                    case DIM_ODD: layer->head_dim = 12; break;
                    case DIM_LARGE: layer->head_dim = 520; break;
                    case DIM_ZERO: layer->head_dim = 0; break;
                    case RATIO: layer->kv_heads = 3; break;
                    case NAN_SCALE: layer->scale = NAN; break;
                    case WINDOW: layer->window = -1; break;
                    case VISION: layer->vision = (ra_vision)7; break;
                    default: layer->size = 8; break;
                    }
                }
                liars_run(&w, word[what]);
                if (what == SOFTCAP) {
                    assert_non_null(strstr(w.reports[0].message, "dropout"));
                }
                expect_same(&w, status[what], "ctx", word[what]);
            }
        }
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_tensors_on_all),
        cmocka_unit_test(bad_tensor_on_one),
        cmocka_unit_test(layers_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
