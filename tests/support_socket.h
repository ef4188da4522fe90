/* A transport over stream sockets, one connected pair for every two ranks: what a program with an
 * engine of its own would give to ra_comm_open_custom. Works between processes. */
#ifndef RA_TESTS_SUPPORT_SOCKET_H
#define RA_TESTS_SUPPORT_SOCKET_H

#include "ringattn.h"

enum { SOCKET_RANKS_MAX = 4 };

typedef struct socket_net {
    int size;
    int fd[SOCKET_RANKS_MAX][SOCKET_RANKS_MAX]; /* fd[a][b]: a's end towards b */
} socket_net;

bool socket_net_open(socket_net *net, int size);
/* Closes every end, or all but those of `keep`. */
void socket_net_close(socket_net *net, int keep);
/* Opens rank's comm over its ends of the net, which stay the caller's. */
ra_status socket_comm_open(const socket_net *net, int rank, ra_comm **out);

#endif
