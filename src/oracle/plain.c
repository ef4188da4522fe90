/* The plain computation: f32 arithmetic, one rounding to the dtype where a dense implementation
 * stores a matrix. It has the shape of oracle.c, row by row, so that the two can be read side by
 * side. Must not know tiles, hops or shards. */
#include "oracle/plain.h"

#include <math.h>

#include "base/alloc.h"
#include "oracle/whole.h"

static float rounded(ra_dtype dtype, float x)
{
    switch (dtype) {
    case RA_BF16: return ra_bf16_to_f32(ra_f32_to_bf16(x));
    case RA_F16: return ra_f16_to_f32(ra_f32_to_f16(x));
    case RA_F32:
    case RA_F64: break;
    }
    return x;
}

/* One (row, head) matrix in f32, [seq, chan] contiguous: exact, inputs are f32 or narrower. */
static void matrix_load(const ra_tensor *t, int64_t row, int64_t head, float *to)
{
    int64_t chan = t->size[RA_CHAN];
    for (int64_t i = 0; i < t->size[RA_SEQ]; i++) {
        for (int64_t c = 0; c < chan; c++) {
            to[i * chan + c] = (float)ra_tensor_get(t, row, head, i, c);
        }
    }
}

static void matrix_store(const float *from, const ra_tensor *t, int64_t row, int64_t head)
{
    int64_t chan = t->size[RA_CHAN];
    for (int64_t i = 0; i < t->size[RA_SEQ]; i++) {
        for (int64_t c = 0; c < chan; c++) {
            ra_tensor_set(t, row, head, i, c, (double)from[i * chan + c]);
        }
    }
}

/* Eight partial sums: channels are a multiple of RA_HEAD_DIM_STEP. */
static float dot_f32(const float *a, const float *b, int64_t chan)
{
    float part[RA_HEAD_DIM_STEP] = {0}, sum = 0;
    for (int64_t c = 0; c < chan; c += RA_HEAD_DIM_STEP) {
        for (int64_t lane = 0; lane < RA_HEAD_DIM_STEP; lane++) {
            part[lane] += a[c + lane] * b[c + lane];
        }
    }
    for (int64_t lane = 0; lane < RA_HEAD_DIM_STEP; lane++) {
        sum += part[lane];
    }
    return sum;
}

static float cut(double x)
{
    float nearest = (float)x;
    return fabs((double)nearest) > fabs(x) ? nextafterf(nearest, 0.0f) : nearest;
}

/* Two partial products a lane: the sum of one step is a tree, which double makes exactly or nearly
 * so. */
static float dot_tensor(const float *a, const float *b, int64_t chan)
{
    enum { STEP = 2 * RA_HEAD_DIM_STEP };
    float sum = 0;
    for (int64_t begin = 0; begin < chan; begin += STEP) {
        double part[RA_HEAD_DIM_STEP] = {0};
        for (int64_t c = begin; c < chan && c < begin + STEP; c += RA_HEAD_DIM_STEP) {
            for (int64_t lane = 0; lane < RA_HEAD_DIM_STEP; lane++) {
                part[lane] += (double)a[c + lane] * (double)b[c + lane];
            }
        }
        for (int64_t half = RA_HEAD_DIM_STEP / 2; half > 0; half /= 2) {
            for (int64_t lane = 0; lane < half; lane++) {
                part[lane] += part[lane + half];
            }
        }
        sum = cut((double)sum + part[0]);
    }
    return sum;
}

float ra_plain_dot(ra_plain_sum sum, const float *a, const float *b, int64_t chan)
{
    return sum == RA_PLAIN_SUM_TENSOR ? dot_tensor(a, b, chan) : dot_f32(a, b, chan);
}

/* delta as a dense implementation makes it: an elementwise product and then its row sum, which is
 * another order than that of the product dout v^T. Where the two should cancel (one key in sight)
 * they leave rounding behind, as they do in every real implementation. */
static float row_sum(const float *a, const float *b, int64_t chan)
{
    float sum = 0;
    for (int64_t c = 0; c < chan; c++) {
        sum += a[c] * b[c];
    }
    return sum;
}

static void add_scaled(float *restrict to, float factor, const float *restrict from, int64_t chan)
{
    for (int64_t c = 0; c < chan; c++) {
        to[c] += factor * from[c];
    }
}

/* Everything f32 of one (row, head): carved from one allocation. */
typedef struct matrices {
    ra_plain_sum sum; /* over channels */
    float *memory;
    float *q, *k, *v, *dout, *dq, *dk, *dv; /* [seq, chan] */
    float *score, *p;                       /* [seq] */
    float *out;                             /* [chan] */
} matrices;

static ra_status matrices_create(ra_plain_sum sum, const ra_whole *whole, const ra_layer *layer,
                                 matrices *m)
{
    m->sum = layer->dtype == RA_F32 ? RA_PLAIN_SUM_F32 : sum;
    int64_t chan = layer->head_dim, each = whole->seq * chan;
    RA_TRY(RA_NEW(&m->memory, 7 * each + 2 * whole->seq + chan));
    m->q = m->memory;
    m->k = m->q + each;
    m->v = m->k + each;
    m->dout = m->v + each;
    m->dq = m->dout + each;
    m->dk = m->dq + each;
    m->dv = m->dk + each;
    m->score = m->dv + each;
    m->p = m->score + whole->seq;
    m->out = m->p + whole->seq;
    return RA_OK;
}

