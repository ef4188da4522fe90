/* Checked calls through the table of callbacks. */
#include "comm/comm.h"

#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/limits.h"

/* What one rank says of itself when all agree. */
typedef struct verdict {
    int64_t status;
    uint64_t value;
} verdict;
typedef char sentence[RA_MESSAGE_BYTES];

struct ra_comm {
    ra_comm_callbacks call;
    ra_exchange_behind exchange_behind; /* NULL: the transport has none */
    int rank, size;
    atomic_bool aborted;
    atomic_ullong bytes_sent;
    verdict *verdicts;   /* [size], as the next: allocated early, so that a rank out of memory */
    sentence *sentences; /* can still say so */
};

ra_status ra_comm_open_custom(int rank, int size, const ra_comm_callbacks *callbacks, ra_comm **out)
{
    if (!callbacks || !out) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", callbacks ? "out" : "callbacks");
    }
    if (callbacks->size != sizeof *callbacks) {
        return RA_FAIL(RA_E_ARG, "callbacks.size: %zu, expected %zu", callbacks->size,
                       sizeof *callbacks);
    }
    if (size < 1 || size > RA_RANKS_MAX) {
        return RA_FAIL(RA_E_ARG, "size: %d ranks, expected 1 to %d", size, RA_RANKS_MAX);
    }
    if (rank < 0 || rank >= size) {
        return RA_FAIL(RA_E_ARG, "rank: %d, expected 0 to %d", rank, size - 1);
    }
    if (!callbacks->exchange || !callbacks->gather || !callbacks->barrier || !callbacks->abort ||
        !callbacks->close) {
        return RA_FAIL(RA_E_ARG, "callbacks: an entry is NULL, expected exchange, gather, barrier, "
                                 "abort and close");
    }
    ra_comm *comm = NULL;
    RA_TRY(RA_NEW(&comm, 1));
    ra_status status = RA_NEW(&comm->verdicts, size);
    status = status ? status : RA_NEW(&comm->sentences, size);
    if (status) {
        ra_free(comm->verdicts);
        ra_free(comm);
        return status;
    }
    comm->call = *callbacks;
    comm->rank = rank;
    comm->size = size;
    *out = comm;
    return RA_OK;
}

int ra_comm_rank(const ra_comm *comm)
{
    return comm->rank;
}

int ra_comm_size(const ra_comm *comm)
{
    return comm->size;
}

uint64_t ra_comm_bytes_sent(const ra_comm *comm)
{
    return atomic_load(&comm->bytes_sent);
}

void ra_comm_abort(ra_comm *comm, const char *why)
{
    atomic_store(&comm->aborted, true);
    comm->call.abort(comm->call.user, why ? why : "aborted by its caller");
}

bool ra_comm_is_aborted(const ra_comm *comm)
{
    return atomic_load(&comm->aborted);
}

void ra_comm_close(ra_comm *comm)
{
    if (comm) {
        comm->call.close(comm->call.user);
        ra_free(comm->verdicts);
        ra_free(comm->sentences);
        ra_free(comm);
    }
}

/* A transport that fails must not be used again: peers may be in another call. A callback that left
 * no message, or returned something that is not a status, still gets one. */
static ra_status finish(ra_comm *comm, const char *what, ra_status status)
{
    if (status == RA_OK) {
        return RA_OK;
    }
    if (status > 0 || strcmp(ra_status_name(status), "RA_UNKNOWN") == 0) {
        status = RA_FAIL(RA_E_COMM, "%s: the transport returned %d, expected a ra_status", what,
                         (int)status);
    } else if (ra_last_error()[0] == '\0') {
        status = RA_FAIL(status, "%s: %s", what, ra_status_text(status));
    }
    ra_comm_abort(comm, ra_last_error());
    return status;
}

static ra_status check_open(const ra_comm *comm, const char *what)
{
    if (atomic_load(&comm->aborted)) {
        return RA_FAIL(RA_E_COMM, "%s: this communicator was aborted", what);
    }
    /* So that finish() can tell whether a callback left a message of its own. */
    ra_fail(RA_OK, "%s", "");
    return RA_OK;
}

