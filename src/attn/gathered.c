/* Two gathers: fixed-size heads, then the run lists, padded to the longest. */
#include "attn/gathered.h"

#include <string.h>

#include "base/alloc.h"
#include "base/hash.h"
#include "plan/desc.h"

/* What a rank says first. */
typedef struct head {
    int64_t rows, seq_local, run_count, token_count;
    int32_t has_runs, has_documents;
} head;

/* This rank's side while it gathers. */
typedef struct exchange {
    int size;
    head mine;
    ra_token_run *tokens; /* [mine.token_count] */
    head *heads;          /* [size] */
    size_t bytes;         /* of one rank's lists, padded */
    char *lists;          /* [bytes] runs, then token runs */
    char *all;            /* [size][bytes] */
} exchange;

static ra_status open_local(ra_ctx *ctx, const ra_step_desc *desc, exchange *x)
{
    if (!desc) {
        return RA_FAIL(RA_E_ARG, "desc: NULL");
    }
    RA_TRY(ra_step_desc_check(desc));
    x->size = ra_comm_size(ctx->comm);
    x->mine = (head){desc->rows, desc->seq_local,    desc->runs ? desc->run_count : 0,
                     0,          desc->runs != NULL, desc->doc_id != NULL};
    RA_TRY(RA_NEW(&x->heads, x->size));
    return ra_token_runs_encode(desc, &x->tokens, &x->mine.token_count);
}

static ra_status compare_heads(const exchange *x)
{
    int64_t seq = 0;
    int speaker = -1;
    for (int rank = 0; rank < x->size; rank++) {
        const head *h = &x->heads[rank], *first = &x->heads[0];
        if (h->rows != first->rows) {
            return RA_FAIL(RA_E_MISMATCH, "desc.rows: rank %d has %lld, rank 0 has %lld", rank,
                           (long long)h->rows, (long long)first->rows);
        }
        /* A rank without tokens says nothing of documents. */
        speaker = speaker < 0 && h->seq_local > 0 ? rank : speaker;
        if (h->seq_local > 0 && h->has_documents != x->heads[speaker].has_documents) {
            return RA_FAIL(RA_E_MISMATCH, "desc.doc_id: rank %d gives %s, rank %d %s", rank,
                           h->has_documents ? "documents" : "none", speaker,
                           h->has_documents ? "none" : "documents");
        }
        if (h->has_runs != first->has_runs) {
            return RA_FAIL(RA_E_MISMATCH, "desc.runs: rank %d gives %s, rank 0 %s", rank,
                           h->has_runs ? "runs" : "none", first->has_runs ? "runs" : "none");
        }
        seq += h->seq_local;
    }
    if (seq > RA_SEQ_MAX) {
        return RA_FAIL(RA_E_ARG,
                       "desc.seq_local: %lld tokens over all ranks, expected at most %lld",
                       (long long)seq, (long long)RA_SEQ_MAX);
    }
    return RA_OK;
}

static ra_status open_lists(const ra_step_desc *desc, exchange *x)
{
    for (int rank = 0; rank < x->size; rank++) {
        size_t bytes = (size_t)x->heads[rank].run_count * sizeof(ra_run) +
                       (size_t)x->heads[rank].token_count * sizeof(ra_token_run);
        x->bytes = bytes > x->bytes ? bytes : x->bytes;
    }
    RA_TRY(RA_NEW(&x->lists, x->bytes));
    RA_TRY(ra_alloc((size_t)x->size, x->bytes, &x->all));
    size_t run_bytes = (size_t)x->mine.run_count * sizeof(ra_run);
    size_t token_bytes = (size_t)x->mine.token_count * sizeof(ra_token_run);
    if (run_bytes > 0) {
        memcpy(x->lists, desc->runs, run_bytes);
    }
    if (token_bytes > 0) {
        memcpy(x->lists + run_bytes, x->tokens, token_bytes);
    }
    return RA_OK;
}

