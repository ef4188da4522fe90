/* Deals (row, key head) pieces to threads; each computes plain and, where needed, the oracle. */
#include "cli/reference.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "base/alloc.h"
#include "base/limits.h"
#include "base/mathx.h"
#include "cli/progress.h"

enum { TRUTH, PLAIN, SIDE_COUNT };

typedef struct work {
    const ra_case *c;
    ra_plain_sum sum;
    ra_tensor result[SIDE_COUNT][RA_RESULT_COUNT]; /* to compute; data NULL = not needed */
    atomic_llong next;
    int64_t piece_count;
    ra_progress progress;
    pthread_mutex_t lock;
    ra_status status; /* the first failure */
    char message[RA_MESSAGE_BYTES];
} work;

/* The heads of one key head in one batch row. */
static ra_tensor piece_of(const ra_tensor *t, int64_t row, int64_t kv_head, int64_t kv_heads)
{
    ra_tensor piece = *t;
    int64_t heads = t->size[RA_HEAD] / kv_heads;
    if (t->data) {
        piece.data = ra_tensor_at(t, row, kv_head * heads, 0);
    }
    piece.size[RA_ROW] = 1;
    piece.size[RA_HEAD] = heads;
    return piece;
}

static ra_status forward(const work *w, int side, const ra_step_desc *desc, const ra_layer *layer,
                         const ra_forward_io *io)
{
    return side == PLAIN ? ra_plain_forward(w->sum, desc, layer, io)
                         : ra_oracle_forward(desc, layer, io);
}

static ra_status backward(const work *w, int side, const ra_step_desc *desc, const ra_layer *layer,
                          const ra_backward_io *io)
{
    return side == PLAIN ? ra_plain_backward(w->sum, desc, layer, io)
                         : ra_oracle_backward(desc, layer, io);
}

static ra_status compute_piece(const work *w, int side, int64_t row, int64_t kv_head)
{
    const ra_case *c = w->c;
    int64_t kv_heads = c->layer.kv_heads, at = row * c->seq;
    ra_layer layer = c->layer;
    layer.q_heads = c->layer.q_heads / c->layer.kv_heads;
    layer.kv_heads = 1;
    ra_step_desc desc = {
        .size = sizeof desc,
        .rows = 1,
        .seq_local = c->seq,
        .doc_id = c->doc_id ? c->doc_id + at : NULL,
        .is_pad = c->is_pad ? c->is_pad + at : NULL,
        .token_type = c->token_type ? c->token_type + at : NULL,
    };
    ra_tensor result[RA_RESULT_COUNT];
    for (int i = 0; i < RA_RESULT_COUNT; i++) {
        result[i] = piece_of(&w->result[side][i], row, kv_head, kv_heads);
    }
    ra_tensor q = piece_of(&c->q, row, kv_head, kv_heads);
    ra_tensor k = piece_of(&c->k, row, kv_head, kv_heads);
    ra_tensor v = piece_of(&c->v, row, kv_head, kv_heads);
    if (result[RA_RESULT_OUT].data) {
        ra_forward_io io = {.size = sizeof io, .q = q, .k = k, .v = v};
        io.out = result[RA_RESULT_OUT];
        io.lse = result[RA_RESULT_LSE];
        RA_TRY(forward(w, side, &desc, &layer, &io));
    }
    if (result[RA_RESULT_DQ].data) {
        ra_backward_io io = {.size = sizeof io, .q = q, .k = k, .v = v};
        io.dout = piece_of(&c->dout, row, kv_head, kv_heads);
        io.dq = result[RA_RESULT_DQ];
        io.dk = result[RA_RESULT_DK];
        io.dv = result[RA_RESULT_DV];
        RA_TRY(backward(w, side, &desc, &layer, &io));
    }
    return RA_OK;
}

