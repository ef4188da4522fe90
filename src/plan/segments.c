/* Documents that a query shard and a key chunk share: turns two arrays of document ids into flat
 * indices and prefix sums. A row's documents are found by sorting its runs of equal id, so that
 * a row of n tokens costs n log n however many documents it holds and whatever their ids. Must not
 * know tensors. */
#include <stdlib.h>

#include "base/alloc.h"
#include "base/limits.h"

/* One document of one query row. */
typedef struct doc {
    int64_t first; /* flat index of its first query token */
    int64_t q_count, k_count;
    int64_t q_at, k_at; /* where its next token goes */
    int32_t id;
} doc;

/* The documents of all rows: by id inside a row, rows in order. */
typedef struct doc_table {
    doc *doc;
    int64_t count, capacity;
    int64_t *row_first; /* [rows + 1] */
} doc_table;

static int by_id(const void *a, const void *b)
{
    const doc *x = a, *y = b;
    if (x->id != y->id) {
        return x->id < y->id ? -1 : 1;
    }
    return (x->first > y->first) - (x->first < y->first);
}

static int by_first(const void *a, const void *b)
{
    const doc *x = *(doc *const *)a, *y = *(doc *const *)b;
    return (x->first > y->first) - (x->first < y->first);
}

/* Appends the distinct documents of one query row, sorted by id. */
static ra_status row_append(doc_table *table, const int32_t *ids, int64_t begin, int64_t seq)
{
    int64_t start = table->count;
    for (int64_t i = 0; i < seq; i++) {
        if (ids[i] > 0 && (i == 0 || ids[i] != ids[i - 1])) {
            RA_TRY(RA_RESERVE(&table->doc, &table->capacity, table->count + 1));
            table->doc[table->count++] = (doc){.first = begin + i, .id = ids[i]};
        }
    }
    int64_t runs = table->count - start, kept = start;
    if (runs > 1) {
        qsort(table->doc + start, (size_t)runs, sizeof *table->doc, by_id);
    }
    for (int64_t i = start; i < start + runs; i++) {
        if (kept == start || table->doc[i].id != table->doc[kept - 1].id) {
            table->doc[kept++] = table->doc[i];
        }
    }
    table->count = kept;
    return RA_OK;
}

