/*
 * ringattn_mpi.h - ranks of ringattn as processes of MPI (any MPI 3 library).
 *
 * libringattn-mpi holds everything of libringattn and what is declared here; a program links one
 * of the two. The program starts and ends MPI itself, with MPI_THREAD_MULTIPLE, or with
 * MPI_THREAD_SERIALIZED if no thread of its own calls MPI while a call of ringattn runs: exchanges
 * run on a thread of the ctx. Tensors are in host memory, or, in a build with CUDA, in that of a
 * GPU; such a library also holds what ringattn_cuda.h declares.
 *
 * Nothing here waits for a rank that is gone. Bytes travel through memory of the transport, at most
 * 2 MiB a message under way, so what MPI cannot cancel never touches a caller's tensor; see
 * ra_mpi_parked. After a failure do not call
 * MPI_Finalize, which may wait for the rank that failed: leave by exit.
 */
#ifndef RINGATTN_MPI_H
#define RINGATTN_MPI_H

#include "ringattn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Collective over the communicator that mpi_comm, an MPI_Comm *, points at; its ranks become those
 * of *out. The communicator is duplicated and remains the caller's. RA_E_COMM if a rank does not
 * come within 30 s; RA_E_UNSUPPORTED if MPI was started with a lower thread level. ra_comm_close of
 * a comm without a failure is collective too, and comes before MPI_Finalize. */
RA_API ra_status ra_comm_open_mpi(const void *mpi_comm, ra_comm **out);

/* Requests of this process that were still pending when a comm that had failed was closed. They
 * and their memory are kept for good; a stopped rank that wakes up may still complete them. */
RA_API int64_t ra_mpi_parked(void);

#ifdef __cplusplus
}
#endif
#endif
