/*
 * Sends the dK/dV partial sums of hop after hop back to the owners of the rows and adds what
 * arrives to this rank's own sums, in hop order, so that the bits never depend on timing. What
 * arrives lands in places of bounded size, piece by piece: while one is added, the next piece lands
 * in another. While hop h is computed into one slot, hop h - 1's sums travel from the other. Under
 * the computation behind the last hop, which changes this rank's own sums, pieces only land. Must
 * not know the mask or what is computed.
 */
#ifndef RA_RING_ROUTE_H
#define RA_RING_ROUTE_H

#include "ring/ring.h"

/* Room of backends that do not know better, and pieces in it: those of a few MiB move fastest
 * between processes. */
enum { RA_LANDING_BYTES = 16 << 20, RA_LANDING_PIECES = 8 };

/* Where gradients arrive: equal on all ranks. */
typedef struct ra_landing {
    int64_t rows; /* of a piece */
    int count;    /* places: RA_LANDING_PIECES, or as many as the largest hop has pieces */
} ra_landing;

typedef struct ra_route ra_route;

typedef struct ra_route_task {
    const ra_route *route;
    int hop;
} ra_route_task;

struct ra_route {
    const ra_ring *ring;
    ra_tensor dk, dv;            /* f32 sums of this rank's own rows, [B, Hkv, S, D] */
    void *slot_k[2], *slot_v[2]; /* f32 partial sums of a chunk's rows */
    ra_landing landing;
    void *landing_k, *landing_v; /* f32, [landing.count, Hkv, landing.rows, D] */
    ra_route_task task[2];
    int64_t ticket[2];
};

/* The landing for the largest messages, from what all ranks know, in about `bytes` for keys and
 * values together; 0 = the above. */
ra_landing ra_route_landing(const ra_schedule *schedule, int64_t heads, int64_t head_dim,
                            int64_t bytes);

/* Room for the sums of hop >= 1's rows, [1, Hkv, chunk_rows, D] f32; waits until the slot's last
 * sums are on their way. */
ra_status ra_route_slot(ra_route *route, int hop, ra_tensor *dk, ra_tensor *dv);
/* The mark behind which a hop's sums travel. */
int ra_route_mark(int hop);
/* Posts the exchange of hop's sums; marked: the computation has set the mark. What comes home is
 * added, beside the computation of other hops than 0. Of the last hop it only lands, as much as
 * there is room for, under the rest of hop 0, */
ra_status ra_route_send(ra_route *route, int hop, bool marked);
/* before which this waits until all is added that is going to be, */
ra_status ra_route_settle(ra_route *route);
/* and behind which this adds it, and posts what there was no room for. */
ra_status ra_route_add(ra_route *route);
/* Waits until every sum is where it belongs, or will be by computations called so far. */
ra_status ra_route_finish(ra_route *route);

#endif