static ra_status unpack(const exchange *x, ra_gathered *out)
{
    int64_t runs = 0, tokens = 0, seq = 0;
    for (int rank = 0; rank < x->size; rank++) {
        runs += x->mine.has_runs ? x->heads[rank].run_count : 1;
        tokens += x->heads[rank].token_count;
        out->has_documents = out->has_documents || x->heads[rank].has_documents;
    }
    out->rows = x->mine.rows;
    RA_TRY(RA_NEW(&out->run_counts, x->size));
    RA_TRY(RA_NEW(&out->token_counts, x->size));
    RA_TRY(RA_NEW(&out->runs, runs));
    RA_TRY(RA_NEW(&out->token_runs, tokens));
    runs = tokens = 0;
    for (int rank = 0; rank < x->size; rank++) {
        const head *h = &x->heads[rank];
        const char *list = x->bytes > 0 ? x->all + (size_t)rank * x->bytes : NULL;
        size_t run_bytes = (size_t)h->run_count * sizeof(ra_run);
        if (x->mine.has_runs) {
            out->run_counts[rank] = (int)h->run_count;
            if (run_bytes > 0) {
                memcpy(out->runs + runs, list, run_bytes);
            }
        } else {
            out->run_counts[rank] = 1;
            out->runs[runs] = (ra_run){seq, h->seq_local};
        }
        out->token_counts[rank] = h->token_count;
        if (h->token_count > 0) {
            memcpy(out->token_runs + tokens, list + run_bytes,
                   (size_t)h->token_count * sizeof(ra_token_run));
        }
        runs += out->run_counts[rank];
        tokens += h->token_count;
        seq += h->seq_local;
    }
    return RA_OK;
}

/* Of all that plans are made from. Plans that differ would make ranks wait for rows that nobody
 * sends, so it is compared before any is made. */
static uint64_t hash_gathered(const ra_gathered *g, int size)
{
    uint64_t hash = RA_HASH_START;
    int64_t runs = 0, tokens = 0;
    for (int rank = 0; rank < size; rank++) {
        runs += g->run_counts[rank];
        tokens += g->token_counts[rank];
    }
    hash = ra_hash(hash, g->run_counts, (size_t)size * sizeof *g->run_counts);
    hash = ra_hash(hash, g->token_counts, (size_t)size * sizeof *g->token_counts);
    hash = ra_hash(hash, g->runs, (size_t)runs * sizeof *g->runs);
    return ra_hash(hash, g->token_runs, (size_t)tokens * sizeof *g->token_runs);
}

ra_status ra_gathered_build(ra_ctx *ctx, const ra_step_desc *desc, ra_gathered *out)
{
    exchange x = {0};
    ra_gathered gathered = {0};
    ra_comm *comm = ctx->comm;
    int timeout_ms = ctx->options.timeout_ms;
    ra_status status = open_local(ctx, desc, &x);
    status = ra_comm_agree(comm, status, timeout_ms);
    status = status ? status : ra_comm_gather(comm, &x.mine, sizeof x.mine, x.heads, timeout_ms);
    status = status ? status : compare_heads(&x);
    if (!status) {
        status = open_lists(desc, &x);
        status = ra_comm_agree(comm, status, timeout_ms);
    }
    status = status ? status : ra_comm_gather(comm, x.lists, x.bytes, x.all, timeout_ms);
    if (!status) {
        status = unpack(&x, &gathered);
        uint64_t hash = status ? 0 : hash_gathered(&gathered, x.size);
        status =
            ra_comm_agree_on(comm, status, "documents and runs, as gathered", hash, timeout_ms);
    }
    ra_free(x.tokens);
    ra_free(x.heads);
    ra_free(x.lists);
    ra_free(x.all);
    if (status) {
        ra_gathered_free(&gathered);
        return status;
    }
    *out = gathered;
    return RA_OK;
}

void ra_gathered_free(ra_gathered *gathered)
{
    ra_free(gathered->run_counts);
    ra_free(gathered->runs);
    ra_free(gathered->token_counts);
    ra_free(gathered->token_runs);
    *gathered = (ra_gathered){0};
}
