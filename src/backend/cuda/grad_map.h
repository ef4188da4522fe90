/* Describes f32 tensors to the hardware, for additions of tiles from shared memory. Must not know
 * what is added. */
#ifndef RA_BACKEND_CUDA_GRAD_MAP_H
#define RA_BACKEND_CUDA_GRAD_MAP_H

#include <cuda.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "tensor/tensor.h"

enum { RA_ADD_ROWS = 16, RA_ADD_CHAN = 32 }; /* a tile: 32 channels are one row of the swizzle */

/* f32, channels in whole tiles, data and strides in multiples of 16 bytes. */
bool ra_add_map_fits(const ra_tensor *t);

/* A map over (channel, sequence, head, row), 128-byte swizzle. What lies outside of the tensor is
 * not written. */
ra_status ra_add_map_encode(const ra_tensor *t, CUtensorMap *out);

#ifdef __cplusplus
}
#endif

#endif
