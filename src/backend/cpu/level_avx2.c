/* The kernels in 256-bit vectors with FMA. Compiled with the instructions, called only where the
 * machine has them. */
#include "backend/cpu/level.h"

#include <immintrin.h>

enum { LANES = 8, VECTORS = 2, BLOCK_ROWS = 6 };
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LARGER(a, b) _mm256_max_ps(a, b)
#define SMALLER(a, b) _mm256_min_ps(a, b)
#include "backend/cpu/kernels.inc"

static bool runs(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

const ra_level ra_level_avx2 = LEVEL_TABLE("avx2", &full);
