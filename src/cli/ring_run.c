/* The body of a rank: take the slices, run, put the results. */
#include "cli/ring_run.h"

#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "cli/files.h"
#include "cli/setup.h"
#include "cli/world.h"
#include "comm/comm.h"

enum { Q, K, V, DOUT, INPUT_COUNT };

typedef struct job {
    const ra_case *c;
    const ra_args *args;
    const ra_deals *deals;
    ra_trace *trace;
    ra_ring_result *out;
} job;

/* A rank's own tensors. */
typedef struct shard {
    ra_tensor input[INPUT_COUNT], result[RA_RESULT_COUNT], kept_k, kept_v;
} shard;

static ra_status allocate(ra_tensor like, int64_t seq, ra_tensor *out)
{
    void *data = NULL;
    ra_tensor t = ra_tensor_bhsd(NULL, like.dtype, like.size[RA_ROW], like.size[RA_HEAD], seq,
                                 like.size[RA_CHAN]);
    RA_TRY(ra_alloc((size_t)ra_tensor_count(&t), ra_dtype_bytes(t.dtype), &data));
    t.data = data;
    *out = t;
    return RA_OK;
}

static size_t position_bytes(const ra_tensor *t)
{
    return (size_t)t->size[RA_CHAN] * ra_dtype_bytes(t->dtype);
}

static ra_status shard_fill(const job *j, const ra_deal *deal, int64_t kept_seq, shard *s)
{
    const ra_tensor *whole[INPUT_COUNT] = {&j->c->q, &j->c->k, &j->c->v, &j->c->dout};
    for (int i = 0; i < INPUT_COUNT; i++) {
        if (whole[i]->data) {
            RA_TRY(allocate(*whole[i], deal->length, &s->input[i]));
            RA_TRY(ra_runs_take(deal->runs, deal->run_count, whole[i]->data,
                                j->c->rows * whole[i]->size[RA_HEAD], j->c->seq,
                                position_bytes(whole[i]), s->input[i].data));
        }
    }
    for (int i = 0; i < RA_RESULT_COUNT; i++) {
        if (j->out->result[i].data) {
            RA_TRY(allocate(j->out->result[i], deal->length, &s->result[i]));
            /* All ones is a NaN in every dtype: what the ring leaves unwritten shows. */
            size_t bytes =
                (size_t)ra_tensor_count(&s->result[i]) * ra_dtype_bytes(s->result[i].dtype);
            if (bytes > 0) {
                memset(s->result[i].data, 0xff, bytes);
            }
        }
    }
    if (j->args->keep_kv && j->out->backward) {
        ra_tensor like = j->c->k;
        like.size[RA_ROW] = 1;
        RA_TRY(allocate(like, kept_seq, &s->kept_k));
        RA_TRY(allocate(like, kept_seq, &s->kept_v));
    }
    return RA_OK;
}

static void shard_free(shard *s)
{
    for (int i = 0; i < INPUT_COUNT; i++) {
        ra_free(s->input[i].data);
    }
    for (int i = 0; i < RA_RESULT_COUNT; i++) {
        ra_free(s->result[i].data);
    }
    ra_free(s->kept_k.data);
    ra_free(s->kept_v.data);
}

/* The same tensors where the backend computes; on the CPU they are the same ones. */
static ra_status shard_put(ra_device device, int rank, const shard *host, shard *out)
{
    for (int i = 0; i < INPUT_COUNT; i++) {
        RA_TRY(ra_device_put(device, rank, &host->input[i], &out->input[i]));
    }
    for (int i = 0; i < RA_RESULT_COUNT; i++) {
        RA_TRY(ra_device_put(device, rank, &host->result[i], &out->result[i]));
    }
    RA_TRY(ra_device_put(device, rank, &host->kept_k, &out->kept_k));
    return ra_device_put(device, rank, &host->kept_v, &out->kept_v);
}

