/* Sums up the predictions for a plan's hops and passes. Part of the CUDA build, though it needs no
 * device. */
#include "attn/step.h"
#include "backend/cuda/forecast.h"
#include "ringattn_cuda.h"

static ra_status check(const ra_plan *plan, const ra_cuda_options *options,
                       const ra_cuda_forecast *out)
{
    if (!plan || !out) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", plan ? "out" : "plan");
    }
    if (options && options->size != sizeof *options) {
        return RA_FAIL(RA_E_ARG, "options.size: %zu, expected %zu", options->size, sizeof *options);
    }
    if (out->size != sizeof *out) {
        return RA_FAIL(RA_E_ARG, "out.size: %zu, expected %zu", out->size, sizeof *out);
    }
    return RA_OK;
}

ra_status ra_cuda_forecast_plan(const ra_plan *plan, const ra_cuda_options *options,
                                ra_cuda_forecast *out)
{
    RA_TRY(check(plan, options, out));
    size_t workspace =
        options && options->workspace_bytes ? options->workspace_bytes : RA_CUDA_WORKSPACE_BYTES;
    bool simple = options && options->simple_only;
    ra_cuda_forecast sum = {
        .size = sizeof sum,
        .forward_kernel = simple ? RA_CUDA_SIMPLE : ra_cuda_forecast_fold(plan->layer),
        .backward_kernel = simple ? RA_CUDA_SIMPLE : ra_cuda_forecast_grad(plan->layer),
    };
    for (int h = 0; h < plan->schedule.hop_count && !simple; h++) {
        double forward = 0, backward = 0;
        RA_TRY(ra_cuda_forecast_cover(&plan->schedule.hop[h].cover, plan->layer, workspace,
                                      &forward, &backward));
        sum.forward_seconds += forward;
    }
    for (int i = 0; i < plan->schedule.pass_count && !simple; i++) {
        double forward = 0, backward = 0;
        RA_TRY(ra_cuda_forecast_cover(plan->schedule.pass[i].cover, plan->layer, workspace,
                                      &forward, &backward));
        sum.backward_seconds += backward;
    }
    sum.workspace_bytes = sum.backward_seconds > 0 ? workspace : 0;
    *out = sum;
    return RA_OK;
}
