/* Ranks as threads: shard, run, put together. */
#include "support_world.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "attn/ctx.h"
#include "backend/cpu/cpu.h"
#include "base/hash.h"
#include "tensor/tensor.h"

enum { POISON = 0xff }; /* every dtype reads NaN */

bool report_keep(rank_report *report, ra_status status, const char *call)
{
    if (status != RA_OK && report->status == RA_OK) {
        report->status = status;
        report->call = call;
        snprintf(report->message, sizeof report->message, "%s", ra_last_error());
    }
    return status == RA_OK;
}

static rank_tensor rank_tensor_new(ra_dtype dtype, int64_t rows, int64_t heads, int64_t seq,
                                   int64_t chan, strides how)
{
    rank_tensor t = {.view = ra_tensor_bhsd(NULL, dtype, rows, heads, seq, chan)};
    int64_t elements = ra_tensor_count(&t.view);
    if (how == STRIDES_BSHD) {
        t.view.stride[RA_HEAD] = chan;
        t.view.stride[RA_SEQ] = heads * chan;
        t.view.stride[RA_ROW] = seq * heads * chan;
    } else if (how == STRIDES_PADDED) {
        t.view.stride[RA_SEQ] = chan + 3;
        t.view.stride[RA_HEAD] = seq * (chan + 3) + 5;
        t.view.stride[RA_ROW] = heads * t.view.stride[RA_HEAD] + 7;
        elements = rows * t.view.stride[RA_ROW];
    }
    t.bytes = (size_t)elements * ra_dtype_bytes(dtype);
    t.memory = malloc(t.bytes ? t.bytes : 1);
    if (!t.memory) {
        abort();
    }
    memset(t.memory, POISON, t.bytes);
    t.view.data = t.memory;
    return t;
}

/* Copies rows between a shard and the whole tensor. */
static void shard_copy(const ra_tensor *local, const ra_tensor *whole, const int64_t *pos, bool in)
{
    size_t bytes = (size_t)local->size[RA_CHAN] * ra_dtype_bytes(local->dtype);
    for (int64_t row = 0; row < local->size[RA_ROW]; row++) {
        for (int64_t head = 0; head < local->size[RA_HEAD]; head++) {
            for (int64_t i = 0; i < local->size[RA_SEQ]; i++) {
                void *mine = ra_tensor_at(local, row, head, i);
                void *full = ra_tensor_at(whole, row, head, pos[i]);
                memcpy(in ? mine : full, in ? full : mine, bytes);
            }
        }
    }
}

void rank_data_create(rank_data *data, const problem *p, const layout *l, int rank, strides how,
                      int64_t kept_seq, bool keep_kv)
{
    const ra_layer *layer = &p->layer;
    const ra_tensor *input[DATA_INPUTS] = {&p->q, &p->k, &p->v, &p->dout};
    memset(data, 0, sizeof *data);
    data->pos = layout_positions(l, rank);
    data->length = l->length[rank];
    for (int i = 0; i < DATA_COUNT; i++) {
        bool is_kv = i == DATA_K || i == DATA_V || i == DATA_DK || i == DATA_DV;
        int heads = is_kv ? layer->kv_heads : layer->q_heads;
        if (i == DATA_KEPT_K || i == DATA_KEPT_V) {
            if (keep_kv) {
                data->tensor[i] = rank_tensor_new(layer->dtype, 1, layer->kv_heads, kept_seq,
                                                  layer->head_dim, how);
            }
        } else if (i == DATA_LSE) {
            data->tensor[i] = rank_tensor_new(RA_F32, p->rows, heads, data->length, 1, how);
        } else {
            data->tensor[i] =
                rank_tensor_new(layer->dtype, p->rows, heads, data->length, layer->head_dim, how);
        }
        if (i < DATA_INPUTS) {
            shard_copy(&data->tensor[i].view, input[i], data->pos, true);
        }
    }
}

void rank_data_free(rank_data *data)
{
    for (int i = 0; i < DATA_COUNT; i++) {
        free(data->tensor[i].memory);
    }
    free(data->pos);
    memset(data, 0, sizeof *data);
}