static void count_sent(ra_comm *comm, const ra_xfer *xfers, int xfer_count)
{
    for (int i = 0; i < xfer_count; i++) {
        atomic_fetch_add(&comm->bytes_sent, xfers[i].send ? xfers[i].bytes : 0);
    }
}

ra_status ra_comm_exchange(ra_comm *comm, const ra_xfer *xfers, int xfer_count, int timeout_ms)
{
    RA_TRY(check_open(comm, "exchange"));
    RA_TRY(finish(comm, "exchange",
                  comm->call.exchange(comm->call.user, xfers, xfer_count, timeout_ms)));
    count_sent(comm, xfers, xfer_count);
    return RA_OK;
}

void ra_comm_set_exchange_behind(ra_comm *comm, ra_exchange_behind exchange)
{
    comm->exchange_behind = exchange;
}

bool ra_comm_has_exchange_behind(const ra_comm *comm)
{
    return comm->exchange_behind != NULL;
}

ra_status ra_comm_exchange_behind(ra_comm *comm, const ra_xfer *xfers, int xfer_count,
                                  int timeout_ms, const ra_order *order)
{
    RA_TRY(check_open(comm, "exchange"));
    RA_TRY(finish(comm, "exchange",
                  comm->exchange_behind(comm->call.user, xfers, xfer_count, timeout_ms, order)));
    count_sent(comm, xfers, xfer_count);
    return RA_OK;
}

ra_status ra_comm_gather(ra_comm *comm, const void *mine, size_t bytes, void *all, int timeout_ms)
{
    RA_TRY(check_open(comm, "gather"));
    return finish(comm, "gather", comm->call.gather(comm->call.user, mine, bytes, all, timeout_ms));
}

ra_status ra_comm_agree(ra_comm *comm, ra_status mine, int timeout_ms)
{
    return ra_comm_agree_on(comm, mine, "", 0, timeout_ms);
}

ra_status ra_comm_agree_on(ra_comm *comm, ra_status mine, const char *what, uint64_t value,
                           int timeout_ms)
{
    if (comm->size == 1) {
        return mine;
    }
    sentence why;
    snprintf(why, sizeof why, "%s", mine ? ra_last_error() : "");
    const verdict own = {.status = mine, .value = value};
    RA_TRY(ra_comm_gather(comm, &own, sizeof own, comm->verdicts, timeout_ms));
    for (int rank = 0; rank < comm->size; rank++) {
        ra_status theirs = (ra_status)comm->verdicts[rank].status;
        if (theirs) { /* all ranks see it, and only now ask for words */
            RA_TRY(ra_comm_gather(comm, why, sizeof why, comm->sentences, timeout_ms));
            comm->sentences[rank][RA_MESSAGE_BYTES - 1] = '\0';
            return RA_FAIL(theirs, "rank %d: %s", rank, comm->sentences[rank]);
        }
    }
    for (int rank = 1; rank < comm->size; rank++) {
        unsigned long long theirs = comm->verdicts[rank].value, first = comm->verdicts[0].value;
        if (theirs != first) {
            return RA_FAIL(RA_E_MISMATCH, "%s: rank %d has %016llx, rank 0 has %016llx", what, rank,
                           theirs, first);
        }
    }
    return RA_OK;
}

void ra_xfer_pack(const ra_xfer *xfer, void *flat)
{
    char *to = flat;
    for (int64_t b = 0; b < xfer->block_count; b++) {
        const ra_block *block = &xfer->blocks[b];
        for (int64_t i = 0; i < block->count; i++, to += block->width) {
            memcpy(to, (const char *)block->data + (size_t)i * block->stride, block->width);
        }
    }
}

void ra_xfer_unpack(const ra_xfer *xfer, const void *flat)
{
    const char *from = flat;
    for (int64_t b = 0; b < xfer->block_count; b++) {
        const ra_block *block = &xfer->blocks[b];
        for (int64_t i = 0; i < block->count; i++, from += block->width) {
            memcpy((char *)block->data + (size_t)i * block->stride, from, block->width);
        }
    }
}
