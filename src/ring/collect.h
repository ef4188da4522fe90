/*
 * Brings the key and value rows of hop after hop to this rank. While hop h is computed from one
 * slot, hop h + 1 travels into the other. With kept storage every hop has its own place and stays.
 * Must not know the mask or what is computed.
 */
#ifndef RA_RING_COLLECT_H
#define RA_RING_COLLECT_H

#include "ring/ring.h"

typedef struct ra_collect ra_collect;

typedef struct ra_collect_task {
    ra_collect *collect;
    int hop;
} ra_collect_task;

struct ra_collect {
    const ra_ring *ring;
    ra_tensor k, v;              /* this rank's own, [B, Hkv, S, D] */
    void *slot_k[2], *slot_v[2]; /* used if kept_k.data is NULL */
    ra_tensor kept_k, kept_v;    /* [1, Hkv, kept_seq, D] */
    bool arrived;                /* everything is in kept_k, kept_v already: nothing is exchanged */
    ra_collect_task task[2];
    int64_t ticket[2];
};

/* Posts the first exchange. fills: the next computation fills the device for long, so that the
 * exchange has to begin before it. */
ra_status ra_collect_start(ra_collect *collect, bool fills);
/* Hands out hop >= 1's rows, [1, Hkv, chunk_rows, D], and posts the next exchange: hop - 1's rows
 * are given back by this. */
ra_status ra_collect_next(ra_collect *collect, int hop, ra_tensor *k, ra_tensor *v);

#endif