ra_forward_io rank_data_forward(const rank_data *data)
{
    const rank_tensor *t = data->tensor;
    ra_forward_io io = {.size = sizeof io,
                        .q = t[DATA_Q].view,
                        .k = t[DATA_K].view,
                        .v = t[DATA_V].view,
                        .out = t[DATA_OUT].view,
                        .lse = t[DATA_LSE].view,
                        .kept_k = t[DATA_KEPT_K].view,
                        .kept_v = t[DATA_KEPT_V].view};
    return io;
}

ra_backward_io rank_data_backward(const rank_data *data)
{
    const rank_tensor *t = data->tensor;
    ra_backward_io io = {.size = sizeof io,
                         .q = t[DATA_Q].view,
                         .k = t[DATA_K].view,
                         .v = t[DATA_V].view,
                         .out = t[DATA_OUT].view,
                         .lse = t[DATA_LSE].view,
                         .kept_k = t[DATA_KEPT_K].view,
                         .kept_v = t[DATA_KEPT_V].view,
                         .dout = t[DATA_DOUT].view,
                         .dq = t[DATA_DQ].view,
                         .dk = t[DATA_DK].view,
                         .dv = t[DATA_DV].view};
    return io;
}

static bool all_poison(const rank_tensor *t)
{
    for (size_t i = 0; i < t->bytes; i++) {
        if (t->memory[i] != POISON) {
            return false;
        }
    }
    return true;
}

/* Poisons the view itself: what is left that is not poison was written outside it. */
static void poison_view(const rank_tensor *t)
{
    const ra_tensor *view = &t->view;
    size_t bytes = (size_t)view->size[RA_CHAN] * ra_dtype_bytes(view->dtype);
    for (int64_t row = 0; row < view->size[RA_ROW]; row++) {
        for (int64_t head = 0; head < view->size[RA_HEAD]; head++) {
            for (int64_t i = 0; i < view->size[RA_SEQ]; i++) {
                memset(ra_tensor_at(view, row, head, i), POISON, bytes);
            }
        }
    }
}

bool rank_data_collect(rank_data *data, bool backward, answer *a)
{
    const ra_tensor *whole[DATA_COUNT] = {
        [DATA_OUT] = &a->out, [DATA_LSE] = &a->lse, [DATA_DQ] = &a->dq,
        [DATA_DK] = &a->dk,   [DATA_DV] = &a->dv,
    };
    bool clean = true;
    for (int i = DATA_OUT; i < DATA_COUNT; i++) {
        rank_tensor *t = &data->tensor[i];
        bool gradient = i == DATA_DQ || i == DATA_DK || i == DATA_DV;
        if (whole[i] && (backward || !gradient)) {
            shard_copy(&t->view, whole[i], data->pos, false);
        }
        if (t->memory) {
            poison_view(t);
            clean = clean && all_poison(t);
        }
    }
    return clean;
}

bool rank_data_no_result(const rank_data *data, int first, int last)
{
    for (int i = first; i <= last; i++) {
        const ra_tensor *t = &data->tensor[i].view;
        for (int64_t j = 0; j < ra_tensor_count(t); j++) {
            int64_t chan = t->size[RA_CHAN], seq = t->size[RA_SEQ], heads = t->size[RA_HEAD];
            int64_t row = j / chan / seq / heads, head = j / chan / seq % heads;
            if (!isnan(ra_tensor_get(t, row, head, j / chan % seq, j % chan))) {
                return false;
            }
        }
    }
    return true;
}

uint64_t rank_data_hash(const rank_data *data)
{
    uint64_t hash = RA_HASH_START;
    for (int i = DATA_OUT; i <= DATA_DV; i++) {
        hash = ra_hash(hash, data->tensor[i].memory, data->tensor[i].bytes);
    }
    return hash | 1;
}

static void *slice_of(const void *whole, size_t width, const problem *p, const int64_t *pos,
                      int64_t length)
{
    if (!whole) {
        return NULL;
    }
    char *slice = malloc((size_t)(p->rows * length) * width + 1);
    if (!slice) {
        abort();
    }
    for (int64_t row = 0; row < p->rows; row++) {
        for (int64_t i = 0; i < length; i++) {
            memcpy(slice + (size_t)(row * length + i) * width,
                   (const char *)whole + (size_t)(row * p->seq + pos[i]) * width, width);
        }
    }
    return slice;
}

