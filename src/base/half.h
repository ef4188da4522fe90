/* bf16 and f16 to f32 and back, rounding to nearest even, NaN kept. Plain C, so that every level
 * computes the same. */
#ifndef RA_BASE_HALF_H
#define RA_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t ra_float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}
static inline float ra_float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static inline float ra_bf16_to_f32(uint16_t h)
{
    return ra_float_of((uint32_t)h << 16);
}

static inline uint16_t ra_f32_to_bf16(float x)
{
    uint32_t u = ra_float_bits(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
        return (uint16_t)((u >> 16) | 0x40u); /* NaN stays NaN, quiet */
    }
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

static inline float ra_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t magnitude = h & 0x7fffu;
    if (magnitude >= 0x7c00u) { /* Inf and NaN */
        return ra_float_of(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    }
    /* Scaling by 2^112 moves the exponent to f32's bias and makes subnormals normal, exactly. */
    return ra_float_of(sign | ra_float_bits(ra_float_of(magnitude << 13) * 0x1p112f));
}

static inline uint16_t ra_f32_to_f16(float x)
{
    uint32_t u = ra_float_bits(x);
    uint16_t sign = (uint16_t)(u >> 16 & 0x8000u);
    uint32_t magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) {
        return (uint16_t)(sign | 0x7e00u);
    }
    if (magnitude >= 0x477ff000u) { /* rounds to 2^16 or more */
        return (uint16_t)(sign | 0x7c00u);
    }
    if (magnitude <
        0x38800000u) { /* subnormal: adding 0.5 leaves the rounded significand in the low bits */
        float rounded = ra_float_of(magnitude) + 0.5f;
        return (uint16_t)(sign | (ra_float_bits(rounded) - 0x3f000000u));
    }
    uint32_t rebiased = magnitude - 0x38000000u;
    return (uint16_t)(sign | (rebiased + 0xfffu + (rebiased >> 13 & 1u)) >> 13);
}

#endif
