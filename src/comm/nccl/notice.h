/*
 * What NCCL does not do: a rank that fails tells the others, with its reason, and the end of a
 * rank's process is noticed. By datagrams between the processes of one machine; ranks of other
 * machines, or of another network namespace, are not reached and wait for their time-out. Must not
 * know NCCL.
 */
#ifndef RA_COMM_NCCL_NOTICE_H
#define RA_COMM_NCCL_NOTICE_H

#include "base/status.h"

typedef struct ra_nccl_notice ra_nccl_notice;

/* id: what all ranks of the communicator, and nobody else, know. Where there are no such sockets
 * nobody is reached. */
ra_status ra_nccl_notice_open(const void *id, size_t id_bytes, int rank, int size,
                              ra_nccl_notice **out);
/* Once all ranks have opened theirs: finds out who can be reached. */
void ra_nccl_notice_meet(ra_nccl_notice *notice);
/* Tells all others; not what one of them has told. */
void ra_nccl_notice_tell(ra_nccl_notice *notice, const char *why);
/* RA_E_COMM if a rank has told something, or the process of a peer of the transfers, of any rank if
 * they are NULL, has been gone for a while; others may have closed theirs in order. Cheap. */
ra_status ra_nccl_notice_check(ra_nccl_notice *notice, const ra_xfer *xfers, int xfer_count);
/* Accepts NULL. */
void ra_nccl_notice_close(ra_nccl_notice *notice);

#endif
