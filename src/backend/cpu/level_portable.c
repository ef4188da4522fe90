/* The kernels in 128-bit vectors, which every compiler target maps to something. Always built. */
#include "backend/cpu/level.h"

enum { LANES = 4, VECTORS = 2, BLOCK_ROWS = 4 };
#define ZIP_LOW(a, b) __builtin_shufflevector(a, b, 0, 4, 1, 5)
#define ZIP_HIGH(a, b) __builtin_shufflevector(a, b, 2, 6, 3, 7)
#define LARGER(a, b) select_vec((a) > (b), a, b)
#define SMALLER(a, b) select_vec((a) < (b), a, b)
#include "backend/cpu/kernels.inc"

static bool runs(void)
{
    return true;
}

const ra_level ra_level_portable = LEVEL_TABLE("portable", &full);
