/* Integer helpers that libc lacks. */
#ifndef RA_BASE_MATHX_H
#define RA_BASE_MATHX_H

#include <stdint.h>

static inline int64_t ra_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t ra_max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}
static inline int64_t ra_clamp_i64(int64_t x, int64_t low, int64_t high)
{
    return ra_max_i64(low, ra_min_i64(x, high));
}
static inline int64_t ra_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}
static inline int64_t ra_round_up(int64_t a, int64_t b)
{
    return ra_ceil_div(a, b) * b;
}

#endif
