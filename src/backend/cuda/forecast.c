/* A cost model of three numbers a kernel, fitted to the rates in docs/kernels.md. */
#include "backend/cuda/forecast.h"

#include <string.h>

#include "backend/cuda/slabs.h"

enum { SM_COUNT = 132 };

/* A unit is some queries of one head and walks tiles of keys; times are of one SM. */
typedef struct fold_model {
    const char *name;
    int chan_max; /* the first model that is wide enough */
    int queries, keys;
    double tile_seconds, unit_seconds;
} fold_model;

static const fold_model models[] = {
    {"fold_256", 256, 128, 64, 1.58e-6, 4e-6},
    {"fold_512", 512, 64, 128, 3.3e-6, 4e-6},
};
enum { MODELS = sizeof models / sizeof *models };

/* Of the cost of a plan of slabs. */
static const double step_seconds = 0.8e-6;

/* Tensor maps take whole slabs of 64 channels. */
static bool is_tuned(const ra_layer *layer)
{
    return layer->dtype != RA_F32 && layer->head_dim % 64 == 0 &&
           layer->head_dim <= models[MODELS - 1].chan_max;
}

static const fold_model *model_of(const ra_layer *layer)
{
    int i = 0;
    while (i < MODELS - 1 && layer->head_dim > models[i].chan_max) {
        i++;
    }
    return &models[i];
}

const char *ra_cuda_forecast_fold(const ra_layer *layer)
{
    return is_tuned(layer) ? model_of(layer)->name : RA_CUDA_SIMPLE;
}

const char *ra_cuda_forecast_grad(const ra_layer *layer)
{
    return is_tuned(layer) && layer->head_dim >= 128 ? "blocks" : RA_CUDA_SIMPLE;
}

static ra_status forecast_fold(const ra_cover *cover, const ra_layer *layer, double *seconds)
{
    const fold_model *model = model_of(layer);
    ra_work work;
    int64_t tiles = 0;
    RA_TRY(ra_work_build(cover, model->queries, model->keys, &work));
    for (int64_t i = 0; i < work.run_count; i++) {
        tiles += ra_ceil_div(work.run[i].count, model->keys);
    }
    double one_head =
        (double)tiles * model->tile_seconds + (double)work.item_count * model->unit_seconds;
    *seconds = one_head * layer->q_heads / SM_COUNT;
    ra_work_free(&work);
    return RA_OK;
}

static ra_status forecast_grad(const ra_cover *cover, const ra_layer *layer, size_t workspace_bytes,
                               double *seconds)
{
    const ra_slab_layout layout = {
        .q_heads = layer->q_heads,
        .kv_heads = layer->kv_heads,
        .chan = layer->head_dim,
        .clusters = SM_COUNT / 2,
        .workspace_bytes = workspace_bytes,
    };
    ra_work work;
    ra_slabs slabs;
    RA_TRY(ra_work_build(cover, RA_BLOCK_ROWS, RA_BLOCK_KEYS, &work));
    ra_status status = ra_slabs_build(cover, &work, &layout, &slabs);
    ra_work_free(&work);
    RA_TRY(status);
    *seconds = slabs.cost * step_seconds;
    ra_slabs_free(&slabs);
    return RA_OK;
}

ra_status ra_cuda_forecast_cover(const ra_cover *cover, const ra_layer *layer,
                                 size_t workspace_bytes, double *forward, double *backward)
{
    *forward = *backward = 0;
    if (strcmp(ra_cuda_forecast_fold(layer), RA_CUDA_SIMPLE) != 0) {
        RA_TRY(forecast_fold(cover, layer, forward));
    }
    if (strcmp(ra_cuda_forecast_grad(layer), RA_CUDA_SIMPLE) != 0) {
        RA_TRY(forecast_grad(cover, layer, workspace_bytes, backward));
    }
    return RA_OK;
}