static ra_status shard_get(ra_device device, const shard *from, const shard *host)
{
    for (int i = 0; i < RA_RESULT_COUNT; i++) {
        if (host->result[i].data) {
            RA_TRY(ra_device_get(device, &from->result[i], &host->result[i]));
        }
    }
    return RA_OK;
}

static void shard_drop(ra_device device, const shard *s)
{
    for (int i = 0; i < INPUT_COUNT; i++) {
        ra_device_drop(device, &s->input[i]);
    }
    for (int i = 0; i < RA_RESULT_COUNT; i++) {
        ra_device_drop(device, &s->result[i]);
    }
    ra_device_drop(device, &s->kept_k);
    ra_device_drop(device, &s->kept_v);
}

static double seconds_since(int64_t begin_ns)
{
    return (double)(ra_clock_ns() - begin_ns) * 1e-9;
}

static ra_status run_forward(const ra_setup *setup, ra_device device, const shard *s, ra_comm *comm,
                             ra_ring_rank *to)
{
    ra_forward_io io = {
        .size = sizeof io,
        .q = s->input[Q],
        .k = s->input[K],
        .v = s->input[V],
        .out = s->result[RA_RESULT_OUT],
        .lse = s->result[RA_RESULT_LSE],
        .kept_k = s->kept_k,
        .kept_v = s->kept_v,
    };
    uint64_t sent = ra_comm_bytes_sent(comm);
    int64_t begin = ra_clock_ns();
    RA_TRY(ra_attn_forward(setup->ctx, setup->plan, &io, (ra_stream){0}));
    RA_TRY(ra_device_wait(device));
    to->forward_seconds = seconds_since(begin);
    to->forward_bytes = ra_comm_bytes_sent(comm) - sent;
    return RA_OK;
}

static ra_status run_backward(const ra_setup *setup, ra_device device, const shard *s,
                              ra_comm *comm, ra_ring_rank *to)
{
    ra_backward_io io = {
        .size = sizeof io,
        .q = s->input[Q],
        .k = s->input[K],
        .v = s->input[V],
        .out = s->result[RA_RESULT_OUT],
        .lse = s->result[RA_RESULT_LSE],
        .kept_k = s->kept_k,
        .kept_v = s->kept_v,
        .dout = s->input[DOUT],
        .dq = s->result[RA_RESULT_DQ],
        .dk = s->result[RA_RESULT_DK],
        .dv = s->result[RA_RESULT_DV],
    };
    uint64_t sent = ra_comm_bytes_sent(comm);
    int64_t begin = ra_clock_ns();
    RA_TRY(ra_attn_backward(setup->ctx, setup->plan, &io, (ra_stream){0}));
    RA_TRY(ra_device_wait(device));
    to->backward_seconds = seconds_since(begin);
    to->backward_bytes = ra_comm_bytes_sent(comm) - sent;
    return RA_OK;
}

static ra_status put_result(const job *j, int rank, int result, const void *data)
{
    const ra_tensor *whole = &j->out->result[result];
    const ra_deal *deal = &j->deals->deal[rank];
    return ra_runs_put(deal->runs, deal->run_count, data, j->c->rows * whole->size[RA_HEAD],
                       j->c->seq, position_bytes(whole), whole->data);
}

/* One result of one rank, from where it was computed, goes to rank 0; a call of every rank. */
static ra_status send_home(const job *j, ra_comm *comm, int from, int result, const ra_tensor *own)
{
    const ra_tensor *whole = &j->out->result[result];
    ra_tensor host = {0}, there = *own;
    int rank = ra_comm_rank(comm);
    ra_device device = j->args->device;
    size_t bytes = (size_t)(j->c->rows * whole->size[RA_HEAD] * j->deals->deal[from].length) *
                   position_bytes(whole);
    if (rank == 0) {
        RA_TRY(allocate(*whole, j->deals->deal[from].length, &host));
        ra_status status = ra_device_put(device, rank, &host, &there);
        if (status) {
            ra_free(host.data);
            return status;
        }
    }
    ra_block block = {there.data, bytes, bytes, 1};
    ra_xfer xfer = {rank == 0 ? from : 0, rank > 0, &block, 1, bytes};
    bool takes_part = (rank == 0 || rank == from) && bytes > 0;
    ra_status status = ra_comm_exchange(comm, &xfer, takes_part, j->args->timeout_ms);
    if (rank == 0) {
        status = status ? status : ra_device_get(device, &there, &host);
        status = status ? status : put_result(j, from, result, host.data);
        ra_device_drop(device, &there);
        ra_free(host.data);
    }
    return status;
}

