/* Rounding is taken as a multiple of the unit of the dtype times the sum of the magnitudes that
 * were added up. */
#include "gpu_bench_check.h"

#include <math.h>

#include "base/limits.h"
#include "tensor/tensor.h"

/* 4 roundings to the dtype: p, ds, out, the result. */
static const double unit = 4 * 0x1p-8;
static const double lse_allowed = 1e-3;

/* A sum of rows, and the sum of its terms' magnitudes. */
typedef struct sum {
    double value[RA_HEAD_DIM_MAX], magnitude[RA_HEAD_DIM_MAX];
} sum;

typedef struct row {
    double x[RA_HEAD_DIM_MAX];
} row;

static row load(const ra_tensor *t, int64_t batch, int64_t head, int64_t seq)
{
    row r = {{0}};
    const uint16_t *from = ra_tensor_at(t, batch, head, seq);
    for (int64_t c = 0; c < t->size[RA_CHAN]; c++) {
        r.x[c] = (double)ra_bf16_to_f32(from[c]);
    }
    return r;
}

static double dot(const row *a, const row *b, double *magnitude)
{
    double value = 0, size = 0;
    for (int c = 0; c < RA_HEAD_DIM_MAX; c++) {
        value += a->x[c] * b->x[c];
        size += fabs(a->x[c] * b->x[c]);
    }
    *magnitude = size;
    return value;
}

static void add(sum *to, double weight, double magnitude, const row *x)
{
    for (int c = 0; c < RA_HEAD_DIM_MAX; c++) {
        to->value[c] += weight * x->x[c];
        to->magnitude[c] += magnitude * fabs(x->x[c]);
    }
}

static double share_of(const ra_tensor *t, int64_t batch, int64_t head, int64_t seq,
                       const sum *want)
{
    double worst = 0;
    row got = load(t, batch, head, seq);
    for (int64_t c = 0; c < t->size[RA_CHAN]; c++) {
        double share = fabs(got.x[c] - want->value[c]) / (unit * (want->magnitude[c] + 1e-30));
        worst = isnan(share) ? INFINITY : fmax(worst, share);
    }
    return worst;
}

static ra_token token_at(const gpu_bench_sample *s, int64_t batch, int64_t pos)
{
    int64_t at = batch * s->q.size[RA_SEQ] + pos;
    return (ra_token){pos, s->doc ? s->doc[at] : 1, s->group ? s->group[at] : -1};
}

static bool allows(const gpu_bench_sample *s, int64_t batch, int64_t query, int64_t key)
{
    return ra_mask_allows(&s->layer, token_at(s, batch, query), token_at(s, batch, key));
}

/* p and ds of one pair. */
typedef struct pair {
    double p, ds, ds_magnitude;
} pair;

static pair pair_of(const ra_layer *layer, const row *q, const row *k, const row *v,
                    const row *dout, double lse, double delta, double delta_magnitude)
{
    double size, scale = (double)layer->scale;
    double p = exp(scale * dot(q, k, &size) - lse);
    double product = dot(dout, v, &size);
    return (pair){p, p * (product - delta) * scale, p * (size + delta_magnitude) * scale};
}

/* out and lse of one query, and dq. */
static double check_query(const gpu_bench_sample *s, int64_t batch, int64_t head, int64_t i,
                          bool backward)
{
    int64_t kv_head = head / (s->layer.q_heads / s->layer.kv_heads), seq = s->k.size[RA_SEQ];
    double size, total = 0, delta_magnitude = 0;
    sum out = {{0}, {0}}, dq = {{0}, {0}};
    row q = load(&s->q, batch, head, i), exact = {{0}};
    for (int64_t j = 0; j < seq; j++) {
        if (allows(s, batch, i, j)) {
            row k = load(&s->k, batch, kv_head, j), v = load(&s->v, batch, kv_head, j);
            /* Scores are of the order of 1, so exp cannot overflow. */
            double weight = exp((double)s->layer.scale * dot(&q, &k, &size));
            total += weight;
            add(&out, weight, weight, &v);
        }
    }
    for (int c = 0; c < RA_HEAD_DIM_MAX; c++) {
        out.value[c] /= total;
        out.magnitude[c] /= total;
        exact.x[c] = out.value[c];
    }
    const float *lse = ra_tensor_at(&s->lse, batch, head, i);
    double lse_share = fabs((double)*lse - log(total)) / lse_allowed;
    double worst = fmax(share_of(&s->out, batch, head, i, &out),
                        isnan(lse_share) ? (double)INFINITY : lse_share);
    if (!backward) {
        return worst;
    }
    row dout = load(&s->dout, batch, head, i);
    double delta = dot(&dout, &exact, &delta_magnitude);
    for (int64_t j = 0; j < seq; j++) {
        if (allows(s, batch, i, j)) {
            row k = load(&s->k, batch, kv_head, j), v = load(&s->v, batch, kv_head, j);
            pair w = pair_of(&s->layer, &q, &k, &v, &dout, log(total), delta, delta_magnitude);
            add(&dq, w.ds, w.ds_magnitude, &k);
        }
    }
    return fmax(worst, share_of(&s->dq, batch, head, i, &dq));
}

/* dk and dv of one key, from the lse and out under test. */
static double check_key(const gpu_bench_sample *s, int64_t batch, int64_t kv_head, int64_t j)
{
    int64_t group = s->layer.q_heads / s->layer.kv_heads;
    sum dk = {{0}, {0}}, dv = {{0}, {0}};
    row k = load(&s->k, batch, kv_head, j), v = load(&s->v, batch, kv_head, j);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int64_t i = 0; i < s->q.size[RA_SEQ]; i++) {
            if (allows(s, batch, i, j)) {
                double delta_magnitude;
                row q = load(&s->q, batch, head, i), dout = load(&s->dout, batch, head, i);
                row out = load(&s->out, batch, head, i);
                double delta = dot(&dout, &out, &delta_magnitude);
                const float *lse = ra_tensor_at(&s->lse, batch, head, i);
                pair w =
                    pair_of(&s->layer, &q, &k, &v, &dout, (double)*lse, delta, delta_magnitude);
                add(&dk, w.ds, w.ds_magnitude, &q);
                add(&dv, w.p, w.p, &dout);
            }
        }
    }
    return fmax(share_of(&s->dk, batch, kv_head, j, &dk), share_of(&s->dv, batch, kv_head, j, &dv));
}

double gpu_bench_check(const gpu_bench_sample *s, bool backward)
{
    int64_t seq = s->q.size[RA_SEQ], last = seq - 1;
    const int64_t at[] = {0, 63, seq / 3, seq / 2 + 1, last - 64, last};
    double worst = 0;
    for (int i = 0; i < 6; i++) {
        int64_t batch = i % s->q.size[RA_ROW], head = (5 * i + 1) % s->layer.q_heads;
        worst = fmax(worst, check_query(s, batch, head, at[i], backward));
        if (backward && i % 2 == 0) {
            worst = fmax(worst, check_key(s, batch, i % s->layer.kv_heads, at[i]));
        }
    }
    return worst;
}
