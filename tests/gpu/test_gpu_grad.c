/* The tuned backward, called directly, on random covers against the fp64 answer: strides that it
 * takes, workspaces so small that many slabs follow each other, few CTAs so that each does many
 * units. The workspace begins as NaN; everything that no piece names is NaN and has to stay so. */
#include "support_cover.h"

#include <math.h>
#include <string.h>

#include "backend/cuda/grad.h"
#include "base/alloc.h"
#include "base/mathx.h"
#include "on_device.h"

static const int64_t chans[] = {512, 256, 512, 256, 128, 192, 320, 448};
static const int64_t heads[][2] = {{2, 1}, {4, 2}, {1, 1}, {8, 1}, {3, 1}, {2, 2}};
static const int sm_counts[] = {2, 4, 6, 132};
enum { CHANS = 8, HEADS = 6, SM_COUNTS = 4, PARTS_MAX = 3 };

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

static void replace(rng *r, ra_tensor *t)
{
    ra_tensor to = aligned(r, t);
    if (to.data != t->data) {
        ra_free(t->data);
    }
    *t = to;
}

static ra_grad_job new_job(rng *r, const cover_case *c, const ra_cover *cover)
{
    ra_grad_job job = cover_grad_job(c, cover);
    job.q = aligned(r, &c->q);
    job.dout = aligned(r, &c->dout);
    replace(r, &job.dq);
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        job.k[i] = aligned(r, &c->k[i]);
        job.v[i] = aligned(r, &c->v[i]);
        replace(r, &job.dk[i]);
        replace(r, &job.dv[i]);
    }
    replace(r, &job.to.dq);
    replace(r, &job.to.dk);
    replace(r, &job.to.dv);
    return job;
}

static void free_job(ra_grad_job *job)
{
    ra_free(job->q.data);
    ra_free(job->dout.data);
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        ra_free(job->k[i].data);
        ra_free(job->v[i].data);
    }
    cover_grad_free(job);
}

/* ---- one launch */

typedef struct device_setting {
    int sm_count;
    size_t workspace_bytes;
} device_setting;

static device_setting some_setting(rng *r, const cover_case *c)
{
    int64_t group = c->q_heads / c->kv_heads, units = group % 2 ? 2 * group : group;
    int64_t blocks = rng_chance(r, 50) ? rng_int(r, 2, 6) : 200;
    return (device_setting){sm_counts[rng_int(r, 0, SM_COUNTS - 1)],
                            (size_t)(blocks * units * RA_BLOCK_BYTES)};
}

static void *upload(const void *from, int64_t count, size_t bytes)
{
    void *memory = NULL;
    expect_cuda(cudaMalloc(&memory, (size_t)(count + 1) * bytes));
    expect_cuda(cudaMemcpy(memory, from, (size_t)count * bytes, cudaMemcpyHostToDevice));
    return memory;
}

static void *nans(size_t bytes)
{
    void *memory = NULL;
    expect_cuda(cudaMalloc(&memory, bytes));
    expect_cuda(cudaMemset(memory, 0xff, bytes));
    return memory;
}

static size_t extent(const ra_tensor *t)
{
    int64_t last = 0;
    for (int i = 0; i < RA_NDIM; i++) {
        last += (t->size[i] - 1) * t->stride[i];
    }
    return ra_tensor_count(t) > 0 ? (size_t)(last + 1) * ra_dtype_bytes(t->dtype) : 0;
}

/* What a tensor holds when an event has happened, whatever goes on beside: on the host. */
static void *read_behind(const ra_tensor *t, cudaEvent_t event, cudaStream_t side)
{
    void *host = NULL;
    expect(ra_alloc(extent(t) + 1, 1, &host));
    expect_cuda(cudaStreamWaitEvent(side, event, 0));
    expect_cuda(cudaMemcpyAsync(host, t->data, extent(t), cudaMemcpyDeviceToHost, side));
    expect_cuda(cudaStreamSynchronize(side));
    return host;
}

