/* Jobs over the cases of support_cover.h, and the comparison of their results with the answer. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "support_cover.h"

static ra_tensor like(const ra_tensor *t, ra_dtype dtype)
{
    ra_tensor copy = ra_tensor_bhsd(NULL, dtype, t->size[RA_ROW], t->size[RA_HEAD], t->size[RA_SEQ],
                                    t->size[RA_CHAN]);
    size_t bytes = (size_t)ra_tensor_count(&copy) * ra_dtype_bytes(dtype);
    if (t->data && bytes) {
        assert_int_equal(ra_alloc(bytes, 1, &copy.data), RA_OK);
        memset(copy.data, 0xff, bytes); /* a NaN in every dtype */
    }
    return copy;
}

ra_fold_job cover_fold_job(const cover_case *c, const ra_cover *cover)
{
    ra_fold_job job = {.cover = cover,
                       .scale = c->scale,
                       .q = c->q,
                       .k = {c->k[0], c->k[1]},
                       .v = {c->v[0], c->v[1]},
                       .acc = like(&c->q, RA_F32),
                       .lse = like(&c->lse, RA_F32),
                       .out = like(&c->q, c->dtype)};
    return job;
}

ra_grad_job cover_grad_job(const cover_case *c, const ra_cover *cover)
{
    ra_grad_job job = {
        .cover = cover,
        .scale = c->scale,
        .q = c->q,
        .dout = c->dout,
        .k = {c->k[0], c->k[1]},
        .v = {c->v[0], c->v[1]},
        .lse = c->lse,
        .delta = c->delta,
        .dq = like(&c->q, RA_F32),
        .to = {like(&c->q, c->dtype), like(&c->k[0], c->dtype), like(&c->k[0], c->dtype)}};
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        job.dk[i] = like(&c->k[i], RA_F32);
        job.dv[i] = like(&c->k[i], RA_F32);
    }
    return job;
}

void cover_fold_free(ra_fold_job *job)
{
    ra_free(job->acc.data);
    ra_free(job->lse.data);
    ra_free(job->out.data);
}

void cover_grad_free(ra_grad_job *job)
{
    ra_free(job->dq.data);
    ra_free(job->to.dq.data);
    ra_free(job->to.dk.data);
    ra_free(job->to.dv.data);
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        ra_free(job->dk[i].data);
        ra_free(job->dv[i].data);
    }
}

/* ---- where gradients are in the end */

/* A row without a partner is in no computation. */
typedef enum place { NOWHERE, IN_RESULT, IN_SUMS } place;

static place *places_new(const cover_case *c, bool keys)
{
    int64_t total = keys ? c->k_total : c->q_total, others = keys ? c->q_total : c->k_total;
    place *at = NULL;
    assert_int_equal(RA_NEW(&at, total + 1), RA_OK);
    for (int64_t i = 0; i < total; i++) {
        const cover_token *t = keys ? &c->k_token[i] : &c->q_token[i];
        for (int64_t j = 0; j < others && at[i] == NOWHERE; j++) {
            const cover_token *other = keys ? &c->q_token[j] : &c->k_token[j];
            bool sees =
                other->row == t->row && ra_mask_rule(&c->cover.mask, keys ? other->token : t->token,
                                                     keys ? t->token : other->token);
            at[i] = !sees ? NOWHERE : t->source == RA_SOURCE_OWN ? IN_RESULT : IN_SUMS;
        }
        for (int64_t j = 0; j < c->later.count && keys && at[i] == IN_RESULT; j++) {
            const ra_piece *later = &c->later.piece[j];
            int64_t offset = t->token.pos - later->pos;
            if (later->row == t->row && later->doc == t->token.doc && 0 <= offset &&
                offset < later->count) {
                at[i] = IN_SUMS;
            }
        }
    }
    return at;
}

/* ---- comparison */

/* How far a result may be off: a share of the largest one, the same everywhere, a share of each. */
typedef struct bounds {
    double tolerance, floor, rounding;
} bounds;

/* Where a tensor holds results: at the tokens of this source that are at this place; at NULL: at
 * all of them. */
typedef struct expected {
    const char *name;
    const cover_token *token;
    int64_t total;
    int source;
    const place *at;
    place which;
    const double *want; /* [total, heads, chan] */
    bounds within;
} expected;

static bool holds(const expected *e, int64_t i)
{
    return e->token[i].source == e->source && (!e->at || e->at[i] == e->which);
}

static void check_token(const expected *e, const ra_tensor *got, int64_t i, double largest)
{
    const cover_token *t = &e->token[i];
    int64_t heads = got->size[RA_HEAD], chan = got->size[RA_CHAN];
    for (int64_t head = 0; head < heads; head++) {
        for (int64_t d = 0; d < chan; d++) {
            double x = ra_tensor_get(got, t->tensor_row, head, t->index, d);
            double want = e->want[(i * heads + head) * chan + d];
            double bound =
                e->within.tolerance * largest + e->within.floor + e->within.rounding * fabs(want);
            if (!(x == want || fabs(x - want) <= bound)) {
                print_error("%s[row %lld, head %lld, pos %lld, %lld]: %.9g, expected %.9g +- "
                            "%.2g\n",
                            e->name, (long long)t->row, (long long)head, (long long)t->token.pos,
                            (long long)d, x, want, bound);
                fail();
            }
        }
    }
}

