/* Views and their checks. */
#include "tensor/tensor.h"

#include <stdlib.h>

size_t ra_dtype_bytes(ra_dtype dtype)
{
    switch (dtype) {
    case RA_F32: return 4;
    case RA_BF16:
    case RA_F16: return 2;
    case RA_F64: return 8;
    }
    return 0;
}

const char *ra_dtype_name(ra_dtype dtype)
{
    switch (dtype) {
    case RA_F32: return "f32";
    case RA_BF16: return "bf16";
    case RA_F16: return "f16";
    case RA_F64: return "f64";
    }
    return "unknown dtype";
}

ra_tensor ra_tensor_bhsd(void *data, ra_dtype dtype, int64_t rows, int64_t heads, int64_t seq,
                         int64_t chan)
{
    return (ra_tensor){
        .data = data,
        .dtype = dtype,
        .size = {rows, heads, seq, chan},
        .stride = {heads * seq * chan, seq * chan, chan, 1},
    };
}

ra_tensor ra_tensor_slice_seq(const ra_tensor *t, int64_t begin, int64_t count)
{
    RA_CHECK(begin >= 0 && count >= 0 && begin + count <= t->size[RA_SEQ]);
    ra_tensor slice = *t;
    slice.size[RA_SEQ] = count;
    if (t->data) {
        slice.data = ra_tensor_at(t, 0, 0, begin);
    }
    return slice;
}

int64_t ra_tensor_count(const ra_tensor *t)
{
    return t->size[RA_ROW] * t->size[RA_HEAD] * t->size[RA_SEQ] * t->size[RA_CHAN];
}

/* Can the farthest element be addressed with a 64-bit byte offset? */
static bool extent_fits(const ra_tensor *t)
{
    int64_t extent = 0, step;
    for (int axis = 0; axis < RA_NDIM; axis++) {
        if (__builtin_mul_overflow(t->size[axis] - 1, t->stride[axis], &step) ||
            step == INT64_MIN || __builtin_add_overflow(extent, step < 0 ? -step : step, &extent)) {
            return false;
        }
    }
    return !__builtin_mul_overflow(extent, (int64_t)8, &step);
}

ra_status ra_tensor_check(const ra_tensor *t, const char *name, ra_dtype dtype, int64_t rows,
                          int64_t heads, int64_t seq, int64_t chan)
{
    static const char *const axis_name[RA_NDIM] = {"rows", "heads", "seq", "chan"};
    const int64_t expected[RA_NDIM] = {rows, heads, seq, chan};
    bool empty = false;
    if (t->dtype != dtype) {
        return RA_FAIL(RA_E_SHAPE, "%s: dtype %s, expected %s", name, ra_dtype_name(t->dtype),
                       ra_dtype_name(dtype));
    }
    for (int axis = 0; axis < RA_NDIM; axis++) {
        if (t->size[axis] != expected[axis]) {
            return RA_FAIL(RA_E_SHAPE, "%s: size of axis %d (%s) is %lld, expected %lld", name,
                           axis, axis_name[axis], (long long)t->size[axis],
                           (long long)expected[axis]);
        }
        empty = empty || expected[axis] == 0;
    }
    if (empty) {
        return RA_OK;
    }
    if (!t->data) {
        return RA_FAIL(RA_E_ARG, "%s: data is NULL, expected %lld elements", name,
                       (long long)ra_tensor_count(t));
    }
    if ((uintptr_t)t->data % ra_dtype_bytes(dtype) != 0) {
        return RA_FAIL(RA_E_ARG, "%s: data %p is not aligned to its %zu-byte elements", name,
                       t->data, ra_dtype_bytes(dtype));
    }
    if (chan > 1 && t->stride[RA_CHAN] != 1) {
        return RA_FAIL(RA_E_SHAPE, "%s: stride of axis 3 (chan) is %lld, expected 1", name,
                       (long long)t->stride[RA_CHAN]);
    }
    if (!extent_fits(t)) {
        return RA_FAIL(RA_E_SHAPE, "%s: strides %lld, %lld, %lld reach beyond 64-bit addresses",
                       name, (long long)t->stride[RA_ROW], (long long)t->stride[RA_HEAD],
                       (long long)t->stride[RA_SEQ]);
    }
    return RA_OK;
}

/* Axes by rising stride: each step must reach beyond everything that the shorter axes span. */
static ra_status check_distinct(const ra_tensor *t, const char *name)
{
    bool done[RA_NDIM] = {false};
    int64_t span = 1; /* elements from the first to behind the last, over the axes done */
    for (int turn = 0; turn < RA_NDIM && ra_tensor_count(t) > 0; turn++) {
        int next = -1;
        for (int axis = 0; axis < RA_NDIM; axis++) {
            if (!done[axis] && (next < 0 || llabs(t->stride[axis]) < llabs(t->stride[next]))) {
                next = axis;
            }
        }
        done[next] = true;
        if (t->size[next] == 1) {
            continue;
        }
        int64_t stride = llabs(t->stride[next]);
        if (stride < span) {
            return RA_FAIL(RA_E_SHAPE,
                           "%s: stride %lld of axis %d: results would overwrite each other, "
                           "expected %lld or more",
                           name, (long long)t->stride[next], next, (long long)span);
        }
        span += (t->size[next] - 1) * stride;
    }
    return RA_OK;
}

ra_status ra_tensor_check_output(const ra_tensor *t, const char *name, ra_dtype dtype, int64_t rows,
                                 int64_t heads, int64_t seq, int64_t chan)
{
    RA_TRY(ra_tensor_check(t, name, dtype, rows, heads, seq, chan));
    return check_distinct(t, name);
}

double ra_tensor_get(const ra_tensor *t, int64_t row, int64_t head, int64_t seq, int64_t chan)
{
    const void *at = ra_tensor_at(t, row, head, seq);
    switch (t->dtype) {
    case RA_F32: return (double)((const float *)at)[chan];
    case RA_BF16: return (double)ra_bf16_to_f32(((const uint16_t *)at)[chan]);
    case RA_F16: return (double)ra_f16_to_f32(((const uint16_t *)at)[chan]);
    case RA_F64: return ((const double *)at)[chan];
    }
    return 0;
}

void ra_tensor_set(const ra_tensor *t, int64_t row, int64_t head, int64_t seq, int64_t chan,
                   double value)
{
    void *at = ra_tensor_at(t, row, head, seq);
    switch (t->dtype) {
    case RA_F32: ((float *)at)[chan] = (float)value; break;
    case RA_BF16: ((uint16_t *)at)[chan] = ra_f32_to_bf16((float)value); break;
    case RA_F16: ((uint16_t *)at)[chan] = ra_f32_to_f16((float)value); break;
    case RA_F64: ((double *)at)[chan] = value; break;
    }
}
