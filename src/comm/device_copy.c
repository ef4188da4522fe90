/* One copy of two dimensions where CUDA's limits allow it. */
#include "comm/device_copy.h"

#include "backend/cuda/check.h"

/* The largest pitch of a two-dimensional copy. */
static const size_t pitch_max = INT32_MAX;

ra_status ra_device_copy_rows(void *to, size_t to_stride, const void *from, size_t from_stride,
                              size_t width, int64_t rows, cudaStream_t stream)
{
    bool wide = to_stride > pitch_max || from_stride > pitch_max;
    if (rows > 1 && !wide && width > 0) {
        RA_CUDA_TRY(cudaMemcpy2DAsync(to, to_stride, from, from_stride, width, (size_t)rows,
                                      cudaMemcpyDefault, stream));
        return RA_OK;
    }
    for (int64_t row = 0; row < rows && width > 0; row++) {
        RA_CUDA_TRY(cudaMemcpyAsync((char *)to + (size_t)row * to_stride,
                                    (const char *)from + (size_t)row * from_stride, width,
                                    cudaMemcpyDefault, stream));
    }
    return RA_OK;
}
