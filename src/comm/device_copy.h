/* Rows of memory to rows of memory, of devices or the host, in the order of a stream. Must not know
 * what the bytes mean. */
#ifndef RA_COMM_DEVICE_COPY_H
#define RA_COMM_DEVICE_COPY_H

#include <cuda_runtime_api.h>

#include "base/status.h"

/* `rows` pieces of `width` bytes; each side has its own stride. May return before it is done. */
ra_status ra_device_copy_rows(void *to, size_t to_stride, const void *from, size_t from_stride,
                              size_t width, int64_t rows, cudaStream_t stream);

#endif
