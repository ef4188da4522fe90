/* The choice, and the sentence that explains it. */
#include "attn/path.h"

enum { TUNED_GLOBAL_HEAD_DIM = 512 };

static ra_path_choice general(const char *reason)
{
    return (ra_path_choice){RA_PATH_GENERAL, "general", reason};
}

static ra_path_choice choose_global(const ra_layer *layer, bool has_documents)
{
    if (layer->head_dim != TUNED_GLOBAL_HEAD_DIM) {
        return general("no window, but head_dim is not 512");
    }
    if (layer->dtype != RA_BF16 && layer->dtype != RA_F16) {
        return general("no window, head_dim 512, but the dtype is neither bf16 nor f16");
    }
    if (!has_documents) {
        return general("no window, head_dim 512, but the step has no document map");
    }
    return (ra_path_choice){RA_PATH_GLOBAL, "global",
                            "causal, no window, head_dim 512, half precision, document map"};
}

ra_path_choice ra_path_choose(const ra_layer *layer, bool has_documents, bool has_vision,
                              bool contiguous)
{
    if (!layer->causal) {
        return general("not causal");
    }
    if (layer->window == 0) {
        return choose_global(layer, has_documents);
    }
    if (layer->vision != RA_VISION_OFF && has_vision) {
        return general("a window with image blocks");
    }
    if (!contiguous) {
        return general("a window, but the shards are not contiguous");
    }
    return (ra_path_choice){RA_PATH_SLIDING, "sliding",
                            layer->vision == RA_VISION_OFF
                                ? "causal window on contiguous shards"
                                : "causal window on contiguous shards; the vision rule finds no "
                                  "image tokens in this step, so the mask is causal"};
}

const char *ra_path_for(const ra_layer *layer, bool has_documents, bool has_vision, bool contiguous,
                        const char **reason)
{
    ra_path_choice choice = layer ? ra_path_choose(layer, has_documents, has_vision, contiguous)
                                  : general("layer: NULL");
    if (reason) {
        *reason = choice.reason;
    }
    return choice.name;
}
