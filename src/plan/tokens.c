/* Run-length records of all ranks to document spans and vision blocks of the full rows. */
#include "plan/tokens.h"

#include <stdlib.h>

#include "base/alloc.h"

static ra_token_run token_at(const ra_step_desc *desc, int64_t row, int64_t index)
{
    int64_t at = row * desc->seq_local + index;
    bool pad = desc->is_pad && desc->is_pad[at];
    int32_t doc = pad ? 0 : desc->doc_id ? desc->doc_id[at] : 1;
    int32_t type = desc->token_type ? desc->token_type[at] : 0;
    return (ra_token_run){1, doc > 0 ? doc : 0, type == 1 || type == 2};
}

ra_status ra_token_runs_encode(const ra_step_desc *desc, ra_token_run **out, int64_t *count)
{
    ra_token_run *runs = NULL;
    int64_t used = 0, capacity = 0;
    bool plain = !desc->doc_id && !desc->is_pad && !desc->token_type;
    for (int64_t row = 0; row < desc->rows; row++) {
        if (plain && desc->seq_local > 0) { /* one document of text a row: nothing to read */
            ra_status status = RA_RESERVE(&runs, &capacity, desc->rows);
            if (status) {
                return status;
            }
            runs[used++] = (ra_token_run){desc->seq_local, 1, 0};
            continue;
        }
        for (int64_t i = 0; i < desc->seq_local; i++) {
            ra_token_run token = token_at(desc, row, i);
            if (i > 0 && runs[used - 1].doc == token.doc && runs[used - 1].vision == token.vision) {
                runs[used - 1].count++;
                continue;
            }
            ra_status status = RA_RESERVE(&runs, &capacity, used + 1);
            if (status) {
                ra_free(runs);
                return status;
            }
            runs[used++] = token;
        }
    }
    *out = runs;
    *count = used;
    return RA_OK;
}

/* A run of one rank's slice, placed in the row. */
typedef struct placed_run {
    int64_t row, begin, end;
    int32_t doc, vision;
} placed_run;

/* What comes from contiguous shards, or with rising ids, is in order already. */
static void sort(void *items, int64_t count, size_t bytes,
                 int (*compare)(const void *, const void *))
{
    const char *at = items;
    int64_t i = 1;
    while (i < count && compare(at + (size_t)(i - 1) * bytes, at + (size_t)i * bytes) <= 0) {
        i++;
    }
    if (i < count) {
        qsort(items, (size_t)count, bytes, compare);
    }
}

static int compare_position(const void *a, const void *b)
{
    const placed_run *left = a, *right = b;
    if (left->row != right->row) {
        return left->row < right->row ? -1 : 1;
    }
    return (left->begin > right->begin) - (left->begin < right->begin);
}

static int compare_span(const void *a, const void *b)
{
    const ra_doc_span *left = a, *right = b;
    if (left->row != right->row) {
        return left->row < right->row ? -1 : 1;
    }
    if (left->doc != right->doc) {
        return left->doc < right->doc ? -1 : 1;
    }
    return (left->begin > right->begin) - (left->begin < right->begin);
}

/* One rank's owned runs in the order of its memory. */
static int compare_memory(const void *a, const void *b)
{
    const ra_owned_run *left = a, *right = b;
    if (left->owner != right->owner) {
        return left->owner < right->owner ? -1 : 1;
    }
    return (left->index > right->index) - (left->index < right->index);
}

/* Cuts the token runs of one row of one rank at the ends of its owned runs. */
static ra_status place_row(const ra_owned_run *owned, int64_t length, int64_t row,
                           const ra_token_run **next, const ra_token_run *end, placed_run **placed,
                           int64_t *placed_count, int64_t *capacity)
{
    int64_t index = 0;
    while (index < length) {
        if (*next == end || (*next)->count <= 0 || (*next)->count > length - index) {
            return RA_FAIL(RA_E_MISMATCH, "token runs of row %lld do not add up to %lld tokens",
                           (long long)row, (long long)length);
        }
        ra_token_run run = *(*next)++;
        while (run.count > 0) {
            while (index >= owned->index + owned->count) {
                owned++;
            }
            int64_t take = ra_min_i64(run.count, owned->index + owned->count - index);
            int64_t begin = owned->start + index - owned->index;
            RA_TRY(RA_RESERVE(placed, capacity, *placed_count + 1));
            (*placed)[(*placed_count)++] =
                (placed_run){row, begin, begin + take, run.doc, run.vision};
            index += take;
            run.count -= take;
        }
    }
    return RA_OK;
}

