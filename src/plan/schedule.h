/*
 * What a rank computes and exchanges for one layer kind, in order: schedule as data. Every rank
 * derives it from the same bytes, so a send always has its receive. Must not know tensors, dtypes
 * or transports.
 *
 * A leg is one distance: this rank sends key rows to rank + distance and receives some from rank -
 * distance (modulo the rank count). A hop is one computation of the forward; the legs whose rows it
 * needs come before it. Each needed row goes once from its owner to each reader, which is the
 * fewest bytes possible. Two builders differ in what a hop is:
 * chunked: hop 0 = own keys, hop h = the rows of leg h - 1; queries are resumed from hop to hop.
 * neighbourhood: hop 0 = queries that need own keys only (computed under the exchange), hop 1 = all
 * others, with own keys and the rows of all legs at once; nothing is
 * resumed. For sliding layers on contiguous shards.
 */
#ifndef RA_PLAN_SCHEDULE_H
#define RA_PLAN_SCHEDULE_H

#include "plan/cover.h"
#include "plan/pieces.h"

/* Key rows of one document that travel together. */
typedef struct ra_key_rows {
    int64_t row;
    int64_t pos, count;
    int64_t index; /* along the sender's sequence axis, or along the receiver's chunk */
    int32_t doc;
} ra_key_rows;

/* One direction of a leg, ascending (row, doc, pos). */
typedef struct ra_message {
    int peer;
    int64_t range_count, row_count;
    ra_key_rows *range;
} ra_message;

typedef struct ra_leg {
    int distance; /* 1 .. rank count - 1 */
    ra_message send, recv;
    int64_t rows_max; /* largest message of this distance over all ranks: never 0 */
} ra_leg;

typedef struct ra_hop {
    int leg_first, leg_count;
    int64_t chunk_rows; /* received rows */
    int64_t kept_index; /* of this chunk along kept_k's sequence axis */
    ra_cover cover;     /* of the forward */
} ra_hop;

/* One computation of the backward: a hop, or half of hop 0 (plan/backward.h). */
typedef struct ra_pass {
    int hop;
    const ra_cover *cover;
} ra_pass;

typedef struct ra_schedule {
    int leg_count, hop_count, n_prior;
    ra_leg *leg;
    ra_hop *hop;
    int64_t rows_received;
    /* Own rows whose gradients other ranks add to, after the last pass too, in whole tiles. */
    int64_t returned_count;
    ra_local_rows *returned;
    /* Those that another rank adds to before any pass does: their sums begin as zero. */
    int64_t empty_count;
    ra_local_rows *empty;
    bool resumes; /* some query of the forward is not both fresh and final: needs an accumulator */
    int pass_count; /* of the backward; 0 if the schedule is for forwards only */
    bool joined;    /* the pass of hop 1 has all queries, and tells when the chunk is done */
    ra_pass *pass;
    ra_cover *pass_cover; /* [pass_count]; NULL without legs: the pass is hop 0 with its cover */
} ra_schedule;

typedef struct ra_schedule_inputs {
    const ra_tokens *tokens;
    const ra_pieces *pieces;
    ra_mask mask;
    int rank, rank_count;
    bool neighbourhood, forward_only;
    bool joined;  /* a neighbourhood's backward has one computation (plan/backward.h) */
    int64_t tile; /* keys whose gradients a kernel computes together */
} ra_schedule_inputs;

enum { RA_SCHEDULE_TILE = 128 }; /* of all backends' kernels, or a multiple of theirs */

ra_status ra_schedule_build(const ra_schedule_inputs *in, ra_schedule *out);
void ra_schedule_free(ra_schedule *schedule);
uint64_t ra_schedule_bytes(const ra_schedule *schedule); /* of memory */

#endif
