/* Carving. */
#include "attn/scratch.h"

#include "base/alloc.h"

typedef struct carver {
    char *base;
    uint64_t used;
} carver;

static void *carve(carver *c, int64_t bytes)
{
    void *at = c->base && bytes > 0 ? c->base + c->used : NULL;
    c->used += (uint64_t)ra_round_up(bytes, RA_ALIGN_BYTES);
    return at;
}

static ra_tensor carve_f32(carver *c, int64_t rows, int64_t heads, int64_t seq, int64_t chan)
{
    int64_t bytes = rows * heads * seq * chan * (int64_t)sizeof(float);
    return ra_tensor_bhsd(carve(c, bytes), RA_F32, rows, heads, seq, chan);
}

/* Two slots, each as large as the largest chunk that comes into it. */
static void carve_slots(carver *c, const ra_scratch_shape *shape, size_t element, void *slot_k[2],
                        void *slot_v[2])
{
    int64_t row_bytes = (int64_t)shape->layer->kv_heads * shape->layer->head_dim * (int64_t)element;
    for (int slot = 0; slot < 2; slot++) {
        int64_t rows = 0;
        for (int h = 0; h < shape->schedule->hop_count; h++) {
            if (h % 2 == slot) {
                rows = ra_max_i64(rows, shape->schedule->hop[h].chunk_rows);
            }
        }
        slot_k[slot] = carve(c, rows * row_bytes);
        slot_v[slot] = carve(c, rows * row_bytes);
    }
}

static ra_backward_sums carve_sums(carver *c, const ra_layer *layer, int64_t rows, int64_t tq,
                                   int64_t tk)
{
    int64_t dim = layer->head_dim;
    ra_backward_sums sum = {.delta = carve_f32(c, rows, layer->q_heads, tq, 1)};
    sum.dq = carve_f32(c, rows, layer->q_heads, tq, dim);
    sum.dk = carve_f32(c, rows, layer->kv_heads, tk, dim);
    sum.dv = carve_f32(c, rows, layer->kv_heads, tk, dim);
    return sum;
}

ra_forward_scratch ra_forward_carve(const ra_scratch_shape *shape, void *base)
{
    ra_forward_scratch s = {0};
    carver c = {.base = base};
    const ra_layer *layer = shape->layer;
    if (shape->schedule->resumes) {
        s.acc = carve_f32(&c, shape->rows, layer->q_heads, shape->seq_local, layer->head_dim);
        if (layer->dtype == RA_F32) {
            s.lse_rest = carve_f32(&c, shape->rows, layer->q_heads, shape->seq_local, 1);
        }
    }
    if (!shape->keep_kv) {
        carve_slots(&c, shape, ra_dtype_bytes(layer->dtype), s.slot_k, s.slot_v);
    }
    s.bytes = c.used;
    return s;
}

ra_backward_scratch ra_backward_carve(const ra_scratch_shape *shape, void *base)
{
    ra_backward_scratch s = {0};
    carver c = {.base = base};
    const ra_layer *layer = shape->layer;
    int64_t dim = layer->head_dim;
    s.sum = carve_sums(&c, layer, shape->rows, shape->seq_local, shape->seq_local);
    if (!shape->keep_kv) {
        carve_slots(&c, shape, ra_dtype_bytes(layer->dtype), s.slot_k, s.slot_v);
    }
    carve_slots(&c, shape, sizeof(float), s.partial_k, s.partial_v);
    s.landing = ra_route_landing(shape->schedule, layer->kv_heads, dim, shape->landing_bytes);
    int64_t landing_bytes =
        s.landing.count * s.landing.rows * layer->kv_heads * dim * (int64_t)sizeof(float);
    s.landing_k = carve(&c, landing_bytes);
    s.landing_v = carve(&c, landing_bytes);
    s.bytes = c.used;
    return s;
}

ra_backward_sums ra_backward_sums_carve(const ra_layer *layer, int64_t tq, int64_t tk, void *base,
                                        uint64_t *bytes)
{
    carver c = {.base = base};
    ra_backward_sums sum = carve_sums(&c, layer, 1, tq, tk);
    *bytes = c.used;
    return sum;
}

ra_grad_job ra_backward_job(const ra_layer *layer, const ra_cover *cover, const ra_backward_io *io,
                            const ra_backward_sums *sum)
{
    return (ra_grad_job){
        .cover = cover,
        .scale = layer->scale,
        .q = io->q,
        .dout = io->dout,
        .k = {[RA_SOURCE_OWN] = io->k},
        .v = {[RA_SOURCE_OWN] = io->v},
        .lse = io->lse,
        .delta = sum->delta,
        .dq = sum->dq,
        .dk = {[RA_SOURCE_OWN] = sum->dk},
        .dv = {[RA_SOURCE_OWN] = sum->dv},
        .to = {io->dq, io->dk, io->dv},
    };
}

int64_t ra_scratch_blocks(const ra_scratch_shape *shape)
{
    int64_t ranges_max = 0;
    for (int h = 0; h < shape->schedule->hop_count; h++) {
        const ra_hop *hop = &shape->schedule->hop[h];
        int64_t ranges = 0;
        for (int l = hop->leg_first; l < hop->leg_first + hop->leg_count; l++) {
            ranges += shape->schedule->leg[l].send.range_count;
            ranges += shape->schedule->leg[l].recv.range_count;
        }
        ranges_max = ra_max_i64(ranges_max, ranges);
    }
    return 2 * shape->layer->kv_heads * ranges_max; /* keys and values */
}