/* Adds what the trace holds so far to the figures of a rank, or takes it away. */
static ra_status add_trace(const job *j, int rank, double sign)
{
    ra_trace_summary now = {.size = sizeof now}, *sum = &j->out->rank[rank].trace;
    if (!j->trace) {
        return RA_OK;
    }
    RA_TRY(ra_trace_summarize(j->trace, rank, &now));
    sum->wall += sign * now.wall;
    sum->compute += sign * now.compute;
    sum->exposed += sign * now.exposed;
    sum->idle += sign * now.idle;
    sum->exchange += sign * now.exchange;
    sum->lost = now.lost; /* of earlier runs too: then the differences mean nothing */
    return RA_OK;
}

/* Ranks of other processes: their figures and results go to rank 0. */
static ra_status bring_home(const job *j, ra_comm *comm, const shard *there)
{
    RA_TRY(add_trace(j, ra_comm_rank(comm), 1));
    ra_ring_rank own = j->out->rank[ra_comm_rank(comm)];
    RA_TRY(ra_comm_gather(comm, &own, sizeof own, j->out->rank, j->args->timeout_ms));
    for (int rank = 0; rank < j->out->ranks; rank++) {
        /* Texts are where they are in each process. */
        j->out->rank[rank].info.path = own.info.path;
        j->out->rank[rank].info.reason = own.info.reason;
        for (int i = 0; rank > 0 && i < RA_RESULT_COUNT; i++) {
            if (j->out->result[i].data) {
                RA_TRY(send_home(j, comm, rank, i, &there->result[i]));
            }
        }
    }
    return RA_OK;
}

static ra_status run_rank(ra_comm *comm, void *user)
{
    const job *j = user;
    int rank = ra_comm_rank(comm);
    const ra_deal *deal = &j->deals->deal[rank];
    ra_ring_rank *to = &j->out->rank[rank];
    ra_setup setup;
    ra_device device = j->args->device;
    shard s = {0}, there = {0};
    ra_ctx_options options = {
        .size = sizeof options,
        .timeout_ms = j->args->timeout_ms,
        .forward_only = !j->out->backward,
        .no_overlap = j->args->no_overlap,
        .keep_kv = j->args->keep_kv && j->out->backward,
        .trace = j->trace,
    };
    RA_TRY(ra_setup_open(j->c, j->args, deal, &options, comm, &setup));
    to->info = setup.info;
    ra_status status;
    if ((status = shard_fill(j, deal, setup.info.kept_seq, &s)) ||
        (status = shard_put(device, rank, &s, &there)) ||
        (status = run_forward(&setup, device, &there, comm, to)) ||
        (j->out->backward && (status = run_backward(&setup, device, &there, comm, to))) ||
        (status = shard_get(device, &there, &s))) {
        goto done;
    }
    for (int i = 0; i < RA_RESULT_COUNT && !status; i++) {
        if (j->out->result[i].data) {
            status = put_result(j, rank, i, s.result[i].data);
        }
    }
    if (!status && j->args->transport != RA_TRANSPORT_THREADS) {
        status = bring_home(j, comm, &there);
    }
done:
    shard_drop(device, &there);
    shard_free(&s);
    ra_setup_close(&setup);
    return status;
}

