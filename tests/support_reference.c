/* The answer to compare with: fp64 oracle, and the plain computation that sets the tolerance. */
#include <stdio.h>
#include <stdlib.h>

#include "oracle/plain.h"
#include "oracle/tolerance.h"
#include "support_problem.h"

/* A test for another machine defines it as what computes there (tests/gpu/on_device.h). */
#ifndef reference_sum
static ra_plain_sum reference_sum(const ra_layer *layer)
{
    (void)layer;
    return RA_PLAIN_SUM_F32;
}
#endif

void reference_create(reference *ref, const problem *p)
{
    ra_step_desc desc = problem_desc(p);
    ra_plain_sum sum = reference_sum(&p->layer);
    answer_create(&ref->oracle, p, RA_F64, RA_F64, false);
    answer_create(&ref->plain, p, p->layer.dtype, RA_F32, false);
    for (int i = 0; i < 2; i++) {
        answer *a = i == 0 ? &ref->oracle : &ref->plain;
        ra_forward_io forward = {
            .size = sizeof forward, .q = p->q, .k = p->k, .v = p->v, .out = a->out, .lse = a->lse};
        ra_backward_io backward = {.size = sizeof backward,
                                   .q = p->q,
                                   .k = p->k,
                                   .v = p->v,
                                   .dout = p->dout,
                                   .dq = a->dq,
                                   .dk = a->dk,
                                   .dv = a->dv};
        ra_status status = i == 0 ? ra_oracle_forward(&desc, &p->layer, &forward)
                                  : ra_plain_forward(sum, &desc, &p->layer, &forward);
        if (status == RA_OK) {
            status = i == 0 ? ra_oracle_backward(&desc, &p->layer, &backward)
                            : ra_plain_backward(sum, &desc, &p->layer, &backward);
        }
        if (status != RA_OK) {
            fail_msg("%s: reference: %s", support_case(), ra_last_error());
        }
    }
}

void reference_free(reference *ref)
{
    answer_free(&ref->oracle, false);
    answer_free(&ref->plain, false);
}

static const double TINY_FLOOR = 256 * 0x1p-24; /* of the largest value, or of 1 */

static void check_tensor(const char *name, const ra_tensor *got, const ra_tensor *plain,
                         const ra_tensor *oracle, ra_dtype rule, const problem *p, bool tiny)
{
    ra_comparison c;
    assert_int_equal(ra_compare(got, plain, oracle, rule, &c), RA_OK);
    bool rounding = tiny && c.misplaced == 0 && c.max_error <= TINY_FLOOR * tensor_largest(oracle);
    if (!c.pass && !rounding) {
        problem_print(p, NULL);
        fail_msg("%s: %s: max error %.3g (allowed %.3g), rms %.3g (%.3g), %lld misplaced; worst at "
                 "[%lld, %lld, %lld, %lld]: %.9g, expected %.9g",
                 support_case(), name, c.max_error, c.max_allowed, c.rms_error, c.rms_allowed,
                 (long long)c.misplaced, (long long)c.worst[RA_ROW], (long long)c.worst[RA_HEAD],
                 (long long)c.worst[RA_SEQ], (long long)c.worst[RA_CHAN], c.worst_got,
                 c.worst_expected);
    }
}

static void check_all(const reference *ref, const problem *p, const answer *got, bool backward,
                      bool tiny)
{
    const answer *plain = &ref->plain, *oracle = &ref->oracle;
    ra_dtype dtype = p->layer.dtype;
    check_tensor("out", &got->out, &plain->out, &oracle->out, dtype, p, tiny);
    check_tensor("lse", &got->lse, &plain->lse, &oracle->lse, RA_F32, p, tiny);
    if (backward) {
        check_tensor("dq", &got->dq, &plain->dq, &oracle->dq, dtype, p, tiny);
        check_tensor("dk", &got->dk, &plain->dk, &oracle->dk, dtype, p, tiny);
        check_tensor("dv", &got->dv, &plain->dv, &oracle->dv, dtype, p, tiny);
    }
}

void reference_check(const reference *ref, const problem *p, const answer *got, bool backward)
{
    check_all(ref, p, got, backward, false);
}

void reference_check_tiny(const reference *ref, const problem *p, const answer *got)
{
    check_all(ref, p, got, true, true);
}
