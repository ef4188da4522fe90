/*
 * Four ranks, each a thread of this process, run a global and a sliding layer over a row of two
 * packed documents and padding, forward and backward. Every rank works on views of the whole
 * tensors, so the output can be compared with the whole-sequence oracle.
 */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "ringattn.h"

enum { RANKS = 4, SEQ = 90, Q_HEADS = 4, KV_HEADS = 2, DIM = 64, LAYERS = 2 };

static int32_t doc[SEQ];
static ra_layer layer[LAYERS];
static ra_forward_io forward[LAYERS]; /* of the whole sequence: tensors are [1, heads, SEQ, chan] */
static ra_backward_io backward[LAYERS];

static ra_tensor new_tensor(int heads, int channels, unsigned seed)
{
    float *data = calloc((size_t)heads * SEQ * (size_t)channels, sizeof *data);
    for (int i = 0; data && seed && i < heads * SEQ * channels; i++) {
        seed = seed * 1664525u + 1013904223u;
        data[i] = (float)(seed >> 8) * 0x1p-23f - 1.0f;
    }
    return ra_tensor_bhsd(data, RA_F32, 1, heads, SEQ, channels);
}

/* Narrows a whole tensor to one rank's rows: strides are free, so nothing is copied. */
static void shard(ra_tensor *t, ra_run run)
{
    t->data = (float *)t->data + run.start * t->stride[RA_SEQ];
    t->size[RA_SEQ] = run.count;
}

static ra_status run_layer(ra_ctx *ctx, const ra_step *step, int i, ra_run run)
{
    const ra_plan *plan = ra_step_plan(step, i);
    ra_forward_io f = forward[i];
    ra_backward_io b = backward[i];
    ra_tensor *const parts[] = {&f.q, &f.k,   &f.v,   &f.out,  &f.lse, &b.q,  &b.k,
                                &b.v, &b.out, &b.lse, &b.dout, &b.dq,  &b.dk, &b.dv};
    for (size_t j = 0; j < sizeof parts / sizeof *parts; j++) {
        shard(parts[j], run);
    }
    ra_status status = ra_attn_forward(ctx, plan, &f, (ra_stream){0});
    return status ? status : ra_attn_backward(ctx, plan, &b, (ra_stream){0});
}

static void *run_rank(void *arg)
{
    ra_comm *comm = arg;
    ra_backend *backend = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_run run;
    ra_runs_contiguous(ra_comm_rank(comm), ra_comm_size(comm), SEQ, &run);
    ra_step_desc desc = {.size = sizeof desc, .rows = 1, .seq_local = run.count};
    desc.doc_id = doc + run.start;

    ra_status status = ra_backend_open_cpu(1, NULL, &backend);
    status = status ? status : ra_ctx_create(backend, comm, layer, LAYERS, NULL, &ctx);
    status = status ? status : ra_step_create(ctx, &desc, &step);
    for (int i = 0; !status && i < LAYERS; i++) {
        status = run_layer(ctx, step, i, run);
    }
    if (status) {
        fprintf(stderr, "rank %d: %s\n", ra_comm_rank(comm), ra_last_error());
        ra_comm_abort(comm, "a rank failed"); /* so that no other rank waits for this one */
    }
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_backend_close(backend);
    return status ? comm : NULL;
}

/* Prints a checksum, and compares with the oracle, which sees the whole sequence at once. */
static bool differs(int i)
{
    ra_step_desc whole = {.size = sizeof whole, .rows = 1, .seq_local = SEQ, .doc_id = doc};
    ra_forward_io io = forward[i];
    io.out = new_tensor(Q_HEADS, DIM, 0);
    io.lse = new_tensor(Q_HEADS, 1, 0);
    double checksum = 0, worst = ra_oracle_forward(&whole, &layer[i], &io) ? INFINITY : 0;
    for (int j = 0; j < Q_HEADS * SEQ * DIM; j++) {
        float out = ((float *)forward[i].out.data)[j], dq = ((float *)backward[i].dq.data)[j];
        double error = fabsf(out - ((float *)io.out.data)[j]);
        worst = error > worst || isnan(error) ? error : worst;
        checksum += out + dq;
    }
    free(io.out.data);
    free(io.lse.data);
    printf("window %2d: checksum %.4f, largest difference from the oracle %.1e\n",
           (int)layer[i].window, checksum, worst);
    return !(worst <= 1e-5);
}

int main(void)
{
    ra_comm *comm[RANKS];
    pthread_t thread[RANKS];
    bool failed = false;
    if (ra_comm_open_threads(RANKS, comm)) {
        exit(1);
    }
    for (int i = 0; i < SEQ; i++) {
        doc[i] = i < 37 ? 1 : i < 80 ? 2 : 0; /* two documents, then padding */
    }
    ra_tensor q = new_tensor(Q_HEADS, DIM, 1), k = new_tensor(KV_HEADS, DIM, 2);
    ra_tensor v = new_tensor(KV_HEADS, DIM, 3), dout = new_tensor(Q_HEADS, DIM, 4);
    for (int i = 0; i < LAYERS; i++) {
        layer[i] = (ra_layer){sizeof *layer, Q_HEADS, KV_HEADS, DIM, RA_F32, .scale = 0.125f};
        layer[i].causal = true;
        layer[i].window = i == 0 ? 0 : 16; /* 0: a global layer */
        ra_tensor out = new_tensor(Q_HEADS, DIM, 0), lse = new_tensor(Q_HEADS, 1, 0);
        forward[i] = (ra_forward_io){sizeof *forward, q, k, v, out, lse, .kept_k = {0}};
        backward[i] = (ra_backward_io){sizeof *backward, q, k, v, out, lse, .dout = dout};
        backward[i].dq = new_tensor(Q_HEADS, DIM, 0);
        backward[i].dk = new_tensor(KV_HEADS, DIM, 0);
        backward[i].dv = new_tensor(KV_HEADS, DIM, 0);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        if (pthread_create(&thread[rank], NULL, run_rank, comm[rank])) {
            exit(1);
        }
    }
    for (int rank = 0; rank < RANKS; rank++) {
        void *lost = NULL;
        failed |= pthread_join(thread[rank], &lost) || lost;
        ra_comm_close(comm[rank]);
    }
    for (int i = 0; !failed && i < LAYERS; i++) {
        failed = differs(i);
    }
    return failed;
}
