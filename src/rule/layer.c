/* Checks of an ra_layer, member by member in the order of the struct. Must not know tensors. */
#include "rule/layer.h"

#include <math.h>
#include <stdio.h>

#include "base/limits.h"

static ra_status heads_check(const ra_layer *layer)
{
    if (layer->q_heads < 1 || layer->q_heads > RA_HEADS_MAX) {
        return RA_FAIL(RA_E_ARG, "layer.q_heads: %d, expected 1 to %d", layer->q_heads,
                       RA_HEADS_MAX);
    }
    if (layer->kv_heads < 1 || layer->kv_heads > RA_HEADS_MAX) {
        return RA_FAIL(RA_E_ARG, "layer.kv_heads: %d, expected 1 to %d", layer->kv_heads,
                       RA_HEADS_MAX);
    }
    if (layer->q_heads % layer->kv_heads != 0) {
        return RA_FAIL(RA_E_SHAPE, "layer.q_heads: %d, expected a multiple of layer.kv_heads, %d",
                       layer->q_heads, layer->kv_heads);
    }
    if (layer->head_dim < RA_HEAD_DIM_STEP || layer->head_dim > RA_HEAD_DIM_MAX ||
        layer->head_dim % RA_HEAD_DIM_STEP != 0) {
        return RA_FAIL(RA_E_ARG, "layer.head_dim: %d, expected a multiple of %d from %d to %d",
                       layer->head_dim, RA_HEAD_DIM_STEP, RA_HEAD_DIM_STEP, RA_HEAD_DIM_MAX);
    }
    return RA_OK;
}

static ra_status mask_check(const ra_layer *layer)
{
    if (layer->window < 0) {
        return RA_FAIL(RA_E_ARG, "layer.window: %lld, expected 0 (none) or more",
                       (long long)layer->window);
    }
    if (layer->window_right < 0) {
        return RA_FAIL(RA_E_ARG, "layer.window_right: %lld, expected 0 (none) or more",
                       (long long)layer->window_right);
    }
    switch (layer->vision) {
    case RA_VISION_OFF:
    case RA_VISION_OVER_WINDOW:
    case RA_VISION_WITHIN_WINDOW: return RA_OK;
    }
    return RA_FAIL(RA_E_ARG, "layer.vision: %d, expected one of the ra_vision values",
                   (int)layer->vision);
}

/* One message for all of them: a caller should not have to repair them one by one. */
static ra_status options_check(const ra_layer *layer)
{
    char dropout[64] = "", softcap[64] = "";
    bool has_dropout = layer->dropout != 0, has_softcap = layer->softcap != 0;
    if (!has_dropout && !has_softcap) {
        return RA_OK;
    }
    if (has_dropout) {
        snprintf(dropout, sizeof dropout, "layer.dropout: %g", (double)layer->dropout);
    }
    if (has_softcap) {
        snprintf(softcap, sizeof softcap, "layer.softcap: %g", (double)layer->softcap);
    }
    return RA_FAIL(RA_E_UNSUPPORTED, "%s%s%s, expected 0: not offered", dropout,
                   has_dropout && has_softcap ? ", " : "", softcap);
}

ra_status ra_layer_check(const ra_layer *layer)
{
    if (!layer) {
        return RA_FAIL(RA_E_ARG, "layer: NULL, expected a layer");
    }
    if (layer->size != sizeof *layer) {
        return RA_FAIL(RA_E_ARG, "layer.size: %zu, expected %zu", layer->size, sizeof *layer);
    }
    RA_TRY(heads_check(layer));
    if (layer->dtype != RA_F32 && layer->dtype != RA_BF16 && layer->dtype != RA_F16) {
        return RA_FAIL(RA_E_ARG, "layer.dtype: %d (%s), expected f32, bf16 or f16",
                       (int)layer->dtype, ra_dtype_name(layer->dtype));
    }
    if (!isfinite(layer->scale)) {
        return RA_FAIL(RA_E_ARG, "layer.scale: %g, expected a finite number", (double)layer->scale);
    }
    RA_TRY(mask_check(layer));
    return options_check(layer);
}
