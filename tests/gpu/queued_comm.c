/* A table in front of another that adds an exchange behind an event. */
#include "queued_comm.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "backend/cuda/check.h"
#include "comm/comm.h"
#include "ringattn_cuda.h"

typedef struct queued {
    ra_comm *inner;
    cudaStream_t stream;
    cudaEvent_t start;
} queued;

static ra_status exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    return ra_comm_exchange(((queued *)user)->inner, xfers, count, timeout_ms);
}

static ra_status exchange_behind(void *user, const ra_xfer *xfers, int count, int timeout_ms,
                                 const ra_order *order)
{
    queued *q = user;
    cudaEvent_t after = (cudaEvent_t)order->after;
    RA_CUDA_TRY(cudaStreamWaitEvent(q->stream, after, 0));
    RA_CUDA_TRY(cudaEventRecord(q->start, q->stream));
    order->queued(order->arg, q->start);
    RA_CUDA_TRY(cudaEventSynchronize(after));
    return exchange(user, xfers, count, timeout_ms);
}

static ra_status gather(void *user, const void *mine, size_t bytes, void *all, int timeout_ms)
{
    return ra_comm_gather(((queued *)user)->inner, mine, bytes, all, timeout_ms);
}

static ra_status barrier(void *user, int timeout_ms)
{
    return gather(user, NULL, 0, NULL, timeout_ms);
}

static void end(void *user, const char *why)
{
    ra_comm_abort(((queued *)user)->inner, why);
}

static void close_queued(void *user)
{
    queued *q = user;
    ra_comm_close(q->inner);
    cudaStreamDestroy(q->stream);
    cudaEventDestroy(q->start);
    free(q);
}

ra_status queued_comms_open(int size, ra_comm **out_by_rank)
{
    RA_TRY(ra_comm_open_threads_cuda(size, out_by_rank));
    for (int rank = 0; rank < size; rank++) {
        queued *q = calloc(1, sizeof *q);
        if (!q || cudaStreamCreateWithFlags(&q->stream, cudaStreamNonBlocking) != cudaSuccess ||
            cudaEventCreateWithFlags(&q->start, cudaEventDisableTiming) != cudaSuccess) {
            abort();
        }
        q->inner = out_by_rank[rank];
        const ra_comm_callbacks callbacks = {.size = sizeof callbacks,
                                             .user = q,
                                             .exchange = exchange,
                                             .gather = gather,
                                             .barrier = barrier,
                                             .abort = end,
                                             .close = close_queued};
        RA_TRY(ra_comm_open_custom(rank, size, &callbacks, &out_by_rank[rank]));
        ra_comm_set_exchange_behind(out_by_rank[rank], exchange_behind);
    }
    return RA_OK;
}
