/* Is a layer kind one that the library computes? Every entry that takes an ra_layer asks here
 * first, so that all of them refuse the same things in the same words. Must not know tensors. */
#ifndef RA_RULE_LAYER_H
#define RA_RULE_LAYER_H

#include "base/status.h"

/* RA_E_ARG or RA_E_SHAPE names the member, its value and what was expected; RA_E_UNSUPPORTED lists
 * every option that is not offered. */
ra_status ra_layer_check(const ra_layer *layer);

#endif
