/* Variable-length attention against its definition in double, segment by segment: query i of a
 * segment stands at position len_k - len_q + i, key j at position j. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "oracle/tolerance.h"
#include "support.h"
#include "tensor/tensor.h"

enum { SEGMENTS_MAX = 6 };

typedef struct varlen_case {
    ra_layer layer;
    int64_t segments;
    int32_t cu_q[SEGMENTS_MAX + 1], cu_k[SEGMENTS_MAX + 1];
    ra_tensor q, k, v, dout;                                      /* dtype of the layer */
    ra_tensor out, lse, dq, dk, dv;                               /* results */
    ra_tensor exact_out, exact_lse, exact_dq, exact_dk, exact_dv; /* f64 */
} varlen_case;

/* [T, H, D] memory seen as [1, H, T, D]. */
static ra_tensor thd_new(ra_dtype dtype, int64_t heads, int64_t total, int64_t chan)
{
    void *data = calloc((size_t)(heads * total * chan) + 1, ra_dtype_bytes(dtype));
    assert_non_null(data);
    return (ra_tensor){
        data, dtype, {1, heads, total, chan}, {heads * total * chan, chan, heads * chan, 1}};
}

static void fill(const ra_tensor *t, rng *r, double deviation)
{
    for (int64_t head = 0; head < t->size[RA_HEAD]; head++) {
        for (int64_t i = 0; i < t->size[RA_SEQ]; i++) {
            for (int64_t c = 0; c < t->size[RA_CHAN]; c++) {
                ra_tensor_set(t, 0, head, i, c, r ? deviation * rng_normal(r) : (double)NAN);
            }
        }
    }
}

static void case_create(varlen_case *x, rng *r, ra_layer layer, int64_t segments,
                        const int32_t *len_q, const int32_t *len_k)
{
    *x = (varlen_case){.layer = layer, .segments = segments};
    for (int64_t i = 0; i < segments; i++) {
        x->cu_q[i + 1] = x->cu_q[i] + len_q[i];
        x->cu_k[i + 1] = x->cu_k[i] + len_k[i];
    }
    int64_t tq = x->cu_q[segments], tk = x->cu_k[segments], chan = layer.head_dim;
    ra_tensor *like_q[] = {&x->q, &x->dout, &x->out, &x->dq};
    ra_tensor *like_k[] = {&x->k, &x->v, &x->dk, &x->dv};
    for (int i = 0; i < 4; i++) {
        *like_q[i] = thd_new(layer.dtype, layer.q_heads, tq, chan);
        *like_k[i] = thd_new(layer.dtype, layer.kv_heads, tk, chan);
        fill(like_q[i], i < 2 ? r : NULL, i == 0 ? 0.5 : 1);
        fill(like_k[i], i < 2 ? r : NULL, i == 0 ? 0.5 : 1);
    }
    x->lse = thd_new(RA_F32, layer.q_heads, tq, 1);
    fill(&x->lse, NULL, 1);
    x->exact_out = thd_new(RA_F64, layer.q_heads, tq, chan);
    x->exact_lse = thd_new(RA_F64, layer.q_heads, tq, 1);
    x->exact_dq = thd_new(RA_F64, layer.q_heads, tq, chan);
    x->exact_dk = thd_new(RA_F64, layer.kv_heads, tk, chan);
    x->exact_dv = thd_new(RA_F64, layer.kv_heads, tk, chan);
}

static void case_free(varlen_case *x)
{
    ra_tensor *all[] = {&x->q,         &x->k,        &x->v,        &x->dout,    &x->out,
                        &x->lse,       &x->dq,       &x->dk,       &x->dv,      &x->exact_out,
                        &x->exact_lse, &x->exact_dq, &x->exact_dk, &x->exact_dv};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        free(all[i]->data);
    }
}

static bool allowed(const ra_layer *layer, int64_t age)
{
    return (!layer->causal || age >= 0) && (layer->window == 0 || age < layer->window) &&
           (layer->window_right == 0 || -age < layer->window_right);
}

