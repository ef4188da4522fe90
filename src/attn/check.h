/* Every argument check of forward and backward, before anything is sent or written. */
#ifndef RA_ATTN_CHECK_H
#define RA_ATTN_CHECK_H

#include "attn/step.h"

/* What the tensors of a call are held to: rows, heads and channels aside, q_seq queries and k_seq
 * keys, and with `keeps` one row of kept_seq kept keys. */
typedef struct ra_io_shape {
    const ra_backend *backend;
    const ra_layer *layer;
    int64_t rows, q_seq, k_seq;
    bool keeps;
    int64_t kept_seq;
} ra_io_shape;

ra_status ra_forward_io_check(const ra_io_shape *shape, const ra_forward_io *io);
ra_status ra_backward_io_check(const ra_io_shape *shape, const ra_backward_io *io);

/* The calls of a plan, with everything else about them. */
ra_status ra_forward_check(const ra_ctx *ctx, const ra_plan *plan, const ra_forward_io *io);
ra_status ra_backward_check(const ra_ctx *ctx, const ra_plan *plan, const ra_backward_io *io);

#endif
