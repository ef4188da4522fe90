/*
 * One message as a stream: a header, then the bytes of its blocks, cut into pieces. Two pieces are
 * under way at a time, each in memory of the flow's own, so that a request that cannot be cancelled
 * never holds memory of a caller. The first piece is small and all that a receiver waits for until
 * it has read the header: a message of another length than expected never meets memory too small
 * for it, which not every MPI library survives. Must not know deadlines or other flows.
 */
#ifndef RA_COMM_MPI_FLOW_H
#define RA_COMM_MPI_FLOW_H

#include <mpi.h>

#include "comm/mpi/memory.h"

enum {
    RA_MPI_SLOTS = 2,
    RA_MPI_FIRST_BYTES = 1024,
    /* Still in a cache when it is sent. Two ranks that share memory exchange 64 MiB in pieces of
     * 1 MiB as fast as unpacked memory, 1.4 GB/s each way; pieces of 4 MiB move at 0.9 GB/s. */
    RA_MPI_PIECE_BYTES = 1 << 20,
    RA_MPI_TAG_DATA = 1,
    RA_MPI_TAG_NOTICE = 2,
};

/* What both sides must agree on; the first bytes of every stream. */
typedef struct ra_mpi_header {
    uint64_t call; /* of the comm's calls, counted */
    uint64_t bytes;
} ra_mpi_header;

/* A piece under way. A sender's is copied, then sent; a receiver's received, then copied. */
typedef struct ra_mpi_slot {
    MPI_Request request; /* MPI_REQUEST_NULL: none */
    bool copying;        /* between its memory and the tensor */
    bool first;          /* it lies in `head` */
    ra_mpi_memory head;  /* always the host's: MPI and this code read and write the header there */
    ra_mpi_memory body;
    size_t bytes;
} ra_mpi_slot;

/* Slots outlive a message: the next one uses their memory again. */
typedef struct ra_mpi_flow {
    const ra_xfer *xfer; /* the caller's, until its exchange returns */
    bool send;
    ra_mpi_place place;
    ra_mpi_header header;
    ra_cursor at;
    uint64_t total, posted, done;                     /* bytes of the stream */
    int64_t pieces_posted, pieces_moved, pieces_done; /* moved: sent or received */
    ra_mpi_slot slot[RA_MPI_SLOTS];
} ra_mpi_flow;

/* RA_E_COMM with MPI's own words if code is an error. */
ra_status ra_mpi_check(int code, const char *what, int peer);

/* Slots without memory or requests. */
void ra_mpi_flow_init(ra_mpi_flow *flow);
/* Posts what can be posted. direct: MPI takes memory of a GPU. */
ra_status ra_mpi_flow_start(ra_mpi_flow *flow, MPI_Comm comm, uint64_t call, const ra_xfer *xfer,
                            bool direct);
/* Takes every piece that is done and posts the next ones; *moved if there was one. */
ra_status ra_mpi_flow_step(ra_mpi_flow *flow, MPI_Comm comm, bool *moved);

/* Asks MPI to drop what the flow waits for, and waits for copies, so that the caller's memory is
 * its own again. Sends stay: MPI libraries do not cancel them. */
void ra_mpi_flow_cancel(ra_mpi_flow *flow);
/* Requests that are still under way. */
int ra_mpi_flow_pending(ra_mpi_flow *flow);
/* Nothing is under way. */
void ra_mpi_flow_free(ra_mpi_flow *flow);

/* Is a request done? An error counts as done: nothing more can come of it. */
bool ra_mpi_done(MPI_Request *request);

#endif