static double dot(const ra_tensor *a, int64_t head_a, int64_t i, const ra_tensor *b, int64_t head_b,
                  int64_t j)
{
    double sum = 0;
    for (int64_t c = 0; c < a->size[RA_CHAN]; c++) {
        sum += ra_tensor_get(a, 0, head_a, i, c) * ra_tensor_get(b, 0, head_b, j, c);
    }
    return sum;
}

/* to[i] += factor * from[j] */
static void add_scaled(const ra_tensor *to, int64_t head_to, int64_t i, double factor,
                       const ra_tensor *from, int64_t head_from, int64_t j)
{
    for (int64_t c = 0; c < to->size[RA_CHAN]; c++) {
        double sum =
            ra_tensor_get(to, 0, head_to, i, c) + factor * ra_tensor_get(from, 0, head_from, j, c);
        ra_tensor_set(to, 0, head_to, i, c, sum);
    }
}

/* One query of one head: keys [begin, end) are its segment's, the first at age `age`. */
static void exact_query(varlen_case *x, int64_t head, int64_t i, int64_t begin, int64_t end,
                        int64_t age)
{
    int64_t kv = head / (x->layer.q_heads / x->layer.kv_heads);
    double scale = (double)x->layer.scale, sum = 0, delta;
    for (int64_t j = begin; j < end; j++) {
        if (allowed(&x->layer, age - (j - begin))) {
            sum += exp(scale * dot(&x->q, head, i, &x->k, kv, j));
        }
    }
    double lse = log(sum);
    ra_tensor_set(&x->exact_lse, 0, head, i, 0, lse);
    for (int64_t j = begin; j < end; j++) {
        if (allowed(&x->layer, age - (j - begin))) {
            double p = exp(scale * dot(&x->q, head, i, &x->k, kv, j) - lse);
            add_scaled(&x->exact_out, head, i, p, &x->v, kv, j);
        }
    }
    delta = sum > 0 ? dot(&x->exact_out, head, i, &x->dout, head, i) : 0;
    for (int64_t j = begin; j < end; j++) {
        if (allowed(&x->layer, age - (j - begin))) {
            double p = exp(scale * dot(&x->q, head, i, &x->k, kv, j) - lse);
            double ds = p * (dot(&x->dout, head, i, &x->v, kv, j) - delta) * scale;
            add_scaled(&x->exact_dv, kv, j, p, &x->dout, head, i);
            add_scaled(&x->exact_dk, kv, j, ds, &x->q, head, i);
            add_scaled(&x->exact_dq, head, i, ds, &x->k, kv, j);
        }
    }
}

static void exact_solve(varlen_case *x)
{
    for (int64_t s = 0; s < x->segments; s++) {
        int64_t len_q = x->cu_q[s + 1] - x->cu_q[s], len_k = x->cu_k[s + 1] - x->cu_k[s];
        for (int64_t head = 0; head < x->layer.q_heads; head++) {
            for (int64_t i = 0; i < len_q; i++) {
                exact_query(x, head, x->cu_q[s] + i, x->cu_k[s], x->cu_k[s + 1], len_k - len_q + i);
            }
        }
    }
}

static void assert_close(const char *name, const ra_tensor *got, const ra_tensor *exact, double u)
{
    for (int64_t head = 0; head < got->size[RA_HEAD]; head++) {
        for (int64_t i = 0; i < got->size[RA_SEQ]; i++) {
            for (int64_t c = 0; c < got->size[RA_CHAN]; c++) {
                double x = ra_tensor_get(got, 0, head, i, c);
                double y = ra_tensor_get(exact, 0, head, i, c);
                if (x != y && !(fabs(x - y) <= 64 * u * (1 + fabs(y)))) {
                    fail_msg("%s: %s [%lld, %lld, %lld] is %g, expected %g", support_case(), name,
                             (long long)head, (long long)i, (long long)c, x, y);
                }
            }
        }
    }
}

static ra_varlen lens_of(const varlen_case *x)
{
    return (ra_varlen){sizeof(ra_varlen), x->cu_q, x->cu_k, x->segments};
}

static ra_forward_io forward_of(const varlen_case *x)
{
    return (ra_forward_io){.size = sizeof(ra_forward_io),
                           .q = x->q,
                           .k = x->k,
                           .v = x->v,
                           .out = x->out,
                           .lse = x->lse};
}

