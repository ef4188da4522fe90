/* What the two passes of the backward share. Must not know instruction sets. */
#ifndef RA_BACKEND_CPU_GRAD_H
#define RA_BACKEND_CPU_GRAD_H

#include "backend/cpu/tile.h"

typedef struct ra_grad_run {
    ra_cpu *cpu;
    const ra_grad_job *job;
    int64_t q_heads, kv_heads;
    int64_t chan, chan_padded; /* to nr */
    int64_t tile_row;          /* floats of a row of a tile of channels */
} ra_grad_run;

/* The first pass computes dq by query tiles; the second dk and dv by key tiles. Each computes the
 * scores and dout.v anew, 7 block products in all instead of 5: the price of sums whose order does
 * not depend on the team, without memory for scores. */
ra_status ra_grad_queries(const ra_grad_run *run);
ra_status ra_grad_keys(const ra_grad_run *run);

/* Loads `count` query rows of one head, of q or of dout, as a tile of `row_end` rows. Rows that
 * attend nothing (lse -inf) become zero: what they hold must not reach a product. */
void ra_grad_load(const ra_grad_run *run, const ra_tensor *t, const ra_piece *piece, int64_t head,
                  int64_t pos, int64_t count, int64_t row_end, float *tile);

#endif
