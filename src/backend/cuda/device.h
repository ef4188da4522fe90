/* Which devices the backend runs on. Must not know what it does there. */
#ifndef RA_BACKEND_CUDA_DEVICE_H
#define RA_BACKEND_CUDA_DEVICE_H

#include "base/status.h"

/* *capability: 90 for Hopper. RA_E_UNAVAILABLE without a driver, RA_E_ARG if there is no such
 * device, RA_E_UNSUPPORTED if no kernel runs on it. */
ra_status ra_cuda_device_check(int device, int *capability);

#endif
