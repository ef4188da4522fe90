/* Ranks that disagree: the same RA_E_MISMATCH on every rank, before anything is computed, naming
 * the item, the ranks and both values. */
#include <stdio.h>
#include <string.h>

#include "backend/backend.h"
#include "comm/comm.h"
#include "support_relay.h"
#include "support_world.h"

enum { RANKS_MAX = 4, SEQ = 16 };

/* A transport whose gather flips a bit of what rank 0 says of its runs. */
typedef struct deaf {
    ra_comm *inner; /* borrowed; first, for support_relay.h */
    bool now;
} deaf;

/* A world in which ranks may say different things. */
typedef struct liars {
    int ranks;
    problem p;
    layout l[RANKS_MAX];
    ra_layer layer[RANKS_MAX];
    int layer_count[RANKS_MAX];
    ra_ctx_options options[RANKS_MAX];
    int64_t rows[RANKS_MAX]; /* 0 = those of p */
    bool hides_documents[RANKS_MAX];
    const char *backend_name[RANKS_MAX]; /* NULL = its own */
    deaf deaf[RANKS_MAX];
    rank_report reports[RANKS_MAX];
} liars;

static ra_status deaf_gather(void *user, const void *mine, size_t bytes, void *all, int timeout_ms)
{
    enum { LISTS_MIN = 32, LISTS_MAX = 128 }; /* 16 bytes a run; nothing else is of such a size */
    deaf *d = user;
    ra_status status = ra_comm_gather(d->inner, mine, bytes, all, timeout_ms);
    if (d->now && bytes >= LISTS_MIN && bytes % 16 == 0 && bytes <= LISTS_MAX) {
        *(unsigned char *)all ^= 1;
    }
    return status;
}

static ra_status deaf_open(deaf *d, ra_comm *inner, ra_comm **out)
{
    ra_comm_callbacks callbacks = relay_callbacks(d);
    callbacks.gather = deaf_gather;
    callbacks.close = relay_close_nothing;
    d->inner = inner;
    return ra_comm_open_custom(ra_comm_rank(inner), ra_comm_size(inner), &callbacks, out);
}

static void liars_create(liars *w, int ranks)
{
    int32_t docs[SEQ];
    memset(w, 0, sizeof *w);
    w->ranks = ranks;
    problem_create(&w->p, layer_of(4, 2, 16, RA_F32), 1, SEQ);
    for (int pos = 0; pos < SEQ; pos++) {
        docs[pos] = 1 + (pos >= 3);
    }
    problem_set_docs(&w->p, docs);
    for (int rank = 0; rank < ranks; rank++) {
        w->layer[rank] = w->p.layer;
        w->layer[rank].window = 4;
        w->layer_count[rank] = 1;
        w->options[rank] = (ra_ctx_options){.size = sizeof w->options[rank], .timeout_ms = 5000};
        w->l[rank] = layout_zigzag(ranks, SEQ);
    }
}

static void speak(int rank, ra_comm *inner, void *arg)
{
    liars *w = arg;
    rank_report *report = &w->reports[rank];
    ra_backend *backend = NULL;
    ra_comm *comm = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_layer layers[2] = {w->layer[rank], w->layer[rank]};
    if (!report_keep(report, ra_backend_open_cpu(1, NULL, &backend), "backend") ||
        !report_keep(report, deaf_open(&w->deaf[rank], inner, &comm), "comm")) {
        return;
    }
    ra_backend_ops ops = *backend->ops;
    ra_backend named = {&ops, backend->self};
    ops.name = w->backend_name[rank] ? w->backend_name[rank] : ops.name;
    if (report_keep(
            report,
            ra_ctx_create(&named, comm, layers, w->layer_count[rank], &w->options[rank], &ctx),
            "ctx")) {
        ra_step_desc desc = rank_desc(&w->p, &w->l[rank], rank), said = desc;
        said.rows = w->rows[rank] ? w->rows[rank] : desc.rows;
        bool hides = w->hides_documents[rank] || w->rows[rank]; /* there is one row of them */
        said.doc_id = hides ? NULL : desc.doc_id;
        report_keep(report, ra_step_create(ctx, &said, &step), "step");
        rank_desc_free(&desc);
    }
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_comm_close(comm);
    ra_backend_close(backend);
}

/* One rank, the last, says something else than the others. */
typedef struct lie {
    const char *name, *call;
    void (*tell)(liars *w, int odd);
    const char *item; /* in the message, as the next two */
    const char *odd_value, *value;
} lie;

