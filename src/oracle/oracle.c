/* Attention of the whole sequence on one rank in double, the mask rule asked for every (query, key)
 * pair: the truth that the ring is compared with. It is written to be read, and shares no code with
 * plans and kernels but the rule. Must not know tiles, hops or shards. */
#include <math.h>

#include "base/alloc.h"
#include "oracle/whole.h"

/* One (row, head) matrix in double, [seq, chan] contiguous. */
static void matrix_load(const ra_tensor *t, int64_t row, int64_t head, double *to)
{
    int64_t chan = t->size[RA_CHAN];
    for (int64_t i = 0; i < t->size[RA_SEQ]; i++) {
        for (int64_t c = 0; c < chan; c++) {
            to[i * chan + c] = ra_tensor_get(t, row, head, i, c);
        }
    }
}

static void matrix_store(const double *from, const ra_tensor *t, int64_t row, int64_t head)
{
    int64_t chan = t->size[RA_CHAN];
    for (int64_t i = 0; i < t->size[RA_SEQ]; i++) {
        for (int64_t c = 0; c < chan; c++) {
            ra_tensor_set(t, row, head, i, c, from[i * chan + c]);
        }
    }
}

/* Eight partial sums: channels are a multiple of RA_HEAD_DIM_STEP. */
static double dot(const double *a, const double *b, int64_t chan)
{
    double part[RA_HEAD_DIM_STEP] = {0}, sum = 0;
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

static void add_scaled(double *restrict to, double factor, const double *restrict from,
                       int64_t chan)
{
    for (int64_t c = 0; c < chan; c++) {
        to[c] += factor * from[c];
    }
}

/* Softmax of one query's row: p [seq] holds the weights of the allowed keys, 0 elsewhere. Returns
 * lse, -inf if no key is allowed. Keys that are not allowed are not read: they may be NaN. */
static double row_softmax(const ra_whole *whole, int64_t row, int64_t i, double scale,
                          const double *q, const double *k, int64_t chan, double *p)
{
    double high = -INFINITY, sum = 0;
    int64_t allowed = 0;
    for (int64_t j = 0; j < whole->seq; j++) {
        p[j] = 0;
        if (ra_whole_allows(whole, row, i, j)) {
            p[j] = scale * dot(q, k + j * chan, chan);
            high = p[j] > high ? p[j] : high;
            allowed++;
        }
    }
    if (allowed == 0) {
        return -INFINITY;
    }
    for (int64_t j = 0; j < whole->seq; j++) {
        if (ra_whole_allows(whole, row, i, j)) {
            p[j] = exp(p[j] - high);
            sum += p[j];
        }
    }
    for (int64_t j = 0; j < whole->seq; j++) {
        p[j] /= sum;
    }
    return high + log(sum);
}

/* out [chan] = sum of p[j] v[j] over the allowed keys. */
static void row_mean(const ra_whole *whole, int64_t row, int64_t i, const double *p,
                     const double *v, int64_t chan, double *out)
{
    for (int64_t c = 0; c < chan; c++) {
        out[c] = 0;
    }
    for (int64_t j = 0; j < whole->seq; j++) {
        if (ra_whole_allows(whole, row, i, j)) {
            add_scaled(out, p[j], v + j * chan, chan);
        }
    }
}

/* Everything double of one (row, head): carved from one allocation. */
typedef struct matrices {
    double *memory;
    double *q, *k, *v, *dout, *dq, *dk, *dv; /* [seq, chan] */
    double *p;                               /* [seq] */
    double *out;                             /* [chan] */
} matrices;

static ra_status matrices_create(const ra_whole *whole, const ra_layer *layer, matrices *m)
{
    int64_t chan = layer->head_dim, each = whole->seq * chan;
    RA_TRY(RA_NEW(&m->memory, 7 * each + whole->seq + chan));
    m->q = m->memory;
    m->k = m->q + each;
    m->v = m->k + each;
    m->dout = m->v + each;
    m->dq = m->dout + each;
    m->dk = m->dq + each;
    m->dv = m->dk + each;
    m->p = m->dv + each;
    m->out = m->p + whole->seq;
    return RA_OK;
}

static void head_forward(const ra_whole *whole, const ra_layer *layer, const ra_forward_io *io,
                         int64_t row, int64_t head, const matrices *m)
{
    int64_t chan = layer->head_dim, kv_head = head / (layer->q_heads / layer->kv_heads);
    matrix_load(&io->q, row, head, m->q);
    matrix_load(&io->k, row, kv_head, m->k);
    matrix_load(&io->v, row, kv_head, m->v);
    for (int64_t i = 0; i < whole->seq; i++) {
        double lse =
            row_softmax(whole, row, i, (double)layer->scale, m->q + i * chan, m->k, chan, m->p);
        row_mean(whole, row, i, m->p, m->v, chan, m->out);
        ra_tensor_set(&io->lse, row, head, i, 0, lse);
        for (int64_t c = 0; c < chan; c++) {
            ra_tensor_set(&io->out, row, head, i, c, m->out[c]);
        }
    }
}

ra_status ra_oracle_forward(const ra_step_desc *desc, const ra_layer *layer,
                            const ra_forward_io *io)
{
    ra_whole whole = {0};
    matrices m = {0};
    RA_TRY(ra_whole_build(desc, layer, &whole));
    ra_status status = ra_whole_forward_check(&whole, layer, io, true);
    if (status) {
        goto done;
    }
    status = matrices_create(&whole, layer, &m);
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

/* Adds one query's part: dp = dout.v, ds = p (dp - delta) scale, delta = out.dout = sum of p dp. */
static void row_backward(const ra_whole *whole, int64_t row, int64_t i, double scale, int64_t chan,
                         const matrices *m)
{
    const double *q = m->q + i * chan, *dout = m->dout + i * chan;
    double *dq = m->dq + i * chan;
    double lse = row_softmax(whole, row, i, scale, q, m->k, chan, m->p);
    if (lse == -INFINITY) {
        return; /* An empty row's dout is ignored: it may be NaN. */
    }
    row_mean(whole, row, i, m->p, m->v, chan, m->out);
    double delta = dot(m->out, dout, chan);
    for (int64_t j = 0; j < whole->seq; j++) {
        if (ra_whole_allows(whole, row, i, j)) {
            double ds = m->p[j] * (dot(dout, m->v + j * chan, chan) - delta) * scale;
            add_scaled(m->dv + j * chan, m->p[j], dout, chan);
            add_scaled(dq, ds, m->k + j * chan, chan);
            add_scaled(m->dk + j * chan, ds, q, chan);
        }
    }
}

/* One KV head with the query heads that read it. */
static void kv_head_backward(const ra_whole *whole, const ra_layer *layer, const ra_backward_io *io,
                             int64_t row, int64_t kv_head, const matrices *m)
{
    int64_t chan = layer->head_dim, group = layer->q_heads / layer->kv_heads;
    size_t bytes = (size_t)(whole->seq * chan) * sizeof(double);
    matrix_load(&io->k, row, kv_head, m->k);
    matrix_load(&io->v, row, kv_head, m->v);
    memset(m->dk, 0, bytes);
    memset(m->dv, 0, bytes);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        matrix_load(&io->q, row, head, m->q);
        matrix_load(&io->dout, row, head, m->dout);
        memset(m->dq, 0, bytes);
        for (int64_t i = 0; i < whole->seq; i++) {
            row_backward(whole, row, i, (double)layer->scale, chan, m);
        }
        matrix_store(m->dq, &io->dq, row, head);
    }
    matrix_store(m->dk, &io->dk, row, kv_head);
    matrix_store(m->dv, &io->dv, row, kv_head);
}

ra_status ra_oracle_backward(const ra_step_desc *desc, const ra_layer *layer,
                             const ra_backward_io *io)
{
    ra_whole whole = {0};
    matrices m = {0};
    RA_TRY(ra_whole_build(desc, layer, &whole));
    ra_status status = ra_whole_backward_check(&whole, layer, io, true);
    if (status) {
        goto done;
    }
    status = matrices_create(&whole, layer, &m);
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
