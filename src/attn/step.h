/* One batch's documents, padding and images, as all ranks hold them, and the plan of every layer
 * kind. This object is the per-step cache: all layers of a kind, forward, backward and
 * recomputation, read the same plan. */
#ifndef RA_ATTN_STEP_H
#define RA_ATTN_STEP_H

#include "attn/ctx.h"
#include "attn/path.h"
#include "attn/scratch.h"

struct ra_plan {
    const ra_step *step;
    const ra_layer *layer;
    ra_path_choice choice;
    ra_schedule schedule;
    /* The backend's work lists; NULL entries where it needs none. */
    void **fold_lists; /* [hop_count] */
    void **grad_lists; /* [pass_count]; those of the hop where the pass has its cover */
    uint64_t forward_bytes, backward_bytes; /* of scratch; backward 0 if forward_only */
};

struct ra_step {
    ra_ctx *ctx;
    int64_t rows, seq_local;
    bool has_documents, has_vision;
    ra_shards shards;
    ra_tokens tokens;
    ra_pieces pieces; /* of all ranks */
    int64_t idle_count;
    ra_local_rows *idle; /* this rank's padding: rows that attend nothing */
    ra_plan plan[RA_LAYERS_MAX];
};

ra_scratch_shape ra_plan_shape(const ra_plan *plan);

#endif