static void *run_pieces(void *argument)
{
    work *w = argument;
    for (;;) {
        int64_t piece = atomic_fetch_add(&w->next, 1);
        if (piece >= w->piece_count) {
            return NULL;
        }
        int64_t kv_heads = w->c->layer.kv_heads;
        for (int side = 0; side < SIDE_COUNT; side++) {
            ra_status status = compute_piece(w, side, piece / kv_heads, piece % kv_heads);
            if (status) {
                pthread_mutex_lock(&w->lock);
                if (!w->status) {
                    w->status = status;
                    strncpy(w->message, ra_last_error(), sizeof w->message - 1);
                }
                pthread_mutex_unlock(&w->lock);
                atomic_store(&w->next, w->piece_count);
            }
            ra_progress_add(&w->progress, 1);
        }
    }
}

/* A thread that cannot be started is no failure: the calling thread works too. */
static void run_threads(work *w)
{
    enum { HELPERS_MAX = 63 };
    pthread_t helper[HELPERS_MAX];
    int64_t wanted = ra_min_i64(ra_min_i64(w->piece_count, ra_cpu_count()) - 1, HELPERS_MAX);
    int started = 0;
    while (started < wanted && pthread_create(&helper[started], NULL, run_pieces, w) == 0) {
        started++;
    }
    run_pieces(w);
    for (int i = 0; i < started; i++) {
        pthread_join(helper[i], NULL);
    }
}

static ra_status allocate(const ra_case *c, int side, ra_result result, work *w, ra_reference *out)
{
    ra_dtype dtype = side == TRUTH ? RA_F64 : result == RA_RESULT_LSE ? RA_F32 : c->layer.dtype;
    ra_tensor t = ra_case_result(c, result, NULL, dtype);
    RA_TRY(ra_alloc((size_t)ra_tensor_count(&t), ra_dtype_bytes(dtype), &out->owned[side][result]));
    t.data = out->owned[side][result];
    w->result[side][result] = t;
    return RA_OK;
}

/* An operation is computed as a whole if any of its results is needed. */
static ra_status prepare(const ra_case *c, bool backward, work *w, ra_reference *out)
{
    const int first[] = {RA_RESULT_OUT, RA_RESULT_DQ, RA_RESULT_COUNT};
    for (int operation = 0; operation < (backward ? 2 : 1); operation++) {
        bool complete = true;
        for (int i = first[operation]; i < first[operation + 1]; i++) {
            complete = complete && c->expected[i].data;
        }
        for (int i = first[operation]; i < first[operation + 1]; i++) {
            if (!complete) {
                RA_TRY(allocate(c, TRUTH, (ra_result)i, w, out));
            }
            RA_TRY(allocate(c, PLAIN, (ra_result)i, w, out));
            out->truth[i] = c->expected[i].data ? c->expected[i] : w->result[TRUTH][i];
            out->plain[i] = w->result[PLAIN][i];
        }
    }
    return RA_OK;
}

ra_status ra_reference_build(const ra_case *c, ra_plain_sum sum, bool backward, ra_reference *out)
{
    *out = (ra_reference){0};
    if (c->layer.q_heads % c->layer.kv_heads != 0) {
        return RA_FAIL(RA_E_SHAPE, "query: %d heads, expected a multiple of the %d key heads",
                       c->layer.q_heads, c->layer.kv_heads);
    }
    work w = {.c = c, .sum = sum, .piece_count = c->rows * c->layer.kv_heads};
    ra_status status = prepare(c, backward, &w, out);
    if (!status) {
        pthread_mutex_init(&w.lock, NULL);
        ra_progress_begin(&w.progress, c->name, w.piece_count * SIDE_COUNT);
        run_threads(&w);
        ra_progress_end(&w.progress);
        pthread_mutex_destroy(&w.lock);
        status = w.status ? RA_FAIL(w.status, "reference: %s", w.message) : RA_OK;
    }
    if (status) {
        ra_reference_free(out);
    }
    return status;
}

void ra_reference_free(ra_reference *reference)
{
    for (int side = 0; side < SIDE_COUNT; side++) {
        for (int i = 0; i < RA_RESULT_COUNT; i++) {
            ra_free(reference->owned[side][i]);
        }
    }
    *reference = (ra_reference){0};
}
