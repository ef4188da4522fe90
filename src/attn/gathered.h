/* Every rank's slice description in every rank's memory: gathered once a step, so that no metadata
 * travels with keys and values. */
#ifndef RA_ATTN_GATHERED_H
#define RA_ATTN_GATHERED_H

#include "attn/ctx.h"

typedef struct ra_gathered {
    int64_t rows;
    bool has_documents;       /* somebody gave doc_id */
    int *run_counts;          /* [ranks] */
    ra_run *runs;             /* rank 0's, rank 1's, ...; contiguous shards are written out */
    int64_t *token_counts;    /* [ranks] */
    ra_token_run *token_runs; /* likewise */
} ra_gathered;

/* Collective; every rank gets the same status. */
ra_status ra_gathered_build(ra_ctx *ctx, const ra_step_desc *desc, ra_gathered *out);
void ra_gathered_free(ra_gathered *gathered);

#endif
