/*
 * Memory of a piece under way, and the copies between it and tensors. Tensors may be in the memory
 * of a GPU if the library is built with CUDA: then copies run beside the messages, and the memory
 * is pinned, or of the GPU itself where MPI can send that. Must not know messages.
 */
#ifndef RA_COMM_MPI_MEMORY_H
#define RA_COMM_MPI_MEMORY_H

#include "base/status.h"
#include "comm/cursor.h"

typedef enum ra_mpi_place {
    RA_MPI_HOST,   /* tensors in host memory */
    RA_MPI_PINNED, /* tensors on a device, pieces in pinned memory */
    RA_MPI_DEVICE, /* tensors on a device, pieces as well */
} ra_mpi_place;

typedef struct ra_mpi_memory {
    char *data;
    size_t bytes;
    ra_mpi_place place;
    void *stream; /* of its copies; NULL on the host */
} ra_mpi_memory;

/* Where pieces of a message between these blocks belong. direct: MPI takes memory of a GPU. */
ra_mpi_place ra_mpi_place_of(const ra_xfer *xfer, bool direct);

/* At least `bytes` for copies of that kind; no copy is under way. */
ra_status ra_mpi_memory_reserve(ra_mpi_memory *m, size_t bytes, ra_mpi_place place);
/* Begins to copy the next bytes of the message to, or else from, m->data + offset. */
ra_status ra_mpi_memory_copy(ra_mpi_memory *m, size_t offset, ra_cursor *at, size_t bytes, bool in);
/* Are its copies done? */
ra_status ra_mpi_memory_done(const ra_mpi_memory *m, bool *done);
/* Waits for its copies, also for those of a message that failed. */
void ra_mpi_memory_settle(const ra_mpi_memory *m);
void ra_mpi_memory_free(ra_mpi_memory *m);

#endif
