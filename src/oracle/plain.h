/* The computation that sets the tolerance: attention of the whole sequence with the roundings that
 * any dense implementation in the dtype makes, and no others. Results are compared with the oracle
 * by how much worse than this they are. Must not know tiles, hops or shards. */
#ifndef RA_ORACLE_PLAIN_H
#define RA_ORACLE_PLAIN_H

#include "base/status.h"

/* What an f32 sum over channels is where the result under test was computed: the sums behind scores
 * and behind dout.v. */
typedef enum ra_plain_sum {
    RA_PLAIN_SUM_F32, /* every product and sum rounded to nearest */
    /* Tensor cores, half dtypes only (f32 keeps RA_PLAIN_SUM_F32): products of 16 channels are
     * exact, are added to the accumulator exactly, and the sum is cut to f32 toward zero. So the
     * result of D channels lies up to D / 16 ulp low, whoever computes there. A model of what Fasi,
     * Higham, Mikaitis and Pranesh measured ("Numerical behavior of NVIDIA tensor cores", PeerJ
     * Computer Science 7, 2021) and of the 16 channels that one instruction of Hopper takes; the
     * bits that the hardware also cuts off single products are left out. */
    RA_PLAIN_SUM_TENSOR,
} ra_plain_sum;

/* Like ra_oracle_forward and ra_oracle_backward, but inputs are used in their dtype; scores,
 * softmax, lse and delta are f32; P and dS are rounded to the dtype before their products, whose
 * sums are f32; results have the dtype of the layer, lse is f32. The backward uses the rounded out
 * and the lse of the plain forward, which it recomputes. */
ra_status ra_plain_forward(ra_plain_sum sum, const ra_step_desc *whole, const ra_layer *layer,
                           const ra_forward_io *io);
ra_status ra_plain_backward(ra_plain_sum sum, const ra_step_desc *whole, const ra_layer *layer,
                            const ra_backward_io *io);

/* The sum of a[c] * b[c] over chan channels, a multiple of RA_HEAD_DIM_STEP. */
float ra_plain_dot(ra_plain_sum sum, const float *a, const float *b, int64_t chan);

#endif
