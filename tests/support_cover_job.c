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

static void set_ones(const ra_tensor *t, const cover_token *token)
{
    for (int64_t h = 0; h < t->size[RA_HEAD]; h++) {
        for (int64_t d = 0; d < t->size[RA_CHAN]; d++) {
            ra_tensor_set(t, token->tensor_row, h, token->index, d, 1);
        }
    }
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
    ra_grad_job job = {.cover = cover,
                       .scale = c->scale,
                       .q = c->q,
                       .dout = c->dout,
                       .k = {c->k[0], c->k[1]},
                       .v = {c->v[0], c->v[1]},
                       .lse = c->lse,
                       .delta = c->delta,
                       .dq = like(&c->q, RA_F32)};
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        job.dk[i] = like(&c->k[i], RA_F32);
        job.dv[i] = like(&c->k[i], RA_F32);
    }
    for (int64_t i = 0; i < c->q_total; i++) {
        set_ones(&job.dq, &c->q_token[i]);
    }
    for (int64_t i = 0; i < c->k_total; i++) {
        set_ones(&job.dk[c->k_token[i].source], &c->k_token[i]);
        set_ones(&job.dv[c->k_token[i].source], &c->k_token[i]);
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
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        ra_free(job->dk[i].data);
        ra_free(job->dv[i].data);
    }
}

/* ---- comparison */

/* How far a result may be off: a share of the largest one, the same everywhere, a share of each. */
typedef struct bounds {
    double tolerance, floor, rounding;
} bounds;

/* `got` holds offset + want at the tokens of this source, each within its bound, and NaN in all
 * other places. want: [total, heads, chan]. */
static void check(const char *name, const ra_tensor *got, const cover_token *token, int64_t total,
                  int source, const double *want, double offset, bounds within)
{
    int64_t heads = got->size[RA_HEAD], chan = got->size[RA_CHAN], named = 0, numbers = 0;
    double largest = 1;
    for (int64_t i = 0; i < total * heads * chan; i++) {
        largest = isfinite(want[i]) ? fmax(largest, fabs(want[i])) : largest;
    }
    for (int64_t i = 0; i < total * heads * chan; i++) {
        const cover_token *t = &token[i / chan / heads];
        if (t->source != source) {
            continue;
        }
        named++;
        int64_t head = i / chan % heads, d = i % chan;
        double x = ra_tensor_get(got, t->tensor_row, head, t->index, d) - offset;
        double bound = within.tolerance * largest + within.floor + within.rounding * fabs(want[i]);
        if (!(x == want[i] || fabs(x - want[i]) <= bound)) {
            print_error("%s[row %lld, head %lld, pos %lld, %lld]: %.9g, expected %.9g +- %.2g\n",
                        name, (long long)t->row, (long long)head, (long long)t->token.pos,
                        (long long)d, x, want[i], bound);
            fail();
        }
    }
    for (int64_t i = 0; i < ra_tensor_count(got) && got->data; i++) {
        int64_t seq = got->size[RA_SEQ];
        numbers += !isnan(ra_tensor_get(got, i / chan / seq / heads, i / chan / seq % heads,
                                        i / chan % seq, i % chan));
    }
    assert_int_equal(numbers, named);
}

void cover_check_fold(const cover_case *c, const ra_fold_job *job, double tolerance)
{
    double rounding = c->dtype == RA_BF16 ? 0x1p-8 : c->dtype == RA_F16 ? 0x1p-11 : 0;
    check("lse", &job->lse, c->q_token, c->q_total, RA_SOURCE_OWN, c->lse_want, 0,
          (bounds){tolerance, 0, 0});
    check("out", &job->out, c->q_token, c->q_total, RA_SOURCE_OWN, c->out, 0,
          (bounds){tolerance, 0, rounding});
}

void cover_check_grad(const cover_case *c, const ra_grad_job *job, double tolerance)
{
    check("dq", &job->dq, c->q_token, c->q_total, RA_SOURCE_OWN, c->dq, 1,
          (bounds){tolerance, 2 * c->dq_f32, 0});
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        check("dk", &job->dk[i], c->k_token, c->k_total, i, c->dk, 1,
              (bounds){tolerance, 2 * c->dk_f32, 0});
        check("dv", &job->dv[i], c->k_token, c->k_total, i, c->dv, 1,
              (bounds){tolerance, 2 * c->dv_f32, 0});
    }
}
