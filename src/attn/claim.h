/* What a rank says of its configuration before ranks work together, and the first difference
 * between ranks. Everything that must be equal is in it; what may differ is not. */
#ifndef RA_ATTN_CLAIM_H
#define RA_ATTN_CLAIM_H

#include "attn/ctx.h"

/* Texts "name value, name value, ...": equal exactly if the configurations are, and ready for the
 * message if they are not. Names have no blank, values no comma. */
typedef struct ra_claim {
    char common[160];
    char layer[RA_LAYERS_MAX][192];
} ra_claim;

ra_claim ra_claim_make(const ra_ctx *ctx);

/* all: [size], in the order of the ranks. RA_E_MISMATCH names the item and two ranks with their
 * values. */
ra_status ra_claims_compare(const ra_claim *all, int size);

#endif