static ra_backward_io backward_of(const varlen_case *x)
{
    return (ra_backward_io){.size = sizeof(ra_backward_io),
                            .q = x->q,
                            .k = x->k,
                            .v = x->v,
                            .out = x->out,
                            .lse = x->lse,
                            .dout = x->dout,
                            .dq = x->dq,
                            .dk = x->dk,
                            .dv = x->dv};
}

static void assert_solved(ra_backend *backend, varlen_case *x)
{
    ra_varlen lens = lens_of(x);
    ra_forward_io forward = forward_of(x);
    ra_backward_io backward = backward_of(x);
    double u = ra_unit_roundoff(x->layer.dtype);
    exact_solve(x);
    assert_int_equal(ra_varlen_forward(backend, &x->layer, &lens, &forward), RA_OK);
    assert_close("out", &x->out, &x->exact_out, u);
    assert_close("lse", &x->lse, &x->exact_lse, 0x1p-24);
    assert_int_equal(ra_varlen_backward(backend, &x->layer, &lens, &backward), RA_OK);
    assert_close("dq", &x->dq, &x->exact_dq, u);
    assert_close("dk", &x->dk, &x->exact_dk, u);
    assert_close("dv", &x->dv, &x->exact_dv, u);
}

static ra_layer sample_layer(int q_heads, int kv_heads, int head_dim, ra_dtype dtype)
{
    return (ra_layer){.size = sizeof(ra_layer),
                      .q_heads = q_heads,
                      .kv_heads = kv_heads,
                      .head_dim = head_dim,
                      .dtype = dtype,
                      .scale = 0.5f,
                      .causal = true};
}

static ra_backend *backend_open(void)
{
    ra_backend *backend = NULL;
    assert_int_equal(ra_backend_open_cpu(2, NULL, &backend), RA_OK);
    return backend;
}

static void random_segments_match_the_definition(void **state)
{
    (void)state;
    static const ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F16};
    static const int64_t windows[] = {0, 0, 1, 3, 8, 100};
    rng r = rng_of(support_seed());
    ra_backend *backend = backend_open();
    for (int step = 0; step < 60; step++) {
        support_limit(60, "step %d", step);
        int32_t len_q[SEGMENTS_MAX], len_k[SEGMENTS_MAX];
        int64_t segments = rng_int(&r, 0, SEGMENTS_MAX);
        for (int i = 0; i < SEGMENTS_MAX; i++) {
            len_q[i] = (int32_t)rng_int(&r, -2, 20);
            len_k[i] = rng_chance(&r, 40) ? len_q[i] : (int32_t)rng_int(&r, -2, 30);
            len_q[i] = len_q[i] < 0 ? 0 : len_q[i];
            len_k[i] = len_k[i] < 0 ? 0 : len_k[i];
        }
        int kv_heads = (int)rng_int(&r, 1, 2), ratio = (int)rng_int(&r, 1, 3);
        ra_layer layer =
            sample_layer(kv_heads * ratio, kv_heads, 8 * (int)rng_int(&r, 1, 3), dtypes[step % 3]);
        layer.causal = !rng_chance(&r, 30);
        layer.window = windows[rng_int(&r, 0, 5)];
        layer.window_right = windows[rng_int(&r, 0, 5)];
        layer.vision = RA_VISION_OVER_WINDOW; /* does not apply */
        varlen_case x;
        case_create(&x, &r, layer, segments, len_q, len_k);
        assert_solved(backend, &x);
        case_free(&x);
    }
    ra_backend_close(backend);
}

static void long_segments_cross_tiles(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    ra_backend *backend = backend_open();
    support_limit(60, "long segments");
    for (int64_t window = 0; window < 300; window += 140) {
        varlen_case x;
        ra_layer layer = sample_layer(2, 1, 16, RA_F32);
        layer.window = window;
        case_create(&x, &r, layer, 3, (int32_t[]){150, 1, 260}, (int32_t[]){270, 129, 130});
        assert_solved(backend, &x);
        case_free(&x);
    }
    ra_backend_close(backend);
}

