/* The CPU backend: the wrapper, every level that this machine runs against the fp64 answer on
 * random and on edge-sized covers, the same bits for any team, the team itself, elementwise
 * operations, and memory that runs out. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "backend/cpu/team.h"
#include "base/alloc.h"
#include "base/limits.h"
#include "support_cover.h"

static const ra_dtype dtypes[] = {RA_F32, RA_BF16, RA_F16};
static const int64_t head_dims[] = {8, 16, 64, 80, 96, 128, 192, 256, 320, 512};
enum { DTYPES = 3, HEAD_DIMS = 10 };

static ra_backend *open_level(int threads, const char *level)
{
    ra_backend *backend = NULL;
    assert_int_equal(ra_backend_open_cpu(threads, level, &backend), RA_OK);
    return backend;
}

/* Every level that this machine runs, ended by NULL; those that it lacks are named aloud. */
enum { LEVELS_MAX = 8 };
static void open_levels(int threads, ra_backend *levels[LEVELS_MAX])
{
    for (int i = 0; ra_cpu_level_name(i); i++) {
        if (ra_cpu_level_runs(i)) {
            *levels++ = open_level(threads, ra_cpu_level_name(i));
        } else {
            print_message("SKIPPED level %s: not on this machine\n", ra_cpu_level_name(i));
        }
    }
    *levels = NULL;
}

static void close_levels(ra_backend *const *levels)
{
    for (; *levels; levels++) {
        ra_backend_close(*levels);
    }
}

static void fold(ra_backend *backend, const ra_fold_job *job)
{
    assert_int_equal(backend->ops->fold(backend->self, job), RA_OK);
}

/* A backward in computations over these covers. */
static ra_grad_job grad(ra_backend *backend, const cover_case *c, const ra_cover *covers, int count)
{
    ra_grad_job job = cover_grad_job(c, covers);
    for (int i = 0; i < count; i++) {
        job.cover = &covers[i];
        assert_int_equal(backend->ops->grad(backend->self, &job), RA_OK);
    }
    return job;
}

static float plain_scale(int64_t chan)
{
    return 1.5f / sqrtf((float)chan);
}

/* A level that multiplies bf16 rounds p and ds to it, as the plain computation does. */
static double tolerance_at(const ra_backend *backend, ra_dtype dtype, double tolerance)
{
    bool rounds = strstr(ra_backend_level(backend), "bf16") && dtype == RA_BF16;
    return rounds ? 0x1p-7 : tolerance;
}

static void check_case(ra_backend *const *levels, const cover_case *c, double tolerance,
                       const char *name, int64_t number)
{
    ra_cover whole;
    cover_passes(c, NULL, 1, &whole);
    for (; *levels; levels++) {
        support_limit(60, "%s, case %lld, %s", name, (long long)number, ra_backend_level(*levels));
        double allowed = tolerance_at(*levels, c->dtype, tolerance);
        ra_fold_job forward = cover_fold_job(c, &c->cover);
        fold(*levels, &forward);
        cover_check_fold(c, &forward, allowed);
        cover_fold_free(&forward);
        ra_grad_job backward = grad(*levels, c, &whole, 1);
        cover_check_grad(c, &backward, allowed);
        cover_grad_free(&backward);
    }
    ra_cover_free(&whole);
}

/* ---- the wrapper and the levels */

static void test_open(void **state)
{
    (void)state;
    ra_backend *backend = NULL;
    assert_int_equal(ra_backend_open_cpu(-1, NULL, &backend), RA_E_ARG);
    assert_non_null(strstr(ra_last_error(), "threads: -1"));
    assert_int_equal(ra_backend_open_cpu(RA_THREADS_MAX + 1, NULL, &backend), RA_E_ARG);
    assert_int_equal(ra_backend_open_cpu(1, "sse9", &backend), RA_E_ARG);
    for (int i = 0; ra_cpu_level_name(i); i++) {
        assert_non_null(strstr(ra_last_error(), ra_cpu_level_name(i)));
    }
    assert_int_equal(ra_backend_open_cpu(1, NULL, NULL), RA_E_ARG);
    assert_null(backend);
    ra_backend_close(NULL);

    assert_string_equal(ra_cpu_level_name(0), "portable");
    assert_true(ra_cpu_level_runs(0));
    assert_null(ra_cpu_level_name(-1));
    assert_false(ra_cpu_level_runs(-1));
    assert_false(ra_cpu_level_runs(1000));
    const char *best = NULL;
    for (int i = 0; ra_cpu_level_name(i); i++) {
        if (ra_cpu_level_runs(i)) {
            best = ra_cpu_level_name(i);
        } else {
            assert_int_equal(ra_backend_open_cpu(1, ra_cpu_level_name(i), &backend),
                             RA_E_UNSUPPORTED);
        }
    }
    backend = open_level(0, NULL);
    assert_string_equal(ra_backend_name(backend), "cpu");
    assert_string_equal(ra_backend_level(backend), best);
    print_message("best level: %s\n", best);
    void *memory = NULL;
    assert_int_equal(backend->ops->alloc(backend->self, 100, &memory), RA_OK);
    assert_int_equal(((char *)memory)[99], 0);
    backend->ops->free(backend->self, memory);
    ra_backend_close(backend);
}