ra_step_desc rank_desc(const problem *p, const layout *l, int rank)
{
    int64_t *pos = layout_positions(l, rank);
    int64_t length = l->length[rank];
    ra_step_desc desc = {.size = sizeof desc, .rows = p->rows, .seq_local = length};
    if (!l->implicit) {
        desc.run_count = l->run_count[rank];
        desc.runs = l->run[rank];
    }
    desc.doc_id = slice_of(p->doc_id, sizeof *p->doc_id, p, pos, length);
    desc.is_pad = slice_of(p->is_pad, 1, p, pos, length);
    desc.token_type = slice_of(p->token_type, sizeof *p->token_type, p, pos, length);
    free(pos);
    return desc;
}

void rank_desc_free(ra_step_desc *desc)
{
    free((void *)(uintptr_t)desc->doc_id);
    free((void *)(uintptr_t)desc->is_pad);
    free((void *)(uintptr_t)desc->token_type);
    memset(desc, 0, sizeof *desc);
}

/* Scratch memory is not zeroed between calls, so none may rely on what it holds: neither that of
 * the ctx nor that of the CPU's workers. */
static void spoil_scratch(const ra_ctx *ctx)
{
    if (strcmp(ra_backend_name(ctx->backend), "cpu") == 0) {
        ra_cpu *cpu = ctx->backend->self;
        pthread_mutex_lock(&cpu->busy);
        if (cpu->scratch) {
            memset(cpu->scratch, POISON, (size_t)cpu->scratch_bytes);
        }
        pthread_mutex_unlock(&cpu->busy);
    }
    ra_tensor scratch = ra_tensor_bhsd(ctx->scratch, RA_F32, 1, 1, 1,
                                       (int64_t)(ctx->scratch_bytes / sizeof(float)));
    if (ctx->scratch) {
        ctx->backend->ops->fill(ctx->backend->self, &scratch, NAN);
    }
}

static bool rank_attend(ra_ctx *ctx, ra_comm *comm, const ra_plan *plan, rank_data *data,
                        const world_options *o, answer *a, rank_report *report)
{
    bool backward = !o->ctx.forward_only;
    ra_forward_io forward = rank_data_forward(data);
    ra_backward_io gradient = rank_data_backward(data);
    uint64_t before = ra_comm_bytes_sent(comm);
    spoil_scratch(ctx);
    if (!report_keep(report, ra_attn_forward(ctx, plan, &forward, (ra_stream){NULL}), "forward")) {
        return false;
    }
    report->forward_bytes = ra_comm_bytes_sent(comm) - before;
    before = ra_comm_bytes_sent(comm);
    spoil_scratch(ctx);
    if (backward && !report_keep(report, ra_attn_backward(ctx, plan, &gradient, (ra_stream){NULL}),
                                 "backward")) {
        return false;
    }
    report->backward_bytes = ra_comm_bytes_sent(comm) - before;
    if (!rank_data_collect(data, backward, a)) {
        ra_fail(RA_E_SHAPE, "memory outside an output view was written");
        return report_keep(report, RA_E_SHAPE, "collect");
    }
    return true;
}

void rank_step(ra_ctx *ctx, ra_comm *comm, int layer, const problem *p, const layout *l,
               const world_options *o, int rank, answer *a, rank_report *report)
{
    ra_step *step = NULL;
    ra_step_desc desc = rank_desc(p, l, rank);
    bool created = report_keep(report, ra_step_create(ctx, &desc, &step), "step");
    rank_desc_free(&desc); /* metadata is copied, so it may go before the step is used */
    if (created) {
        const ra_plan *plan = ra_step_plan(step, layer);
        report->info.size = sizeof report->info;
        if (report_keep(report, ra_plan_inspect(plan, &report->info), "inspect") &&
            !o->ctx.plan_only) {
            rank_data data;
            rank_data_create(&data, p, l, rank, o->strides, report->info.kept_seq, o->ctx.keep_kv);
            rank_attend(ctx, comm, plan, &data, o, a, report);
            rank_data_free(&data);
        }
    }
    ra_step_free(step);
}

