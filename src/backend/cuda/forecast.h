/*
 * What computations take on one H200, predicted from covers alone: needs no device. Must not know
 * tensors, hops or ranks.
 */
#ifndef RA_BACKEND_CUDA_FORECAST_H
#define RA_BACKEND_CUDA_FORECAST_H

#include "backend/cuda/work.h"

#define RA_CUDA_SIMPLE "simple" /* the plain kernels' name */

/* The default of ra_cuda_options.workspace_bytes; documented in ringattn_cuda.h. */
#define RA_CUDA_WORKSPACE_BYTES ((size_t)544 << 20)

/* The kernels that the dispatch chooses for a layer's contiguous tensors. */
const char *ra_cuda_forecast_fold(const ra_layer *layer);
const char *ra_cuda_forecast_grad(const ra_layer *layer);

/* Seconds of one cover on all SMs, by these kernels; 0 for "simple". RA_E_UNSUPPORTED if the
 * workspace is too small for the backward. */
ra_status ra_cuda_forecast_cover(const ra_cover *cover, const ra_layer *layer,
                                 size_t workspace_bytes, double *forward, double *backward);

#endif
