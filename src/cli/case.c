/* Reads a case file: tensors by name, shapes that must agree, metadata strings. */
#include "cli/case.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "base/limits.h"

const char *ra_result_name(ra_result result)
{
    static const char *const names[RA_RESULT_COUNT] = {"out", "lse", "grad_query", "grad_key",
                                                       "grad_value"};
    return names[result];
}

ra_tensor ra_case_result(const ra_case *c, ra_result result, void *data, ra_dtype dtype)
{
    bool is_key = result == RA_RESULT_DK || result == RA_RESULT_DV;
    return ra_tensor_bhsd(data, dtype, c->rows, is_key ? c->layer.kv_heads : c->layer.q_heads,
                          c->seq, result == RA_RESULT_LSE ? 1 : c->layer.head_dim);
}

static ra_dtype float_dtype(ra_st_dtype dtype)
{
    switch (dtype) {
    case RA_ST_F32: return RA_F32;
    case RA_ST_F64: return RA_F64;
    case RA_ST_F16: return RA_F16;
    case RA_ST_BF16: return RA_BF16;
    default: return 0;
    }
}

static ra_status check_shape(const ra_st_tensor *tensor, const int64_t *shape, int dims)
{
    char expected[128] = "";
    bool equal = tensor->dims == dims;
    for (int i = 0; i < dims; i++) {
        size_t used = strlen(expected);
        equal = equal && tensor->shape[i] == shape[i];
        snprintf(expected + used, sizeof expected - used, "%s%lld", i ? ", " : "",
                 (long long)shape[i]);
    }
    if (!equal) {
        return RA_FAIL(RA_E_SHAPE, "%s: shape with %d dimensions%s, expected [%s]", tensor->name,
                       tensor->dims, tensor->dims == dims ? " and other sizes" : "", expected);
    }
    return RA_OK;
}

static ra_status find_required(const ra_case *c, const char *name, const ra_st_tensor **out)
{
    *out = ra_safetensors_find(&c->file, name);
    return *out ? RA_OK : RA_FAIL(RA_E_IO, "%s: tensor missing", name);
}

/* An input of the query's dtype; data NULL if it is optional and absent. */
static ra_status read_input(const ra_case *c, const char *name, int heads, bool optional,
                            ra_tensor *out)
{
    const ra_st_tensor *tensor = ra_safetensors_find(&c->file, name);
    if (!tensor) {
        return optional ? RA_OK : RA_FAIL(RA_E_IO, "%s: tensor missing", name);
    }
    const int64_t shape[] = {c->rows, heads, c->seq, c->layer.head_dim};
    RA_TRY(check_shape(tensor, shape, RA_NDIM));
    if (float_dtype(tensor->dtype) != c->layer.dtype) {
        return RA_FAIL(RA_E_SHAPE, "%s: dtype %s, expected that of query, %s", name,
                       ra_st_dtype_name(tensor->dtype), ra_dtype_name(c->layer.dtype));
    }
    *out = ra_tensor_bhsd((void *)(uintptr_t)tensor->data, c->layer.dtype, shape[0], shape[1],
                          shape[2], shape[3]);
    return RA_OK;
}

