/* Asks the driver for tensor maps. The driver's function is found through the runtime, so that the
 * library links without the driver's own library. Must not know what is computed from the tiles. */
#include "backend/cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include "backend/cuda/check.h"

typedef CUresult (*encode_function)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                                    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                                    const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                    CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

enum { ALIGNMENT = 16 }; /* bytes, of data and strides */

/* The hardware's limits on extents and on strides in bytes. */
static const int64_t extent_max = (int64_t)1 << 32, stride_max = (int64_t)1 << 40;

bool ra_tensor_map_fits(const ra_tensor *t)
{
    int64_t bytes = (int64_t)ra_dtype_bytes(t->dtype);
    bool fits = (t->dtype == RA_BF16 || t->dtype == RA_F16) && t->size[RA_CHAN] % RA_SLAB == 0 &&
                (uintptr_t)t->data % ALIGNMENT == 0;
    for (int axis = RA_ROW; axis < RA_CHAN; axis++) {
        int64_t stride = t->stride[axis] * bytes;
        bool walks = t->size[axis] > 1; /* otherwise the stride is never used */
        fits = fits && t->size[axis] >= 1 && t->size[axis] <= extent_max &&
               (!walks || (stride > 0 && stride < stride_max && stride % ALIGNMENT == 0));
    }
    return fits;
}

/* Any valid number where the stride is never used. */
static cuuint64_t stride_bytes(const ra_tensor *t, int axis)
{
    int64_t stride = t->stride[axis] * (int64_t)ra_dtype_bytes(t->dtype);
    return t->size[axis] > 1 ? (cuuint64_t)stride : ALIGNMENT;
}

ra_status ra_tensor_map_encode(const ra_tensor *t, int seq, int slabs, CUtensorMap *out)
{
    RA_CHECK(ra_tensor_map_fits(t));
    void *found = NULL;
    enum cudaDriverEntryPointQueryResult result;
    RA_CUDA_TRY(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                                 cudaEnableDefault, &result));
    if (!found) {
        return RA_FAIL(RA_E_DEVICE, "driver: no cuTensorMapEncodeTiled, expected one of CUDA 12");
    }
    encode_function encode;
    memcpy(&encode, &found, sizeof encode);
    cuuint64_t extents[5] = {RA_SLAB, (cuuint64_t)t->size[RA_SEQ],
                             (cuuint64_t)(t->size[RA_CHAN] / RA_SLAB), (cuuint64_t)t->size[RA_HEAD],
                             (cuuint64_t)t->size[RA_ROW]};
    cuuint64_t strides[4] = {stride_bytes(t, RA_SEQ), RA_SLAB * ra_dtype_bytes(t->dtype),
                             stride_bytes(t, RA_HEAD), stride_bytes(t, RA_ROW)};
    cuuint32_t box[5] = {RA_SLAB, (cuuint32_t)seq, (cuuint32_t)slabs, 1, 1};
    cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUtensorMapDataType type =
        t->dtype == RA_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    CUresult error = encode(out, type, 5, t->data, extents, strides, box, steps,
                            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error != CUDA_SUCCESS) {
        return RA_FAIL(RA_E_DEVICE, "cuTensorMapEncodeTiled: error %d, expected 0", (int)error);
    }
    return RA_OK;
}
