/*
 * What the machine could do: multiply-adds per second with an instruction set, from registers
 * alone. Must not know attention.
 */
#ifndef RA_CLI_PEAK_H
#define RA_CLI_PEAK_H

/* FLOP/s of f32 multiply-adds on `threads` threads, in the vectors of a ra_backend_level. Takes
 * about 50 ms. */
double ra_peak_measure(const char *level, int threads);

#endif