static ra_status read_inputs(ra_case *c)
{
    const ra_st_tensor *query, *key;
    RA_TRY(find_required(c, "query", &query));
    RA_TRY(find_required(c, "key", &key));
    if (query->dims != RA_NDIM || key->dims != RA_NDIM) {
        return RA_FAIL(RA_E_SHAPE, "query, key: %d and %d dimensions, expected %d", query->dims,
                       key->dims, RA_NDIM);
    }
    const int64_t *size = query->shape;
    if (size[RA_ROW] < 1 || size[RA_ROW] > RA_ROWS_MAX || size[RA_SEQ] < 1 ||
        size[RA_SEQ] > RA_SEQ_MAX || size[RA_HEAD] < 1 || size[RA_HEAD] > RA_HEADS_MAX ||
        key->shape[RA_HEAD] < 1 || key->shape[RA_HEAD] > RA_HEADS_MAX || size[RA_CHAN] < 1 ||
        size[RA_CHAN] > RA_HEAD_DIM_MAX) {
        return RA_FAIL(RA_E_SHAPE,
                       "query: shape [%lld, %lld, %lld, %lld] with %lld key heads, expected 1 to "
                       "%d heads, 1 to %d channels and no empty dimension",
                       (long long)size[0], (long long)size[1], (long long)size[2],
                       (long long)size[3], (long long)key->shape[RA_HEAD], RA_HEADS_MAX,
                       RA_HEAD_DIM_MAX);
    }
    c->rows = size[RA_ROW];
    c->seq = size[RA_SEQ];
    c->layer.q_heads = (int)size[RA_HEAD];
    c->layer.kv_heads = (int)key->shape[RA_HEAD];
    c->layer.head_dim = (int)size[RA_CHAN];
    c->layer.dtype = float_dtype(query->dtype);
    if (c->layer.dtype == 0 || c->layer.dtype == RA_F64) {
        return RA_FAIL(RA_E_SHAPE, "query: dtype %s, expected F32, BF16 or F16",
                       ra_st_dtype_name(query->dtype));
    }
    RA_TRY(read_input(c, "query", c->layer.q_heads, false, &c->q));
    RA_TRY(read_input(c, "key", c->layer.kv_heads, false, &c->k));
    RA_TRY(read_input(c, "value", c->layer.kv_heads, false, &c->v));
    return read_input(c, "grad_out", c->layer.q_heads, true, &c->dout);
}

static ra_status read_expected(ra_case *c)
{
    for (int i = 0; i < RA_RESULT_COUNT; i++) {
        const ra_st_tensor *tensor = ra_safetensors_find(&c->file, ra_result_name((ra_result)i));
        if (!tensor) {
            continue;
        }
        ra_dtype dtype = float_dtype(tensor->dtype);
        ra_tensor view = ra_case_result(c, (ra_result)i, (void *)(uintptr_t)tensor->data, dtype);
        RA_TRY(check_shape(tensor, view.size, i == RA_RESULT_LSE ? RA_NDIM - 1 : RA_NDIM));
        if (dtype == 0) {
            return RA_FAIL(RA_E_SHAPE, "%s: dtype %s, expected F64, F32, BF16 or F16", tensor->name,
                           ra_st_dtype_name(tensor->dtype));
        }
        c->expected[i] = view;
    }
    return RA_OK;
}

