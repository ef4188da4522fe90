/* Predictions of time on a GPU against the measurements of docs/kernels.md, from which the model
 * was fitted, and what is not predicted. Needs no device. */
#include "backend/cuda/forecast.h"

#include <stdio.h>
#include <string.h>

#include "attn/step.h"
#include "support.h"

static const size_t workspace = RA_CUDA_WORKSPACE_BYTES;

typedef struct row {
    int64_t seq;
    int q_heads, kv_heads, head_dim;
    bool causal;
    int64_t window;
    size_t workspace_mib;
    double forward, backward; /* measured, ms; 0 = not measured */
} row;

static const row rows[] = {
    {8192, 32, 4, 512, false, 0, 544, 6.694, 19.23},
    {8192, 32, 4, 512, true, 0, 544, 3.457, 10.23},
    {32768, 32, 4, 512, true, 0, 544, 52.79, 157},
    {8192, 32, 4, 512, true, 0, 64, 0, 11.33},
    {8192, 32, 16, 256, false, 0, 544, 3.147, 10.46},
    {8192, 32, 16, 256, true, 0, 544, 1.697, 5.44},
    {8192, 32, 16, 256, true, 1024, 544, 0.4662, 1.666},
    {32768, 32, 16, 256, true, 1024, 544, 1.924, 6.861},
    {8192, 32, 16, 256, true, 512, 544, 0.2919, 1.038},
    {32768, 32, 16, 256, true, 512, 544, 1.181, 4.198},
};

static ra_layer layer_of_row(const row *r)
{
    return (ra_layer){
        .size = sizeof(ra_layer),
        .q_heads = r->q_heads,
        .kv_heads = r->kv_heads,
        .head_dim = r->head_dim,
        .dtype = RA_BF16,
        .scale = 0.0625f,
        .causal = r->causal,
        .window = r->window,
    };
}

/* Of one rank: its only cover is the plan's only hop. */
static void predict(const row *r, const ra_layer *layer, double *forward, double *backward)
{
    ra_backend *backend;
    ra_comm *comm;
    ra_ctx *ctx;
    ra_step *step;
    ra_ctx_options options = {.size = sizeof options, .plan_only = true};
    ra_step_desc desc = {.size = sizeof desc, .rows = 1, .seq_local = r->seq};
    assert_int_equal(ra_backend_open_cpu(1, NULL, &backend), RA_OK);
    assert_int_equal(ra_comm_open_threads(1, &comm), RA_OK);
    assert_int_equal(ra_ctx_create(backend, comm, layer, 1, &options, &ctx), RA_OK);
    assert_int_equal(ra_step_create(ctx, &desc, &step), RA_OK);
    const ra_plan *plan = ra_step_plan(step, 0);
    assert_int_equal(plan->schedule.hop_count, 1);
    assert_int_equal(ra_cuda_forecast_cover(&plan->schedule.hop[0].cover, layer,
                                            r->workspace_mib << 20, forward, backward),
                     RA_OK);
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_comm_close(comm);
    ra_backend_close(backend);
}

static void expect_near(double seconds, double milliseconds)
{
    double ratio = seconds * 1e3 / milliseconds;
    printf(" %8.3f ms, measured %8.3f, ratio %.3f", seconds * 1e3, milliseconds, ratio);
    assert_true(milliseconds == 0 || (ratio > 0.85 && ratio < 1.15));
}

static void test_measured(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const row *r = &rows[i];
        ra_layer layer = layer_of_row(r);
        double forward, backward;
        predict(r, &layer, &forward, &backward);
        printf("D=%d seq %lld window %lld: forward", r->head_dim, (long long)r->seq,
               (long long)r->window);
        expect_near(forward, r->forward);
        printf("; backward");
        expect_near(backward, r->backward);
        printf("\n");
    }
}

static void test_names(void **state)
{
    (void)state;
    static const struct {
        int head_dim;
        ra_dtype dtype;
        const char *fold, *grad;
    } cases[] = {
        {512, RA_BF16, "fold_512", "blocks"},
        {320, RA_F16, "fold_512", "blocks"},
        {256, RA_F16, "fold_256", "blocks"},
        {64, RA_BF16, "fold_256", RA_CUDA_SIMPLE},
        {80, RA_BF16, RA_CUDA_SIMPLE, RA_CUDA_SIMPLE},
        {256, RA_F32, RA_CUDA_SIMPLE, RA_CUDA_SIMPLE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        row r = {256, 2, 1, cases[i].head_dim, true, 0, workspace >> 20, 0, 0};
        ra_layer layer = layer_of_row(&r);
        layer.dtype = cases[i].dtype;
        double forward, backward;
        predict(&r, &layer, &forward, &backward);
        assert_string_equal(ra_cuda_forecast_fold(&layer), cases[i].fold);
        assert_string_equal(ra_cuda_forecast_grad(&layer), cases[i].grad);
        assert_int_equal(forward > 0, strcmp(cases[i].fold, RA_CUDA_SIMPLE) != 0);
        assert_int_equal(backward > 0, strcmp(cases[i].grad, RA_CUDA_SIMPLE) != 0);
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_measured),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
