/* Fold and grad of the CUDA backend on random covers against the fp64 answer, the tuned kernels
 * against the plain ones, and the elementwise operations. */
#include "support_cover.h"

#include <math.h>
#include <string.h>

#include "base/alloc.h"
#include "on_device.h"
#include "ringattn_cuda.h"

#undef ra_backend_close /* this test closes what it opens */

static ra_backend *open_device(bool simple_only)
{
    ra_backend *backend = NULL;
    ra_cuda_options options = {.size = sizeof options, .simple_only = simple_only};
    if (ra_backend_open_cuda(0, &options, &backend)) {
        fail_msg("%s", ra_last_error());
    }
    return backend;
}

static void expect(ra_status status)
{
    if (status) {
        fail_msg("%s: %s", support_case(), ra_last_error());
    }
}

static void *prepare(const ra_backend *backend, const ra_cover *cover, const ra_tensor *q,
                     const cover_case *c)
{
    void *prepared = NULL;
    ra_layer layer = {
        .size = sizeof layer,
        .q_heads = (int)c->q_heads,
        .kv_heads = (int)c->kv_heads,
        .head_dim = (int)c->chan,
        .dtype = q->dtype,
        .scale = c->scale,
    };
    expect(backend->ops->prepare(backend->self, cover, &layer, &prepared));
    return prepared;
}

static void fold(const ra_backend *backend, const cover_case *c, ra_fold_job *job)
{
    ra_tensor *list[] = {&job->q,    &job->k[0], &job->k[1], &job->v[0],
                         &job->v[1], &job->acc,  &job->lse,  &job->out};
    device_copy copy;
    void *prepared = prepare(backend, job->cover, &job->q, c);
    expect(device_copy_put(&copy, list, sizeof list / sizeof *list));
    job->prepared = prepared;
    ra_status status = backend->ops->fold(backend->self, job);
    backend->ops->discard(backend->self, prepared);
    expect(status);
    expect(device_copy_get(&copy));
}

static void grad(const ra_backend *backend, const cover_case *c, ra_grad_job *job)
{
    ra_tensor *list[] = {&job->q,     &job->dout,  &job->k[0],  &job->k[1], &job->v[0],
                         &job->v[1],  &job->lse,   &job->delta, &job->dq,   &job->dk[0],
                         &job->dk[1], &job->dv[0], &job->dv[1]};
    device_copy copy;
    void *prepared = prepare(backend, job->cover, &job->q, c);
    expect(device_copy_put(&copy, list, sizeof list / sizeof *list));
    job->prepared = prepared;
    ra_status status = backend->ops->grad(backend->self, job);
    backend->ops->discard(backend->self, prepared);
    expect(status);
    expect(device_copy_get(&copy));
}

/* The plain kernels round nothing but the results, tuned ones also p and ds. */
static double tolerance_of(ra_dtype dtype, bool simple)
{
    double unit = dtype == RA_BF16 ? 0x1p-8 : 0x1p-11;
    return simple || dtype == RA_F32 ? 2e-5 : 2 * unit;
}

static void check_case(const ra_backend *backend, bool simple, const cover_case *c)
{
    ra_fold_job forward = cover_fold_job(c, &c->cover);
    fold(backend, c, &forward);
    cover_check_fold(c, &forward, tolerance_of(c->dtype, simple));
    cover_fold_free(&forward);
    ra_grad_job backward = cover_grad_job(c, &c->cover);
    grad(backend, c, &backward);
    cover_check_grad(c, &backward, tolerance_of(c->dtype, simple));
    cover_grad_free(&backward);
}

static const int64_t dims[] = {512, 256, 8, 64, 80, 128, 192, 320, 504};
static const ra_dtype dtypes[] = {RA_BF16, RA_F16, RA_F32};
enum { DIMS = 9, DTYPES = 3 };

