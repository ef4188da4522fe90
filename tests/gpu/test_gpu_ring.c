/* Random problems of the head dims and dtypes that tuned kernels take, and of others, through the
 * ring on the device against the oracle, by the tolerance. --seed gives other problems. */
#include "support_random.h"
#include "support_world.h"

#include <math.h>
#include <string.h>

#include "tensor/tensor.h"

typedef struct kind {
    int q_heads, kv_heads, head_dim;
    ra_dtype dtype;
    int64_t seq_max;
} kind;

static const kind kinds[] = {
    {4, 1, 512, RA_BF16, 300}, {2, 1, 256, RA_BF16, 420}, {8, 1, 512, RA_BF16, 150},
    {4, 2, 256, RA_F16, 300},  {2, 2, 512, RA_F16, 260},  {3, 1, 512, RA_BF16, 140},
    {2, 1, 64, RA_F32, 300},   {6, 2, 256, RA_BF16, 520}, {2, 1, 128, RA_BF16, 300},
    {1, 1, 512, RA_F32, 150},  {2, 1, 80, RA_F16, 200},   {5, 1, 256, RA_BF16, 140},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* Padding holds NaN: nobody may read it. */
static void spoil_padding(problem *p)
{
    ra_tensor *tensor[] = {&p->q, &p->k, &p->v, &p->dout};
    for (int64_t i = 0; i < p->rows * p->seq; i++) {
        bool pad = (p->doc_id && p->doc_id[i] <= 0) || (p->is_pad && p->is_pad[i]);
        for (int t = 0; t < 4 && pad; t++) {
            for (int64_t head = 0; head < tensor[t]->size[RA_HEAD]; head++) {
                for (int64_t c = 0; c < p->layer.head_dim; c++) {
                    ra_tensor_set(tensor[t], i / p->seq, head, i % p->seq, c, (double)NAN);
                }
            }
        }
    }
}

static void make_problem(rng *r, const kind *k, problem *p)
{
    ra_layer layer = layer_of(k->q_heads, k->kv_heads, k->head_dim, k->dtype);
    int64_t seq = rng_int(r, 1, k->seq_max);
    if (rng_chance(r, 50)) {
        random_mask(r, seq, &layer);
    }
    bool gemma = rng_chance(r, 50);
    layer.scale = gemma ? 1.0f : 1.0f / sqrtf((float)k->head_dim);
    problem_create(p, layer, rng_chance(r, 70) ? 1 : 2, seq);
    if (rng_chance(r, 60)) {
        random_metadata(r, p);
    }
    if (gemma) {
        problem_fill_gemma(p, r);
    } else {
        problem_fill_unit(p, r);
    }
    spoil_padding(p);
}

static void test_random(void **state)
{
    (void)state;
    static const int ranks[] = {1, 2, 4, 7};
    for (int64_t step = 0; step < support_steps(KINDS); step++) {
        rng r = rng_of(support_seed() * 1000 + (uint64_t)step);
        const kind *k = &kinds[step % KINDS];
        problem p;
        reference ref;
        support_limit(120, "random ring, seed %llu, step %lld", (unsigned long long)support_seed(),
                      (long long)step);
        make_problem(&r, k, &p);
        reference_create(&ref, &p);
        for (int i = 0; i < 4; i++) {
            layout l = layout_kind((int)rng_int(&r, 0, LAYOUT_KINDS - 1), ranks[i], p.seq, &r);
            world_options options = {.strides = (strides)rng_int(&r, 0, STRIDES_COUNT - 1)};
            options.ctx.keep_kv = rng_chance(&r, 30);
            options.ctx.no_overlap = rng_chance(&r, 30);
            answer got;
            world_run(&p, &l, &options, &got, NULL);
            reference_check_tiny(&ref, &p, &got);
            if (step == 0) { /* and the same bits again */
                answer again;
                world_run(&p, &l, &options, &again, NULL);
                assert_true(answer_same_bits(&got, &again));
                answer_free(&again, false);
            }
            answer_free(&got, false);
        }
        reference_free(&ref);
        problem_free(&p);
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
