/* Device memory for callers that have no CUDA code of their own: the command line and the tests.
 * Must not know backends. */
#include "backend/cuda/check.h"
#include "ringattn_cuda.h"

ra_status ra_cuda_alloc(int device, size_t bytes, void **out)
{
    void *memory = NULL;
    if (!out) {
        return RA_FAIL(RA_E_ARG, "out: NULL, expected where to put the address");
    }
    RA_CUDA_TRY(cudaSetDevice(device));
    if (bytes > 0) {
        RA_CUDA_TRY(cudaMalloc(&memory, bytes));
        cudaError_t error = cudaMemsetAsync(memory, 0, bytes, NULL);
        error = error ? error : cudaStreamSynchronize(NULL);
        if (error) {
            cudaFree(memory);
            return ra_cuda_fail(error, "zeroing device memory");
        }
    }
    *out = memory;
    return RA_OK;
}

void ra_cuda_free(void *memory)
{
    cudaFree(memory);
}

ra_status ra_cuda_copy(void *to, const void *from, size_t bytes, ra_stream stream)
{
    cudaStream_t on = (cudaStream_t)stream.handle;
    if (bytes > 0) {
        RA_CUDA_TRY(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, on));
    }
    RA_CUDA_TRY(cudaStreamSynchronize(on));
    return RA_OK;
}

ra_status ra_cuda_wait(ra_stream stream)
{
    RA_CUDA_TRY(cudaStreamSynchronize((cudaStream_t)stream.handle));
    return RA_OK;
}
