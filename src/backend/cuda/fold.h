/* The tuned forward kernels, for the table of dispatch.c. */
#ifndef RA_BACKEND_CUDA_FOLD_H
#define RA_BACKEND_CUDA_FOLD_H

#include "backend/cuda/dispatch.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const ra_cuda_fold_kernel ra_cuda_fold_512; /* head dims above 256; items of 64 queries */
extern const ra_cuda_fold_kernel ra_cuda_fold_256; /* up to 256; items of at most 128 queries */

#ifdef __cplusplus
}
#endif

#endif
