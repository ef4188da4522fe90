/*
 * What the machine could do: multiply-adds per second with an instruction set, from registers
 * alone. Must not know attention.
 */
#ifndef RA_CLI_PEAK_H
#define RA_CLI_PEAK_H

#include "ringattn.h"

/* FLOP/s of multiply-adds on `threads` threads, in the vectors of a ra_backend_level: of f32, or of
 * bf16 pairs where the level multiplies those and inputs are of that dtype. Takes about 50 ms. */
double ra_peak_measure(const char *level, ra_dtype dtype, int threads);

#endif