static void run_random(bool simple)
{
    static const int64_t heads[][2] = {{2, 1}, {4, 2}, {1, 1}, {8, 1}, {3, 1}, {2, 2}};
    ra_backend *backend = open_device(simple);
    for (int64_t step = 0; step < support_steps(54); step++) {
        rng r = rng_of(support_seed() + (uint64_t)step);
        const int64_t *h = heads[rng_int(&r, 0, 5)];
        int64_t chan = dims[step % 2 ? step / 2 % 2 : step / 2 % DIMS];
        cover_shape shape = {h[0], h[1], chan, dtypes[step % DTYPES], 1.0f / sqrtf((float)chan)};
        support_limit(60, "random covers, %s kernels, step %lld", simple ? "plain" : "best",
                      (long long)step);
        cover_case c = cover_random(&r, shape, chan > 128 ? 200 : 300);
        if (c.cover.q_count > 0) {
            check_case(backend, simple, &c);
        }
        cover_case_free(&c);
    }
    print_message("kernels: %s forward, %s backward\n", ra_cuda_kernel(backend, false),
                  ra_cuda_kernel(backend, true));
    ra_backend_close(backend);
}

static void test_simple(void **state)
{
    (void)state;
    run_random(true);
}

static void test_best(void **state)
{
    (void)state;
    run_random(false);
}

/* Sizes at the edges of every tile, under four masks in turn. */
static void test_edges(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 63, 64, 65, 127, 128, 129, 200};
    static const ra_mask masks[] = {{.causal = true},
                                    {.causal = false},
                                    {.causal = true, .window = 20},
                                    {.window = 40, .window_right = 9}};
    ra_backend *backend = open_device(false);
    for (int64_t step = 0; step < support_steps(64); step++) {
        int i = (int)(37 * step % 64); /* each once, and a part of them is of every sort */
        support_limit(60, "edges, case %d", i);
        rng r = rng_of(support_seed() + (uint64_t)i);
        int64_t chan = i % 2 ? 512 : 256;
        cover_shape shape = {2, 1, chan, i % 3 ? RA_BF16 : RA_F16, 1.0f / sqrtf((float)chan)};
        cover_case c = cover_pair(&r, shape, masks[(i + i / 8) % 4], sizes[i / 8], sizes[i % 8]);
        check_case(backend, false, &c);
        cover_case_free(&c);
    }
    ra_backend_close(backend);
}

/* The keys in three computations, one of which has none at all. */
static void test_resume(void **state)
{
    (void)state;
    ra_backend *backend = open_device(false);
    for (int64_t step = 0; step < support_steps(18); step++) {
        support_limit(60, "resume, step %lld", (long long)step);
        rng r = rng_of(support_seed() + (uint64_t)step);
        int64_t chan = dims[step % 4];
        ra_dtype dtype = dtypes[step % DTYPES];
        cover_shape shape = {4, 2, chan, dtype, 1.0f / sqrtf((float)chan)};
        cover_case c = cover_random(&r, shape, 200);
        uint8_t *parts = NULL;
        assert_int_equal(RA_NEW(&parts, 3 * c.cover.k_count + 1), RA_OK);
        for (int64_t i = 0; i < c.cover.k_count; i++) {
            parts[(rng_chance(&r, 50) ? 0 : 2) * c.cover.k_count + i] = 1;
        }
        ra_fold_job forward = cover_fold_job(&c, &c.cover);
        ra_grad_job backward = cover_grad_job(&c, &c.cover);
        for (int part = 0; part < 3 && c.cover.q_count > 0; part++) {
            ra_cover cover = cover_part(&c, parts + part * c.cover.k_count, part == 0, part == 2);
            forward.cover = backward.cover = &cover;
            fold(backend, &c, &forward);
            grad(backend, &c, &backward);
            ra_cover_free(&cover);
        }
        if (c.cover.q_count > 0) {
            cover_check_fold(&c, &forward, tolerance_of(dtype, false));
            cover_check_grad(&c, &backward, tolerance_of(dtype, false));
        }
        cover_fold_free(&forward);
        cover_grad_free(&backward);
        ra_free(parts);
        cover_case_free(&c);
    }
    ra_backend_close(backend);
}