static ra_status prepare(const ra_case *c, const ra_args *args, ra_ring_result *out)
{
    out->ranks = args->ranks;
    out->backward = c->dout.data && !args->forward_only;
    RA_TRY(RA_NEW(&out->rank, args->ranks));
    for (int i = 0; i < (out->backward ? RA_RESULT_COUNT : RA_RESULT_DQ); i++) {
        ra_dtype dtype = i == RA_RESULT_LSE ? RA_F32 : c->layer.dtype;
        ra_tensor t = ra_case_result(c, (ra_result)i, NULL, dtype);
        RA_TRY(ra_alloc((size_t)ra_tensor_count(&t), ra_dtype_bytes(dtype), &out->owned[i]));
        t.data = out->owned[i];
        out->result[i] = t;
    }
    return RA_OK;
}

ra_status ra_ring_run(const ra_case *c, const ra_args *args, ra_trace *trace, ra_ring_result *out)
{
    *out = (ra_ring_result){0};
    ra_deals deals;
    const ra_step_desc whole = ra_case_desc(c);
    job j = {.c = c, .args = args, .deals = &deals, .trace = trace, .out = out};
    ra_status status = ra_deals_build(&args->layout, args->ranks, &whole, &c->layer, &deals);
    status = status ? status : prepare(c, args, out);
    for (int rank = 0; rank < args->ranks && !status; rank++) {
        status = add_trace(&j, rank, -1);
    }
    status = ra_processes_agree(args->transport, status);
    if (!status) {
        int64_t begin = ra_clock_ns();
        status = args->transport != RA_TRANSPORT_THREADS
                     ? ra_processes_run(args->transport, run_rank, &j)
                     : ra_world_run(args->device, args->ranks, run_rank, &j);
        out->seconds = seconds_since(begin);
    }
    for (int rank = 0; rank < args->ranks && !status && args->transport == RA_TRANSPORT_THREADS;
         rank++) {
        status = add_trace(&j, rank, 1);
    }
    ra_deals_free(&deals);
    if (status) {
        ra_ring_result_free(out);
        return RA_FAIL(status, "%s: %s", c->path, ra_last_error());
    }
    return RA_OK;
}

ra_status ra_trace_open(const ra_args *args, ra_trace **out)
{
    enum { EVENT_MAX = 1 << 16 };
    *out = NULL;
    if (!args->trace) {
        return RA_OK;
    }
    for (int i = 0; i <= args->file_count; i++) {
        const char *other = i < args->file_count ? args->files[i] : args->out;
        if (other && ra_file_is_same(args->trace, other)) {
            return RA_FAIL(RA_E_ARG, "--trace: %s, expected another file than %s, which is %s",
                           args->trace, other, i < args->file_count ? "an input" : "the output");
        }
    }
    return ra_trace_create(EVENT_MAX, out);
}

ra_status ra_outputs_check(const ra_args *args)
{
    const char *const path[] = {args->out, args->trace};
    for (int i = 0; i < 2 && args->rank == 0; i++) {
        if (path[i]) {
            RA_TRY(ra_aside_check(path[i]));
        }
    }
    return RA_OK;
}

void ra_trace_print(const ra_ring_result *result)
{
    for (int rank = 0; rank < result->ranks; rank++) {
        const ra_trace_summary *t = &result->rank[rank].trace;
        double percent = t->wall > 0 ? 100 / t->wall : 0;
        if (t->lost > 0) {
            printf("  trace: no sums, it had no room for %lld events\n", (long long)t->lost);
            return;
        }
        if (t->wall > 0) {
            printf("  trace, rank %d: %.2f ms: compute %.1f %%, exposed communication %.1f %%, "
                   "idle %.1f %%; exchanges %.2f ms\n",
                   rank, t->wall * 1e3, t->compute * percent, t->exposed * percent,
                   t->idle * percent, t->exchange * 1e3);
        }
    }
}

ra_status ra_trace_save(const ra_trace *trace, const char *path)
{
    ra_aside aside;
    RA_TRY(ra_aside_open(path, &aside));
    return ra_aside_close(&aside, ra_trace_write(trace, aside.path));
}

void ra_ring_result_free(ra_ring_result *result)
{
    for (int i = 0; i < RA_RESULT_COUNT; i++) {
        ra_free(result->owned[i]);
    }
    ra_free(result->rank);
    *result = (ra_ring_result){0};
}
