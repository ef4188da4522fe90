/* Where everything of one call lies in the ctx's scratch memory. One function carves, with memory
 * or to measure, so that the bytes a plan states are the bytes a call uses. */
#ifndef RA_ATTN_SCRATCH_H
#define RA_ATTN_SCRATCH_H

#include "backend/backend.h"
#include "ring/route.h"
#include "tensor/tensor.h"

/* The sizes that decide. */
typedef struct ra_scratch_shape {
    const ra_schedule *schedule;
    const ra_layer *layer;
    int64_t rows, seq_local;
    bool keep_kv;
    int64_t landing_bytes; /* the backend's */
} ra_scratch_shape;

typedef struct ra_forward_scratch {
    ra_tensor acc;               /* f32 like out; data NULL if no query is resumed */
    ra_tensor lse_rest;          /* f32 like lse; data NULL too for inputs in halves */
    void *slot_k[2], *slot_v[2]; /* two chunks of received rows; NULL with keep_kv */
    uint64_t bytes;
} ra_forward_scratch;

typedef struct ra_backward_sums {
    ra_tensor delta;      /* f32 like lse */
    ra_tensor dq, dk, dv; /* f32 like q, k and v */
} ra_backward_sums;

typedef struct ra_backward_scratch {
    ra_backward_sums sum;
    void *slot_k[2], *slot_v[2];
    void *partial_k[2], *partial_v[2]; /* f32 sums of two chunks */
    void *landing_k, *landing_v;       /* f32, pieces of other ranks' sums */
    ra_landing landing;
    uint64_t bytes;
} ra_backward_scratch;

/* base NULL: only bytes counts. */
ra_forward_scratch ra_forward_carve(const ra_scratch_shape *shape, void *base);
ra_backward_scratch ra_backward_carve(const ra_scratch_shape *shape, void *base);
/* The sums of a call alone, tq queries and tk keys of one row: their bytes go to *bytes. */
ra_backward_sums ra_backward_sums_carve(const ra_layer *layer, int64_t tq, int64_t tk, void *base,
                                        uint64_t *bytes);
/* The backward of one cover over a call's own keys. */
ra_grad_job ra_backward_job(const ra_layer *layer, const ra_cover *cover, const ra_backward_io *io,
                            const ra_backward_sums *sum);
/* Blocks of the largest exchange. */
int64_t ra_scratch_blocks(const ra_scratch_shape *shape);

#endif