static int compare_ids(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

/* Ids are names: where one does not fit 32 bits, all are replaced by their rank among the ids of
 * the file, so that two ids that share their low bits stay two documents. */
static ra_status narrow_ids(const int64_t *wide, int64_t count, int32_t *out)
{
    int64_t *sorted = NULL, distinct = 0, largest = 0;
    for (int64_t i = 0; i < count; i++) {
        largest = wide[i] > largest ? wide[i] : largest;
    }
    if (largest <= INT32_MAX) {
        for (int64_t i = 0; i < count; i++) {
            out[i] = wide[i] > 0 ? (int32_t)wide[i] : 0;
        }
        return RA_OK;
    }
    RA_TRY(RA_NEW(&sorted, count));
    memcpy(sorted, wide, (size_t)count * sizeof *sorted);
    qsort(sorted, (size_t)count, sizeof *sorted, compare_ids);
    for (int64_t i = 0; i < count; i++) {
        if (sorted[i] > 0 && (distinct == 0 || sorted[distinct - 1] != sorted[i])) {
            sorted[distinct++] = sorted[i];
        }
    }
    ra_status status = distinct <= INT32_MAX
                           ? RA_OK
                           : RA_FAIL(RA_E_UNSUPPORTED, "packed_seq_ids: more than 2^31 documents");
    for (int64_t i = 0; i < count && !status; i++) {
        const int64_t *found =
            wide[i] > 0 ? bsearch(&wide[i], sorted, (size_t)distinct, sizeof *sorted, compare_ids)
                        : NULL;
        out[i] = found ? (int32_t)(found - sorted) + 1 : 0;
    }
    ra_free(sorted);
    return status;
}

/* Token types are compared before they are narrowed: 2^32 + 1 is no image. */
static void narrow_types(const int64_t *wide, int64_t count, int32_t *out)
{
    for (int64_t i = 0; i < count; i++) {
        out[i] = wide[i] == 1 || wide[i] == 2 ? (int32_t)wide[i] : 0;
    }
}

/* An I32 or I64 [rows, seq] tensor; *out stays NULL if absent. */
static ra_status read_integers(const ra_case *c, const char *name, bool are_ids, int32_t **out)
{
    const ra_st_tensor *tensor = ra_safetensors_find(&c->file, name);
    if (!tensor) {
        return RA_OK;
    }
    const int64_t shape[] = {c->rows, c->seq}, count = c->rows * c->seq;
    RA_TRY(check_shape(tensor, shape, 2));
    if (tensor->dtype != RA_ST_I32 && tensor->dtype != RA_ST_I64) {
        return RA_FAIL(RA_E_SHAPE, "%s: dtype %s, expected I32 or I64", name,
                       ra_st_dtype_name(tensor->dtype));
    }
    RA_TRY(RA_NEW(out, count));
    if (tensor->dtype == RA_ST_I32) {
        memcpy(*out, tensor->data, (size_t)count * sizeof **out);
    } else if (are_ids) {
        return narrow_ids(tensor->data, count, *out);
    } else {
        narrow_types(tensor->data, count, *out);
    }
    return RA_OK;
}

static ra_status read_padding(ra_case *c)
{
    const ra_st_tensor *tensor = ra_safetensors_find(&c->file, "padding_mask");
    if (!tensor) {
        return RA_OK;
    }
    const int64_t shape[] = {c->rows, c->seq};
    RA_TRY(check_shape(tensor, shape, 2));
    if (tensor->dtype != RA_ST_U8 && tensor->dtype != RA_ST_BOOL) {
        return RA_FAIL(RA_E_SHAPE, "padding_mask: dtype %s, expected U8 or BOOL",
                       ra_st_dtype_name(tensor->dtype));
    }
    RA_TRY(RA_NEW(&c->is_pad, c->rows * c->seq));
    memcpy(c->is_pad, tensor->data, tensor->bytes);
    return RA_OK;
}

static ra_status check_word(const ra_case *c, const char *key, const char *expected)
{
    const char *word = ra_safetensors_meta(&c->file, key);
    return !word || strcmp(word, expected) == 0
               ? RA_OK
               : RA_FAIL(RA_E_IO, "metadata %s: %.64s, expected %s", key, word, expected);
}

static ra_status read_scale(ra_case *c)
{
    const char *text = ra_safetensors_meta(&c->file, "scale");
    char *end = NULL;
    float scale = text ? strtof(text, &end) : 0.0f;
    if (!text || end == text || *end || !isfinite(scale)) {
        return RA_FAIL(RA_E_IO, "metadata scale: %.64s, expected a finite number",
                       text ? text : "missing");
    }
    c->layer.scale = scale;
    return RA_OK;
}

static ra_status read_layer(ra_case *c)
{
    c->layer.size = sizeof c->layer;
    RA_TRY(check_word(c, "format", "ringattn-case-v1"));
    RA_TRY(check_word(c, "layout", "BHSD"));
    RA_TRY(read_scale(c));
    const char *causal = ra_safetensors_meta(&c->file, "causal");
    if (!causal || (strcmp(causal, "true") != 0 && strcmp(causal, "false") != 0)) {
        return RA_FAIL(RA_E_IO, "metadata causal: %.64s, expected true or false",
                       causal ? causal : "missing");
    }
    c->layer.causal = strcmp(causal, "true") == 0;
    const char *window = ra_safetensors_meta(&c->file, "sliding_window");
    if (window) {
        RA_TRY(ra_number_parse("metadata sliding_window", window, 0, INT64_MAX, &c->layer.window));
    }
    const char *vision = ra_safetensors_meta(&c->file, "vision_rule");
    if (vision) {
        RA_TRY(ra_vision_parse("metadata vision_rule", vision, &c->layer.vision));
    }
    return check_word(c, "layer", c->layer.window > 0 ? "sliding" : "global");
}

/* A name from a hostile file must not steer the terminal it is printed on. */
static void copy_name(const char *name, ra_case *c)
{
    snprintf(c->name, sizeof c->name, "%s", name ? name : c->path);
    for (char *at = c->name; *at; at++) {
        if ((unsigned char)*at < 32 || *at == 127) {
            *at = '?';
        }
    }
}

static ra_status read_case(ra_case *c)
{
    RA_TRY(ra_safetensors_read(c->path, &c->file));
    copy_name(ra_safetensors_meta(&c->file, "name"), c);
    ra_status status;
    if ((status = read_inputs(c)) || (status = read_layer(c)) || (status = read_expected(c)) ||
        (status = read_integers(c, "packed_seq_ids", true, &c->doc_id)) ||
        (status = read_integers(c, "mm_token_type_ids", false, &c->token_type)) ||
        (status = read_padding(c))) {
        return RA_FAIL(status, "%s: %s", c->path, ra_last_error());
    }
    return RA_OK;
}

ra_status ra_case_read(const char *path, ra_case *out)
{
    *out = (ra_case){.path = path};
    ra_status status = read_case(out);
    if (status) {
        ra_case_free(out);
    }
    return status;
}

ra_status ra_tensor_convert(ra_tensor *t, ra_dtype dtype, void **owned)
{
    ra_tensor to = ra_tensor_bhsd(NULL, dtype, t->size[0], t->size[1], t->size[2], t->size[3]);
    RA_TRY(ra_alloc((size_t)ra_tensor_count(t), ra_dtype_bytes(dtype), owned));
    to.data = *owned;
    for (int64_t row = 0; row < t->size[RA_ROW]; row++) {
        for (int64_t head = 0; head < t->size[RA_HEAD]; head++) {
            for (int64_t seq = 0; seq < t->size[RA_SEQ]; seq++) {
                for (int64_t chan = 0; chan < t->size[RA_CHAN]; chan++) {
                    ra_tensor_set(&to, row, head, seq, chan,
                                  ra_tensor_get(t, row, head, seq, chan));
                }
            }
        }
    }
    *t = to;
    return RA_OK;
}

ra_step_desc ra_case_desc(const ra_case *c)
{
    return (ra_step_desc){
        .size = sizeof(ra_step_desc),
        .rows = c->rows,
        .seq_local = c->seq,
        .doc_id = c->doc_id,
        .is_pad = c->is_pad,
        .token_type = c->token_type,
    };
}

ra_status ra_case_convert(ra_case *c, ra_dtype dtype)
{
    ra_tensor *inputs[] = {&c->q, &c->k, &c->v, &c->dout};
    for (int i = 0; i < 4; i++) {
        if (inputs[i]->data) {
            RA_TRY(ra_tensor_convert(inputs[i], dtype, &c->converted[i]));
        }
    }
    c->layer.dtype = dtype;
    for (int i = 0; i < RA_RESULT_COUNT; i++) {
        c->expected[i].data = NULL;
    }
    return RA_OK;
}

void ra_case_free(ra_case *c)
{
    for (int i = 0; i < 4; i++) {
        ra_free(c->converted[i]);
    }
    ra_free(c->doc_id);
    ra_free(c->token_type);
    ra_free(c->is_pad);
    ra_safetensors_free(&c->file);
    *c = (ra_case){0};
}
