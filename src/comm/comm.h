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
/* For a transport that queues its transfers on a device: they begin behind the event `after`.
 * `queued` is called, at most once, when they are in the device's queues; computations that follow
 * its event leave the transfers the first choice of processors. */
typedef struct ra_order {
    void *after;
    void (*queued)(void *arg, void *event);
    void *arg;
} ra_order;
typedef ra_status (*ra_exchange_behind)(void *user, const ra_xfer *xfers, int xfer_count,
                                        int timeout_ms, const ra_order *order);

/* Gives a comm that a transport has just opened such an exchange. */
void ra_comm_set_exchange_behind(ra_comm *comm, ra_exchange_behind exchange);
bool ra_comm_has_exchange_behind(const ra_comm *comm);
/* Like ra_comm_exchange; the time-out counts from `after` on. */
ra_status ra_comm_exchange_behind(ra_comm *comm, const ra_xfer *xfers, int xfer_count,
                                  int timeout_ms, const ra_order *order);

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
