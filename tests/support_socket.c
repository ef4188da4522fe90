/* Non-blocking sends and receives under poll, with a deadline. Every message is its length, then
 * its bytes. */
#include "support_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/status.h"
#include "support.h"

typedef struct socket_comm {
    int rank, size;
    int fd[SOCKET_RANKS_MAX];
} socket_comm;

/* One message under way, in either direction. */
typedef struct flow {
    int peer;
    bool send;
    char *bytes; /* header and payload */
    size_t done, total;
    const ra_xfer *xfer;
} flow;

bool socket_net_open(socket_net *net, int size)
{
    net->size = size;
    for (int a = 0; a < size; a++) {
        net->fd[a][a] = -1;
        for (int b = a + 1; b < size; b++) {
            int pair[2];
            if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair) != 0) {
                return false;
            }
            for (int i = 0; i < 2; i++) {
                fcntl(pair[i], F_SETFL, O_NONBLOCK);
            }
            net->fd[a][b] = pair[0];
            net->fd[b][a] = pair[1];
        }
    }
    return true;
}

void socket_net_close(socket_net *net, int keep)
{
    for (int a = 0; a < net->size; a++) {
        for (int b = 0; b < net->size; b++) {
            if (a != b && a != keep && net->fd[a][b] >= 0) {
                close(net->fd[a][b]);
                net->fd[a][b] = -1;
            }
        }
    }
}

static ra_status flow_open(flow *f, const ra_xfer *xfer)
{
    uint64_t bytes = xfer->bytes;
    *f = (flow){xfer->peer,
                xfer->send,
                malloc(sizeof bytes + (size_t)bytes),
                0,
                sizeof bytes + (size_t)bytes,
                xfer};
    if (!f->bytes) {
        return RA_FAIL(RA_E_NOMEM, "socket: %llu bytes", (unsigned long long)bytes);
    }
    memcpy(f->bytes, &bytes, sizeof bytes);
    if (xfer->send) {
        ra_xfer_pack(xfer, f->bytes + sizeof bytes);
    }
    return RA_OK;
}

/* Moves what the socket takes or gives now. */
static ra_status flow_step(const socket_comm *c, flow *f)
{
    int fd = c->fd[f->peer];
    while (f->done < f->total) {
        ssize_t moved = f->send ? send(fd, f->bytes + f->done, f->total - f->done, MSG_NOSIGNAL)
                                : recv(fd, f->bytes + f->done, f->total - f->done, 0);
        if (moved > 0) {
            f->done += (size_t)moved;
        } else if (moved < 0 && (errno == EAGAIN || errno == EINTR)) {
            return RA_OK;
        } else {
            return RA_FAIL(RA_E_COMM, "rank %d is gone: %s", f->peer,
                           moved == 0 ? "end of file" : strerror(errno));
        }
    }
    uint64_t bytes = 0;
    memcpy(&bytes, f->bytes, sizeof bytes);
    if (bytes != f->xfer->bytes) {
        return RA_FAIL(RA_E_COMM, "rank %d sent %llu bytes, expected %llu", f->peer,
                       (unsigned long long)bytes, (unsigned long long)f->xfer->bytes);
    }
    if (!f->send) {
        ra_xfer_unpack(f->xfer, f->bytes + sizeof bytes);
    }
    return RA_OK;
}

static ra_status flows_run(const socket_comm *c, flow *flows, int count, int timeout_ms)
{
    double deadline = support_now() + timeout_ms * 1e-3;
    for (;;) {
        struct pollfd polls[2 * SOCKET_RANKS_MAX];
        int waiting = 0, peer = 0;
        for (int i = 0; i < count; i++) {
            if (flows[i].done < flows[i].total) {
                RA_TRY(flow_step(c, &flows[i]));
            }
            if (flows[i].done < flows[i].total) {
                peer = flows[i].peer;
                polls[waiting++] =
                    (struct pollfd){c->fd[peer], flows[i].send ? POLLOUT : POLLIN, 0};
            }
        }
        if (waiting == 0) {
            return RA_OK;
        }
        if (support_now() > deadline) {
            return RA_FAIL(RA_E_COMM, "rank %d: nothing within %d ms", peer, timeout_ms);
        }
        poll(polls, (nfds_t)waiting, 20);
    }
}

static ra_status socket_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    const socket_comm *c = user;
    flow flows[2 * SOCKET_RANKS_MAX] = {{0}};
    ra_status status = RA_OK;
    for (int i = 0; i < count && !status; i++) {
        status = flow_open(&flows[i], &xfers[i]);
    }
    status = status ? status : flows_run(c, flows, count, timeout_ms);
    for (int i = 0; i < count; i++) {
        free(flows[i].bytes);
    }
    return status;
}

static ra_status socket_gather(void *user, const void *mine, size_t bytes, void *all,
                               int timeout_ms)
{
    socket_comm *c = user;
    ra_block blocks[SOCKET_RANKS_MAX], own = {(void *)(uintptr_t)mine, bytes, bytes, 1};
    ra_xfer xfers[2 * SOCKET_RANKS_MAX];
    int count = 0;
    for (int rank = 0; rank < c->size; rank++) {
        blocks[rank] = (ra_block){(char *)all + (size_t)rank * bytes, bytes, bytes, 1};
        if (rank != c->rank) {
            xfers[count++] = (ra_xfer){rank, true, &own, 1, bytes};
            xfers[count++] = (ra_xfer){rank, false, &blocks[rank], 1, bytes};
        } else if (bytes > 0) {
            memcpy(blocks[rank].data, mine, bytes);
        }
    }
    return socket_exchange(user, xfers, count, timeout_ms);
}

static ra_status socket_barrier(void *user, int timeout_ms)
{
    char mine = 0, all[SOCKET_RANKS_MAX];
    return socket_gather(user, &mine, 1, all, timeout_ms);
}

/* Peers see the end of the stream. Safe from any thread: shutdown() is. */
static void socket_abort(void *user, const char *why)
{
    socket_comm *c = user;
    (void)why;
    for (int rank = 0; rank < c->size; rank++) {
        if (rank != c->rank) {
            shutdown(c->fd[rank], SHUT_RDWR);
        }
    }
}

static void socket_close(void *user)
{
    free(user);
}

ra_status socket_comm_open(const socket_net *net, int rank, ra_comm **out)
{
    socket_comm *c = calloc(1, sizeof *c);
    if (!c) {
        return RA_FAIL(RA_E_NOMEM, "socket: no memory");
    }
    c->rank = rank;
    c->size = net->size;
    memcpy(c->fd, net->fd[rank], sizeof c->fd);
    const ra_comm_callbacks callbacks = {.size = sizeof callbacks,
                                         .user = c,
                                         .exchange = socket_exchange,
                                         .gather = socket_gather,
                                         .barrier = socket_barrier,
                                         .abort = socket_abort,
                                         .close = socket_close};
    ra_status status = ra_comm_open_custom(rank, net->size, &callbacks, out);
    if (status) {
        free(c);
    }
    return status;
}
