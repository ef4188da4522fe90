/* Compares a result with the reference by the errors of the plain computation; sums in double. Must
 * not know what a tensor holds. */
#include "oracle/tolerance.h"

#include <math.h>

#include "tensor/check.h"

double ra_unit_roundoff(ra_dtype dtype)
{
    switch (dtype) {
    case RA_F32: return 0x1p-24;
    case RA_F16: return 0x1p-11;
    case RA_BF16: return 0x1p-8;
    case RA_F64: return 0x1p-53;
    }
    return 0;
}

/* Largest magnitude and sum of squares of one error or value. */
typedef struct extent {
    double max, squares;
    int64_t count;
} extent;

static bool extent_add(extent *e, double x)
{
    bool larger = fabs(x) > e->max;
    e->max = larger ? fabs(x) : e->max;
    e->squares += x * x;
    e->count++;
    return larger;
}

static double extent_rms(const extent *e)
{
    return e->count ? sqrt(e->squares / (double)e->count) : 0;
}

/* Sums over all elements. */
typedef struct sums {
    extent error, plain, reference;
} sums;

static bool same_special(double a, double b)
{
    return (isnan(a) && isnan(b)) || a == b;
}

static void worst_set(ra_comparison *out, const int64_t at[RA_NDIM], double got, double expected)
{
    memcpy(out->worst, at, sizeof out->worst);
    out->worst_got = got;
    out->worst_expected = expected;
}

static void element_add(sums *total, const int64_t at[RA_NDIM], double got, double plain,
                        double reference, ra_comparison *out)
{
    if (!isfinite(got) || !isfinite(reference)) {
        if (!same_special(got, reference)) {
            if (out->misplaced++ == 0) {
                worst_set(out, at, got, reference);
            }
        }
        return;
    }
    extent_add(&total->reference, reference);
    if (isfinite(plain)) { /* An overflow of the plain computation must not allow any error. */
        extent_add(&total->plain, plain - reference);
    }
    if (extent_add(&total->error, got - reference) && out->misplaced == 0) {
        worst_set(out, at, got, reference);
    }
}

ra_status ra_compare(const ra_tensor *got, const ra_tensor *plain, const ra_tensor *reference,
                     ra_dtype rule_dtype, ra_comparison *out)
{
    sums total = {0};
    ra_comparison result = {0};
    double u = ra_unit_roundoff(rule_dtype);
    RA_TRY(ra_view_check(got, "got", false));
    const int64_t *size = got->size;
    RA_TRY(ra_view_check(plain, "plain", false));
    RA_TRY(ra_tensor_check(plain, "plain", plain->dtype, size[0], size[1], size[2], size[3]));
    RA_TRY(ra_view_check(reference, "reference", false));
    RA_TRY(ra_tensor_check(reference, "reference", reference->dtype, size[0], size[1], size[2],
                           size[3]));
    if (u == 0) {
        return RA_FAIL(RA_E_ARG, "rule_dtype: %d, expected one of the ra_dtype values",
                       (int)rule_dtype);
    }
    int64_t at[RA_NDIM];
    for (at[0] = 0; at[0] < size[0]; at[0]++) {
        for (at[1] = 0; at[1] < size[1]; at[1]++) {
            for (at[2] = 0; at[2] < size[2]; at[2]++) {
                for (at[3] = 0; at[3] < size[3]; at[3]++) {
                    element_add(&total, at, ra_tensor_get(got, at[0], at[1], at[2], at[3]),
                                ra_tensor_get(plain, at[0], at[1], at[2], at[3]),
                                ra_tensor_get(reference, at[0], at[1], at[2], at[3]), &result);
                }
            }
        }
    }
    result.max_error = total.error.max;
    result.rms_error = extent_rms(&total.error);
    result.max_allowed = 2 * total.plain.max + 2 * u * total.reference.max;
    result.rms_allowed = 1.5 * extent_rms(&total.plain) + 0.5 * u * extent_rms(&total.reference);
    result.pass = result.misplaced == 0 && result.max_error <= result.max_allowed &&
                  result.rms_error <= result.rms_allowed;
    *out = result;
    return RA_OK;
}