/* Five queries and two keys, causal: the first three see nothing, and their gradient is ignored. */
static void queries_before_the_keys_are_empty(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    ra_backend *backend = backend_open();
    varlen_case x;
    case_create(&x, &r, sample_layer(2, 1, 8, RA_F32), 3, (int32_t[]){5, 2, 1},
                (int32_t[]){2, 0, 3});
    for (int64_t i = 0; i < 7; i++) {
        bool empty = i < 3 || i > 4;
        ra_tensor row = ra_tensor_slice_seq(&x.dout, i, 1);
        if (empty) {
            fill(&row, NULL, 1);
        }
    }
    assert_solved(backend, &x);
    for (int64_t i = 0; i < 8; i++) {
        bool empty = i < 3 || i == 5 || i == 6;
        assert_true((ra_tensor_get(&x.lse, 0, 1, i, 0) == -INFINITY) == empty);
        assert_true((ra_tensor_get(&x.out, 0, 1, i, 0) == 0) == empty);
        assert_true(!empty || ra_tensor_get(&x.dq, 0, 1, i, 0) == 0);
    }
    case_free(&x);
    ra_backend_close(backend);
}

static void nothing_to_do(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    ra_backend *backend = backend_open();
    varlen_case x;
    case_create(&x, &r, sample_layer(2, 1, 8, RA_F32), 0, NULL, NULL);
    assert_solved(backend, &x);
    case_free(&x);
    case_create(&x, &r, sample_layer(2, 1, 8, RA_F32), 2, (int32_t[]){0, 0}, (int32_t[]){4, 0});
    assert_solved(backend, &x);
    assert_true(ra_tensor_get(&x.dk, 0, 0, 3, 7) == 0);
    case_free(&x);
    case_create(&x, &r, sample_layer(2, 1, 8, RA_F32), 2, (int32_t[]){3, 1}, (int32_t[]){0, 0});
    assert_solved(backend, &x);
    assert_true(ra_tensor_get(&x.dq, 0, 1, 3, 7) == 0);
    case_free(&x);
    ra_backend_close(backend);
}

static void assert_refused(ra_backend *backend, const varlen_case *x, const ra_varlen *lens,
                           const ra_forward_io *io, ra_status status, const char *part)
{
    assert_int_equal(ra_varlen_forward(backend, &x->layer, lens, io), status);
    if (!strstr(ra_last_error(), part)) {
        fail_msg("message \"%s\" does not name \"%s\"", ra_last_error(), part);
    }
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    ra_backend *backend = backend_open();
    varlen_case x;
    case_create(&x, &r, sample_layer(2, 1, 8, RA_F32), 2, (int32_t[]){3, 1}, (int32_t[]){2, 2});
    const ra_varlen good = lens_of(&x);
    const ra_forward_io forward = forward_of(&x);
    const int32_t late[] = {1, 3, 4}, back[] = {0, 5, 4}, shorter[] = {0, 1, 3};
    ra_varlen lens = good;
    ra_forward_io io = forward;
    assert_refused(NULL, &x, &good, &io, RA_E_ARG, "backend: NULL");
    assert_refused(backend, &x, NULL, &io, RA_E_ARG, "lens: NULL");
    assert_refused(backend, &x, &good, NULL, RA_E_ARG, "io: NULL");
    lens.size = 0;
    assert_refused(backend, &x, &lens, &io, RA_E_ARG, "lens.size: 0");
    lens = good, lens.segments = -1;
    assert_refused(backend, &x, &lens, &io, RA_E_ARG, "lens.segments: -1");
    lens = good, lens.cu_k = NULL;
    assert_refused(backend, &x, &lens, &io, RA_E_ARG, "lens.cu_k: NULL");
    lens = good, lens.cu_q = late;
    assert_refused(backend, &x, &lens, &io, RA_E_ARG, "lens.cu_q[0]: 1");
    lens.cu_q = back;
    assert_refused(backend, &x, &lens, &io, RA_E_ARG, "lens.cu_q[2]: 4, expected at least 5");
    lens.cu_q = shorter;
    assert_refused(backend, &x, &lens, &io, RA_E_SHAPE, "q: size of axis 2 (seq) is 4, expected 3");
    io.size = 1;
    assert_refused(backend, &x, &good, &io, RA_E_ARG, "io.size: 1");
    io = forward, io.k.dtype = RA_BF16;
    assert_refused(backend, &x, &good, &io, RA_E_SHAPE, "k: dtype bf16");
    io = forward, io.out.data = io.q.data;
    assert_refused(backend, &x, &good, &io, RA_E_ARG, "out: data");
    io = forward, io.lse.size[RA_HEAD] = 1;
    assert_refused(backend, &x, &good, &io, RA_E_SHAPE, "lse: size of axis 1");
    ra_backward_io backward = backward_of(&x);
    backward.dv.data = NULL;
    assert_int_equal(ra_varlen_backward(backend, &x.layer, &good, &backward), RA_E_ARG);
    assert_non_null(strstr(ra_last_error(), "dv: data is NULL"));
    x.layer.softcap = 30;
    assert_refused(backend, &x, &good, &forward, RA_E_UNSUPPORTED, "softcap");
    assert_true(isnan(ra_tensor_get(&x.out, 0, 0, 0, 0)));
    case_free(&x);
    ra_backend_close(backend);
}

