/* Random covers on the kernels that the dispatch chooses, forward and backward, against the fp64
 * answer, each twice with the same bits: tile edges, documents, windows, images, padding, resumed
 * states, any head dim, bf16 and f16. --seed gives others; says how many it did. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "device_job.h"
#include "ringattn_cuda.h"

enum { SHAPES = 140, PARTS_MAX = 4 };

static const int64_t dims[] = {512, 256, 512, 256, 320, 192, 512, 256, 64, 128, 384, 448};
static const int64_t odd_dims[] = {8, 80, 200, 264, 504};
static const int64_t heads[][2] = {{2, 1}, {4, 2}, {1, 1}, {8, 1}, {3, 1}, {2, 2}, {6, 3}};
static const int64_t edges[] = {1, 16, 64, 80, 128, 160, 192, 256};

static cover_shape random_shape(rng *r)
{
    const int64_t *h = heads[rng_int(r, 0, 6)];
    int64_t chan = rng_chance(r, 90) ? dims[rng_int(r, 0, 11)] : odd_dims[rng_int(r, 0, 4)];
    ra_dtype dtype = rng_chance(r, 65) ? RA_BF16 : rng_chance(r, 90) ? RA_F16 : RA_F32;
    float scale = rng_chance(r, 20) ? 1.0f : 1.0f / sqrtf((float)chan);
    return (cover_shape){h[0], h[1], chan, dtype, scale};
}

/* A tile edge, one less or one more. */
static int64_t random_edge(rng *r)
{
    int64_t size = edges[rng_int(r, 0, 7)] + rng_int(r, -1, 1);
    return size > 0 ? size : 1;
}

static cover_case random_pair(rng *r, cover_shape shape)
{
    int64_t queries = random_edge(r), keys = random_edge(r);
    ra_mask mask = {.causal = rng_chance(r, 60)};
    if (rng_chance(r, 50)) {
        mask.window = rng_chance(r, 50) ? random_edge(r) : rng_int(r, 1, 40);
    }
    if (rng_chance(r, 25)) {
        mask.window_right = rng_int(r, 1, 100);
    }
    return cover_pair(r, shape, mask, queries, keys);
}

/* The key pieces of each of `parts` computations, dealt at random. */
static uint8_t *deal_keys(rng *r, const cover_case *c, int parts)
{
    uint8_t *keep = NULL;
    int64_t keys = c->cover.k_count;
    device_job_expect(RA_NEW(&keep, parts * keys + 1));
    for (int64_t i = 0; i < keys; i++) {
        keep[rng_int(r, 0, parts - 1) * keys + i] = 1;
    }
    return keep;
}

typedef struct results {
    ra_fold_job forward;
    ra_grad_job backward;
} results;

static results compute(const ra_backend *backend, const cover_case *c, const uint8_t *keep,
                       int parts)
{
    results x = {cover_fold_job(c, &c->cover), cover_grad_job(c, &c->cover)};
    ra_cover passes[PARTS_MAX];
    cover_passes(c, keep, parts, passes);
    for (int part = 0; part < parts; part++) {
        ra_cover cover =
            cover_part(c, keep + part * c->cover.k_count, part == 0, part == parts - 1);
        x.forward.cover = &cover;
        x.backward.cover = &passes[part];
        device_job_fold(backend, c, &x.forward);
        device_job_grad(backend, c, &x.backward);
        ra_cover_free(&cover);
        ra_cover_free(&passes[part]);
    }
    return x;
}

static void results_free(results *x)
{
    cover_fold_free(&x->forward);
    cover_grad_free(&x->backward);
}

static void check_same_bits(const cover_case *c, const results *a, const results *b)
{
    assert_true(cover_same_bits(&a->forward.out, &b->forward.out));
    assert_true(cover_same_bits(&a->forward.lse, &b->forward.lse));
    assert_true(cover_same_grads(c, &a->backward, &b->backward));
}

static void check_case(rng *r, const ra_backend *backend, const cover_case *c)
{
    int parts = rng_chance(r, 70) ? 1 : (int)rng_int(r, 2, PARTS_MAX);
    uint8_t *keep = deal_keys(r, c, parts);
    results first = compute(backend, c, keep, parts), second = compute(backend, c, keep, parts);
    double tolerance = device_job_tolerance(c->dtype, false);
    cover_check_fold(c, &first.forward, tolerance);
    cover_check_grad(c, &first.backward, tolerance);
    check_same_bits(c, &first, &second);
    results_free(&first);
    results_free(&second);
    ra_free(keep);
}

/* How many shapes each kernel ran. */
enum { NAMES = 8 };
typedef struct tally {
    const char *name[NAMES];
    int64_t count[NAMES];
} tally;

static void tally_add(tally *t, const char *name)
{
    for (int i = 0; i < NAMES; i++) {
        if (!t->name[i] || strcmp(t->name[i], name) == 0) {
            t->name[i] = name;
            t->count[i]++;
            return;
        }
    }
}

static void tally_print(const char *what, const tally *t)
{
    printf("  %s:", what);
    for (int i = 0; i < NAMES && t->name[i]; i++) {
        printf(" %s %lld", t->name[i], (long long)t->count[i]);
    }
    printf("\n");
}

static void test_sweep(void **state)
{
    (void)state;
    ra_backend *backend = device_job_open(false);
    tally forward = {0}, backward = {0};
    int64_t shapes = 0, draw = 0;
    double start = support_now();
    for (; shapes < support_steps(SHAPES); draw++) {
        rng r = rng_of(support_seed() * 1000003 + (uint64_t)draw);
        cover_shape shape = random_shape(&r);
        support_limit(120, "sweep, seed %llu, draw %lld", (unsigned long long)support_seed(),
                      (long long)draw);
        cover_case c = draw % 5 < 2 ? random_pair(&r, shape) : cover_random(&r, shape, 180);
        if (c.cover.q_count > 0) {
            check_case(&r, backend, &c);
            shapes++;
            tally_add(&forward, ra_cuda_kernel(backend, false));
            tally_add(&backward, ra_cuda_kernel(backend, true));
        }
        cover_case_free(&c);
    }
    printf("shapes: %lld in %.1f s, each twice with the same bits\n", (long long)shapes,
           support_now() - start);
    tally_print("forward", &forward);
    tally_print("backward", &backward);
    device_job_close(backend);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sweep)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
