/* Variable-length attention on packed tokens, one rank: turns prefix sums into a cover in which
 * every segment is a row of its own, and lets the backend compute it. Must not know rings. */
#include "attn/check.h"
#include "attn/scratch.h"
#include "base/alloc.h"
#include "plan/passes.h"
#include "rule/layer.h"

static ra_status cu_check(const int32_t *cu, const char *name, int64_t segments)
{
    if (!cu) {
        return RA_FAIL(RA_E_ARG, "lens.%s: NULL, expected %lld elements", name,
                       (long long)(segments + 1));
    }
    if (cu[0] != 0) {
        return RA_FAIL(RA_E_ARG, "lens.%s[0]: %d, expected 0", name, (int)cu[0]);
    }
    for (int64_t i = 1; i <= segments; i++) {
        if (cu[i] < cu[i - 1]) {
            return RA_FAIL(RA_E_ARG, "lens.%s[%lld]: %d, expected at least %d, the one before",
                           name, (long long)i, (int)cu[i], (int)cu[i - 1]);
        }
    }
    return RA_OK;
}

/* What the tensors have to be like, once that can be told. */
static ra_status shape_find(const ra_backend *backend, const ra_layer *layer, const ra_varlen *lens,
                            ra_io_shape *shape)
{
    if (!backend) {
        return RA_FAIL(RA_E_ARG, "backend: NULL, expected an open backend");
    }
    RA_TRY(ra_layer_check(layer));
    if (!lens) {
        return RA_FAIL(RA_E_ARG, "lens: NULL, expected prefix sums");
    }
    if (lens->size != sizeof *lens) {
        return RA_FAIL(RA_E_ARG, "lens.size: %zu, expected %zu", lens->size, sizeof *lens);
    }
    if (lens->segments < 0 || lens->segments > INT32_MAX) {
        return RA_FAIL(RA_E_ARG, "lens.segments: %lld, expected 0 to %d", (long long)lens->segments,
                       INT32_MAX);
    }
    RA_TRY(cu_check(lens->cu_q, "cu_q", lens->segments));
    RA_TRY(cu_check(lens->cu_k, "cu_k", lens->segments));
    *shape = (ra_io_shape){
        .backend = backend,
        .layer = layer,
        .rows = 1,
        .q_seq = lens->cu_q[lens->segments],
        .k_seq = lens->cu_k[lens->segments],
    };
    return RA_OK;
}

static ra_piece piece_of(int64_t segment, int64_t pos, int64_t count, int64_t index)
{
    return (ra_piece){
        .row = segment,
        .pos = pos,
        .count = count,
        .index = index,
        .doc = 1,
        .source = RA_SOURCE_OWN,
        .fresh = true,
        .final = true,
    };
}

/* Key j of a segment stands at position j; its queries end where its keys end, so the first may
 * stand before position 0. Queries that see no key are a piece of their own: it has no partner,
 * and whatever their gradient holds is never read. */
static ra_status cover_build(const ra_layer *layer, const ra_varlen *lens, const ra_tokens *tokens,
                             ra_cover *cover)
{
    cover->tokens = tokens;
    cover->mask = ra_mask_of_layer(layer);
    cover->mask.vision = RA_VISION_OFF;
    RA_TRY(RA_NEW(&cover->q, 2 * lens->segments));
    RA_TRY(RA_NEW(&cover->k, lens->segments));
    int64_t ahead = ra_mask_reach(&cover->mask, 0, (ra_range){0, 0}).end;
    for (int64_t i = 0; i < lens->segments; i++) {
        int64_t q_index = lens->cu_q[i], q_count = lens->cu_q[i + 1] - q_index;
        int64_t k_index = lens->cu_k[i], k_count = lens->cu_k[i + 1] - k_index;
        int64_t pos = k_count - q_count;
        int64_t blind = ra_clamp_i64(1 - ahead - pos, 0, q_count);
        if (blind > 0) {
            cover->q[cover->q_count++] = piece_of(i, pos, blind, q_index);
        }
        if (q_count > blind) {
            cover->q[cover->q_count++] = piece_of(i, pos + blind, q_count - blind, q_index + blind);
        }
        if (k_count > 0) {
            cover->k[cover->k_count++] = piece_of(i, 0, k_count, k_index);
        }
    }
    ra_cover_link(cover);
    return RA_OK;
}

