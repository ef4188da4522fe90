/*
 * Thread ranks over any memory: the exchange of comm/threads.c with the copying left to the caller.
 * Must not know where the bytes are.
 */
#ifndef RA_COMM_THREADS_H
#define RA_COMM_THREADS_H

#include "base/status.h"

/* `rows` pieces of `width` bytes; each side has its own stride. */
typedef struct ra_copy {
    void *to;
    const void *from;
    size_t width, to_stride, from_stride;
    int64_t rows;
} ra_copy;

/* How a receiver brings bytes from a sender's memory into its own. Calls of one rank come from one
 * thread at a time, calls of several ranks beside each other. */
typedef struct ra_copier {
    void *user;
    ra_status (*copy)(void *user, int rank, const ra_copy *copy); /* may return before it is done */
    ra_status (*finish)(void *user, int rank); /* returns when this rank's copies are done */
    void (*close)(void *user);                 /* after the last rank has closed */
} ra_copier;

/* What the openers of thread ranks refuse. */
ra_status ra_comm_threads_check(int size, ra_comm *const *out_by_rank);
/* The arguments are checked. Takes over copier->user, also when it fails. */
ra_status ra_comm_open_threads_with(int size, const ra_copier *copier, ra_comm **out_by_rank);

#endif
