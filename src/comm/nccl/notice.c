/* A socket for each rank, in the abstract namespace: its name holds a hash of the id, and is free
 * again when the process ends. */
#include "comm/nccl/notice.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/limits.h"

enum { PROBE_NS = 50000000 }; /* a rank that closes in order may be ahead by less */

typedef struct message {
    int32_t rank;
    char why[RA_MESSAGE_BYTES];
} message;

struct ra_nccl_notice {
    int socket; /* -1 = none */
    int rank, size;
    uint64_t name[2];
    bool heard;        /* from another rank: all have been told */
    bool *reached;     /* [size] */
    int64_t probed_ns; /* the last time */
    int gone;          /* rank that was not there the last time, or -1 */
};

/* FNV-1a, from two starts. */
static uint64_t hash(const unsigned char *bytes, size_t count, uint64_t start)
{
    for (size_t i = 0; i < count; i++) {
        start = (start ^ bytes[i]) * 0x100000001b3u;
    }
    return start;
}

static socklen_t address_of(const ra_nccl_notice *n, int rank, struct sockaddr_un *out)
{
    *out = (struct sockaddr_un){.sun_family = AF_UNIX};
    int length = snprintf(out->sun_path + 1, sizeof out->sun_path - 1, "ringattn-%016llx%016llx-%d",
                          (unsigned long long)n->name[0], (unsigned long long)n->name[1], rank);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int open_socket(void)
{
    return socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
}

ra_status ra_nccl_notice_open(const void *id, size_t id_bytes, int rank, int size,
                              ra_nccl_notice **out)
{
    ra_nccl_notice *n = NULL;
    struct sockaddr_un address;
    RA_TRY(RA_NEW(&n, 1));
    ra_status status = RA_NEW(&n->reached, size);
    if (status) {
        ra_free(n);
        return status;
    }
    n->rank = rank;
    n->size = size;
    n->gone = -1;
    n->name[0] = hash(id, id_bytes, 0xcbf29ce484222325u);
    n->name[1] = hash(id, id_bytes, 0x9e3779b97f4a7c15u);
    n->socket = open_socket();
    socklen_t length = address_of(n, rank, &address);
    if (n->socket >= 0 && bind(n->socket, (struct sockaddr *)&address, length) != 0) {
        close(n->socket);
        n->socket = -1;
    }
    *out = n;
    return RA_OK;
}

/* Does somebody hold the rank's name? Where that cannot be found out, yes. */
static bool is_there(const ra_nccl_notice *n, int rank)
{
    struct sockaddr_un address;
    socklen_t length = address_of(n, rank, &address);
    int probe = open_socket();
    if (probe < 0) {
        return true;
    }
    bool there = connect(probe, (struct sockaddr *)&address, length) == 0 || errno != ECONNREFUSED;
    close(probe);
    return there;
}

void ra_nccl_notice_meet(ra_nccl_notice *n)
{
    for (int rank = 0; n->socket >= 0 && rank < n->size; rank++) {
        n->reached[rank] = rank != n->rank && is_there(n, rank);
    }
    n->probed_ns = ra_clock_ns();
}

void ra_nccl_notice_tell(ra_nccl_notice *n, const char *why)
{
    message said = {.rank = n->rank};
    snprintf(said.why, sizeof said.why, "%s", why);
    for (int rank = 0; n->socket >= 0 && !n->heard && rank < n->size; rank++) {
        struct sockaddr_un address;
        socklen_t length = address_of(n, rank, &address);
        if (rank != n->rank) {
            sendto(n->socket, &said, sizeof said, 0, (struct sockaddr *)&address, length);
        }
    }
}

/* The first that could be reached and is gone, of the peers or of all ranks, or -1. */
static int find_gone(const ra_nccl_notice *n, const ra_xfer *xfers, int xfer_count)
{
    int count = xfers ? xfer_count : n->size;
    for (int i = 0; i < count; i++) {
        int rank = xfers ? xfers[i].peer : i;
        if (n->reached[rank] && !is_there(n, rank)) {
            return rank;
        }
    }
    return -1;
}

ra_status ra_nccl_notice_check(ra_nccl_notice *n, const ra_xfer *xfers, int xfer_count)
{
    message said;
    if (n->socket < 0) {
        return RA_OK;
    }
    if (recv(n->socket, &said, sizeof said, 0) == (ssize_t)sizeof said) {
        n->heard = true;
        said.why[RA_MESSAGE_BYTES - 1] = '\0';
        return RA_FAIL(RA_E_COMM, "rank %d aborted: %.400s", said.rank, said.why);
    }
    int64_t now = ra_clock_ns();
    if (now - n->probed_ns < PROBE_NS) {
        return RA_OK;
    }
    int gone = find_gone(n, xfers, xfer_count), before = n->gone;
    n->probed_ns = now;
    n->gone = gone;
    return gone >= 0 && gone == before
               ? RA_FAIL(RA_E_COMM, "rank %d: its process has ended, or closed its communicator",
                         gone)
               : RA_OK;
}

void ra_nccl_notice_close(ra_nccl_notice *n)
{
    if (n) {
        if (n->socket >= 0) {
            close(n->socket);
        }
        ra_free(n->reached);
        ra_free(n);
    }
}
