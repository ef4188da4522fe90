/* The backend's operations that treat every row alike, on a stream. Must not know attention. */
#ifndef RA_BACKEND_CUDA_ELEMENTWISE_H
#define RA_BACKEND_CUDA_ELEMENTWISE_H

#include "backend/cuda/dispatch.h"

#ifdef __cplusplus
extern "C" {
#endif

ra_status ra_cuda_fill(const ra_tensor *t, float value, cudaStream_t stream);
ra_status ra_cuda_add(const ra_tensor *to, const ra_tensor *from, cudaStream_t stream);
ra_status ra_cuda_cast(const ra_tensor *to, const ra_tensor *from, cudaStream_t stream);
ra_status ra_cuda_row_dot(const ra_tensor *a, const ra_tensor *b, const ra_tensor *dot,
                          cudaStream_t stream);

/* Some 6 us in which the stream takes one processor only: a kernel of another stream that may
 * start now starts before the next one of this. */
ra_status ra_cuda_pause(cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
