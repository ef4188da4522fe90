/* Checks that public entries share beyond those of one tensor of known size. Must not know what
 * tensors mean. */
#ifndef RA_TENSOR_CHECK_H
#define RA_TENSOR_CHECK_H

#include "tensor/tensor.h"

/* Is `t` a view of any size, with a known dtype? writable: may it be written? */
ra_status ra_view_check(const ra_tensor *t, const char *name, bool writable);

/* Are all entries of index in [0, limit)? Names the first that is not. */
ra_status ra_index_check(const int64_t *index, int64_t total, int64_t limit);

/* Do a result and another tensor have no element in common? Tensors that share rows of one pitch,
 * as slices of a fused buffer do, are compared inside the pitch. */
ra_status ra_apart_check(const ra_tensor *result, const char *name, const ra_tensor *other,
                         const char *other_name);

#endif
