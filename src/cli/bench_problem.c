/*
 * The direct computation needs no lse or out of its own for whole rows of dk and dv: it takes the
 * ones under test, whose sampled rows are checked first. What rounding explains is a multiple of
 * the sum of the magnitudes that were added up.
 */
#include "cli/bench_problem.h"

#include <math.h>

#include "base/alloc.h"
#include "base/limits.h"
#include "oracle/tolerance.h"

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void fill_random(const ra_tensor *t, uint32_t seed)
{
    uint32_t state = seed;
    for (int64_t head = 0; head < t->size[RA_HEAD]; head++) {
        for (int64_t seq = 0; seq < t->size[RA_SEQ]; seq++) {
            for (int64_t chan = 0; chan < t->size[RA_CHAN]; chan++) {
                double x = (double)next_random(&state) * 0x1p-23 - 1.0;
                ra_tensor_set(t, 0, head, seq, chan, x);
            }
        }
    }
}

static ra_status allocate(const ra_bench_problem *problem, bool is_key, bool is_lse, void **owned,
                          ra_tensor *out)
{
    const ra_layer *layer = &problem->layer;
    ra_dtype dtype = is_lse ? RA_F32 : layer->dtype;
    ra_tensor t = ra_tensor_bhsd(NULL, dtype, 1, is_key ? layer->kv_heads : layer->q_heads,
                                 problem->seq, is_lse ? 1 : layer->head_dim);
    RA_TRY(ra_alloc((size_t)ra_tensor_count(&t), ra_dtype_bytes(dtype), owned));
    t.data = *owned;
    *out = t;
    return RA_OK;
}

ra_status ra_bench_problem_create(const ra_layer *layer, int64_t seq, ra_bench_problem *out)
{
    *out = (ra_bench_problem){.layer = *layer, .seq = seq};
    ra_tensor *inputs[] = {&out->q, &out->k, &out->v, &out->dout};
    ra_status status = RA_OK;
    for (int i = 0; i < 4 && !status; i++) {
        status = allocate(out, i == 1 || i == 2, false, &out->owned[i], inputs[i]);
        if (!status) {
            fill_random(inputs[i], (uint32_t)i + 1);
        }
    }
    for (int i = 0; i < RA_RESULT_COUNT && !status; i++) {
        status = allocate(out, i >= RA_RESULT_DK, i == RA_RESULT_LSE, &out->owned[4 + i],
                          &out->result[i]);
    }
    if (status) {
        ra_bench_problem_free(out);
    }
    return status;
}

void ra_bench_problem_free(ra_bench_problem *problem)
{
    for (int i = 0; i < 4 + RA_RESULT_COUNT; i++) {
        ra_free(problem->owned[i]);
    }
    *problem = (ra_bench_problem){0};
}

/* A sum and the sum of its terms' magnitudes, a channel each. */
typedef struct sum {
    double value[RA_HEAD_DIM_MAX], magnitude[RA_HEAD_DIM_MAX];
} sum;

typedef struct row {
    double x[RA_HEAD_DIM_MAX];
} row;

static void load(const ra_tensor *t, int64_t head, int64_t seq, row *out)
{
    for (int64_t c = 0; c < t->size[RA_CHAN]; c++) {
        out->x[c] = ra_tensor_get(t, 0, head, seq, c);
    }
}

static double dot(const row *a, const row *b, int64_t chan, double *magnitude)
{
    double value = 0, size = 0;
    for (int64_t c = 0; c < chan; c++) {
        value += a->x[c] * b->x[c];
        size += fabs(a->x[c] * b->x[c]);
    }
    *magnitude = size;
    return value;
}

static void add(sum *to, double weight, double magnitude, const row *x, int64_t chan)
{
    for (int64_t c = 0; c < chan; c++) {
        to->value[c] += weight * x->x[c];
        to->magnitude[c] += magnitude * fabs(x->x[c]);
    }
}

static bool allows(const ra_layer *layer, int64_t query, int64_t key)
{
    return ra_mask_allows(layer, (ra_token){query, 1, -1}, (ra_token){key, 1, -1});
}

/* 4 roundings to the dtype (p, ds, out, the result), and 64 of the f32 sums. */
static double share_of_allowed(const ra_bench_problem *p, ra_result result, int64_t head,
                               int64_t seq, const sum *expected)
{
    double worst = 0, unit = 4 * ra_unit_roundoff(p->layer.dtype) + 64 * ra_unit_roundoff(RA_F32);
    for (int64_t c = 0; c < p->layer.head_dim; c++) {
        double got = ra_tensor_get(&p->result[result], 0, head, seq, c);
        double share = fabs(got - expected->value[c]) / (unit * (expected->magnitude[c] + 1e-30));
        worst = share > worst || isnan(share) ? (isnan(share) ? INFINITY : share) : worst;
    }
    return worst;
}