/* ---- the team */

typedef struct tally {
    atomic_int times[1000];
    atomic_int worker_max;
} tally;

static void count_item(void *arg, int64_t item, int worker)
{
    tally *t = arg;
    atomic_fetch_add(&t->times[item], 1);
    int seen = atomic_load(&t->worker_max);
    while (worker > seen && !atomic_compare_exchange_weak(&t->worker_max, &seen, worker)) {
    }
}

static void test_team(void **state)
{
    (void)state;
    static const int sizes[] = {1, 2, 3, 7};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        ra_team *team = NULL;
        assert_int_equal(ra_team_open(sizes[i], &team), RA_OK);
        assert_int_equal(ra_team_size(team), sizes[i]);
        for (int64_t count = 0; count < 200; count++) {
            tally t = {0};
            int64_t items = count < 100 ? count : 1000 - count;
            ra_team_run(team, items, count_item, &t);
            for (int64_t item = 0; item < 1000; item++) {
                assert_int_equal(atomic_load(&t.times[item]), item < items);
            }
            assert_in_range(atomic_load(&t.worker_max), 0, sizes[i] - 1);
        }
        ra_team_close(team);
    }
    ra_team_close(NULL);
}

/* ---- fold and grad against the answer */

static void test_random(void **state)
{
    (void)state;
    static const int64_t heads[][2] = {{1, 1}, {4, 2}, {3, 1}, {8, 1}, {10, 1}, {2, 2}};
    ra_backend *levels[LEVELS_MAX];
    open_levels(2, levels);
    for (int64_t step = 0; step < support_steps(90); step++) {
        rng r = rng_of(support_seed() + (uint64_t)step);
        const int64_t *h = heads[rng_int(&r, 0, 5)];
        int64_t chan = head_dims[step % HEAD_DIMS];
        cover_shape shape = {h[0], h[1], chan, dtypes[step % DTYPES], plain_scale(chan)};
        cover_case c = cover_random(&r, shape, chan > 128 ? 80 : 250);
        check_case(levels, &c, 1e-5, "random covers", step);
        cover_case_free(&c);
    }
    close_levels(levels);
}

