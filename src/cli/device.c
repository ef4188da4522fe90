/* The CPU does nothing here; what CUDA does is left out of builds without it. */
#include "cli/device.h"

#include <string.h>

#include "tensor/tensor.h"

#ifdef RA_WITH_CUDA
#include "ringattn_cuda.h"
#endif

ra_status ra_device_parse(const char *text, ra_device *out)
{
#ifdef RA_WITH_CUDA
    bool has_cuda = ra_cuda_device_count() > 0;
    if (strcmp(text, "cuda") == 0) {
        *out = RA_DEVICE_CUDA;
        return RA_OK;
    }
    const char *expected = "cpu, cuda or auto";
#else
    bool has_cuda = false;
    const char *expected = "cpu or auto (built without CUDA)";
#endif
    if (strcmp(text, "cpu") != 0 && strcmp(text, "auto") != 0) {
        return RA_FAIL(RA_E_ARG, "--backend: %.64s, expected %s", text, expected);
    }
    *out = strcmp(text, "auto") == 0 && has_cuda ? RA_DEVICE_CUDA : RA_DEVICE_CPU;
    return RA_OK;
}

#ifdef RA_WITH_CUDA

int ra_device_count(ra_device device)
{
    return device == RA_DEVICE_CPU ? 1 : ra_cuda_device_count();
}

int ra_device_index(int rank)
{
    int count = ra_cuda_device_count();
    return count > 0 ? rank % count : 0;
}

static size_t bytes_of(const ra_tensor *t)
{
    return (size_t)ra_tensor_count(t) * ra_dtype_bytes(t->dtype);
}

ra_status ra_device_backend(ra_device device, int rank, int threads, const char *cpu_level,
                            ra_backend **out)
{
    return device == RA_DEVICE_CPU ? ra_backend_open_cpu(threads, cpu_level, out)
                                   : ra_backend_open_cuda(ra_device_index(rank), NULL, out);
}

ra_status ra_device_comms(ra_device device, int ranks, ra_comm **out_by_rank)
{
    return device == RA_DEVICE_CPU ? ra_comm_open_threads(ranks, out_by_rank)
                                   : ra_comm_open_threads_cuda(ranks, out_by_rank);
}

ra_status ra_device_put(ra_device device, int rank, const ra_tensor *host, ra_tensor *out)
{
    void *memory = NULL;
    *out = *host;
    if (device == RA_DEVICE_CPU || !host->data) {
        return RA_OK;
    }
    RA_TRY(ra_cuda_alloc(ra_device_index(rank), bytes_of(host), &memory));
    out->data = memory;
    ra_status status = ra_cuda_copy(memory, host->data, bytes_of(host), (ra_stream){0});
    if (status) {
        ra_device_drop(device, out);
        out->data = NULL;
    }
    return status;
}

ra_status ra_device_get(ra_device device, const ra_tensor *from, const ra_tensor *host)
{
    return device == RA_DEVICE_CPU
               ? RA_OK
               : ra_cuda_copy(host->data, from->data, bytes_of(host), (ra_stream){0});
}

void ra_device_drop(ra_device device, const ra_tensor *t)
{
    if (device != RA_DEVICE_CPU) {
        ra_cuda_free(t->data);
    }
}

ra_status ra_device_wait(ra_device device)
{
    return device == RA_DEVICE_CPU ? RA_OK : ra_cuda_wait((ra_stream){0});
}

/* Contiguous tensors of whole 64-channel slabs run on tensor cores, all others on plain kernels. */
ra_plain_sum ra_device_sum(ra_device device, const ra_layer *layer)
{
    bool tuned = device == RA_DEVICE_CUDA && layer->dtype != RA_F32 && layer->head_dim % 64 == 0;
    return tuned ? RA_PLAIN_SUM_TENSOR : RA_PLAIN_SUM_F32;
}

ra_status ra_device_predict(ra_device device, const ra_plan *plan, ra_device_forecast *out)
{
    ra_cuda_forecast f = {.size = sizeof f};
    *out = (ra_device_forecast){0};
    if (device == RA_DEVICE_CUDA) {
        RA_TRY(ra_cuda_forecast_plan(plan, NULL, &f));
        *out = (ra_device_forecast){f.forward_kernel, f.backward_kernel, f.forward_seconds,
                                    f.backward_seconds, f.workspace_bytes};
    }
    return RA_OK;
}

#else

int ra_device_count(ra_device device)
{
    (void)device;
    return 1;
}

int ra_device_index(int rank)
{
    (void)rank;
    return 0;
}

ra_status ra_device_backend(ra_device device, int rank, int threads, const char *cpu_level,
                            ra_backend **out)
{
    (void)device;
    (void)rank;
    return ra_backend_open_cpu(threads, cpu_level, out);
}

ra_status ra_device_comms(ra_device device, int ranks, ra_comm **out_by_rank)
{
    (void)device;
    return ra_comm_open_threads(ranks, out_by_rank);
}

ra_status ra_device_put(ra_device device, int rank, const ra_tensor *host, ra_tensor *out)
{
    (void)device;
    (void)rank;
    *out = *host;
    return RA_OK;
}

ra_status ra_device_get(ra_device device, const ra_tensor *from, const ra_tensor *host)
{
    (void)device;
    (void)from;
    (void)host;
    return RA_OK;
}

void ra_device_drop(ra_device device, const ra_tensor *t)
{
    (void)device;
    (void)t;
}

ra_status ra_device_wait(ra_device device)
{
    (void)device;
    return RA_OK;
}

ra_plain_sum ra_device_sum(ra_device device, const ra_layer *layer)
{
    (void)device;
    (void)layer;
    return RA_PLAIN_SUM_F32;
}

ra_status ra_device_predict(ra_device device, const ra_plan *plan, ra_device_forecast *out)
{
    (void)device;
    (void)plan;
    *out = (ra_device_forecast){0};
    return RA_OK;
}

#endif
