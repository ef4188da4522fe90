/* What a rank says of its configuration before ranks work together, and the first difference
 * between ranks. Everything that must be equal is in it; what may differ is not. */
#ifndef RA_ATTN_CLAIM_H
#define RA_ATTN_CLAIM_H

#include "attn/ctx.h"

/* Collective: RA_OK if every rank is ready, with the same configuration. mine: this rank's own
 * failure, with which ctx may be NULL; it becomes every rank's. RA_E_MISMATCH names the item that
 * differs, and two ranks with their values. */
ra_status ra_claims_agree(const ra_ctx *ctx, ra_comm *comm, ra_status mine, int timeout_ms);

#endif
