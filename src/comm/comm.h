/*
 * The ranks' exchange table, ra_comm_callbacks of the public header, with what every transport
 * shares: counting, the deadline, and the rule that a failure is final. Must not know what the
 * bytes mean.
 */
#ifndef RA_COMM_COMM_H
#define RA_COMM_COMM_H

#include "base/status.h"

/* Posts every transfer and waits for all; counts sent bytes. Any failure leaves the comm aborted.
 */
ra_status ra_comm_exchange(ra_comm *comm, const ra_xfer *xfers, int xfer_count, int timeout_ms);
/* Has a call on this rank failed, or the comm been aborted here? It stays so. */
bool ra_comm_is_aborted(const ra_comm *comm);
/* all [size][bytes]. */
ra_status ra_comm_gather(ra_comm *comm, const void *mine, size_t bytes, void *all, int timeout_ms);
/* Every rank learns the worst that happened to any of them: the status and message of the first
 * rank that failed, or RA_OK. */
ra_status ra_comm_agree(ra_comm *comm, ra_status mine, int timeout_ms);
/* The same, and if nobody failed RA_E_MISMATCH unless all ranks give the same value. */
ra_status ra_comm_agree_on(ra_comm *comm, ra_status mine, const char *what, uint64_t value,
                           int timeout_ms);

#endif