ra_status ra_varlen_forward(ra_backend *backend, const ra_layer *layer, const ra_varlen *lens,
                            const ra_forward_io *io)
{
    ra_cover cover = {0};
    ra_tokens tokens = {0};
    ra_io_shape shape;
    RA_TRY(shape_find(backend, layer, lens, &shape));
    RA_TRY(ra_forward_io_check(&shape, io));
    ra_status status = cover_build(layer, lens, &tokens, &cover);
    if (!status && cover.q_count > 0) {
        ra_fold_job job = {
            .cover = &cover,
            .scale = layer->scale,
            .q = io->q,
            .k = {[RA_SOURCE_OWN] = io->k},
            .v = {[RA_SOURCE_OWN] = io->v},
            .lse = io->lse,
            .out = io->out,
        };
        void *prepared = NULL;
        status = backend->ops->prepare(backend->self, &cover, layer, &prepared);
        job.prepared = prepared;
        status = status ? status : backend->ops->fold(backend->self, &job);
        backend->ops->discard(backend->self, prepared);
    }
    ra_cover_free(&cover);
    return status;
}

/* Rows that see nothing, or that nobody sees, are in no piece: their gradient is zero. */
static ra_status fill_others(const ra_backend *backend, const ra_tensor *t, const ra_piece *pieces,
                             int64_t count)
{
    int64_t at = 0;
    for (int64_t i = 0; i <= count; i++) { /* indices ascend as segments do */
        int64_t end = i < count ? pieces[i].index : t->size[RA_SEQ];
        ra_tensor rows = ra_tensor_slice_seq(t, at, end - at);
        if (ra_tensor_count(&rows) > 0) {
            RA_TRY(backend->ops->fill(backend->self, &rows, 0.0f));
        }
        at = i < count ? end + pieces[i].count : end;
    }
    return RA_OK;
}

static ra_status grad_run(const ra_backend *backend, const ra_layer *layer, const ra_cover *cover,
                          const ra_backward_io *io, const ra_backward_sums *sum)
{
    const ra_backend_ops *ops = backend->ops;
    ra_grad_job job = ra_backward_job(layer, cover, io, sum);
    void *prepared = NULL;
    RA_TRY(ops->row_dot(backend->self, &io->dout, &io->out, &sum->delta));
    RA_TRY(ops->prepare(backend->self, cover, layer, &prepared));
    job.prepared = prepared;
    ra_status status = ops->grad(backend->self, &job);
    ops->discard(backend->self, prepared);
    return status;
}

ra_status ra_varlen_backward(ra_backend *backend, const ra_layer *layer, const ra_varlen *lens,
                             const ra_backward_io *io)
{
    ra_cover cover = {0};
    ra_tokens tokens = {0};
    ra_io_shape shape;
    RA_TRY(shape_find(backend, layer, lens, &shape));
    RA_TRY(ra_backward_io_check(&shape, io));
    uint64_t bytes = 0;
    ra_backward_sums_carve(layer, shape.q_seq, shape.k_seq, NULL, &bytes);
    if (bytes == 0) {
        return RA_OK;
    }
    void *memory = NULL;
    ra_status status = backend->ops->alloc(backend->self, (size_t)bytes, &memory);
    if (status) {
        goto done;
    }
    ra_backward_sums sum = ra_backward_sums_carve(layer, shape.q_seq, shape.k_seq, memory, &bytes);
    status = cover_build(layer, lens, &tokens, &cover);
    if (status) {
        goto done;
    }
    status = ra_cover_trim(&cover);
    if (!status && cover.q_count > 0) {
        status = grad_run(backend, layer, &cover, io, &sum);
    }
    status = status ? status : fill_others(backend, &io->dq, cover.q, cover.q_count);
    status = status ? status : fill_others(backend, &io->dk, cover.k, cover.k_count);
    status = status ? status : fill_others(backend, &io->dv, cover.k, cover.k_count);
done:
    if (memory) {
        backend->ops->free(backend->self, memory);
    }
    ra_cover_free(&cover);
    return status;
}
