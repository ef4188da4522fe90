/*
 * What the ring's results are measured against: the truth (the file's expected tensors, or the fp64
 * oracle) and the plain computation that sets the tolerance. Both are computed per batch row and
 * key head, which are independent, on all CPUs. Must not know ranks.
 */
#ifndef RA_CLI_REFERENCE_H
#define RA_CLI_REFERENCE_H

#include "cli/case.h"
#include "oracle/plain.h"

typedef struct ra_reference {
    ra_tensor truth[RA_RESULT_COUNT]; /* RA_F64, or the file's */
    ra_tensor plain[RA_RESULT_COUNT]; /* the layer's dtype; lse RA_F32 */
    void *owned[2][RA_RESULT_COUNT];  /* truth, plain */
} ra_reference;

/* sum: of the plain computation, as where the results were computed. */
ra_status ra_reference_build(const ra_case *c, ra_plain_sum sum, bool backward, ra_reference *out);
void ra_reference_free(ra_reference *reference);

#endif
