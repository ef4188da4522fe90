/* The end of an NCCL communicator, on a thread of its own: NCCL's calls for it may wait, for the
 * device or for other ranks, and nobody here may wait for long. Must not know why it ends. */
#ifndef RA_COMM_NCCL_ENDING_H
#define RA_COMM_NCCL_ENDING_H

#include "comm/nccl/library.h"

typedef struct ra_nccl_ending ra_nccl_ending;

/* Made before the communicator, so that its end needs no memory. */
ra_status ra_nccl_ending_create(const ra_nccl_library *nccl, int device, ra_nccl_ending **out);
/* Begins to free comm, which may be NULL; once. fails: at once, with what is under way; else when
 * all ranks end theirs, or timeout_ms has passed. */
void ra_nccl_end(ra_nccl_ending *ending, ncclComm_t comm, bool fails, int timeout_ms);
/* Has it ended, within timeout_ms? Else NCCL may still use memory that it was given. */
bool ra_nccl_ended(ra_nccl_ending *ending, int timeout_ms);
/* An end that has begun goes on. Accepts NULL. */
void ra_nccl_ending_free(ra_nccl_ending *ending);

#endif
