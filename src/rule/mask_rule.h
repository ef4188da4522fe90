/*
 * The one mask rule, in its two forms: a predicate on a pair of tokens (the definition) and, for a
 * query, the interval of key positions that the predicate allows inside the query's document (what
 * plans and kernels use). tests/test_rule.c proves them equal on every pair. Scalar, for host and
 * device. docs/mask.md explains it.
 *
 * Why an interval is enough: without vision the allowed keys are a band around the query. A vision
 * block is a run of consecutive positions that contains the query, and so is the band, so their
 * union is again one run. Both ends never move backwards as the query moves forward, which is why a
 * tile of queries needs one run of keys, partial at its two ends and full between them.
 */
#ifndef RA_RULE_MASK_RULE_H
#define RA_RULE_MASK_RULE_H

#include "base/limits.h"
#include "base/mathx.h"
#include "ringattn.h"

#ifdef __CUDACC__
#define RA_RULE static inline __host__ __device__
#else
#define RA_RULE static inline
#endif

typedef struct ra_mask {
    bool causal;
    int64_t window, window_right; /* 0 = none; at most RA_SEQ_MAX, which sees everything */
    ra_vision vision;
} ra_mask;

/* Positions [begin, end). */
typedef struct ra_range {
    int64_t begin, end;
} ra_range;

RA_RULE ra_mask ra_mask_of_layer(const ra_layer *layer)
{
    ra_mask mask = {layer->causal, ra_min_i64(layer->window, RA_SEQ_MAX),
                    ra_min_i64(layer->window_right, RA_SEQ_MAX),
                    layer->window > 0 ? layer->vision : RA_VISION_OFF};
    return mask;
}

/* May `query` attend `key`? Both are tokens of one batch row. */
RA_RULE bool ra_mask_rule(const ra_mask *mask, ra_token query, ra_token key)
{
    int64_t age = query.pos - key.pos;
    bool same_doc = query.doc > 0 && query.doc == key.doc;
    bool same_block = mask->vision != RA_VISION_OFF && query.group >= 0 && query.group == key.group;
    bool in_order = !mask->causal || age >= 0;
    bool in_window = (mask->window == 0 || age < mask->window) &&
                     (mask->window_right == 0 || -age < mask->window_right);
    if (mask->vision == RA_VISION_OVER_WINDOW) {
        return same_doc && ((in_order && in_window) || same_block);
    }
    return same_doc && (in_order || same_block) && in_window;
}

/* The positions that a query at `pos` may attend inside its document. block: the vision block that
 * holds it, or an empty range for text. Always contains pos itself. */
RA_RULE ra_range ra_mask_reach(const ra_mask *mask, int64_t pos, ra_range block)
{
    bool has_block = mask->vision != RA_VISION_OFF && block.begin < block.end;
    int64_t left = mask->window ? pos - mask->window + 1 : -RA_SEQ_MAX;
    int64_t right = mask->window_right ? pos + mask->window_right : 2 * RA_SEQ_MAX;
    int64_t ahead = mask->causal ? pos + 1 : 2 * RA_SEQ_MAX;
    ra_range reach = {left, ra_min_i64(ahead, right)};
    if (has_block && mask->vision == RA_VISION_OVER_WINDOW) {
        reach.begin = ra_min_i64(reach.begin, block.begin);
        reach.end = ra_max_i64(reach.end, block.end);
    } else if (has_block) {
        reach.end = ra_min_i64(ra_max_i64(ahead, block.end), right);
    }
    return reach;
}

#endif
