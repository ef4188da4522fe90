/*
 * Messages cut into pieces, and pieces into rounds, by their bytes alone, as the rows of sender and
 * receiver may lie differently: so both cut alike, and every piece is one send and one receive. A
 * piece that lies in memory without a gap is sent and received where it is; another passes through
 * a place in staging memory. Must not know NCCL or streams.
 */
#ifndef RA_COMM_NCCL_ROUNDS_H
#define RA_COMM_NCCL_ROUNDS_H

#include "base/status.h"
#include "comm/cursor.h"

/* Few pieces: a send for every head costs more than the copies to put heads together, and NCCL may
 * need several operations of the device for them. A message larger than SMALL is cut in the middle,
 * where values follow keys, so that each half may lie without a gap. A round bounds the staging
 * memory. It is large, as each is an operation of its own, and between two of them a computation
 * may take every processor. */
enum {
    RA_NCCL_SMALL_BYTES = 4 << 20,
    RA_NCCL_PIECE_BYTES = 128 << 20,
    RA_NCCL_ROUND_BYTES = 384 << 20, /* and at most a piece more */
};

typedef struct ra_nccl_piece {
    int peer;
    bool send;
    ra_cursor at;
    size_t bytes;
    char *direct;   /* where it lies without a gap, or NULL */
    size_t staging; /* else the place in staging memory, in bytes */
} ra_nccl_piece;

/* A message under way: what is left of it. */
typedef struct ra_nccl_message {
    const ra_xfer *xfer;
    ra_cursor at;
    uint64_t passed;
} ra_nccl_message;

typedef struct ra_nccl_rounds {
    size_t small_bytes, piece_bytes, round_bytes; /* set by the owner, equal on all ranks */
    ra_nccl_message *message;                     /* [message_count] */
    int64_t message_capacity;
    int message_count;
    ra_nccl_piece *piece; /* [piece_count] of the present round */
    int64_t piece_capacity;
    int piece_count;
    size_t staging_bytes; /* that they need */
} ra_nccl_rounds;

/* The transfers stay the caller's until the last round is done. */
ra_status ra_nccl_rounds_start(ra_nccl_rounds *rounds, const ra_xfer *xfers, int count);
/* Cuts the next round; without pieces when all is done. */
ra_status ra_nccl_rounds_next(ra_nccl_rounds *rounds);
void ra_nccl_rounds_free(ra_nccl_rounds *rounds);

#endif
