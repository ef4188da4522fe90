/* Host copies are done at once. */
#include "comm/mpi/memory.h"

#include <string.h>

#include "base/alloc.h"

#ifdef RA_WITH_CUDA
#include "backend/cuda/check.h"
#include "comm/device_copy.h"
#endif

static void copy_host(char *flat, const ra_stretch *s, bool in)
{
    for (int64_t row = 0; row < s->rows; row++, flat += s->width) {
        char *at = s->data + (size_t)row * s->stride;
        memcpy(in ? flat : at, in ? at : flat, s->width);
    }
}

#ifdef RA_WITH_CUDA

ra_mpi_place ra_mpi_place_of(const ra_xfer *xfer, bool direct)
{
    struct cudaPointerAttributes at;
    if (xfer->bytes == 0) {
        return RA_MPI_HOST;
    }
    if (cudaPointerGetAttributes(&at, xfer->blocks[0].data) != cudaSuccess) {
        cudaGetLastError(); /* no driver: all memory is the host's */
        return RA_MPI_HOST;
    }
    bool on_device = at.type == cudaMemoryTypeDevice || at.type == cudaMemoryTypeManaged;
    if (on_device) {
        cudaSetDevice(at.device);
    }
    return !on_device ? RA_MPI_HOST : direct ? RA_MPI_DEVICE : RA_MPI_PINNED;
}

/* A failure leaves what ra_mpi_memory_free can free. */
static ra_status open_device(ra_mpi_memory *m, size_t bytes)
{
    cudaStream_t stream = NULL;
    void *data = NULL;
    RA_CUDA_TRY(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    m->stream = stream;
    if (m->place == RA_MPI_DEVICE) {
        RA_CUDA_TRY(cudaMalloc(&data, bytes));
    } else {
        RA_CUDA_TRY(cudaMallocHost(&data, bytes));
    }
    m->data = data;
    return RA_OK;
}

static void close_device(ra_mpi_memory *m)
{
    if (m->stream) {
        cudaStreamDestroy((cudaStream_t)m->stream);
    }
    if (m->place == RA_MPI_DEVICE) {
        cudaFree(m->data);
    } else {
        cudaFreeHost(m->data);
    }
}

static ra_status copy_device(const ra_mpi_memory *m, char *flat, const ra_stretch *s, bool in)
{
    cudaStream_t stream = (cudaStream_t)m->stream;
    return in ? ra_device_copy_rows(flat, s->width, s->data, s->stride, s->width, s->rows, stream)
              : ra_device_copy_rows(s->data, s->stride, flat, s->width, s->width, s->rows, stream);
}

ra_status ra_mpi_memory_done(const ra_mpi_memory *m, bool *done)
{
    cudaError_t error = m->stream ? cudaStreamQuery((cudaStream_t)m->stream) : cudaSuccess;
    *done = error == cudaSuccess;
    if (error == cudaErrorNotReady) {
        cudaGetLastError();
        return RA_OK;
    }
    return error ? ra_cuda_fail(error, "copying a piece") : RA_OK;
}

void ra_mpi_memory_settle(const ra_mpi_memory *m)
{
    if (m->stream) {
        cudaStreamSynchronize((cudaStream_t)m->stream);
    }
}

#else

ra_mpi_place ra_mpi_place_of(const ra_xfer *xfer, bool direct)
{
    (void)xfer;
    (void)direct;
    return RA_MPI_HOST;
}

static ra_status open_device(ra_mpi_memory *m, size_t bytes)
{
    (void)m;
    (void)bytes;
    return RA_FAIL(RA_E_UNAVAILABLE, "built without CUDA");
}

static void close_device(ra_mpi_memory *m)
{
    (void)m;
}

static ra_status copy_device(const ra_mpi_memory *m, char *flat, const ra_stretch *s, bool in)
{
    (void)m;
    (void)flat;
    (void)s;
    (void)in;
    return RA_FAIL(RA_E_UNAVAILABLE, "built without CUDA");
}

ra_status ra_mpi_memory_done(const ra_mpi_memory *m, bool *done)
{
    (void)m;
    *done = true;
    return RA_OK;
}

void ra_mpi_memory_settle(const ra_mpi_memory *m)
{
    (void)m;
}

#endif

ra_status ra_mpi_memory_reserve(ra_mpi_memory *m, size_t bytes, ra_mpi_place place)
{
    if (m->bytes >= bytes && m->place == place) {
        return RA_OK;
    }
    ra_mpi_memory_free(m);
    m->place = place;
    RA_TRY(place == RA_MPI_HOST ? ra_alloc(bytes, 1, &m->data) : open_device(m, bytes));
    m->bytes = bytes;
    return RA_OK;
}

ra_status ra_mpi_memory_copy(ra_mpi_memory *m, size_t offset, ra_cursor *at, size_t bytes, bool in)
{
    char *flat = m->data + offset;
    for (size_t passed = 0; passed < bytes;) {
        ra_stretch s = ra_cursor_take(at, bytes - passed);
        if (m->place == RA_MPI_HOST) {
            copy_host(flat + passed, &s, in);
        } else {
            RA_TRY(copy_device(m, flat + passed, &s, in));
        }
        passed += ra_stretch_bytes(&s);
    }
    return RA_OK;
}

void ra_mpi_memory_free(ra_mpi_memory *m)
{
    if (m->place == RA_MPI_HOST) {
        ra_free(m->data);
    } else {
        close_device(m);
    }
    *m = (ra_mpi_memory){0};
}
