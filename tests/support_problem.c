/* Problems, shards and answers: data only. */
#include "support_problem.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tensor/tensor.h"

static void *memory_new(size_t bytes)
{
    void *memory = calloc(1, bytes ? bytes : 1);
    assert_non_null(memory);
    return memory;
}

static ra_tensor tensor_new(ra_dtype dtype, int64_t rows, int64_t heads, int64_t seq, int64_t chan)
{
    size_t bytes = (size_t)(rows * heads * seq * chan) * ra_dtype_bytes(dtype);
    return ra_tensor_bhsd(memory_new(bytes), dtype, rows, heads, seq, chan);
}

ra_layer layer_of(int q_heads, int kv_heads, int head_dim, ra_dtype dtype)
{
    ra_layer layer = {.size = sizeof layer,
                      .q_heads = q_heads,
                      .kv_heads = kv_heads,
                      .head_dim = head_dim,
                      .dtype = dtype,
                      .scale = 1.0f,
                      .causal = true};
    return layer;
}

void problem_create(problem *p, ra_layer layer, int64_t rows, int64_t seq)
{
    memset(p, 0, sizeof *p);
    p->layer = layer;
    p->rows = rows;
    p->seq = seq;
    p->q = tensor_new(layer.dtype, rows, layer.q_heads, seq, layer.head_dim);
    p->dout = tensor_new(layer.dtype, rows, layer.q_heads, seq, layer.head_dim);
    p->k = tensor_new(layer.dtype, rows, layer.kv_heads, seq, layer.head_dim);
    p->v = tensor_new(layer.dtype, rows, layer.kv_heads, seq, layer.head_dim);
}

void problem_free(problem *p)
{
    free(p->doc_id);
    free(p->token_type);
    free(p->is_pad);
    free(p->q.data);
    free(p->k.data);
    free(p->v.data);
    free(p->dout.data);
    memset(p, 0, sizeof *p);
}

static void *copy_of(const void *from, size_t bytes)
{
    void *copy = memory_new(bytes);
    memcpy(copy, from, bytes);
    return copy;
}

void problem_set_docs(problem *p, const int32_t *doc_id)
{
    free(p->doc_id);
    p->doc_id = copy_of(doc_id, (size_t)(p->rows * p->seq) * sizeof *doc_id);
}

void problem_set_pads(problem *p, const uint8_t *is_pad)
{
    free(p->is_pad);
    p->is_pad = copy_of(is_pad, (size_t)(p->rows * p->seq));
}

void problem_set_types(problem *p, const int32_t *token_type)
{
    free(p->token_type);
    p->token_type = copy_of(token_type, (size_t)(p->rows * p->seq) * sizeof *token_type);
}

void problem_set_image(problem *p, int64_t begin, int64_t end)
{
    if (!p->token_type) {
        p->token_type = memory_new((size_t)(p->rows * p->seq) * sizeof *p->token_type);
    }
    for (int64_t row = 0; row < p->rows; row++) {
        for (int64_t pos = begin; pos < end; pos++) {
            p->token_type[row * p->seq + pos] = 1;
        }
    }
}

#define FOR_EACH_ROW(t, row, head, seq)                                                            \
    for (int64_t row = 0; row < (t)->size[RA_ROW]; row++)                                          \
        for (int64_t head = 0; head < (t)->size[RA_HEAD]; head++)                                  \
            for (int64_t seq = 0; seq < (t)->size[RA_SEQ]; seq++)

void tensor_fill(const ra_tensor *t, double value)
{
    FOR_EACH_ROW(t, row, head, seq)
    {
        for (int64_t c = 0; c < t->size[RA_CHAN]; c++) {
            ra_tensor_set(t, row, head, seq, c, value);
        }
    }
}

void tensor_fill_normal(const ra_tensor *t, rng *r, double deviation)
{
    FOR_EACH_ROW(t, row, head, seq)
    {
        for (int64_t c = 0; c < t->size[RA_CHAN]; c++) {
            ra_tensor_set(t, row, head, seq, c, deviation * rng_normal(r));
        }
    }
}

void problem_fill_unit(problem *p, rng *r)
{
    double deviation = pow((double)p->layer.head_dim, -0.25) / sqrt((double)p->layer.scale);
    tensor_fill_normal(&p->q, r, deviation);
    tensor_fill_normal(&p->k, r, deviation);
    tensor_fill_normal(&p->v, r, 1.0);
    tensor_fill_normal(&p->dout, r, 1.0);
}

static void fill_normed(const ra_tensor *t, rng *r)
{
    int64_t chan = t->size[RA_CHAN];
    double *x = memory_new((size_t)chan * sizeof *x);
    FOR_EACH_ROW(t, row, head, seq)
    {
        double square = 0.0;
        for (int64_t c = 0; c < chan; c++) {
            x[c] = rng_normal(r);
            square += x[c] * x[c];
        }
        double factor = sqrt((double)chan / square);
        for (int64_t c = 0; c < chan; c++) {
            ra_tensor_set(t, row, head, seq, c, x[c] * factor);
        }
    }
    free(x);
}

void problem_fill_gemma(problem *p, rng *r)
{
    fill_normed(&p->q, r);
    fill_normed(&p->k, r);
    tensor_fill_normal(&p->v, r, 1.0);
    tensor_fill_normal(&p->dout, r, 1.0);
}

