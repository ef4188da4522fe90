/* Turns a tensor into the hardware's description of it, for copies of tiles to shared memory. Must
 * not know what is computed from the tiles. */
#ifndef RA_BACKEND_CUDA_TENSOR_MAP_H
#define RA_BACKEND_CUDA_TENSOR_MAP_H

#include <cuda.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "tensor/tensor.h"

enum { RA_SLAB = 64 }; /* channels of a slab: 128 bytes, one row of the shared-memory swizzle */

/* Can a map describe `t`? bf16 or f16, channels in whole slabs, data and strides in multiples of 16
 * bytes. */
bool ra_tensor_map_fits(const ra_tensor *t);

/* A map over (channel of the slab, sequence, slab, head, row), 128-byte swizzle; a copy takes `seq`
 * positions of `slabs` slabs and writes them slab after slab. What lies outside of the tensor reads
 * as zero. */
ra_status ra_tensor_map_encode(const ra_tensor *t, int seq, int slabs, CUtensorMap *out);

#ifdef __cplusplus
}
#endif

#endif