/* All ranks' runs, placed and sorted by position. */
static ra_status place_all(const ra_shards *shards, int64_t rows, const int64_t *run_counts,
                           const ra_token_run *runs, placed_run **placed, int64_t *placed_count)
{
    ra_owned_run *by_memory = NULL;
    int64_t capacity = 0, owned_first = 0;
    if (shards->run_count == 0) {
        return RA_OK; /* no tokens, no lists */
    }
    ra_status status = RA_NEW(&by_memory, shards->run_count);
    for (int64_t i = 0; !status && i < shards->run_count; i++) {
        by_memory[i] = shards->run[i];
    }
    if (!status) {
        sort(by_memory, shards->run_count, sizeof *by_memory, compare_memory);
    }
    for (int rank = 0; !status && rank < shards->rank_count; rank++) {
        const ra_token_run *next = runs, *end = runs + run_counts[rank];
        for (int64_t row = 0; !status && row < rows; row++) {
            status = place_row(by_memory + owned_first, shards->length[rank], row, &next, end,
                               placed, placed_count, &capacity);
        }
        runs = end;
        while (owned_first < shards->run_count && by_memory[owned_first].owner == rank) {
            owned_first++;
        }
    }
    if (!status) {
        sort(*placed, *placed_count, sizeof **placed, compare_position);
    }
    ra_free(by_memory);
    return status;
}

/* Neighbouring runs of one document become one span; a run of vision tokens becomes one block. */
static void join(const placed_run *placed, int64_t count, ra_tokens *tokens)
{
    const placed_run *before = NULL;
    for (int64_t i = 0; i < count; i++) {
        const placed_run *run = &placed[i];
        bool touches = before && before->row == run->row && before->end == run->begin;
        if (run->doc > 0 && touches && before->doc == run->doc) {
            tokens->span[tokens->span_count - 1].end = run->end;
        } else if (run->doc > 0) {
            tokens->span[tokens->span_count++] =
                (ra_doc_span){run->row, run->begin, run->end, run->doc};
        }
        if (run->vision && touches && before->vision) {
            tokens->block[tokens->block_count - 1].end = run->end;
        } else if (run->vision) {
            tokens->block[tokens->block_count++] = (ra_range){run->begin, run->end};
            tokens->block_first[run->row + 1] = tokens->block_count;
        }
        before = run;
    }
    for (int64_t row = 0; row < tokens->rows; row++) {
        tokens->block_first[row + 1] =
            ra_max_i64(tokens->block_first[row + 1], tokens->block_first[row]);
    }
}

ra_status ra_tokens_build(const ra_shards *shards, int64_t rows, const int64_t *run_counts,
                          const ra_token_run *runs, ra_tokens *out)
{
    ra_tokens tokens = {.rows = rows, .seq = shards->seq};
    placed_run *placed = NULL;
    int64_t placed_count = 0, span_max = 0, block_max = 0;
    ra_status status = place_all(shards, rows, run_counts, runs, &placed, &placed_count);
    for (int64_t i = 0; i < placed_count; i++) {
        span_max += placed[i].doc > 0;
        block_max += placed[i].vision;
    }
    if (!status) {
        status = RA_NEW(&tokens.span, span_max);
    }
    if (!status) {
        status = RA_NEW(&tokens.block, block_max);
    }
    if (!status) {
        status = RA_NEW(&tokens.block_first, rows + 1);
    }
    if (!status) {
        join(placed, placed_count, &tokens);
        sort(tokens.span, tokens.span_count, sizeof *tokens.span, compare_span);
        *out = tokens;
    } else {
        ra_tokens_free(&tokens);
    }
    ra_free(placed);
    return status;
}

void ra_tokens_free(ra_tokens *tokens)
{
    ra_free(tokens->span);
    ra_free(tokens->block);
    ra_free(tokens->block_first);
    *tokens = (ra_tokens){0};
}

int64_t ra_tokens_block_behind(const ra_tokens *tokens, int64_t row, int64_t pos)
{
    int64_t low = tokens->block_first[row], high = tokens->block_first[row + 1];
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (tokens->block[middle].end <= pos) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

ra_range ra_tokens_block(const ra_tokens *tokens, int64_t row, int64_t pos)
{
    int64_t low = ra_tokens_block_behind(tokens, row, pos);
    if (low < tokens->block_first[row + 1] && tokens->block[low].begin <= pos) {
        return tokens->block[low];
    }
    return (ra_range){pos, pos};
}