static int64_t count_numbers(const ra_tensor *t)
{
    int64_t seq = t->size[RA_SEQ], heads = t->size[RA_HEAD], chan = t->size[RA_CHAN], numbers = 0;
    for (int64_t i = 0; i < ra_tensor_count(t) && t->data; i++) {
        numbers += !isnan(ra_tensor_get(t, i / chan / seq / heads, i / chan / seq % heads,
                                        i / chan % seq, i % chan));
    }
    return numbers;
}

/* `got` holds what is wanted, each element within its bound, and NaN in all other places; but sums
 * of rows whose result is elsewhere may hold anything. */
static void check(const expected *e, const ra_tensor *got)
{
    int64_t width = got->size[RA_HEAD] * got->size[RA_CHAN], named = 0, free = 0;
    double largest = 1;
    for (int64_t i = 0; i < e->total * width; i++) {
        largest = isfinite(e->want[i]) ? fmax(largest, fabs(e->want[i])) : largest;
    }
    for (int64_t i = 0; i < e->total; i++) {
        if (holds(e, i)) {
            check_token(e, got, i, largest);
            named += width;
        } else if (e->at && e->at[i] == IN_RESULT && e->token[i].source == e->source) {
            free += width;
        }
    }
    int64_t numbers = count_numbers(got);
    assert_in_range(numbers, named, named + free);
}

static double rounding_of(ra_dtype dtype)
{
    return dtype == RA_BF16 ? 0x1p-8 : dtype == RA_F16 ? 0x1p-11 : 0;
}

void cover_check_fold(const cover_case *c, const ra_fold_job *job, double tolerance)
{
    expected e = {"lse", c->q_token, c->q_total,  RA_SOURCE_OWN,
                  NULL,  0,          c->lse_want, {tolerance, 0, 0}};
    check(&e, &job->lse);
    e.name = "out";
    e.want = c->out;
    e.within.rounding = rounding_of(c->dtype);
    check(&e, &job->out);
}

static void check_grads(const char *name, const cover_case *c, const place *at, const double *want,
                        bounds within, const ra_tensor *result, const ra_tensor *sums, bool keys)
{
    expected e = {name,
                  keys ? c->k_token : c->q_token,
                  keys ? c->k_total : c->q_total,
                  RA_SOURCE_OWN,
                  at,
                  IN_SUMS,
                  want,
                  within};
    for (int source = 0; source < (keys ? RA_SOURCE_COUNT : 1); source++) {
        e.source = source;
        check(&e, &sums[source]);
    }
    e.source = RA_SOURCE_OWN;
    e.which = IN_RESULT;
    e.within.rounding = rounding_of(c->dtype);
    check(&e, result);
}

void cover_check_grad(const cover_case *c, const ra_grad_job *job, double tolerance)
{
    place *q = places_new(c, false), *k = places_new(c, true);
    check_grads("dq", c, q, c->dq, (bounds){tolerance, 2 * c->dq_f32, 0}, &job->to.dq, &job->dq,
                false);
    check_grads("dk", c, k, c->dk, (bounds){tolerance, 2 * c->dk_f32, 0}, &job->to.dk, job->dk,
                true);
    check_grads("dv", c, k, c->dv, (bounds){tolerance, 2 * c->dv_f32, 0}, &job->to.dv, job->dv,
                true);
    ra_free(q);
    ra_free(k);
}

static bool same_sums(const cover_case *c, const place *k, const ra_tensor *a, const ra_tensor *b)
{
    bool same = true;
    for (int64_t i = 0; i < c->k_total; i++) {
        const cover_token *t = &c->k_token[i];
        const ra_tensor *x = &a[t->source], *y = &b[t->source];
        for (int64_t head = 0; k[i] == IN_SUMS && head < x->size[RA_HEAD]; head++) {
            same = same && memcmp(ra_tensor_at(x, t->tensor_row, head, t->index),
                                  ra_tensor_at(y, t->tensor_row, head, t->index),
                                  (size_t)x->size[RA_CHAN] * sizeof(float)) == 0;
        }
    }
    return same;
}

bool cover_same_grads(const cover_case *c, const ra_grad_job *a, const ra_grad_job *b)
{
    place *k = places_new(c, true);
    bool same = cover_same_bits(&a->to.dq, &b->to.dq) && cover_same_bits(&a->to.dk, &b->to.dk) &&
                cover_same_bits(&a->to.dv, &b->to.dv) && same_sums(c, k, a->dk, b->dk) &&
                same_sums(c, k, a->dv, b->dv);
    ra_free(k);
    return same;
}
