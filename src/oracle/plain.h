/* The computation that sets the tolerance: attention of the whole sequence with the roundings that
 * any dense implementation in the dtype makes, and no others. Results are compared with the oracle
 * by how much worse than this they are. Must not know tiles, hops or shards. */
#ifndef RA_ORACLE_PLAIN_H
#define RA_ORACLE_PLAIN_H

#include "base/status.h"

/* Like ra_oracle_forward and ra_oracle_backward, but inputs are used in their dtype; scores,
 * softmax, lse and delta are f32; P and dS are rounded to the dtype before their products, whose
 * sums are f32; results have the dtype of the layer, lse is f32. The backward uses the rounded out
 * and the lse of the plain forward, which it recomputes. */
ra_status ra_plain_forward(const ra_step_desc *whole, const ra_layer *layer,
                           const ra_forward_io *io);
ra_status ra_plain_backward(const ra_step_desc *whole, const ra_layer *layer,
                            const ra_backward_io *io);

#endif
