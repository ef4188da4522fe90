/* The kernels in 512-bit vectors. Compiled with the instructions, called only where the machine has
 * them. */
#include "backend/cpu/level.h"

#include "backend/cpu/vectors512.inc"

static bool runs(void)
{
    return runs_vectors512();
}

const ra_level ra_level_avx512 = LEVEL_TABLE("avx512", &full);
