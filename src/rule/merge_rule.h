/*
 * The one merge rule: two softmax results over disjoint keys become one.
 *   lse = log(exp(a) + exp(b)),  out = keep * out_a + add * out_b,  keep = exp(a - lse), add =
 * exp(b - lse). Two empty parts (-inf, -inf) stay empty: weights 0, lse -inf, never NaN. A part
 * merged with an empty one is kept bit for bit.
 */
#ifndef RA_RULE_MERGE_RULE_H
#define RA_RULE_MERGE_RULE_H

#include <math.h>

#include "rule/mask_rule.h"

typedef struct ra_merge_weights {
    float keep, add, lse;
} ra_merge_weights;

RA_RULE ra_merge_weights ra_merge_rule(float lse_a, float lse_b)
{
    ra_merge_weights weights;
    float high = lse_a > lse_b ? lse_a : lse_b;
    if (lse_b == -INFINITY) {
        weights.keep = lse_a == -INFINITY ? 0.0f : 1.0f;
        weights.add = 0.0f;
        weights.lse = lse_a;
    } else if (lse_a == -INFINITY) {
        weights.keep = 0.0f;
        weights.add = 1.0f;
        weights.lse = lse_b;
    } else {
        float exp_a = expf(lse_a - high), exp_b = expf(lse_b - high);
        weights.keep = exp_a / (exp_a + exp_b);
        weights.add = exp_b / (exp_a + exp_b);
        weights.lse = high + logf(exp_a + exp_b);
    }
    return weights;
}

#endif
