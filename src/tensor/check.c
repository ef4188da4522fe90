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

ra_status ra_apart_check(const ra_tensor *result, const char *name, const ra_tensor *other,
                         const char *other_name)
{
    if (result->data && result->data == other->data) {
        return RA_FAIL(RA_E_ARG, "%s: data %p is that of %s, expected memory of its own", name,
                       result->data, other_name);
    }
    return RA_OK;
}
