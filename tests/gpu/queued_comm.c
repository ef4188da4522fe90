/* A table in front of another that adds an exchange behind an event. */
#include "queued_comm.h"

#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "backend/cuda/check.h"
#include "comm/comm.h"
#include "ringattn_cuda.h"
#include "support_relay.h"

typedef struct queued {
    ra_comm *inner; /* first, for support_relay.h */
    cudaStream_t stream;
    cudaEvent_t start;
} queued;

static ra_status exchange_behind(void *user, const ra_xfer *xfers, int count, int timeout_ms,
                                 const ra_order *order)
{
    queued *q = user;
    cudaEvent_t after = (cudaEvent_t)order->after;
    RA_CUDA_TRY(cudaStreamWaitEvent(q->stream, after, 0));
    RA_CUDA_TRY(cudaEventRecord(q->start, q->stream));
    order->queued(order->arg, q->start);
    RA_CUDA_TRY(cudaEventSynchronize(after));
    return ra_comm_exchange(q->inner, xfers, count, timeout_ms);
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
        ra_comm_callbacks callbacks = relay_callbacks(q);
        callbacks.close = close_queued;
        RA_TRY(ra_comm_open_custom(rank, size, &callbacks, &out_by_rank[rank]));
        ra_comm_set_exchange_behind(out_by_rank[rank], exchange_behind);
    }
    return RA_OK;
}