/* Sizes at the edges of every tile, queries and keys apart, under four masks in turn. */
static void test_edges(void **state)
{
    (void)state;
    static const int64_t sizes[] = {1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
    static const ra_mask masks[] = {{.causal = true},
                                    {.causal = false},
                                    {.causal = true, .window = 20},
                                    {.window = 40, .window_right = 9}};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    ra_backend *levels[LEVELS_MAX];
    open_levels(1, levels);
    for (int i = 0; i < SIZES * SIZES; i++) {
        rng r = rng_of(support_seed() + (uint64_t)i);
        int64_t chan = head_dims[i % 7 == 0 ? i / 7 % HEAD_DIMS : i % 3];
        cover_shape shape = {2, 1, chan, dtypes[i % DTYPES], plain_scale(chan)};
        cover_case c =
            cover_pair(&r, shape, masks[(i + i / SIZES) % 4], sizes[i / SIZES], sizes[i % SIZES]);
        check_case(levels, &c, 1e-5, "edges", i);
        cover_case_free(&c);
    }
    close_levels(levels);
}

/* Every head dim and dtype with more keys than a tile holds, and scores as large as Gemma's. */
static void test_head_dims(void **state)
{
    (void)state;
    ra_backend *levels[LEVELS_MAX];
    open_levels(2, levels);
    for (int i = 0; i < HEAD_DIMS * DTYPES; i++) {
        rng r = rng_of(support_seed() + (uint64_t)i);
        cover_shape shape = {1, 1, head_dims[i / DTYPES], dtypes[i % DTYPES], 1.0f};
        cover_case c = cover_pair(&r, shape, (ra_mask){.causal = true}, 26, 270);
        check_case(levels, &c, 1e-4, "head dims", i);
        cover_case_free(&c);
    }
    close_levels(levels);
}

/* The keys in three computations, one of which has none at all: the state goes through acc and lse,
 * gradients add up. */
static void test_resume(void **state)
{
    (void)state;
    ra_backend *backend = open_level(2, NULL);
    for (int64_t step = 0; step < support_steps(40); step++) {
        support_limit(60, "resume, step %lld", (long long)step);
        rng r = rng_of(support_seed() + (uint64_t)step);
        int64_t chan = head_dims[step % 5];
        cover_shape shape = {4, 2, chan, dtypes[step % DTYPES], plain_scale(chan)};
        cover_case c = cover_random(&r, shape, 200);
        uint8_t *parts = NULL;
        assert_int_equal(RA_NEW(&parts, 3 * c.cover.k_count + 1), RA_OK);
        for (int64_t i = 0; i < c.cover.k_count; i++) {
            parts[(rng_chance(&r, 50) ? 0 : 2) * c.cover.k_count + i] = 1;
        }
        ra_fold_job forward = cover_fold_job(&c, &c.cover);
        for (int part = 0; part < 3; part++) {
            ra_cover cover = cover_part(&c, parts + part * c.cover.k_count, part == 0, part == 2);
            forward.cover = &cover;
            fold(backend, &forward);
            ra_cover_free(&cover);
        }
        ra_cover passes[3];
        cover_passes(&c, parts, 3, passes);
        ra_grad_job backward = grad(backend, &c, passes, 3);
        double allowed = tolerance_at(backend, c.dtype, 1e-5);
        cover_check_fold(&c, &forward, allowed);
        cover_check_grad(&c, &backward, allowed);
        cover_fold_free(&forward);
        cover_grad_free(&backward);
        for (int part = 0; part < 3; part++) {
            ra_cover_free(&passes[part]);
        }
        ra_free(parts);
        cover_case_free(&c);
    }
    ra_backend_close(backend);
}

/* Same bits for any team; and those of a row do not depend on which rows share its tile. */
static void test_same_bits(void **state)
{
    (void)state;
    static const int threads[] = {2, 3, 5};
    for (int64_t step = 0; step < support_steps(12); step++) {
        support_limit(60, "same bits, step %lld", (long long)step);
        rng r = rng_of(support_seed() + (uint64_t)step);
        cover_shape shape = {6, step % 3 ? 2 : 3, step % 2 ? 64 : 24, dtypes[step % DTYPES], 0.3f};
        cover_case c = cover_random(&r, shape, 400);
        ra_cover cut = cover_cut_queries(&c, rng_int(&r, 1, 100));
        ra_backend *one = open_level(1, NULL);
        ra_fold_job forward = cover_fold_job(&c, &c.cover);
        ra_cover whole;
        cover_passes(&c, NULL, 1, &whole);
        fold(one, &forward);
        ra_grad_job backward = grad(one, &c, &whole, 1);
        for (int i = 0; i < 3; i++) {
            ra_backend *team = open_level(threads[i], NULL);
            ra_fold_job other = cover_fold_job(&c, i == 0 ? &cut : &c.cover);
            fold(team, &other);
            ra_grad_job other_grad = grad(team, &c, &whole, 1);
            assert_true(cover_same_bits(&forward.out, &other.out));
            assert_true(cover_same_bits(&forward.lse, &other.lse));
            assert_true(cover_same_grads(&c, &backward, &other_grad));
            cover_fold_free(&other);
            cover_grad_free(&other_grad);
            ra_backend_close(team);
        }
        cover_fold_free(&forward);
        cover_grad_free(&backward);
        ra_cover_free(&cut);
        ra_cover_free(&whole);
        ra_backend_close(one);
        cover_case_free(&c);
    }
}

/* One token with q = k = 2 in one channel: the score is 4, so lse is 4 times scale exactly. */
static void test_exact_scale(void **state)
{
    (void)state;
    ra_backend *levels[LEVELS_MAX];
    open_levels(1, levels);
    for (ra_backend **level = levels; *level; level++) {
        rng r = rng_of(1);
        cover_shape shape = {1, 1, 16, RA_F32, 0.7f};
        cover_case c = cover_pair(&r, shape, (ra_mask){.causal = true}, 1, 1);
        for (int64_t d = 0; d < 16; d++) {
            ra_tensor_set(&c.q, 0, 0, 0, d, d == 0 ? 2 : 0);
            ra_tensor_set(&c.k[0], 0, 0, 0, d, d == 0 ? 2 : 0);
        }
        ra_fold_job job = cover_fold_job(&c, &c.cover);
        fold(*level, &job);
        assert_true(*(float *)job.lse.data == 4 * 0.7f);
        for (int64_t d = 0; d < 16; d++) {
            assert_true(ra_tensor_get(&job.out, 0, 0, 0, d) == ra_tensor_get(&c.v[0], 0, 0, 0, d));
        }
        cover_fold_free(&job);
        cover_case_free(&c);
    }
    close_levels(levels);
}

/* ---- elementwise */

static void test_elementwise(void **state)
{
    (void)state;
    enum { B = 2, H = 3, S = 37, D = 72, N = B * H * S * D };
    static float a[N], b[N], dots[B * H * S];
    static uint16_t half[N], other[N];
    ra_backend *backend = open_level(3, NULL);
    const ra_backend_ops *ops = backend->ops;
    rng r = rng_of(support_seed());
    for (int i = 0; i < N; i++) {
        a[i] = (float)rng_normal(&r);
    }
    ra_tensor ta = ra_tensor_bhsd(a, RA_F32, B, H, S, D),
              tb = ra_tensor_bhsd(b, RA_F32, B, H, S, D);
    ra_tensor dot = ra_tensor_bhsd(dots, RA_F32, B, H, S, 1);
    assert_int_equal(ops->fill(backend->self, &tb, 0.5f), RA_OK);
    assert_int_equal(ops->add(backend->self, &tb, &ta), RA_OK);
    for (int i = 0; i < N; i++) {
        assert_true(b[i] == 0.5f + a[i]);
    }
    for (int i = 1; i < DTYPES; i++) {
        /* [B, S, H, D] in memory. */
        ra_tensor th = {half, dtypes[i], {B, H, S, D}, {S * H * D, D, H * D, 1}};
        ra_tensor to = ra_tensor_bhsd(other, dtypes[i], B, H, S, D);
        assert_int_equal(ops->cast(backend->self, &th, &ta), RA_OK);
        assert_int_equal(ops->fill(backend->self, &to, -2.0f), RA_OK);
        assert_int_equal(ops->row_dot(backend->self, &th, &to, &dot), RA_OK);
        for (int row = 0; row < B * H * S; row++) {
            int64_t head = row / S % H, seq = row % S;
            double want = 0;
            for (int64_t d = 0; d < D; d++) {
                float x = a[row * D + d];
                float rounded = dtypes[i] == RA_BF16 ? ra_bf16_to_f32(ra_f32_to_bf16(x))
                                                     : ra_f16_to_f32(ra_f32_to_f16(x));
                assert_true(ra_tensor_get(&th, row / S / H, head, seq, d) == (double)rounded);
                want -= 2 * (double)rounded;
            }
            assert_true(fabs((double)dots[row] - want) < 1e-4);
        }
    }
    assert_int_equal(ops->cast(backend->self, &tb, &ta), RA_OK);
    assert_memory_equal(a, b, sizeof a);
    ra_tensor nothing = ra_tensor_bhsd(NULL, RA_F32, B, H, 0, D);
    assert_int_equal(ops->fill(backend->self, &nothing, 1), RA_OK);
    ra_backend_close(backend);
}

/* ---- memory that runs out */

/* Everything one user does, with the n-th allocation failing: a status, nothing lost. */
static ra_status use_backend(const ra_fold_job *forward, const ra_grad_job *backward)
{
    ra_backend *backend = NULL;
    ra_status status = ra_backend_open_cpu(2, NULL, &backend);
    if (!status) {
        status = backend->ops->fold(backend->self, forward);
    }
    if (!status) {
        status = backend->ops->grad(backend->self, backward);
    }
    ra_backend_close(backend);
    return status;
}

static void test_no_memory(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    cover_shape shape = {2, 1, 32, RA_F32, 0.3f};
    cover_case c = cover_random(&r, shape, 100);
    ra_fold_job forward = cover_fold_job(&c, &c.cover);
    ra_cover whole;
    cover_passes(&c, NULL, 1, &whole);
    ra_grad_job backward = cover_grad_job(&c, &whole);
    ra_status status = RA_E_NOMEM;
    int failures = 0;
    for (; status; failures++) {
        ra_alloc_probe probe = {.fail_at = failures + 1};
        ra_alloc_watch(&probe);
        status = use_backend(&forward, &backward);
        ra_alloc_watch(NULL);
        assert_true(status == RA_OK || status == RA_E_NOMEM);
        assert_int_equal(atomic_load(&probe.live_bytes), 0);
    }
    assert_in_range(failures, 5, 20);
    cover_check_fold(&c, &forward, 1e-5);
    cover_check_grad(&c, &backward, 1e-5);
    cover_fold_free(&forward);
    cover_grad_free(&backward);
    ra_cover_free(&whole);
    cover_case_free(&c);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_open),        cmocka_unit_test(test_team),
        cmocka_unit_test(test_exact_scale), cmocka_unit_test(test_random),
        cmocka_unit_test(test_edges),       cmocka_unit_test(test_head_dims),
        cmocka_unit_test(test_resume),      cmocka_unit_test(test_same_bits),
        cmocka_unit_test(test_elementwise), cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
