/*
 * Layouts: a word of the command line becomes the runs of global positions of every rank. Must not
 * know tensors.
 */
#ifndef RA_CLI_SHARDS_H
#define RA_CLI_SHARDS_H

#include "base/status.h"

typedef enum ra_layout_kind {
    RA_LAYOUT_CONTIGUOUS,
    RA_LAYOUT_ZIGZAG,
    RA_LAYOUT_UNEVEN,
    RA_LAYOUT_RUNS,
    RA_LAYOUT_BALANCED,
} ra_layout_kind;

typedef struct ra_layout {
    ra_layout_kind kind;
    uint64_t seed;    /* of uneven */
    const char *path; /* of runs; borrowed */
    int64_t align;    /* of balanced; 0 = none */
    bool equal_tokens;
} ra_layout;

/* One rank's share of a row. */
typedef struct ra_deal {
    int64_t length; /* positions over all runs */
    int run_count;
    ra_run *runs; /* never NULL: NULL would mean contiguous to ra_step_create */
} ra_deal;

typedef struct ra_deals {
    int ranks;
    int64_t seq;
    ra_deal *deal; /* [ranks] */
} ra_deals;

ra_status ra_layout_parse(const char *text, ra_layout *out);
ra_status ra_vision_parse(const char *name, const char *text, ra_vision *out);
/* "zigzag", "uneven:7", "runs:FILE", "balanced:align=64,equal" */
void ra_layout_print(const ra_layout *layout, char *text, size_t text_bytes);

/* whole: the metadata of the whole batch, and the layer kind: what balanced weighs. */
ra_status ra_deals_build(const ra_layout *layout, int ranks, const ra_step_desc *whole,
                         const ra_layer *layer, ra_deals *out);
void ra_deals_free(ra_deals *deals);

#endif
