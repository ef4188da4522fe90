/* A whole batch as the oracle and the plain computation see it: one token record an element, and
 * the argument checks that both share. Must not know how attention is computed. */
#ifndef RA_ORACLE_WHOLE_H
#define RA_ORACLE_WHOLE_H

#include "rule/mask_rule.h"
#include "tensor/tensor.h"

typedef struct ra_whole {
    int64_t rows, seq;
    ra_mask mask;
    ra_token *token; /* [rows, seq]; doc is 0 for padding */
} ra_whole;

/* Checks desc (its runs are ignored) and layer. */
ra_status ra_whole_build(const ra_step_desc *desc, const ra_layer *layer, ra_whole *out);
void ra_whole_free(ra_whole *whole);

/* May query position i attend key position j of a row? The rule, per element. */
static inline bool ra_whole_allows(const ra_whole *whole, int64_t row, int64_t i, int64_t j)
{
    const ra_token *token = whole->token + row * whole->seq;
    return ra_mask_rule(&whole->mask, token[i], token[j]);
}

/* wide: may results be RA_F64 and of any dtype? Else they have the dtypes of the operation. */
ra_status ra_whole_forward_check(const ra_whole *whole, const ra_layer *layer,
                                 const ra_forward_io *io, bool wide);
ra_status ra_whole_backward_check(const ra_whole *whole, const ra_layer *layer,
                                  const ra_backward_io *io, bool wide);

#endif