/* In place, or two results in one place: a wrong result that nothing would show. */
static void results_that_share_memory_are_refused(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    ra_backend *backend = backend_open();
    varlen_case x;
    case_create(&x, &r, sample_layer(2, 1, 8, RA_F32), 2, (int32_t[]){3, 1}, (int32_t[]){2, 2});
    const ra_varlen lens = lens_of(&x);
    ra_forward_io f = forward_of(&x);
    ra_backward_io b = backward_of(&x);
    ra_tensor *forward[] = {&f.out, &f.lse, &f.q, &f.k, &f.v}; /* results first */
    ra_tensor *backward[] = {&b.dq, &b.dk, &b.dv, &b.q, &b.k, &b.v, &b.out, &b.lse, &b.dout};
    ra_tensor **lists[] = {forward, backward};
    const int results[] = {2, 3}, counts[] = {5, 9};
    for (int l = 0; l < 2; l++) {
        for (int i = 0; i < results[l]; i++) {
            for (int j = 0; j < counts[l]; j++) {
                ra_tensor *one = lists[l][i], *two = lists[l][j]; /* the larger has room for both */
                bool larger = ra_tensor_count(one) >= ra_tensor_count(two);
                ra_tensor *moved = larger ? two : one;
                void *own = moved->data;
                moved->data = larger ? one->data : two->data;
                ra_status status = l == 0 ? ra_varlen_forward(backend, &x.layer, &lens, &f)
                                          : ra_varlen_backward(backend, &x.layer, &lens, &b);
                assert_int_equal(status, i == j ? RA_OK : RA_E_ARG);
                assert_true(i == j || strstr(ra_last_error(), "shares memory with"));
                moved->data = own;
            }
        }
    }
    case_free(&x);
    ra_backend_close(backend);
}

static void failed_allocations_leave_nothing(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    varlen_case x;
    case_create(&x, &r, sample_layer(2, 1, 8, RA_F32), 2, (int32_t[]){3, 1}, (int32_t[]){2, 2});
    ra_varlen lens = lens_of(&x);
    ra_forward_io forward = forward_of(&x);
    ra_backward_io backward = backward_of(&x);
    bool failed = true;
    for (long fail = 1; failed; fail++) {
        ra_alloc_probe probe = {0};
        ra_alloc_watch(&probe);
        ra_backend *backend = backend_open();
        atomic_store(&probe.fail_at, fail);
        ra_status status = ra_varlen_forward(backend, &x.layer, &lens, &forward);
        if (!status) {
            status = ra_varlen_backward(backend, &x.layer, &lens, &backward);
        }
        failed = status != RA_OK;
        assert_true(status == RA_OK || status == RA_E_NOMEM);
        assert_true(failed || fail > 5);
        ra_backend_close(backend);
        ra_alloc_watch(NULL);
        assert_int_equal(atomic_load(&probe.live_bytes), 0);
    }
    case_free(&x);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_segments_match_the_definition),
        cmocka_unit_test(long_segments_cross_tiles),
        cmocka_unit_test(queries_before_the_keys_are_empty),
        cmocka_unit_test(nothing_to_do),
        cmocka_unit_test(bad_arguments_are_named),
        cmocka_unit_test(results_that_share_memory_are_refused),
        cmocka_unit_test(failed_allocations_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
