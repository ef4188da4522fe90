/* Plans of long packed sequences stay small: a million tokens, 64 ranks, 500 documents, both layer
 * kinds of the model, contiguous and zigzag shards. Time is printed for S and 2S, not judged. */
#include "support.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"

enum { RANKS = 64, DOCUMENTS = 500, LAYERS = 2, PLAN_BYTES_MAX = 1 << 20 };

typedef struct big {
    int64_t seq;
    int32_t *doc_id; /* [seq] */
    bool zigzag;
} big;

typedef struct seat {
    const big *world;
    ra_comm *comm;
    int rank;
    ra_status status;
    char message[512];
    ra_plan_info info[LAYERS];
    long long live_bytes; /* of the step */
    double seconds;       /* to create it */
} seat;

static int32_t *slice_of(const big *w, const ra_run *runs, int run_count, int64_t *length)
{
    *length = 0;
    for (int i = 0; i < run_count; i++) {
        *length += runs[i].count;
    }
    int32_t *slice = malloc((size_t)*length * sizeof *slice + 1);
    int64_t at = 0;
    for (int i = 0; slice && i < run_count; i++) {
        memcpy(slice + at, w->doc_id + runs[i].start, (size_t)runs[i].count * sizeof *slice);
        at += runs[i].count;
    }
    return slice;
}

static ra_status create(seat *s, const ra_step_desc *desc, ra_alloc_probe *probe)
{
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_layer global = {.size = sizeof global,
                       .q_heads = 16,
                       .kv_heads = 2,
                       .head_dim = 512,
                       .dtype = RA_BF16,
                       .scale = 1.0f,
                       .causal = true};
    ra_layer layers[LAYERS] = {global, global};
    layers[1].head_dim = 256;
    layers[1].kv_heads = 8;
    layers[1].window = 1024;
    ra_ctx_options options = {.size = sizeof options, .plan_only = true, .timeout_ms = 300000};
    ra_status status = ra_backend_open_cpu(1, NULL, &backend);
    status = status ? status : ra_ctx_create(backend, s->comm, layers, LAYERS, &options, &ctx);
    if (!status) {
        long long before = atomic_load(&probe->live_bytes);
        double start = support_now();
        status = ra_step_create(ctx, desc, &step);
        s->seconds = support_now() - start;
        s->live_bytes = atomic_load(&probe->live_bytes) - before;
    }
    for (int i = 0; i < LAYERS && !status; i++) {
        s->info[i].size = sizeof s->info[i];
        status = ra_plan_inspect(ra_step_plan(step, i), &s->info[i]);
    }
    if (status) {
        snprintf(s->message, sizeof s->message, "%s", ra_last_error());
    }
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_backend_close(backend);
    return status;
}

static void *sit(void *arg)
{
    seat *s = arg;
    ra_run runs[2];
    int64_t length = 0;
    ra_alloc_probe probe;
    memset(&probe, 0, sizeof probe);
    int run_count = s->world->zigzag ? ra_runs_zigzag(s->rank, RANKS, s->world->seq, runs)
                                     : ra_runs_contiguous(s->rank, RANKS, s->world->seq, runs);
    int32_t *doc_id = slice_of(s->world, runs, run_count, &length);
    ra_step_desc desc = {.size = sizeof desc, .rows = 1, .seq_local = length, .doc_id = doc_id};
    if (s->world->zigzag) {
        desc.runs = runs;
        desc.run_count = run_count;
    }
    ra_alloc_watch(&probe);
    s->status = create(s, &desc, &probe);
    ra_alloc_watch(NULL);
    free(doc_id);
    return NULL;
}

static void measure(int64_t seq, bool zigzag)
{
    static seat seats[RANKS];
    pthread_t thread[RANKS];
    ra_comm *comm[RANKS];
    big w = {seq, malloc((size_t)seq * sizeof *w.doc_id), zigzag};
    rng r = rng_of(support_seed());
    support_limit(300, "plan of %lld tokens, %s", (long long)seq, zigzag ? "zigzag" : "contiguous");
    assert_non_null(w.doc_id);
    int64_t at = 0;
    for (int doc = 1; doc <= DOCUMENTS; doc++) {
        int64_t mean = (seq - at) / (DOCUMENTS - doc + 1);
        int64_t end = doc == DOCUMENTS ? seq : at + rng_int(&r, 1, 2 * mean - 1);
        while (at < end && at < seq) {
            w.doc_id[at++] = doc;
        }
    }
    assert_int_equal(ra_comm_open_threads(RANKS, comm), RA_OK);
    for (int rank = 0; rank < RANKS; rank++) {
        seats[rank] = (seat){.world = &w, .comm = comm[rank], .rank = rank};
        assert_int_equal(pthread_create(&thread[rank], NULL, sit, &seats[rank]), 0);
    }
    uint64_t largest[LAYERS] = {0}, metadata = 0;
    long long live = 0;
    double seconds = 0;
    for (int rank = 0; rank < RANKS; rank++) {
        pthread_join(thread[rank], NULL);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        const seat *s = &seats[rank];
        ra_comm_close(comm[rank]);
        if (s->status != RA_OK) {
            fail_msg("%s: rank %d: %s", support_case(), rank, s->message);
        }
        uint64_t plans = 0;
        for (int i = 0; i < LAYERS; i++) {
            plans += s->info[i].plan_bytes;
            largest[i] = s->info[i].plan_bytes > largest[i] ? s->info[i].plan_bytes : largest[i];
            assert_true(s->info[i].plan_bytes <= PLAN_BYTES_MAX);
            assert_int_equal(s->info[i].seq_total, seq);
        }
        /* Nothing that is not stated. */
        assert_true(s->live_bytes <= (long long)(plans + s->info[0].metadata_bytes + 4096));
        metadata = s->info[0].metadata_bytes;
        live = s->live_bytes > live ? s->live_bytes : live;
        seconds = s->seconds > seconds ? s->seconds : seconds;
    }
    printf("%lld tokens, %d ranks, %d documents, %s: plan %llu B global, %llu B sliding, metadata "
           "%llu "
           "B, step %lld B, %.0f ms (64 threads on this machine)\n",
           (long long)seq, RANKS, DOCUMENTS, zigzag ? "zigzag" : "contiguous",
           (unsigned long long)largest[0], (unsigned long long)largest[1],
           (unsigned long long)metadata, live, seconds * 1e3);
    free(w.doc_id);
}

static void million_tokens(void **state)
{
    (void)state;
    for (int zigzag = 0; zigzag < 2; zigzag++) {
        measure(1 << 20, zigzag == 1);
        measure(1 << 21, zigzag == 1);
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(million_tokens)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
