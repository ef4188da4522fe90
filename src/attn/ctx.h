/* The long-lived worker of one rank: backend, comm, layer kinds, scratch memory and the courier. */
#ifndef RA_ATTN_CTX_H
#define RA_ATTN_CTX_H

#include "ring/ring.h"

struct ra_ctx {
    ra_backend *backend; /* borrowed */
    ra_comm *comm;       /* borrowed */
    ra_ctx_options options;
    int layer_count;
    ra_layer layer[RA_LAYERS_MAX];
    ra_courier *courier;
    void *scratch; /* backend memory, for one call at a time; grows with the steps */
    uint64_t scratch_bytes;
    ra_block_list blocks; /* of one exchange */
    ra_xfer *xfers;       /* [2 * ranks] */
    ra_status status;     /* the failure that ended it */
    char message[RA_MESSAGE_BYTES];
};

/* Refuses calls after a failure. */
ra_status ra_ctx_check(const ra_ctx *ctx);
/* Ends the ctx after a failure inside a collective call: aborts the comm, waits for the courier,
 * remembers why. Returns the failure, its message restored. RA_OK passes. */
ra_status ra_ctx_finish(ra_ctx *ctx, ra_status status);
/* Memory for the largest plan so far. */
ra_status ra_ctx_reserve(ra_ctx *ctx, uint64_t scratch_bytes, int64_t blocks);
/* What collect and route need. */
ra_ring ra_ctx_ring(ra_ctx *ctx, const ra_schedule *schedule, const ra_layer *layer);

#endif
