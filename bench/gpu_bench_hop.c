/* See gpu_bench_hop.h. */
#include "gpu_bench_hop.h"

#include <math.h>

#include "backend/backend.h"
#include "base/alloc.h"

struct gpu_bench_hop {
    const ra_backend *backend;
    ra_tokens tokens;
    ra_piece q, k;
    ra_cover cover;
    ra_fold_job job;
    void *prepared, *acc;
};

/* One document; the keys lie before the queries. */
static void make_cover(gpu_bench_hop *hop, int64_t seq)
{
    hop->tokens.rows = 1;
    hop->tokens.seq = 2 * seq;
    hop->q = (ra_piece){.pos = seq, .count = seq, .doc = 1};
    hop->k = (ra_piece){.count = seq, .doc = 1};
    hop->cover =
        (ra_cover){.tokens = &hop->tokens, .q_count = 1, .k_count = 1, .q = &hop->q, .k = &hop->k};
    ra_cover_link(&hop->cover);
}

ra_status gpu_bench_hop_open(const ra_backend *backend, const ra_layer *layer,
                             const ra_forward_io *io, gpu_bench_hop **out)
{
    const ra_backend_ops *ops = backend->ops;
    int64_t heads = layer->q_heads, seq = io->q.size[RA_SEQ], chan = layer->head_dim;
    gpu_bench_hop *hop = NULL;
    RA_TRY(RA_NEW(&hop, 1));
    hop->backend = backend;
    make_cover(hop, seq);
    ra_status status = ops->prepare(backend->self, &hop->cover, layer, &hop->prepared);
    if (status) {
        goto done;
    }
    status = ops->alloc(backend->self, (size_t)(heads * seq * chan) * sizeof(float), &hop->acc);
    if (status) {
        goto done;
    }
    hop->job = (ra_fold_job){
        .cover = &hop->cover,
        .prepared = hop->prepared,
        .scale = layer->scale,
        .q = io->q,
        .k = {[RA_SOURCE_OWN] = io->k},
        .v = {[RA_SOURCE_OWN] = io->v},
        .acc = ra_tensor_bhsd(hop->acc, RA_F32, 1, heads, seq, chan),
        .lse = io->lse,
        .out = io->out,
    };
    status = ops->fill(backend->self, &hop->job.lse, -INFINITY);
done:
    if (status) {
        gpu_bench_hop_close(hop);
    } else {
        *out = hop;
    }
    return status;
}

void gpu_bench_hop_close(gpu_bench_hop *hop)
{
    if (hop) {
        const ra_backend *backend = hop->backend;
        backend->ops->discard(backend->self, hop->prepared);
        if (hop->acc) {
            backend->ops->free(backend->self, hop->acc);
        }
        ra_free(hop);
    }
}

ra_status gpu_bench_hop_run(const gpu_bench_hop *hop)
{
    return hop->backend->ops->fold(hop->backend->self, &hop->job);
}

ra_status gpu_bench_hop_result(const gpu_bench_hop *hop, const ra_forward_io *io)
{
    return hop->backend->ops->cast(hop->backend->self, &io->out, &hop->job.acc);
}