/* The document of a row with this id, or NULL: also for padding, whose ids are in no table. */
static doc *row_find(const doc_table *table, int64_t row, int32_t id)
{
    int64_t low = table->row_first[row], high = table->row_first[row + 1];
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (table->doc[middle].id < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < table->row_first[row + 1] && table->doc[low].id == id ? &table->doc[low] : NULL;
}

typedef void visit(doc *found, int64_t flat, void *user);

/* Calls `each` for every token whose document its query row has; searches once a run. */
static void tokens_visit(const doc_table *table, const int32_t *ids, int64_t rows, int64_t seq,
                         visit *each, void *user)
{
    for (int64_t row = 0; row < rows; row++) {
        doc *found = NULL;
        for (int64_t flat = row * seq; flat < (row + 1) * seq; flat++) {
            if (flat == row * seq || ids[flat] != ids[flat - 1]) {
                found = row_find(table, row, ids[flat]);
            }
            if (found) {
                each(found, flat, user);
            }
        }
    }
}

static void count_query(doc *found, int64_t flat, void *user)
{
    (void)flat, (void)user;
    found->q_count++;
}

static void count_key(doc *found, int64_t flat, void *user)
{
    (void)flat, (void)user;
    found->k_count++;
}

static void put_query(doc *found, int64_t flat, void *user)
{
    ra_segments *out = user;
    if (found->k_count > 0) {
        out->q_index[found->q_at++] = flat;
    }
}

static void put_key(doc *found, int64_t flat, void *user)
{
    ra_segments *out = user;
    out->k_index[found->k_at++] = flat;
}

static ra_status table_build(doc_table *table, const int32_t *q_ids, int64_t q_seq,
                             const int32_t *k_ids, int64_t k_seq, int64_t rows)
{
    RA_TRY(RA_NEW(&table->row_first, rows + 1));
    for (int64_t row = 0; row < rows && q_seq > 0; row++) {
        RA_TRY(row_append(table, q_ids + row * q_seq, row * q_seq, q_seq));
        table->row_first[row + 1] = table->count;
    }
    tokens_visit(table, q_ids, rows, q_seq, count_query, NULL);
    tokens_visit(table, k_ids, rows, k_seq, count_key, NULL);
    return RA_OK;
}

/* Puts the shared documents in order of first appearance and gives each its place. */
static ra_status places_assign(doc_table *table, doc **order, ra_segments *out)
{
    for (int64_t i = 0; i < table->count; i++) {
        if (table->doc[i].k_count > 0) {
            order[out->count++] = &table->doc[i];
        }
    }
    if (out->count > 1) {
        qsort(order, (size_t)out->count, sizeof(doc *), by_first);
    }
    for (int64_t i = 0; i < out->count; i++) {
        order[i]->q_at = out->q_total;
        order[i]->k_at = out->k_total;
        out->q_total += order[i]->q_count;
        out->k_total += order[i]->k_count;
    }
    if (out->q_total > INT32_MAX || out->k_total > INT32_MAX) {
        return RA_FAIL(RA_E_SHAPE, "%s: %lld shared tokens, expected at most %d: cu is int32",
                       out->q_total > INT32_MAX ? "q_ids" : "k_ids",
                       (long long)(out->q_total > INT32_MAX ? out->q_total : out->k_total),
                       INT32_MAX);
    }
    RA_TRY(RA_NEW(&out->q_index, out->q_total));
    RA_TRY(RA_NEW(&out->k_index, out->k_total));
    RA_TRY(RA_NEW(&out->cu_q, out->count + 1));
    RA_TRY(RA_NEW(&out->cu_k, out->count + 1));
    for (int64_t i = 0; i < out->count; i++) {
        int32_t q = (int32_t)order[i]->q_count, k = (int32_t)order[i]->k_count;
        out->cu_q[i + 1] = out->cu_q[i] + q;
        out->cu_k[i + 1] = out->cu_k[i] + k;
        out->max_q = q > out->max_q ? q : out->max_q;
        out->max_k = k > out->max_k ? k : out->max_k;
    }
    return RA_OK;
}

/* Is the query row one document and then only padding? */
static bool row_is_dense(const int32_t *ids, int64_t seq)
{
    int64_t end = 0;
    while (end < seq && ids[end] > 0 && ids[end] == ids[0]) {
        end++;
    }
    bool starts = end > 0;
    while (end < seq && ids[end] <= 0) {
        end++;
    }
    return starts && end == seq;
}

static bool row_is_document(const int32_t *ids, int64_t row, int64_t seq, int32_t id)
{
    for (int64_t flat = row * seq; flat < (row + 1) * seq; flat++) {
        if (ids[flat] != id) {
            return false;
        }
    }
    return seq > 0;
}

static void flags_set(const int32_t *q_ids, int64_t q_seq, const int32_t *k_ids, int64_t k_seq,
                      int64_t rows, ra_segments *out)
{
    out->dense_local = out->dense_cross = q_seq > 0;
    for (int64_t row = 0; row < rows && out->dense_local; row++) {
        const int32_t *q = q_ids + row * q_seq;
        out->dense_local = row_is_dense(q, q_seq);
        out->dense_cross =
            out->dense_cross && out->dense_local && row_is_document(k_ids, row, k_seq, q[0]);
    }
}

static ra_status pads_mark(const int32_t *q_ids, int64_t total, ra_segments *out)
{
    for (int64_t i = 0; i < total; i++) {
        if (q_ids[i] <= 0) {
            if (!out->pad_rows) {
                RA_TRY(RA_NEW(&out->pad_rows, total));
            }
            out->pad_rows[i] = 1;
        }
    }
    return RA_OK;
}

static ra_status ids_check(const int32_t *ids, const char *name, int64_t rows, int64_t seq)
{
    if (seq < 0 || seq > RA_SEQ_MAX) {
        return RA_FAIL(RA_E_ARG, "%s_seq: %lld, expected 0 to %lld", name, (long long)seq,
                       (long long)RA_SEQ_MAX);
    }
    if (rows < 1 || rows > RA_ROWS_MAX) {
        return RA_FAIL(RA_E_ARG, "rows: %lld, expected 1 to %lld", (long long)rows,
                       (long long)RA_ROWS_MAX);
    }
    if (seq > 0 && !ids) {
        return RA_FAIL(RA_E_ARG, "%s_ids: NULL, expected %lld elements", name,
                       (long long)(rows * seq));
    }
    return RA_OK;
}

ra_status ra_segments_build(const int32_t *q_ids, int64_t q_seq, const int32_t *k_ids,
                            int64_t k_seq, int64_t rows, ra_segments *out)
{
    doc_table table = {0};
    ra_segments built = {0};
    doc **order = NULL;
    RA_TRY(ids_check(q_ids, "q", rows, q_seq));
    RA_TRY(ids_check(k_ids, "k", rows, k_seq));
    if (!out) {
        return RA_FAIL(RA_E_ARG, "out: NULL, expected segments to fill");
    }
    ra_status status = table_build(&table, q_ids, q_seq, k_ids, k_seq, rows);
    if (status) {
        goto done;
    }
    status = RA_NEW(&order, table.count);
    if (status) {
        goto done;
    }
    status = places_assign(&table, order, &built);
    if (status) {
        goto done;
    }
    status = pads_mark(q_ids, rows * q_seq, &built);
    if (status) {
        goto done;
    }
    tokens_visit(&table, q_ids, rows, q_seq, put_query, &built);
    tokens_visit(&table, k_ids, rows, k_seq, put_key, &built);
    flags_set(q_ids, q_seq, k_ids, k_seq, rows, &built);
    *out = built;
done:
    ra_free(order);
    ra_free(table.doc);
    ra_free(table.row_first);
    if (status) {
        ra_segments_free(&built);
    }
    return status;
}

void ra_segments_free(ra_segments *segments)
{
    if (segments) {
        ra_free(segments->q_index);
        ra_free(segments->k_index);
        ra_free(segments->cu_q);
        ra_free(segments->cu_k);
        ra_free(segments->pad_rows);
        *segments = (ra_segments){0};
    }
}
