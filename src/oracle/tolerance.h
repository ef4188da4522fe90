/* The one definition of "close enough": a result may be a little worse than the plain computation
 * in the same dtype is, both measured against the oracle. Must not know what a tensor holds. */
#ifndef RA_ORACLE_TOLERANCE_H
#define RA_ORACLE_TOLERANCE_H

#include "base/status.h"

typedef struct ra_comparison {
    double max_error, rms_error;      /* of the result against the reference */
    double max_allowed, rms_allowed;  /* what the plain computation's error allows */
    int64_t worst[RA_NDIM];           /* first misplaced Inf or NaN, else the largest error */
    double worst_got, worst_expected; /* there */
    int64_t misplaced;                /* elements whose Inf or NaN is not the reference's */
    bool pass;
} ra_comparison;

/* pass: max|err| <= 2 max|err_plain| + 2 u max|ref| and rms(err) <= 1.5 rms(err_plain) + 0.5 u
 * rms(ref), u the unit roundoff of rule_dtype (RA_F32 for lse); Inf and NaN stand where the
 * reference has them, and are left out of the sums. Equal sizes, any dtypes. */
ra_status ra_compare(const ra_tensor *got, const ra_tensor *plain, const ra_tensor *reference,
                     ra_dtype rule_dtype, ra_comparison *out);

/* 2^-24, 2^-11, 2^-8 or 2^-53. */
double ra_unit_roundoff(ra_dtype dtype);

#endif
