/* Turns failures of the CUDA runtime into statuses that name the call and CUDA's own words. Must
 * not know what was called. */
#ifndef RA_BACKEND_CUDA_CHECK_H
#define RA_BACKEND_CUDA_CHECK_H

#include <assert.h>

#include <cuda_runtime_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "base/status.h"

/* error is not cudaSuccess. Also clears it where CUDA allows that. */
static inline ra_status ra_cuda_fail(cudaError_t error, const char *call)
{
    cudaGetLastError();
    return RA_FAIL(error == cudaErrorMemoryAllocation ? RA_E_NOMEM : RA_E_DEVICE, "%.160s: %s (%s)",
                   call, cudaGetErrorString(error), cudaGetErrorName(error));
}

#ifdef __cplusplus
}
#endif

/* Passes a failure of a runtime call on. */
#define RA_CUDA_TRY(call)                                                                          \
    do {                                                                                           \
        cudaError_t cuda_error_ = (call);                                                          \
        if (cuda_error_ != cudaSuccess) {                                                          \
            return ra_cuda_fail(cuda_error_, #call);                                               \
        }                                                                                          \
    } while (0)

#endif