/* p and ds of one pair, from the rows of both sides. */
typedef struct pair {
    double p, ds, ds_magnitude;
} pair;

static pair pair_of(const ra_layer *layer, const row *q, const row *k, const row *v,
                    const row *dout, double lse, double delta, double delta_magnitude)
{
    double ignored, size;
    double p = exp((double)layer->scale * dot(q, k, layer->head_dim, &ignored) - lse);
    double dp = dot(dout, v, layer->head_dim, &size);
    return (pair){p, p * (dp - delta) * (double)layer->scale,
                  p * (size + delta_magnitude) * (double)layer->scale};
}

typedef struct bench_scratch {
    row q, k, v, dout, out;
    sum first, second;
} bench_scratch;

/* out and dq of one query, and through them its lse. */
static double check_query(const ra_bench_problem *p, int64_t head, int64_t i, bench_scratch *s)
{
    const ra_layer *layer = &p->layer;
    int64_t chan = layer->head_dim, kv_head = head / (layer->q_heads / layer->kv_heads);
    double ignored, delta_magnitude, total = 0;
    s->first = s->second = (sum){0};
    load(&p->q, head, i, &s->q);
    load(&p->dout, head, i, &s->dout);
    for (int64_t j = 0; j < p->seq; j++) {
        if (allows(layer, i, j)) {
            load(&p->k, kv_head, j, &s->k);
            load(&p->v, kv_head, j, &s->v);
            /* Scores are of the order of 1, so exp cannot overflow. */
            double weight = exp((double)layer->scale * dot(&s->q, &s->k, chan, &ignored));
            total += weight;
            add(&s->first, weight, weight, &s->v, chan);
        }
    }
    for (int64_t c = 0; c < chan; c++) {
        s->first.value[c] /= total;
        s->first.magnitude[c] /= total;
        s->out.x[c] = s->first.value[c];
    }
    double delta = dot(&s->dout, &s->out, chan, &delta_magnitude);
    for (int64_t j = 0; j < p->seq; j++) {
        if (allows(layer, i, j)) {
            load(&p->k, kv_head, j, &s->k);
            load(&p->v, kv_head, j, &s->v);
            pair w =
                pair_of(layer, &s->q, &s->k, &s->v, &s->dout, log(total), delta, delta_magnitude);
            add(&s->second, w.ds, w.ds_magnitude, &s->k, chan);
        }
    }
    double out = share_of_allowed(p, RA_RESULT_OUT, head, i, &s->first);
    double dq = share_of_allowed(p, RA_RESULT_DQ, head, i, &s->second);
    double lse = fabs(ra_tensor_get(&p->result[RA_RESULT_LSE], 0, head, i, 0) - log(total)) / 1e-4;
    return fmax(isnan(lse) ? INFINITY : lse, fmax(out, dq));
}

/* dk and dv of one key. */
static double check_key(const ra_bench_problem *p, int64_t kv_head, int64_t j, bench_scratch *s)
{
    const ra_layer *layer = &p->layer;
    int64_t chan = layer->head_dim, group = layer->q_heads / layer->kv_heads;
    s->first = s->second = (sum){0};
    load(&p->k, kv_head, j, &s->k);
    load(&p->v, kv_head, j, &s->v);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (int64_t i = 0; i < p->seq; i++) {
            if (!allows(layer, i, j)) {
                continue;
            }
            double delta_magnitude;
            load(&p->q, head, i, &s->q);
            load(&p->dout, head, i, &s->dout);
            load(&p->result[RA_RESULT_OUT], head, i, &s->out);
            double delta = dot(&s->dout, &s->out, chan, &delta_magnitude);
            pair w = pair_of(layer, &s->q, &s->k, &s->v, &s->dout,
                             ra_tensor_get(&p->result[RA_RESULT_LSE], 0, head, i, 0), delta,
                             delta_magnitude);
            add(&s->first, w.ds, w.ds_magnitude, &s->q, chan);
            add(&s->second, w.p, w.p, &s->dout, chan);
        }
    }
    return fmax(share_of_allowed(p, RA_RESULT_DK, kv_head, j, &s->first),
                share_of_allowed(p, RA_RESULT_DV, kv_head, j, &s->second));
}

ra_status ra_bench_problem_check(const ra_bench_problem *problem, double *worst)
{
    const int64_t last = problem->seq - 1, sample[] = {0, problem->seq / 3, last};
    bench_scratch *scratch = NULL;
    RA_TRY(RA_NEW(&scratch, 1));
    *worst = 0;
    for (int i = 0; i < 3; i++) {
        int64_t head = i % problem->layer.q_heads, kv_head = i % problem->layer.kv_heads;
        *worst = fmax(*worst, check_query(problem, head, sample[i], scratch));
        *worst = fmax(*worst, check_key(problem, kv_head, sample[i], scratch));
    }
    ra_free(scratch);
    return RA_OK;
}
