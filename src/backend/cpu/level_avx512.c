/* The kernels in 512-bit vectors. Compiled with the instructions, called only where the machine has
 * them. */
#include "backend/cpu/level.h"

#include <immintrin.h>

enum { LANES = 16, VECTORS = 4, BLOCK_ROWS = 6 };
#define ZIP_LOW(a, b)                                                                              \
    __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ZIP_HIGH(a, b)                                                                             \
    __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define LARGER(a, b) _mm512_max_ps(a, b)
#define SMALLER(a, b) _mm512_min_ps(a, b)
#include "backend/cpu/kernels.inc"

static bool runs(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("fma");
}

const ra_level ra_level_avx512 = LEVEL_TABLE("avx512", &full);
