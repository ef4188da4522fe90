/* The metadata of the whole batch, as every rank holds it: runs of one document and vision blocks
 * of the full rows. Turns the run-length records that ranks exchange into sorted lists. Must not
 * know tensors or layers. */
#ifndef RA_PLAN_TOKENS_H
#define RA_PLAN_TOKENS_H

#include "plan/shard.h"

/* Consecutive local tokens of equal document and kind: what a rank says of its slice. */
typedef struct ra_token_run {
    int64_t count;
    int32_t doc;    /* <= 0 is padding */
    int32_t vision; /* 1 = image or video */
} ra_token_run;

/* Consecutive positions of one document in one row; padding is in none. */
typedef struct ra_doc_span {
    int64_t row, begin, end;
    int32_t doc;
} ra_doc_span;

typedef struct ra_tokens {
    int64_t rows, seq;
    int64_t span_count;
    ra_doc_span *span; /* [span_count] by (row, doc, begin) */
    int64_t block_count;
    ra_range *block;      /* [block_count] vision blocks by (row, begin) */
    int64_t *block_first; /* [rows + 1] first block of a row */
} ra_tokens;

/* Run-length codes a slice [rows, seq_local]; runs restart at each row. Free *out with ra_free. */
ra_status ra_token_runs_encode(const ra_step_desc *desc, ra_token_run **out, int64_t *count);

/* runs: those of rank 0, then of rank 1, ...; run_counts [rank_count]. */
ra_status ra_tokens_build(const ra_shards *shards, int64_t rows, const int64_t *run_counts,
                          const ra_token_run *runs, ra_tokens *out);
void ra_tokens_free(ra_tokens *tokens);

/* The first vision block of the row that ends behind a position; block_first[row + 1] if none. */
int64_t ra_tokens_block_behind(const ra_tokens *tokens, int64_t row, int64_t pos);
/* The vision block of a position, an empty range for text. */
ra_range ra_tokens_block(const ra_tokens *tokens, int64_t row, int64_t pos);

#endif
