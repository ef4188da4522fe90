/* A strided [rows, heads, seq, chan] view: addresses, slices, checks. Must not know what the
 * numbers mean. */
#ifndef RA_TENSOR_TENSOR_H
#define RA_TENSOR_TENSOR_H

#include "base/half.h"
#include "base/status.h"

/* Address of channel 0; the 64-bit product keeps tensors of more than 2^31 elements right. */
static inline void *ra_tensor_at(const ra_tensor *t, int64_t row, int64_t head, int64_t seq)
{
    int64_t offset = row * t->stride[RA_ROW] + head * t->stride[RA_HEAD] + seq * t->stride[RA_SEQ];
    return (char *)t->data + offset * (int64_t)ra_dtype_bytes(t->dtype);
}

/* The view of seq positions [begin, begin + count). */
ra_tensor ra_tensor_slice_seq(const ra_tensor *t, int64_t begin, int64_t count);

/* Is `t` a readable view of exactly this size and dtype? Names the argument `name` and the axis. A
 * view without elements may have data NULL. */
ra_status ra_tensor_check(const ra_tensor *t, const char *name, ra_dtype dtype, int64_t rows,
                          int64_t heads, int64_t seq, int64_t chan);
/* Additionally: may it be written? Refuses strides that lay two elements on one address. */
ra_status ra_tensor_check_output(const ra_tensor *t, const char *name, ra_dtype dtype, int64_t rows,
                                 int64_t heads, int64_t seq, int64_t chan);

int64_t ra_tensor_count(const ra_tensor *t);

/* One element, any dtype, for code where speed does not matter. */
double ra_tensor_get(const ra_tensor *t, int64_t row, int64_t head, int64_t seq, int64_t chan);
void ra_tensor_set(const ra_tensor *t, int64_t row, int64_t head, int64_t seq, int64_t chan,
                   double value);

#endif
