/* The tuned forward kernels, each called directly, on random covers against the fp64 answer:
 * strides that they take, few CTAs so that each does many units, states resumed and stored.
 * Everything that no piece names is NaN and has to stay so. */
#include "support_cover.h"

#include <math.h>
#include <string.h>

#include "backend/cuda/fold.h"
#include "base/alloc.h"
#include "on_device.h"

typedef struct target {
    const ra_cuda_fold_kernel *kernel;
    int32_t q_tile;
    int64_t chans[4];
} target;

static const target targets[] = {
    {&ra_cuda_fold_512, 64, {512, 512, 320, 448}},
    {&ra_cuda_fold_256, 128, {256, 256, 64, 192}},
};
enum { TARGETS = 2 };

static const int64_t heads[][2] = {{2, 1}, {4, 2}, {1, 1}, {8, 1}, {3, 1}, {2, 2}};
enum { HEADS = 6 };

static void expect(ra_status status)
{
    if (status) {
        fail_msg("%s: %s", support_case(), ra_last_error());
    }
}

static void expect_cuda(cudaError_t error)
{
    if (error) {
        fail_msg("%s: %s", support_case(), cudaGetErrorString(error));
    }
}

/* ---- strides that a tensor map takes */

static void *at(const ra_tensor *t, int64_t i)
{
    int64_t seq = t->size[RA_SEQ], head = t->size[RA_HEAD];
    return ra_tensor_at(t, i / seq / head, i / seq % head, i % seq);
}

/* The same numbers in memory of its own, with gaps of 8 elements or none, heads or positions
 * outside. Gaps are NaN. */
static ra_tensor aligned(rng *r, const ra_tensor *t)
{
    ra_tensor to = *t;
    int64_t rows = t->size[RA_ROW] * t->size[RA_HEAD] * t->size[RA_SEQ];
    if (!t->data || rows == 0) {
        return to;
    }
    bool seq_outside = rng_chance(r, 50);
    int64_t row = t->size[RA_CHAN] + 8 * rng_int(r, 0, 1);
    to.stride[RA_SEQ] = seq_outside ? row * t->size[RA_HEAD] : row;
    to.stride[RA_HEAD] = seq_outside ? row : row * t->size[RA_SEQ];
    to.stride[RA_ROW] = row * t->size[RA_HEAD] * t->size[RA_SEQ];
    size_t bytes = ra_dtype_bytes(t->dtype);
    expect(ra_alloc((size_t)(rows * row) * bytes, 1, &to.data));
    memset(to.data, 0xff, (size_t)(rows * row) * bytes);
    for (int64_t i = 0; i < rows; i++) {
        memcpy(at(&to, i), at(t, i), (size_t)t->size[RA_CHAN] * bytes);
    }
    return to;
}

static ra_fold_job new_job(rng *r, const cover_case *c, const ra_cover *cover)
{
    ra_fold_job made = cover_fold_job(c, cover), job = made;
    job.q = aligned(r, &c->q);
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        job.k[i] = aligned(r, &c->k[i]);
        job.v[i] = aligned(r, &c->v[i]);
    }
    job.acc = aligned(r, &made.acc);
    job.out = aligned(r, &made.out);
    ra_free(made.acc.data);
    ra_free(made.out.data);
    return job;
}

static void free_job(ra_fold_job *job)
{
    ra_free(job->q.data);
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        ra_free(job->k[i].data);
        ra_free(job->v[i].data);
    }
    cover_fold_free(job);
}

/* ---- one launch */

static const void *upload(const void *from, int64_t count, size_t bytes)
{
    void *memory = NULL;
    expect_cuda(cudaMalloc(&memory, (size_t)(count + 1) * bytes));
    expect_cuda(cudaMemcpy(memory, from, (size_t)count * bytes, cudaMemcpyHostToDevice));
    return memory;
}

static void fold(const target *t, const cover_case *c, ra_fold_job *job, int sm_count)
{
    ra_cuda_work work = {.q_heads = (int)c->q_heads, .kv_heads = (int)c->kv_heads};
    ra_cuda_launch launch = {.sm_count = sm_count, .capability = 90};
    void *counters = NULL;
    expect(ra_work_build(job->cover, t->q_tile, 0, &work.host));
    if (work.host.item_count == 0) {
        ra_work_free(&work.host);
        return;
    }
    work.item = upload(work.host.item, work.host.item_count, sizeof *work.item);
    work.run = upload(work.host.run, work.host.run_count, sizeof *work.run);
    work.reach = upload(work.host.reach, work.host.reach_count, sizeof *work.reach);
    expect_cuda(cudaMalloc(&counters, RA_CUDA_COUNTERS * sizeof *launch.counters));
    expect_cuda(cudaMemset(counters, 0xff, RA_CUDA_COUNTERS * sizeof *launch.counters));
    launch.counters = counters;
    ra_tensor *list[] = {&job->q,    &job->k[0], &job->k[1], &job->v[0],
                         &job->v[1], &job->acc,  &job->lse,  &job->out};
    device_copy copy;
    expect(device_copy_put(&copy, list, sizeof list / sizeof *list));
    assert_true(t->kernel->supports(job, &work, &launch));
    expect(t->kernel->launch(job, &work, &launch));
    expect_cuda(cudaDeviceSynchronize());
    expect(device_copy_get(&copy));
    cudaFree((void *)(uintptr_t)work.item);
    cudaFree((void *)(uintptr_t)work.run);
    cudaFree((void *)(uintptr_t)work.reach);
    cudaFree(counters);
    ra_work_free(&work.host);
}

