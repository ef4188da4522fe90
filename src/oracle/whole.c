/* Turns a step description of the whole batch into one token record an element, and checks the
 * tensors of the oracle and of the plain computation. Must not know how attention is computed. */
#include "oracle/whole.h"

#include "base/alloc.h"
#include "plan/desc.h"
#include "rule/layer.h"
#include "tensor/check.h"

ra_status ra_whole_build(const ra_step_desc *desc, const ra_layer *layer, ra_whole *out)
{
    ra_whole whole = {0};
    int32_t *group = NULL;
    ra_step_desc rows_only;
    if (!desc) {
        return RA_FAIL(RA_E_ARG, "whole: NULL, expected a step description");
    }
    rows_only = *desc;
    rows_only.run_count = 0;
    rows_only.runs = NULL;
    RA_TRY(ra_step_desc_check(&rows_only));
    RA_TRY(ra_layer_check(layer));
    whole.rows = desc->rows;
    whole.seq = desc->seq_local;
    whole.mask = ra_mask_of_layer(layer);
    ra_status status = RA_NEW(&whole.token, whole.rows * whole.seq);
    if (status) {
        goto done;
    }
    if (desc->token_type) {
        status = RA_NEW(&group, whole.rows * whole.seq);
        if (status) {
            goto done;
        }
        status = ra_vision_groups(desc->token_type, whole.rows, whole.seq, group);
        if (status) {
            goto done;
        }
    }
    for (int64_t flat = 0; flat < whole.rows * whole.seq; flat++) {
        int32_t doc = desc->doc_id ? desc->doc_id[flat] : 1;
        bool padding = doc <= 0 || (desc->is_pad && desc->is_pad[flat]);
        whole.token[flat] = (ra_token){
            .pos = flat % whole.seq,
            .doc = padding ? 0 : doc,
            .group = group ? group[flat] : -1,
        };
    }
    *out = whole;
done:
    ra_free(group);
    if (status) {
        ra_free(whole.token);
    }
    return status;
}

void ra_whole_free(ra_whole *whole)
{
    ra_free(whole->token);
    whole->token = NULL;
}

static ra_status io_check(const void *io, size_t size, size_t expected)
{
    if (!io) {
        return RA_FAIL(RA_E_ARG, "io: NULL, expected tensors");
    }
    if (size != expected) {
        return RA_FAIL(RA_E_ARG, "io.size: %zu, expected %zu", size, expected);
    }
    return RA_OK;
}

static ra_status input_check(const ra_whole *whole, const ra_layer *layer, const ra_tensor *t,
                             const char *name, int heads)
{
    return ra_tensor_check(t, name, layer->dtype, whole->rows, heads, whole->seq, layer->head_dim);
}

static ra_status result_check(const ra_whole *whole, const ra_tensor *t, const char *name,
                              ra_dtype dtype, bool wide, int heads, int64_t chan)
{
    if (wide && ra_dtype_bytes(t->dtype) > 0) {
        dtype = t->dtype;
    }
    return ra_tensor_check_output(t, name, dtype, whole->rows, heads, whole->seq, chan);
}

ra_status ra_whole_forward_check(const ra_whole *whole, const ra_layer *layer,
                                 const ra_forward_io *io, bool wide)
{
    RA_TRY(io_check(io, io ? io->size : 0, sizeof *io));
    RA_TRY(input_check(whole, layer, &io->q, "q", layer->q_heads));
    RA_TRY(input_check(whole, layer, &io->k, "k", layer->kv_heads));
    RA_TRY(input_check(whole, layer, &io->v, "v", layer->kv_heads));
    RA_TRY(
        result_check(whole, &io->out, "out", layer->dtype, wide, layer->q_heads, layer->head_dim));
    RA_TRY(result_check(whole, &io->lse, "lse", RA_F32, wide, layer->q_heads, 1));
    RA_TRY(ra_apart_check(&io->out, "out", &io->q, "q"));
    RA_TRY(ra_apart_check(&io->out, "out", &io->k, "k"));
    RA_TRY(ra_apart_check(&io->out, "out", &io->v, "v"));
    return ra_apart_check(&io->out, "out", &io->lse, "lse");
}

ra_status ra_whole_backward_check(const ra_whole *whole, const ra_layer *layer,
                                  const ra_backward_io *io, bool wide)
{
    RA_TRY(io_check(io, io ? io->size : 0, sizeof *io));
    RA_TRY(input_check(whole, layer, &io->q, "q", layer->q_heads));
    RA_TRY(input_check(whole, layer, &io->k, "k", layer->kv_heads));
    RA_TRY(input_check(whole, layer, &io->v, "v", layer->kv_heads));
    RA_TRY(input_check(whole, layer, &io->dout, "dout", layer->q_heads));
    const struct {
        const ra_tensor *t;
        const char *name;
        int heads;
    } result[3] = {{&io->dq, "dq", layer->q_heads},
                   {&io->dk, "dk", layer->kv_heads},
                   {&io->dv, "dv", layer->kv_heads}};
    for (int i = 0; i < 3; i++) {
        RA_TRY(result_check(whole, result[i].t, result[i].name, layer->dtype, wide, result[i].heads,
                            layer->head_dim));
        RA_TRY(ra_apart_check(result[i].t, result[i].name, &io->q, "q"));
        RA_TRY(ra_apart_check(result[i].t, result[i].name, &io->k, "k"));
        RA_TRY(ra_apart_check(result[i].t, result[i].name, &io->v, "v"));
        RA_TRY(ra_apart_check(result[i].t, result[i].name, &io->dout, "dout"));
        RA_TRY(ra_apart_check(result[i].t, result[i].name, result[(i + 1) % 3].t,
                              result[(i + 1) % 3].name));
    }
    return RA_OK;
}
