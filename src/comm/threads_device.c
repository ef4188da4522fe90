/*
 * Thread ranks whose tensors are in the memory of one or several CUDA devices: the copier of
 * comm/threads.c with a stream for each receiver. A sender's rows are there and a receiver's place
 * is free when an exchange begins (marks see to that), so the copies wait for nothing. Must not
 * know what the bytes mean.
 */
#include "backend/cuda/check.h"
#include "base/alloc.h"
#include "comm/device_copy.h"
#include "comm/threads.h"
#include "ringattn_cuda.h"

/* A receiver's stream, on the device of its memory; opened by its first copy. */
typedef struct receiver {
    bool open;
    int device, reached; /* the sender's device that was made readable last; -1 = none */
    cudaStream_t stream;
} receiver;

typedef struct receivers {
    int size;
    receiver *receiver; /* [size] */
} receivers;

static ra_status open_receiver(receiver *r, const void *memory)
{
    struct cudaPointerAttributes attributes;
    RA_CUDA_TRY(cudaPointerGetAttributes(&attributes, memory));
    if (attributes.type == cudaMemoryTypeDevice) {
        RA_CUDA_TRY(cudaSetDevice(attributes.device));
    }
    RA_CUDA_TRY(cudaGetDevice(&r->device));
    RA_CUDA_TRY(cudaStreamCreateWithFlags(&r->stream, cudaStreamNonBlocking));
    r->reached = -1;
    r->open = true;
    return RA_OK;
}

/* Copies from a device that this one may not read pass through the host's memory. */
static ra_status reach(receiver *r, const void *memory)
{
    struct cudaPointerAttributes attributes;
    int can = 0;
    RA_CUDA_TRY(cudaPointerGetAttributes(&attributes, memory));
    if (attributes.type != cudaMemoryTypeDevice || attributes.device == r->device ||
        attributes.device == r->reached) {
        return RA_OK;
    }
    r->reached = attributes.device;
    RA_CUDA_TRY(cudaDeviceCanAccessPeer(&can, r->device, r->reached));
    cudaError_t error = can ? cudaDeviceEnablePeerAccess(r->reached, 0) : cudaSuccess;
    if (error == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
        return RA_OK;
    }
    return error ? ra_cuda_fail(error, "cudaDeviceEnablePeerAccess") : RA_OK;
}

static ra_status copy_device(void *user, int rank, const ra_copy *copy)
{
    receiver *r = &((receivers *)user)->receiver[rank];
    if (!r->open) {
        RA_TRY(open_receiver(r, copy->to));
    }
    RA_CUDA_TRY(cudaSetDevice(r->device));
    RA_TRY(reach(r, copy->from));
    return ra_device_copy_rows(copy->to, copy->to_stride, copy->from, copy->from_stride,
                               copy->width, copy->rows, r->stream);
}

static ra_status finish_device(void *user, int rank)
{
    const receiver *r = &((receivers *)user)->receiver[rank];
    if (r->open) {
        RA_CUDA_TRY(cudaStreamSynchronize(r->stream));
    }
    return RA_OK;
}

static void close_device(void *user)
{
    receivers *all = user;
    for (int rank = 0; rank < all->size; rank++) {
        if (all->receiver[rank].open) {
            cudaSetDevice(all->receiver[rank].device);
            cudaStreamDestroy(all->receiver[rank].stream);
        }
    }
    ra_free(all->receiver);
    ra_free(all);
}

ra_status ra_comm_open_threads_cuda(int size, ra_comm **out_by_rank)
{
    receivers *all = NULL;
    RA_TRY(ra_comm_threads_check(size, out_by_rank));
    if (ra_cuda_device_count() == 0) {
        return RA_FAIL(RA_E_UNAVAILABLE, "no CUDA device or driver on this machine");
    }
    RA_TRY(RA_NEW(&all, 1));
    ra_status status = RA_NEW(&all->receiver, size);
    if (status) {
        ra_free(all);
        return status;
    }
    all->size = size;
    const ra_copier copier = {
        .user = all,
        .copy = copy_device,
        .finish = finish_device,
        .close = close_device,
    };
    return ra_comm_open_threads_with(size, &copier, out_by_rank);
}