/* p is rounded to the dtype before it meets the values. */
static double tolerance_of(ra_dtype dtype)
{
    return dtype == RA_BF16 ? 0x1p-7 : 0x1p-10;
}

static int some_sms(rng *r)
{
    static const int counts[] = {2, 4, 6, 132};
    return counts[rng_int(r, 0, 3)];
}

static void check_case(rng *r, const target *t, const cover_case *c)
{
    ra_fold_job job = new_job(r, c, &c->cover);
    fold(t, c, &job, some_sms(r));
    cover_check_fold(c, &job, tolerance_of(c->dtype));
    free_job(&job);
}

/* ---- tests */

static cover_shape shape_of(rng *r, const target *t)
{
    const int64_t *h = heads[rng_int(r, 0, HEADS - 1)];
    int64_t chan = t->chans[rng_int(r, 0, 3)];
    ra_dtype dtype = rng_chance(r, 70) ? RA_BF16 : RA_F16;
    return (cover_shape){h[0], h[1], chan, dtype,
                         rng_chance(r, 20) ? 1.0f : 1.0f / sqrtf((float)chan)};
}

static void test_random(void **state)
{
    (void)state;
    for (int64_t i = 0; i < support_steps(80); i++) {
        rng r = rng_of(support_seed() + (uint64_t)i);
        const target *t = &targets[i % TARGETS];
        support_limit(120, "%s, random cover %lld", t->kernel->name, (long long)i);
        cover_case c = cover_random(&r, shape_of(&r, t), i % 16 < 2 ? 700 : 250);
        check_case(&r, t, &c);
        cover_case_free(&c);
    }
}

/* Sizes at the edges of every tile. */
static void test_edges(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 63, 64, 65, 127, 128, 129, 257};
    static const ra_mask masks[] = {{.causal = true},
                                    {.causal = false},
                                    {.causal = true, .window = 20},
                                    {.window = 40, .window_right = 9}};
    for (int64_t step = 0; step < support_steps(128); step++) {
        int64_t i = 37 * step % 128; /* each once, and a part of them is of every sort */
        rng r = rng_of(support_seed() + (uint64_t)i);
        const target *t = &targets[i % TARGETS];
        int64_t size = i / TARGETS;
        support_limit(120, "%s, edges %lld", t->kernel->name, (long long)i);
        cover_shape shape = shape_of(&r, t);
        cover_case c =
            cover_pair(&r, shape, masks[(size + size / 8) % 4], sizes[size / 8], sizes[size % 8]);
        check_case(&r, t, &c);
        cover_case_free(&c);
    }
}

/* The keys in three computations, one of which has none at all. */
static void test_resume(void **state)
{
    (void)state;
    for (int64_t step = 0; step < support_steps(24); step++) {
        rng r = rng_of(support_seed() + (uint64_t)step);
        const target *t = &targets[step % TARGETS];
        support_limit(120, "%s, resume %lld", t->kernel->name, (long long)step);
        cover_case c = cover_random(&r, shape_of(&r, t), 250);
        int64_t keys = c.cover.k_count;
        uint8_t *parts = NULL;
        expect(RA_NEW(&parts, 3 * keys + 1));
        for (int64_t i = 0; i < keys; i++) {
            parts[(rng_chance(&r, 50) ? 0 : 2) * keys + i] = 1;
        }
        ra_fold_job job = new_job(&r, &c, &c.cover);
        for (int part = 0; part < 3; part++) {
            ra_cover cover = cover_part(&c, parts + part * keys, part == 0, part == 2);
            job.cover = &cover;
            fold(t, &c, &job, some_sms(&r));
            ra_cover_free(&cover);
        }
        cover_check_fold(&c, &job, tolerance_of(c.dtype));
        free_job(&job);
        ra_free(parts);
        cover_case_free(&c);
    }
}

/* The bits depend neither on the run nor on how many CTAs share the work. */
static void test_same_bits(void **state)
{
    (void)state;
    for (int64_t i = 0; i < support_steps(3 * TARGETS); i++) {
        rng r = rng_of(support_seed() + (uint64_t)i);
        const target *t = &targets[i % TARGETS];
        support_limit(120, "%s, same bits %lld", t->kernel->name, (long long)i);
        cover_case c = cover_random(&r, shape_of(&r, t), 400);
        rng again = r;
        ra_fold_job first = new_job(&r, &c, &c.cover), second = new_job(&again, &c, &c.cover);
        fold(t, &c, &first, 132);
        fold(t, &c, &second, 2);
        assert_true(cover_same_bits(&first.out, &second.out));
        assert_true(cover_same_bits(&first.lse, &second.lse));
        free_job(&first);
        free_job(&second);
        cover_case_free(&c);
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