static void test_elementwise(void **state)
{
    (void)state;
    enum { B = 2, H = 3, S = 37, D = 72, N = B * H * S * D };
    static float a[N], b[N], dots[B * H * S];
    static uint16_t half[N], other[N];
    ra_backend *backend = open_device(false);
    const ra_backend_ops *ops = backend->ops;
    rng r = rng_of(support_seed());
    support_limit(60, "elementwise");
    for (int i = 0; i < N; i++) {
        a[i] = (float)rng_normal(&r);
    }
    for (int i = 0; i < 2; i++) {
        /* [B, S, H, D] in memory. */
        ra_tensor th = {half, dtypes[i], {B, H, S, D}, {S * H * D, D, H * D, 1}};
        ra_tensor to = ra_tensor_bhsd(other, dtypes[i], B, H, S, D);
        ra_tensor ta = ra_tensor_bhsd(a, RA_F32, B, H, S, D);
        ra_tensor tb = ra_tensor_bhsd(b, RA_F32, B, H, S, D);
        ra_tensor dot = ra_tensor_bhsd(dots, RA_F32, B, H, S, 1);
        ra_tensor *list[] = {&th, &to, &ta, &tb, &dot};
        device_copy copy;
        expect(device_copy_put(&copy, list, 5));
        expect(ops->fill(backend->self, &tb, 0.0f));
        expect(ops->fill(backend->self, &tb, 0.5f));
        expect(ops->mark(backend->self, RA_MARK_ROUTE));
        expect(ops->wait_mark(backend->self, RA_MARK_ROUTE));
        expect(ops->add(backend->self, &tb, &ta));
        expect(ops->cast(backend->self, &th, &ta));
        expect(ops->fill(backend->self, &to, -2.0f));
        expect(ops->row_dot(backend->self, &th, &to, &dot));
        expect(device_copy_get(&copy));
        for (int row = 0; row < B * H * S; row++) {
            double want = 0;
            for (int64_t d = 0; d < D; d++) {
                float x = a[row * D + d];
                float rounded = dtypes[i] == RA_BF16 ? ra_bf16_to_f32(ra_f32_to_bf16(x))
                                                     : ra_f16_to_f32(ra_f32_to_f16(x));
                assert_true(ra_tensor_get(&th, row / S / H, row / S % H, row % S, d) ==
                            (double)rounded);
                assert_true(b[row * D + d] == 0.5f + x);
                want -= 2 * (double)rounded;
            }
            assert_true(fabs((double)dots[row] - want) < 1e-4);
        }
    }
    ra_backend_close(backend);
}

/* Host memory is refused, not followed; options and devices are checked. */
static void test_refused(void **state)
{
    (void)state;
    static float host[8 * 8];
    ra_backend *backend = open_device(false), *none = NULL;
    ra_cuda_options wrong = {.size = 1};
    ra_tensor t = ra_tensor_bhsd(host, RA_F32, 1, 1, 8, 8);
    assert_int_equal(backend->ops->fill(backend->self, &t, 1), RA_E_ARG);
    assert_non_null(strstr(ra_last_error(), "expected device memory"));
    assert_int_equal(ra_backend_open_cuda(-1, NULL, &none), RA_E_ARG);
    assert_int_equal(ra_backend_open_cuda(ra_cuda_device_count(), NULL, &none), RA_E_ARG);
    assert_int_equal(ra_backend_open_cuda(0, &wrong, &none), RA_E_ARG);
    assert_int_equal(ra_backend_open_cuda(0, NULL, NULL), RA_E_ARG);
    assert_null(none);
    void *memory = NULL;
    assert_int_equal(ra_cuda_alloc(0, (size_t)1 << 50, &memory), RA_E_NOMEM);
    assert_string_equal(ra_backend_name(backend), "cuda");
    assert_string_equal(ra_cuda_kernel(backend, false), "");
    ra_backend_close(backend);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refused), cmocka_unit_test(test_elementwise),
        cmocka_unit_test(test_simple),  cmocka_unit_test(test_best),
        cmocka_unit_test(test_edges),   cmocka_unit_test(test_resume),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
