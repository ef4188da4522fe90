/* Checks of views of any size, of row indices, and of results that share memory with inputs. Must
 * not know what tensors mean. */
#include "tensor/check.h"

#include "base/limits.h"

ra_status ra_view_check(const ra_tensor *t, const char *name, bool writable)
{
    if (!t) {
        return RA_FAIL(RA_E_ARG, "%s: NULL, expected a tensor", name);
    }
    if (ra_dtype_bytes(t->dtype) == 0) {
        return RA_FAIL(RA_E_SHAPE, "%s: dtype %d, expected one of the ra_dtype values", name,
                       (int)t->dtype);
    }
    static const int64_t most[RA_NDIM] = {RA_ROWS_MAX, RA_SEQ_MAX, RA_SEQ_MAX, RA_SEQ_MAX};
    for (int axis = 0; axis < RA_NDIM; axis++) {
        if (t->size[axis] < 0 || t->size[axis] > most[axis]) {
            return RA_FAIL(RA_E_SHAPE, "%s: size of axis %d is %lld, expected 0 to %lld", name,
                           axis, (long long)t->size[axis], (long long)most[axis]);
        }
    }
    const int64_t *size = t->size;
    return writable ? ra_tensor_check_output(t, name, t->dtype, size[RA_ROW], size[RA_HEAD],
                                             size[RA_SEQ], size[RA_CHAN])
                    : ra_tensor_check(t, name, t->dtype, size[RA_ROW], size[RA_HEAD], size[RA_SEQ],
                                      size[RA_CHAN]);
}

ra_status ra_index_check(const int64_t *index, int64_t total, int64_t limit)
{
    if (total < 0) {
        return RA_FAIL(RA_E_ARG, "total: %lld, expected 0 or more", (long long)total);
    }
    if (total > 0 && !index) {
        return RA_FAIL(RA_E_ARG, "index: NULL, expected %lld elements", (long long)total);
    }
    for (int64_t i = 0; i < total; i++) {
        if (index[i] < 0 || index[i] >= limit) {
            return RA_FAIL(RA_E_ARG, "index[%lld]: %lld, expected 0 or more and less than %lld",
                           (long long)i, (long long)index[i], (long long)limit);
        }
    }
    return RA_OK;
}

/* The same elements with strides that are not negative, so that data is the lowest address. */
static ra_tensor upright(const ra_tensor *t)
{
    ra_tensor up = *t;
    for (int axis = 0; axis < RA_NDIM; axis++) {
        if (up.stride[axis] < 0) {
            int64_t back = (up.size[axis] - 1) * up.stride[axis];
            up.data = (char *)up.data + back * (int64_t)ra_dtype_bytes(up.dtype);
            up.stride[axis] = -up.stride[axis];
        }
    }
    return up;
}

/* Bytes from the lowest element to behind the highest, and the axis of the longest stride. */
typedef struct extent {
    uintptr_t bytes, pitch; /* pitch: of that axis; 0 if no axis has more than one element */
    int pitch_axis;
} extent;

static extent extent_of(const ra_tensor *t)
{
    uintptr_t element = ra_dtype_bytes(t->dtype);
    extent e = {.bytes = element};
    for (int axis = 0; axis < RA_NDIM; axis++) {
        uintptr_t step = (uintptr_t)t->stride[axis] * element;
        e.bytes += (uintptr_t)(t->size[axis] - 1) * step;
        if (t->size[axis] > 1 && step > e.pitch) {
            e.pitch = step;
            e.pitch_axis = axis;
        }
    }
    return e;
}

/* Do two upright tensors have no byte in common? Where both have one pitch, as slices of a fused
 * buffer do, it is enough to compare one row of b with the row of a that begins in the same pitch
 * and the next. Unequal pitches with extents that meet count as shared. */
static bool are_apart(ra_tensor a, ra_tensor b)
{
    extent ea = extent_of(&a), eb = extent_of(&b);
    uintptr_t at = (uintptr_t)a.data, bt = (uintptr_t)b.data;
    if (at + ea.bytes <= bt || bt + eb.bytes <= at) {
        return true;
    }
    if (ea.pitch == 0 || ea.pitch != eb.pitch) {
        return false;
    }
    uintptr_t gap = bt >= at ? (bt - at) % ea.pitch : ea.pitch - 1 - (at - bt - 1) % ea.pitch;
    a.size[ea.pitch_axis] = b.size[eb.pitch_axis] = 1;
    ra_tensor next = a;
    a.data = (void *)(uintptr_t)0; /* addresses relative to a's row from here on */
    b.data = (void *)gap;
    next.data = (void *)ea.pitch;
    return are_apart(a, b) && are_apart(next, b);
}

ra_status ra_apart_check(const ra_tensor *result, const char *name, const ra_tensor *other,
                         const char *other_name)
{
    if (!result->data || !other->data || ra_tensor_count(result) <= 0 ||
        ra_tensor_count(other) <= 0) {
        return RA_OK;
    }
    if (!are_apart(upright(result), upright(other))) {
        return RA_FAIL(RA_E_ARG, "%s: data %p shares memory with %s, expected memory of its own",
                       name, result->data, other_name);
    }
    return RA_OK;
}