/* Launches, and compares the chunk's sums as they are behind their mark with those at the end. */
static void launch_marked(const ra_grad_job *job, const ra_cuda_work *work, ra_cuda_launch *launch)
{
    const ra_tensor *const sums[] = {&job->dk[RA_SOURCE_CHUNK], &job->dv[RA_SOURCE_CHUNK]};
    cudaStream_t side = NULL;
    expect_cuda(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    expect_cuda(cudaEventCreateWithFlags(&launch->chunk_done, cudaEventDisableTiming));
    expect(ra_cuda_block_grad.launch(job, work, launch));
    void *early[2], *late[2];
    for (int i = 0; i < 2; i++) {
        early[i] = read_behind(sums[i], launch->chunk_done, side);
    }
    expect_cuda(cudaDeviceSynchronize());
    for (int i = 0; i < 2; i++) {
        late[i] = read_behind(sums[i], launch->chunk_done, side);
        if (memcmp(early[i], late[i], extent(sums[i])) != 0) {
            fail_msg("%s: the chunk's sums change behind their mark", support_case());
        }
        ra_free(early[i]);
        ra_free(late[i]);
    }
    expect_cuda(cudaEventDestroy(launch->chunk_done));
    expect_cuda(cudaStreamDestroy(side));
}

static void grad(const cover_case *c, ra_grad_job *job, device_setting setting, bool marked)
{
    const ra_cuda_grad_kernel *kernel = &ra_cuda_block_grad;
    ra_cuda_kept kept = {0};
    ra_cuda_work work = {.q_heads = (int)c->q_heads, .kv_heads = (int)c->kv_heads, .kept = &kept};
    ra_cuda_launch launch = {
        .sm_count = setting.sm_count, .capability = 90, .workspace_bytes = setting.workspace_bytes};
    expect(ra_work_build(job->cover, 128, 128, &work.host));
    void *reach = upload(work.host.reach, work.host.reach_count, sizeof *work.reach);
    work.reach = reach;
    expect_cuda(cudaDeviceGetDefaultMemPool(&launch.pool, 0));
    launch.counters = nans(RA_CUDA_COUNTERS * sizeof *launch.counters);
    ra_tensor *list[] = {&job->q,     &job->dout,  &job->k[0],  &job->k[1],
                         &job->v[0],  &job->v[1],  &job->lse,   &job->delta,
                         &job->dq,    &job->dk[0], &job->dk[1], &job->dv[0],
                         &job->dv[1], &job->to.dq, &job->to.dk, &job->to.dv};
    device_copy copy;
    expect(device_copy_put(&copy, list, sizeof list / sizeof *list));
    assert_true(kernel->supports(job, &work, &launch));
    launch.workspace = nans(setting.workspace_bytes);
    if (marked) {
        launch_marked(job, &work, &launch);
    } else {
        expect(kernel->launch(job, &work, &launch));
        expect_cuda(cudaDeviceSynchronize());
    }
    expect(device_copy_get(&copy));
    kept.discard(kept.memory, NULL);
    cudaFree(reach);
    cudaFree(launch.counters);
    cudaFree(launch.workspace);
    ra_work_free(&work.host);
}

/* p and ds are rounded to the dtype before they are multiplied. */
static double tolerance_of(ra_dtype dtype)
{
    return dtype == RA_BF16 ? 0x1p-7 : 0x1p-10;
}

/* A backward in computations that share the keys out, keep as in cover_passes. */
static void check_passes(rng *r, const cover_case *c, const uint8_t *keep, int parts)
{
    ra_cover passes[PARTS_MAX];
    cover_passes(c, keep, parts, passes);
    ra_grad_job job = new_job(r, c, passes);
    for (int part = 0; part < parts; part++) {
        job.cover = &passes[part];
        grad(c, &job, some_setting(r, c), rng_chance(r, 50));
    }
    cover_check_grad(c, &job, tolerance_of(c->dtype));
    free_job(&job);
    for (int part = 0; part < parts; part++) {
        ra_cover_free(&passes[part]);
    }
}

static void check_case(rng *r, const cover_case *c)
{
    check_passes(r, c, NULL, 1);
}

/* ---- tests */

static cover_shape shape_of(rng *r, int64_t step)
{
    const int64_t *h = heads[rng_int(r, 0, HEADS - 1)];
    int64_t chan = chans[step % CHANS];
    ra_dtype dtype = rng_chance(r, 70) ? RA_BF16 : RA_F16;
    return (cover_shape){h[0], h[1], chan, dtype, 1.0f / sqrtf((float)chan)};
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
    for (int64_t step = 0; step < support_steps(64); step++) {
        int64_t i = 37 * step % 64; /* each once, and a part of them is of every sort */
        rng r = rng_of(support_seed() + (uint64_t)i);
        support_limit(120, "edges %lld", (long long)i);
        cover_case c =
            cover_pair(&r, shape_of(&r, i), masks[(i + i / 8) % 4], sizes[i / 8], sizes[i % 8]);
        check_case(&r, &c);
        cover_case_free(&c);
    }
}

static void test_random(void **state)
{
    (void)state;
    for (int64_t i = 0; i < support_steps(80); i++) {
        rng r = rng_of(support_seed() + (uint64_t)i);
        support_limit(120, "random cover %lld", (long long)i);
        cover_case c = cover_random(&r, shape_of(&r, i), i % 16 < 2 ? 700 : 250);
        if (c.cover.q_count > 0) {
            check_case(&r, &c);
        }
        cover_case_free(&c);
    }
}

/* The keys in three computations, one of which has none at all. */
static void test_hops(void **state)
{
    (void)state;
    for (int64_t step = 0; step < support_steps(16); step++) {
        rng r = rng_of(support_seed() + (uint64_t)step);
        support_limit(120, "hops %lld", (long long)step);
        cover_case c = cover_random(&r, shape_of(&r, step), 250);
        int64_t keys = c.cover.k_count;
        uint8_t *parts = NULL;
        expect(RA_NEW(&parts, 3 * keys + 1));
        for (int64_t i = 0; i < keys; i++) {
            parts[(rng_chance(&r, 50) ? 0 : 2) * keys + i] = 1;
        }
        if (c.cover.q_count > 0) {
            check_passes(&r, &c, parts, 3);
        }
        ra_free(parts);
        cover_case_free(&c);
    }
}

/* The bits depend neither on the run nor, in one slab, on how many CTAs share the work. */
static void test_same_bits(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        rng r = rng_of(support_seed() + (uint64_t)i);
        support_limit(120, "same bits %d", i);
        cover_case c = cover_random(&r, shape_of(&r, i), 400);
        ra_cover whole;
        cover_passes(&c, NULL, 1, &whole);
        rng again = r, third = r;
        ra_grad_job jobs[] = {new_job(&r, &c, &whole), new_job(&again, &c, &whole),
                              new_job(&third, &c, &whole)};
        size_t all = (size_t)512 << 20;
        grad(&c, &jobs[0], (device_setting){132, all}, false);
        grad(&c, &jobs[1], (device_setting){132, all}, true);
        grad(&c, &jobs[2], (device_setting){2, all}, false);
        assert_true(cover_same_grads(&c, &jobs[0], &jobs[1]));
        assert_true(cover_same_grads(&c, &jobs[0], &jobs[2]));
        for (int j = 0; j < 3; j++) {
            free_job(&jobs[j]);
        }
        ra_cover_free(&whole);
        cover_case_free(&c);
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_edges),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_hops),
        cmocka_unit_test(test_same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