ra_backend world_backend(const world_options *o, const ra_backend *inner, ra_backend_ops *ops)
{
    *ops = *inner->ops;
    ops->marks_chunk = o->joined; /* true of any whose calls are done when they return */
    return (ra_backend){ops, inner->self};
}

void rank_run(ra_comm *comm, const problem *p, const layout *l, const world_options *o, int rank,
              answer *a, rank_report *report)
{
    ra_alloc_probe *before = o->probes ? ra_alloc_watch(&o->probes[rank]) : NULL;
    ra_backend *backend = NULL, planned;
    ra_backend_ops ops;
    ra_ctx *ctx = NULL;
    ra_ctx_options options = o->ctx;
    options.size = sizeof options;
    if (report_keep(report, ra_backend_open_cpu(o->threads ? o->threads : 1, o->level, &backend),
                    "backend") &&
        (planned = world_backend(o, backend, &ops),
         report_keep(report, ra_ctx_create(&planned, comm, &p->layer, 1, &options, &ctx), "ctx"))) {
        rank_step(ctx, comm, 0, p, l, o, rank, a, report);
    } else {
        ra_comm_abort(comm, "a rank could not start");
    }
    ra_ctx_free(ctx);
    ra_backend_close(backend);
    if (o->probes) {
        ra_alloc_watch(before);
    }
}

ra_backend landing_backend(const ra_backend *inner, int64_t bytes, ra_backend_ops *ops)
{
    *ops = *inner->ops;
    ops->landing_bytes = bytes ? bytes : ops->landing_bytes;
    return (ra_backend){ops, inner->self};
}

typedef struct seat {
    int rank;
    ra_comm *comm;
    world_fn fn;
    void *arg;
} seat;

static void *seat_main(void *arg)
{
    seat *s = arg;
    s->fn(s->rank, s->comm, s->arg);
    return NULL;
}

bool world_each(int ranks, world_fn fn, void *arg)
{
    ra_comm *comm[PROBLEM_RANKS_MAX] = {NULL};
    pthread_t thread[PROBLEM_RANKS_MAX];
    seat seats[PROBLEM_RANKS_MAX];
    if (ra_comm_open_threads(ranks, comm) != RA_OK) {
        return false;
    }
    for (int rank = 0; rank < ranks; rank++) {
        seats[rank] = (seat){rank, comm[rank], fn, arg};
        if (pthread_create(&thread[rank], NULL, seat_main, &seats[rank]) != 0) {
            abort();
        }
    }
    for (int rank = 0; rank < ranks; rank++) {
        pthread_join(thread[rank], NULL);
    }
    for (int rank = 0; rank < ranks; rank++) {
        ra_comm_close(comm[rank]);
    }
    return true;
}

typedef struct job {
    const problem *p;
    const layout *l;
    const world_options *o;
    answer *a;
    rank_report *reports;
} job;

static void job_run(int rank, ra_comm *comm, void *arg)
{
    job *j = arg;
    rank_run(comm, j->p, j->l, j->o, rank, j->a, &j->reports[rank]);
}

void world_try(const problem *p, const layout *l, const world_options *o, answer *a,
               rank_report *reports)
{
    job j = {p, l, o, a, reports};
    memset(reports, 0, (size_t)l->ranks * sizeof *reports);
    assert_true(world_each(l->ranks, job_run, &j));
}

void world_run(const problem *p, const layout *l, const world_options *o, answer *a,
               rank_report *reports)
{
    rank_report own[PROBLEM_RANKS_MAX];
    rank_report *seen = reports ? reports : own;
    answer_create(a, p, p->layer.dtype, RA_F32, false);
    world_try(p, l, o, a, seen);
    for (int rank = 0; rank < l->ranks; rank++) {
        if (seen[rank].status != RA_OK) {
            problem_print(p, l);
            fail_msg("%s: rank %d of %d: %s: %s: %s", support_case(), rank, l->ranks,
                     seen[rank].call, ra_status_name(seen[rank].status), seen[rank].message);
        }
    }
}
