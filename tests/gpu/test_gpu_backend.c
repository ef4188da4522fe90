/* Fold and grad of the CUDA backend on random covers against the fp64 answer, the tuned kernels
 * against the plain ones, and the elementwise operations. */
#include <math.h>

#include "base/alloc.h"
#include "device_job.h"
#include "ringattn_cuda.h"

static void check_case(const ra_backend *backend, bool simple, const cover_case *c)
{
    double tolerance = device_job_tolerance(c->dtype, simple);
    ra_fold_job forward = cover_fold_job(c, &c->cover);
    device_job_fold(backend, c, &forward);
    cover_check_fold(c, &forward, tolerance);
    cover_fold_free(&forward);
    ra_cover whole;
    cover_passes(c, NULL, 1, &whole);
    ra_grad_job backward = cover_grad_job(c, &whole);
    device_job_grad(backend, c, &backward);
    cover_check_grad(c, &backward, tolerance);
    cover_grad_free(&backward);
    ra_cover_free(&whole);
}

static const int64_t dims[] = {512, 256, 8, 64, 80, 128, 192, 320, 504};
static const ra_dtype dtypes[] = {RA_BF16, RA_F16, RA_F32};
enum { DIMS = 9, DTYPES = 3 };

static void run_random(bool simple)
{
    static const int64_t heads[][2] = {{2, 1}, {4, 2}, {1, 1}, {8, 1}, {3, 1}, {2, 2}};
    ra_backend *backend = device_job_open(simple);
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
    device_job_close(backend);
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
    ra_backend *backend = device_job_open(false);
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
    device_job_close(backend);
}

/* The keys in three computations, one of which has none at all. */
static void test_resume(void **state)
{
    (void)state;
    ra_backend *backend = device_job_open(false);
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
        ra_cover passes[3];
        cover_passes(&c, parts, 3, passes);
        for (int part = 0; part < 3; part++) {
            ra_cover cover = cover_part(&c, parts + part * c.cover.k_count, part == 0, part == 2);
            forward.cover = &cover;
            backward.cover = &passes[part];
            if (c.cover.q_count > 0) {
                device_job_fold(backend, &c, &forward);
                device_job_grad(backend, &c, &backward);
            }
            ra_cover_free(&cover);
            ra_cover_free(&passes[part]);
        }
        if (c.cover.q_count > 0) {
            cover_check_fold(&c, &forward, device_job_tolerance(dtype, false));
            cover_check_grad(&c, &backward, device_job_tolerance(dtype, false));
        }
        cover_fold_free(&forward);
        cover_grad_free(&backward);
        ra_free(parts);
        cover_case_free(&c);
    }
    device_job_close(backend);
}

static void test_elementwise(void **state)
{
    (void)state;
    enum { B = 2, H = 3, S = 37, D = 72, N = B * H * S * D };
    static float a[N], b[N], dots[B * H * S];
    static uint16_t half[N], other[N];
    ra_backend *backend = device_job_open(false);
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
        device_job_expect(device_copy_put(&copy, list, 5));
        device_job_expect(ops->fill(backend->self, &tb, 0.0f));
        device_job_expect(ops->fill(backend->self, &tb, 0.5f));
        device_job_expect(ops->mark(backend->self, RA_MARK_ROUTE));
        device_job_expect(ops->wait_mark(backend->self, RA_MARK_ROUTE));
        device_job_expect(ops->add(backend->self, &tb, &ta));
        device_job_expect(ops->wait_add(backend->self));
        device_job_expect(ops->cast(backend->self, &th, &ta));
        device_job_expect(ops->fill(backend->self, &to, -2.0f));
        device_job_expect(ops->row_dot(backend->self, &th, &to, &dot));
        device_job_expect(device_copy_get(&copy));
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
    device_job_close(backend);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_elementwise), cmocka_unit_test(test_simple),
        cmocka_unit_test(test_best),        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_resume),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