void problem_fill_probe(problem *p)
{
    assert_true(p->layer.head_dim >= p->seq);
    tensor_fill(&p->q, 0.0);
    tensor_fill(&p->k, 0.0);
    tensor_fill(&p->v, 0.0);
    tensor_fill(&p->dout, 1.0);
    FOR_EACH_ROW(&p->v, row, head, seq)
    {
        ra_tensor_set(&p->v, row, head, seq, seq, 1.0);
    }
}

ra_step_desc problem_desc(const problem *p)
{
    ra_step_desc desc = {.size = sizeof desc,
                         .rows = p->rows,
                         .seq_local = p->seq,
                         .doc_id = p->doc_id,
                         .is_pad = p->is_pad,
                         .token_type = p->token_type};
    return desc;
}

int32_t *problem_groups(const problem *p)
{
    int32_t *group = memory_new((size_t)(p->rows * p->seq) * sizeof *group);
    for (int64_t i = 0; i < p->rows * p->seq; i++) {
        group[i] = -1;
    }
    if (p->token_type) {
        assert_int_equal(ra_vision_groups(p->token_type, p->rows, p->seq, group), RA_OK);
    }
    return group;
}

static ra_token token_at(const problem *p, const int32_t *group, int64_t row, int64_t pos)
{
    int64_t index = row * p->seq + pos;
    int32_t doc = p->doc_id ? p->doc_id[index] : 1;
    ra_token token = {pos, p->is_pad && p->is_pad[index] ? 0 : doc, group[index]};
    return token;
}

bool problem_allows(const problem *p, const int32_t *group, int64_t row, int64_t query, int64_t key)
{
    return ra_mask_allows(&p->layer, token_at(p, group, row, query), token_at(p, group, row, key));
}

int64_t problem_visible(const problem *p, int64_t row, int64_t query)
{
    int32_t *group = problem_groups(p);
    int64_t visible = 0;
    for (int64_t key = 0; key < p->seq; key++) {
        visible += problem_allows(p, group, row, query, key);
    }
    free(group);
    return visible;
}

void answer_create(answer *a, const problem *p, ra_dtype dtype, ra_dtype lse_dtype, bool shared)
{
    ra_tensor *tensor[] = {&a->out, &a->dq, &a->dk, &a->dv, &a->lse};
    for (int i = 0; i < 5; i++) {
        int64_t heads = i == 2 || i == 3 ? p->layer.kv_heads : p->layer.q_heads;
        int64_t chan = i == 4 ? 1 : p->layer.head_dim;
        ra_tensor t =
            ra_tensor_bhsd(NULL, i == 4 ? lse_dtype : dtype, p->rows, heads, p->seq, chan);
        size_t bytes = (size_t)ra_tensor_count(&t) * ra_dtype_bytes(t.dtype);
        if (shared) {
            t.data = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
            assert_true(t.data != MAP_FAILED);
        } else {
            t.data = memory_new(bytes);
        }
        tensor_fill(&t, NAN);
        *tensor[i] = t;
    }
}

void answer_free(answer *a, bool shared)
{
    ra_tensor *tensor[] = {&a->out, &a->dq, &a->dk, &a->dv, &a->lse};
    for (int i = 0; i < 5; i++) {
        if (shared && tensor[i]->data) {
            size_t bytes = (size_t)ra_tensor_count(tensor[i]) * ra_dtype_bytes(tensor[i]->dtype);
            munmap(tensor[i]->data, bytes ? bytes : 1);
        } else {
            free(tensor[i]->data);
        }
    }
    memset(a, 0, sizeof *a);
}

bool tensor_same_bits(const ra_tensor *a, const ra_tensor *b)
{
    return memcmp(a->data, b->data, (size_t)ra_tensor_count(a) * ra_dtype_bytes(a->dtype)) == 0;
}

bool answer_same_bits(const answer *a, const answer *b)
{
    return tensor_same_bits(&a->out, &b->out) && tensor_same_bits(&a->lse, &b->lse) &&
           tensor_same_bits(&a->dq, &b->dq) && tensor_same_bits(&a->dk, &b->dk) &&
           tensor_same_bits(&a->dv, &b->dv);
}

double tensor_largest(const ra_tensor *t)
{
    double largest = 1.0;
    FOR_EACH_ROW(t, row, head, seq)
    {
        for (int64_t c = 0; c < t->size[RA_CHAN]; c++) {
            double x = fabs(ra_tensor_get(t, row, head, seq, c));
            largest = isfinite(x) && x > largest ? x : largest;
        }
    }
    return largest;
}

double tensor_error(const ra_tensor *a, const ra_tensor *b)
{
    double worst = 0.0;
    FOR_EACH_ROW(a, row, head, seq)
    {
        for (int64_t c = 0; c < a->size[RA_CHAN]; c++) {
            double x = ra_tensor_get(a, row, head, seq, c);
            double y = ra_tensor_get(b, row, head, seq, c);
            double error = x == y ? 0.0 : fabs(x - y);
            if (!(error <= worst)) {
                worst = isnan(error) ? (double)INFINITY : error;
            }
        }
    }
    return worst;
}
