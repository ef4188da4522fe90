/* Every argument check of forward and backward, before anything is sent or written. */
#ifndef RA_ATTN_CHECK_H
#define RA_ATTN_CHECK_H

#include "attn/step.h"

ra_status ra_forward_check(const ra_ctx *ctx, const ra_plan *plan, const ra_forward_io *io);
ra_status ra_backward_check(const ra_ctx *ctx, const ra_plan *plan, const ra_backward_io *io);

#endif
