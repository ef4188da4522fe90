/* See grad_map.h. The driver's function is found through the runtime, so that the library links
 * without the driver's own library. */
#include "backend/cuda/grad_map.h"

#include <cuda_runtime_api.h>
#include <string.h>

#include "backend/cuda/check.h"

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

enum { ALIGNMENT = 16 }; /* bytes, of data and strides */

/* The hardware's limits on extents and on strides in bytes. */
static const int64_t extent_max = (int64_t)1 << 32, stride_max = (int64_t)1 << 40;

static int64_t stride_bytes(const ra_tensor *t, int axis)
{
    return t->stride[axis] * (int64_t)sizeof(float);
}

bool ra_add_map_fits(const ra_tensor *t)
{
    bool fits = t->dtype == RA_F32 && t->size[RA_CHAN] % RA_ADD_CHAN == 0 &&
                (uintptr_t)t->data % ALIGNMENT == 0;
    for (int axis = RA_ROW; axis < RA_CHAN; axis++) {
        int64_t stride = stride_bytes(t, axis);
        bool walks = t->size[axis] > 1; /* otherwise the stride is never used */
        fits = fits && t->size[axis] >= 1 && t->size[axis] <= extent_max &&
               (!walks || (stride > 0 && stride < stride_max && stride % ALIGNMENT == 0));
    }
    return fits;
}

ra_status ra_add_map_encode(const ra_tensor *t, CUtensorMap *out)
{
    RA_CHECK(ra_add_map_fits(t));
    void *found = NULL;
    enum cudaDriverEntryPointQueryResult result;
    RA_CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                 cudaEnableDefault, &result));
    if (!found) {
        return RA_FAIL(RA_E_DEVICE, "driver: no cuTensorMapEncodeTiled, expected one of CUDA 12");
    }
    encode_function encode;
    memcpy(&encode, &found, sizeof encode);
    cuuint64_t extents[4], strides[3];
    cuuint32_t box[4] = {RA_ADD_CHAN, RA_ADD_ROWS, 1, 1}, steps[4] = {1, 1, 1, 1};
    for (int i = 0; i < 4; i++) {
        int axis = RA_CHAN - i;
        extents[i] = (cuuint64_t)t->size[axis];
        if (i > 0) { /* any valid number where the stride is never used */
            strides[i - 1] = t->size[axis] > 1 ? (cuuint64_t)stride_bytes(t, axis) : ALIGNMENT;
        }
    }
    CUresult error = encode(out, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 4, t->data, extents, strides, box,
                            steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error != CUDA_SUCCESS) {
        return RA_FAIL(RA_E_DEVICE, "cuTensorMapEncodeTiled: error %d, expected 0", (int)error);
    }
    return RA_OK;
}