static void lie_overlap(liars *w, int odd)
{
    w->l[odd].run[odd][0].start--;
}
static void lie_missing(liars *w, int odd)
{
    w->l[odd].run[odd][0].count--;
    w->l[odd].run[odd][0].start++;
    w->l[odd].length[odd]--;
}
static void lie_no_runs(liars *w, int odd)
{
    w->l[odd].implicit = true;
}
static void lie_rows(liars *w, int odd)
{
    w->rows[odd] = 2;
}
static void lie_documents(liars *w, int odd)
{
    w->hides_documents[odd] = true;
}
static void lie_window(liars *w, int odd)
{
    w->layer[odd].window = 5;
}
static void lie_window_right(liars *w, int odd)
{
    w->layer[odd].window_right = 2;
}
static void lie_vision(liars *w, int odd)
{
    w->layer[odd].vision = RA_VISION_WITHIN_WINDOW;
}
static void lie_causal(liars *w, int odd)
{
    w->layer[odd].causal = false;
}
static void lie_scale(liars *w, int odd)
{
    w->layer[odd].scale = 0.5f;
}
static void lie_q_heads(liars *w, int odd)
{
    w->layer[odd].q_heads = 8;
}
static void lie_kv_heads(liars *w, int odd)
{
    w->layer[odd].kv_heads = 1;
}
static void lie_head_dim(liars *w, int odd)
{
    w->layer[odd].head_dim = 24;
}
static void lie_dtype(liars *w, int odd)
{
    w->layer[odd].dtype = RA_BF16;
}
static void lie_layers(liars *w, int odd)
{
    w->layer_count[odd] = 2;
}
static void lie_keep(liars *w, int odd)
{
    w->options[odd].keep_kv = true;
}
static void lie_forward(liars *w, int odd)
{
    w->options[odd].forward_only = true;
}
static void lie_plan(liars *w, int odd)
{
    w->options[odd].plan_only = true;
}
static void lie_backend(liars *w, int odd)
{
    w->backend_name[odd] = "abacus";
}
static void lie_bytes(liars *w, int odd)
{
    w->deaf[odd].now = true;
}

static const lie lies[] = {
    {"overlapping runs", "step", lie_overlap, "runs: ranks", "", "both own position"},
    {"missing runs", "step", lie_missing, "runs: nobody owns positions", "", ""},
    {"runs or none", "step", lie_no_runs, "desc.runs: ", "none", "runs"},
    {"rows", "step", lie_rows, "desc.rows: ", "2", "1"},
    {"documents or none", "step", lie_documents, "desc.doc_id: ", "none", "documents"},
    {"a gather that lies", "step", lie_bytes, "documents and runs, as gathered: ", "", ""},
    {"window", "ctx", lie_window, "layer 0, window: ", "5", "4"},
    {"window_right", "ctx", lie_window_right, "layer 0, window_right: ", "2", "0"},
    {"vision rule", "ctx", lie_vision, "layer 0, vision: ", "within_window", "off"},
    {"causal", "ctx", lie_causal, "layer 0, causal: ", "0", "1"},
    {"scale", "ctx", lie_scale, "layer 0, scale: ", "0.5", "1"},
    {"query heads", "ctx", lie_q_heads, "layer 0, q_heads: ", "8", "4"},
    {"key heads", "ctx", lie_kv_heads, "layer 0, kv_heads: ", "1", "2"},
    {"head_dim", "ctx", lie_head_dim, "layer 0, head_dim: ", "24", "16"},
    {"dtype", "ctx", lie_dtype, "layer 0, dtype: ", "bf16", "f32"},
    {"layer count", "ctx", lie_layers, "layers: ", "2", "1"},
    {"keep_kv", "ctx", lie_keep, "keep_kv: ", "1", "0"},
    {"forward_only", "ctx", lie_forward, "forward_only: ", "1", "0"},
    {"plan_only", "ctx", lie_plan, "plan_only: ", "1", "0"},
    {"backend", "ctx", lie_backend, "backend: ", "abacus", "cpu"},
};

/* Probe P14: claims that do not fit together give the same error on all, naming the item, the ranks
 * and both values. */
static void every_item(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof lies / sizeof *lies; i++) {
        for (int ranks = 2; ranks <= RANKS_MAX; ranks++) {
            const lie *told = &lies[i];
            liars w;
            char odd_rank[32];
            liars_create(&w, ranks);
            told->tell(&w, ranks - 1);
            support_limit(20, "%s, %d ranks", told->name, ranks);
            assert_true(world_each(ranks, speak, &w));
            const char *message = w.reports[0].message;
            snprintf(odd_rank, sizeof odd_rank, "rank %d", ranks - 1);
            if (!strstr(message, told->item) || (*told->odd_value && !strstr(message, odd_rank)) ||
                !strstr(message, told->odd_value) || !strstr(message, told->value)) {
                fail_msg("%s: \"%s\", expected \"%s\", \"%s\" of %s and \"%s\"", support_case(),
                         message, told->item, told->odd_value, odd_rank, told->value);
            }
            for (int rank = 0; rank < ranks; rank++) {
                assert_int_equal(w.reports[rank].status, RA_E_MISMATCH);
                assert_string_equal(w.reports[rank].call, told->call);
                assert_string_equal(w.reports[rank].message, message);
            }
            problem_free(&w.p);
        }
    }
}

/* Without a lie, and with ranks that have no tokens and so nothing to say of documents, all agree.
 */
static void agreement(void **state)
{
    (void)state;
    liars w;
    liars_create(&w, RANKS_MAX);
    for (int rank = 0; rank < RANKS_MAX; rank++) { /* the last rank owns nothing */
        w.l[rank] = layout_contiguous(RANKS_MAX - 1, SEQ);
        w.l[rank].ranks = RANKS_MAX;
        w.l[rank].implicit = false;
    }
    w.hides_documents[RANKS_MAX - 1] = true;
    support_limit(20, "agreement");
    assert_true(world_each(RANKS_MAX, speak, &w));
    for (int rank = 0; rank < RANKS_MAX; rank++) {
        if (w.reports[rank].status) {
            fail_msg("rank %d: %s: %s", rank, w.reports[rank].call, w.reports[rank].message);
        }
    }
    problem_free(&w.p);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_item),
        cmocka_unit_test(agreement),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
