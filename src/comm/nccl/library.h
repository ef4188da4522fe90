/* The NCCL library, found when the program runs: the copy that the process uses already (two of
 * them in one process would not get along), else the system's. Must not know what it is used for.
 */
#ifndef RA_COMM_NCCL_LIBRARY_H
#define RA_COMM_NCCL_LIBRARY_H

#include <nccl.h>

#include "base/status.h"

/* The functions that the transport calls: member, name. */
#define RA_NCCL_FUNCTIONS(X)                                                                       \
    X(version, ncclGetVersion)                                                                     \
    X(unique_id, ncclGetUniqueId)                                                                  \
    X(init, ncclCommInitRankConfig)                                                                \
    X(finalize, ncclCommFinalize)                                                                  \
    X(destroy, ncclCommDestroy)                                                                    \
    X(abort, ncclCommAbort)                                                                        \
    X(async_error, ncclCommGetAsyncError)                                                          \
    X(error_string, ncclGetErrorString)                                                            \
    X(last_error, ncclGetLastError)                                                                \
    X(group_start, ncclGroupStart)                                                                 \
    X(group_end, ncclGroupEnd)                                                                     \
    X(send, ncclSend)                                                                              \
    X(recv, ncclRecv)                                                                              \
    X(all_gather, ncclAllGather)

typedef struct ra_nccl_library {
#define RA_NCCL_MEMBER(member, name) __typeof__(name) *member;
    RA_NCCL_FUNCTIONS(RA_NCCL_MEMBER)
#undef RA_NCCL_MEMBER
} ra_nccl_library;

/* RA_E_UNAVAILABLE, with the reason, if there is none or one older than 2.14, the first with
 * communicators that do not block. A library that was loaded stays. */
ra_status ra_nccl_load(ra_nccl_library *out);

#endif