/* Scores and softmax weights of one query's allowed keys, and its out, rounded. Returns lse. */
static float row_forward(const ra_whole *whole, const ra_layer *layer, int64_t row, int64_t i,
                         const matrices *m)
{
    int64_t chan = layer->head_dim, allowed = 0;
    float high = -INFINITY, sum = 0;
    memset(m->out, 0, (size_t)chan * sizeof *m->out);
    for (int64_t j = 0; j < whole->seq; j++) {
        if (ra_whole_allows(whole, row, i, j)) {
            m->score[j] =
                layer->scale * ra_plain_dot(m->sum, m->q + i * chan, m->k + j * chan, chan);
            high = m->score[j] > high ? m->score[j] : high;
            allowed++;
        }
    }
    if (allowed == 0) {
        return -INFINITY;
    }
    for (int64_t j = 0; j < whole->seq; j++) {
        if (ra_whole_allows(whole, row, i, j)) {
            m->p[j] = expf(m->score[j] - high);
            sum += m->p[j];
        }
    }
    for (int64_t j = 0; j < whole->seq; j++) {
        if (ra_whole_allows(whole, row, i, j)) {
            add_scaled(m->out, rounded(layer->dtype, m->p[j] / sum), m->v + j * chan, chan);
        }
    }
    for (int64_t c = 0; c < chan; c++) {
        m->out[c] = rounded(layer->dtype, m->out[c]);
    }
    return high + logf(sum);
}

static void head_forward(const ra_whole *whole, const ra_layer *layer, const ra_forward_io *io,
                         int64_t row, int64_t head, const matrices *m)
{
    int64_t kv_head = head / (layer->q_heads / layer->kv_heads);
    matrix_load(&io->q, row, head, m->q);
    matrix_load(&io->k, row, kv_head, m->k);
    matrix_load(&io->v, row, kv_head, m->v);
    for (int64_t i = 0; i < whole->seq; i++) {
        float lse = row_forward(whole, layer, row, i, m);
        ra_tensor_set(&io->lse, row, head, i, 0, (double)lse);
        for (int64_t c = 0; c < layer->head_dim; c++) {
            ra_tensor_set(&io->out, row, head, i, c, (double)m->out[c]);
        }
    }
}

ra_status ra_plain_forward(ra_plain_sum sum, const ra_step_desc *desc, const ra_layer *layer,
                           const ra_forward_io *io)
{
    ra_whole whole = {0};
    matrices m = {0};
    RA_TRY(ra_whole_build(desc, layer, &whole));
    ra_status status = ra_whole_forward_check(&whole, layer, io, false);
    if (status) {
        goto done;
    }
    status = matrices_create(sum, &whole, layer, &m);
    if (status) {
        goto done;
    }
    for (int64_t row = 0; row < whole.rows && whole.seq > 0; row++) {
        for (int64_t head = 0; head < layer->q_heads; head++) {
            head_forward(&whole, layer, io, row, head, &m);
        }
    }
done:
    ra_free(m.memory);
    ra_whole_free(&whole);
    return status;
}

static void row_backward(const ra_whole *whole, const ra_layer *layer, int64_t row, int64_t i,
                         const matrices *m)
{
    int64_t chan = layer->head_dim;
    const float *q = m->q + i * chan, *dout = m->dout + i * chan;
    float *dq = m->dq + i * chan;
    float lse = row_forward(whole, layer, row, i, m);
    if (lse == -INFINITY) {
        return; /* An empty row's dout is ignored: it may be NaN. */
    }
    float delta = row_sum(m->out, dout, chan);
    for (int64_t j = 0; j < whole->seq; j++) {
        if (ra_whole_allows(whole, row, i, j)) {
            float p = expf(m->score[j] - lse);
            float dp = ra_plain_dot(m->sum, dout, m->v + j * chan, chan);
            float ds = p * (dp - delta) * layer->scale;
            ds = rounded(layer->dtype, ds);
            add_scaled(m->dv + j * chan, rounded(layer->dtype, p), dout, chan);
            add_scaled(dq, ds, m->k + j * chan, chan);
            add_scaled(m->dk + j * chan, ds, q, chan);
        }
    }
}

/* One KV head with the query heads that read it; dK and dV are rounded once, after the last. */
static void kv_head_backward(const ra_whole *whole, const ra_layer *layer, const ra_backward_io *io,
                             int64_t row, int64_t kv_head, const matrices *m)
{
    int64_t group = layer->q_heads / layer->kv_heads;
    size_t bytes = (size_t)(whole->seq * layer->head_dim) * sizeof(float);
    matrix_load(&io->k, row, kv_head, m->k);
    matrix_load(&io->v, row, kv_head, m->v);
    memset(m->dk, 0, bytes);
    memset(m->dv, 0, bytes);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        matrix_load(&io->q, row, head, m->q);
        matrix_load(&io->dout, row, head, m->dout);
        memset(m->dq, 0, bytes);
        for (int64_t i = 0; i < whole->seq; i++) {
            row_backward(whole, layer, row, i, m);
        }
        matrix_store(m->dq, &io->dq, row, head);
    }
    matrix_store(m->dk, &io->dk, row, kv_head);
    matrix_store(m->dv, &io->dv, row, kv_head);
}

ra_status ra_plain_backward(ra_plain_sum sum, const ra_step_desc *desc, const ra_layer *layer,
                            const ra_backward_io *io)
{
    ra_whole whole = {0};
    matrices m = {0};
    RA_TRY(ra_whole_build(desc, layer, &whole));
    ra_status status = ra_whole_backward_check(&whole, layer, io, false);
    if (status) {
        goto done;
    }
    status = matrices_create(sum, &whole, layer, &m);
    if (status) {
        goto done;
    }
    for (int64_t row = 0; row < whole.rows && whole.seq > 0; row++) {
        for (int64_t head = 0; head < layer->kv_heads; head++) {
            kv_head_backward(&whole, layer, io, row, head, &m);
        }
    }
done:
    ra_free(m.memory);
    ra_whole_free(&whole);
    return status;
}
