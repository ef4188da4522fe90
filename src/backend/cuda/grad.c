/*
 * The tuned backward: slab after slab, first the score kernel, then gemm, for as many KV heads at
 * a time as the plan of slabs says. Launches follow each other without gaps, each waiting on the
 * device for what the one before wrote. The workspace holds p, then ds. Must not know how a kernel
 * computes or how slabs are chosen.
 */
#include "backend/cuda/grad.h"

#include "backend/cuda/check.h"
#include "backend/cuda/grad_map.h"
#include "backend/cuda/tensor_map.h"
#include "base/alloc.h"
#include "base/mathx.h"

enum {
    CHAN_MIN = 128, /* a phase of the score kernel has two chunks at least */
    CHAN_MAX = 512,
    HALF_BYTES = RA_BLOCK_BYTES / 2, /* p or ds of a block */
    ALIGN = 256,
    DEAD_BYTES = 16, /* a bit a query of a unit of a strip */
};

/* ---- lists */

/* A plan of slabs and its arrays in device memory. */
typedef struct grad_lists {
    ra_slabs host;
    char *memory;
    const ra_slab_strip *strip;
    const ra_slab_tile *tile;
    const ra_slab_block *block;
    const ra_slab_ref *ref;
    const ra_slab_output *output;
    const ra_slab_unit *unit;
    const ra_slab_run *run;
    uint16_t *dead; /* masks of dead queries, of one slab */
} grad_lists;

/* An array of the lists: where it is, where its address on the device goes. */
typedef struct part {
    const void *from;
    size_t bytes;
    const void **to;
} part;

enum { PARTS = 7 };

static size_t rounded(size_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

/* units: of one slab, of one block */
static size_t dead_bytes(const ra_slabs *slabs, int64_t units)
{
    int64_t most = 0;
    for (int64_t i = 0; i < slabs->slab_count; i++) {
        most = ra_max_i64(most, slabs->slab[i].strip_count);
    }
    return (size_t)(most * units) * DEAD_BYTES;
}

static ra_status upload_parts(grad_lists *lists, const part *parts, char *staging, size_t bytes,
                              size_t dead, const ra_cuda_launch *on)
{
    void *memory = NULL;
    RA_CUDA_TRY(cudaMallocFromPoolAsync(&memory, bytes + dead, on->pool, on->stream));
    lists->memory = memory;
    lists->dead = (uint16_t *)(void *)(lists->memory + bytes);
    size_t at = 0;
    for (int i = 0; i < PARTS; i++) {
        memcpy(staging + at, parts[i].from, parts[i].bytes);
        *parts[i].to = lists->memory + at;
        at += rounded(parts[i].bytes);
    }
    RA_CUDA_TRY(cudaMemcpyAsync(memory, staging, bytes, cudaMemcpyHostToDevice, on->stream));
    return RA_OK;
}

static ra_status upload(grad_lists *lists, int group, const ra_cuda_launch *on)
{
    const ra_slabs *host = &lists->host;
    const void *to[PARTS];
    const part parts[PARTS] = {
        {host->strip, (size_t)host->strip_count * sizeof *host->strip, &to[0]},
        {host->tile, (size_t)host->tile_count * sizeof *host->tile, &to[1]},
        {host->block, (size_t)host->block_count * sizeof *host->block, &to[2]},
        {host->ref, (size_t)host->ref_count * sizeof *host->ref, &to[3]},
        {host->output, (size_t)host->output_count * sizeof *host->output, &to[4]},
        {host->unit, (size_t)host->unit_count * sizeof *host->unit, &to[5]},
        {host->run, (size_t)host->run_count * sizeof *host->run, &to[6]},
    };
    size_t bytes = 0;
    char *staging = NULL;
    for (int i = 0; i < PARTS; i++) {
        bytes += rounded(parts[i].bytes);
    }
    RA_TRY(ra_alloc(bytes, 1, &staging));
    int64_t units = (int64_t)host->kv_heads * (group / host->units_heads) * 2;
    ra_status status = upload_parts(lists, parts, staging, bytes, dead_bytes(host, units), on);
    ra_free(staging);
    RA_TRY(status);
    lists->strip = to[0];
    lists->tile = to[1];
    lists->block = to[2];
    lists->ref = to[3];
    lists->output = to[4];
    lists->unit = to[5];
    lists->run = to[6];
    return RA_OK;
}

static void close_lists(void *memory, cudaStream_t stream)
{
    grad_lists *lists = memory;
    if (lists->memory) {
        cudaFreeAsync(lists->memory, stream);
    }
    ra_slabs_free(&lists->host);
    ra_free(lists);
}

/* Plans once for all launches over the same work lists. */
static ra_status open_lists(const ra_grad_job *job, const ra_cuda_work *work,
                            const ra_cuda_launch *at, grad_lists **out)
{
    ra_slab_layout layout = {
        .q_heads = work->q_heads,
        .kv_heads = work->kv_heads,
        .chan = (int)job->q.size[RA_CHAN],
        .clusters = at->sm_count / 2,
        .workspace_bytes = at->workspace_bytes,
    };
    *out = work->kept->memory;
    if (*out) {
        return RA_OK;
    }
    RA_TRY(RA_NEW(out, 1));
    ra_status status = ra_slabs_build(job->cover, &work->host, &layout, &(*out)->host);
    if (!status && (*out)->host.block_count > 0) {
        status = upload(*out, work->q_heads / work->kv_heads, at);
    }
    if (status) {
        close_lists(*out, at->stream);
        return status;
    }
    *work->kept = (ra_cuda_kept){*out, close_lists};
    return RA_OK;
}

/* ---- arguments */

static int64_t slots_of(const ra_slabs *slabs, const ra_slab *slab, int group)
{
    int pairs = group / slabs->units_heads;
    return (int64_t)slab->block_count * slabs->kv_heads * pairs * 2;
}

static int64_t most_slots(const ra_slabs *slabs, int group)
{
    int64_t most = 0;
    for (int64_t i = 0; i < slabs->slab_count; i++) {
        most = ra_max_i64(most, slots_of(slabs, &slabs->slab[i], group));
    }
    return most;
}

static ra_grad_view view_of(const ra_tensor *t)
{
    return (ra_grad_view){t->data, t->stride[RA_ROW], t->stride[RA_HEAD], t->stride[RA_SEQ]};
}

/* Half of the workspace as a tensor: a head is a block. */
static ra_tensor blocks_of(char *memory, ra_dtype dtype, int64_t slots)
{
    return ra_tensor_bhsd(memory, dtype, 1, slots, RA_BLOCK_ROWS, RA_BLOCK_KEYS);
}

/* A source without keys has no tensors; its maps are never used. */
static ra_status encode_sources(const ra_grad_job *job, bool runs, ra_score_args *score,
                                ra_gemm_args *gemm)
{
    int keys = runs ? RA_STEP : RA_BLOCK_KEYS, slabs = runs ? 2 : 1;
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        if (job->k[i].data) {
            RA_TRY(ra_tensor_map_encode(&job->k[i], keys, slabs, &score->k[i]));
            RA_TRY(ra_tensor_map_encode(&job->v[i], keys, slabs, &score->v[i]));
            RA_TRY(ra_tensor_map_encode(&job->k[i], RA_STEP, 2, &gemm->k[i]));
            RA_TRY(ra_add_map_encode(&job->dk[i], &gemm->add_dk[i]));
            RA_TRY(ra_add_map_encode(&job->dv[i], &gemm->add_dv[i]));
            gemm->dk[i] = view_of(&job->dk[i]);
            gemm->dv[i] = view_of(&job->dv[i]);
        }
    }
    return RA_OK;
}

/* runs: of the score kernel for runs. */
static ra_status encode_args(const ra_grad_job *job, const ra_cuda_work *work, char *workspace,
                             int64_t slots, bool runs, ra_score_args *score, ra_gemm_args *gemm)
{
    int rows = runs ? RA_STEP : RA_BLOCK_ROWS, slabs = runs ? 2 : 1;
    ra_tensor p = blocks_of(workspace, job->q.dtype, slots);
    ra_tensor ds = blocks_of(workspace + slots * HALF_BYTES, job->q.dtype, slots);
    RA_TRY(ra_tensor_map_encode(&job->q, rows, slabs, &score->q));
    RA_TRY(ra_tensor_map_encode(&job->dout, rows, slabs, &score->dout));
    RA_TRY(ra_tensor_map_encode(&p, RA_ADD_ROWS, 3 - slabs, &score->p));
    RA_TRY(ra_tensor_map_encode(&ds, RA_ADD_ROWS, 3 - slabs, &score->ds));
    RA_TRY(ra_tensor_map_encode(&job->q, RA_STEP, 2, &gemm->q));
    RA_TRY(ra_tensor_map_encode(&job->dout, RA_STEP, 2, &gemm->dout));
    RA_TRY(ra_tensor_map_encode(&ds, RA_BLOCK_ROWS, 1, &gemm->ds_rows));
    RA_TRY(ra_tensor_map_encode(&ds, RA_STEP, 2, &gemm->ds_keys));
    RA_TRY(ra_tensor_map_encode(&p, RA_STEP, 2, &gemm->p_keys));
    RA_TRY(ra_add_map_encode(&job->dq, &gemm->add_dq));
    score->lse = view_of(&job->lse);
    score->delta = view_of(&job->delta);
    score->reach = work->reach;
    gemm->dq = view_of(&job->dq);
    return encode_sources(job, runs, score, gemm);
}

/* A job whose rows all go on has no results. */
static ra_status encode_results(const ra_grad_results *to, ra_gemm_args *gemm)
{
    const ra_tensor *const results[] = {&to->dq, &to->dk, &to->dv};
    CUtensorMap *const maps[] = {&gemm->final_dq, &gemm->final_dk, &gemm->final_dv};
    ra_grad_view *const views[] = {&gemm->result_dq, &gemm->result_dk, &gemm->result_dv};
    for (int i = 0; i < 3; i++) {
        if (results[i]->data) {
            RA_TRY(ra_tensor_map_encode(results[i], RA_ADD_ROWS, 1, maps[i]));
            *views[i] = view_of(results[i]);
        }
    }
    return RA_OK;
}

static ra_grad_slab slab_of(const grad_lists *lists, const ra_slab *slab, const ra_grad_job *job,
                            int group)
{
    const ra_slabs *host = &lists->host;
    return (ra_grad_slab){
        .strip = lists->strip,
        .tile = lists->tile,
        .block = lists->block + slab->block_first,
        .ref = lists->ref,
        .output = lists->output,
        .unit = lists->unit + slab->unit_first,
        .run = lists->run + slab->run_first,
        .strip_first = slab->strip_first,
        .strip_count = slab->strip_count,
        .block_count = slab->block_count,
        .unit_count = slab->unit_count,
        .run_count = slab->run_count,
        .kv_count = host->kv_heads,
        .group = group,
        .pairs = group / host->units_heads,
        .unit_head = host->units_heads - 1,
        .unit_row = host->units_heads == 1 ? RA_BLOCK_ROWS : 0,
        .chan = (int)job->q.size[RA_CHAN],
        .scale = job->scale,
    };
}

/* ---- the chain */

static ra_status launch_score(const ra_score_args *args, ra_dtype dtype, int clusters,
                              cudaStream_t stream)
{
    return args->slab.run_count > 0 ? ra_grad_score_256(args, dtype, clusters, stream)
                                    : ra_grad_score(args, dtype, clusters, stream);
}

typedef struct chain {
    const grad_lists *lists;
    const ra_grad_job *job;
    const ra_cuda_launch *at;
    int kv_heads, group, launches;
    ra_score_args score;
    ra_gemm_args gemm;
} chain;

/* Launches use counters in turn. They begin, and take units, while earlier ones run, but no more of
 * them than there are processors; so each clears the counter for half a turn later. */
static void count_launch(chain *c, ra_grad_slab *slab)
{
    uint32_t *counters = c->at->counters;
    slab->first = c->launches == 0;
    slab->counter = counters + c->launches % RA_CUDA_COUNTERS;
    slab->later_counter = counters + (c->launches + RA_CUDA_COUNTERS / 2) % RA_CUDA_COUNTERS;
    c->launches++;
}

/* The slabs [begin, end) for all KV heads. */
static ra_status run_slabs(chain *c, int64_t begin, int64_t end)
{
    const ra_slabs *host = &c->lists->host;
    const ra_dtype dtype = c->job->q.dtype;
    const int clusters = c->at->sm_count / 2;
    for (int kv = 0; kv < c->kv_heads; kv += host->kv_heads) {
        for (int64_t i = begin; i < end; i++) {
            ra_grad_slab slab = slab_of(c->lists, &host->slab[i], c->job, c->group);
            slab.kv_first = kv;
            slab.dead = c->lists->dead;
            count_launch(c, &slab);
            c->score.slab = slab;
            RA_TRY(launch_score(&c->score, dtype, clusters, c->at->stream));
            count_launch(c, &slab);
            c->gemm.slab = slab;
            RA_TRY(ra_grad_gemm(&c->gemm, dtype, clusters, c->at->stream));
        }
    }
    return RA_OK;
}

/* Where somebody waits for the chunk's sums, the slabs that add to them go first, or one slab on a
 * rank without a chunk: it receives what others send then. */
static ra_status run_chain(const grad_lists *lists, const ra_grad_job *job,
                           const ra_cuda_work *work, const ra_cuda_launch *at)
{
    const ra_slabs *host = &lists->host;
    chain c = {.lists = lists, .job = job, .at = at, .kv_heads = work->kv_heads};
    c.group = work->q_heads / work->kv_heads;
    int64_t slots = most_slots(host, c.group);
    RA_TRY(encode_args(job, work, at->workspace, slots, host->run_count > 0, &c.score, &c.gemm));
    RA_TRY(encode_results(&job->to, &c.gemm));
    size_t counter_bytes = RA_CUDA_COUNTERS * sizeof *at->counters;
    RA_CUDA_TRY(cudaMemsetAsync(at->counters, 0, counter_bytes, at->stream));
    int64_t early = at->chunk_done ? ra_max_i64(1, host->chunk_slabs) : 0;
    RA_TRY(run_slabs(&c, 0, early));
    if (at->chunk_done) {
        RA_CUDA_TRY(cudaEventRecord(at->chunk_done, at->stream));
    }
    return run_slabs(&c, early, host->slab_count);
}

/* ---- the kernel of the table */

static bool supports(const ra_grad_job *job, const ra_cuda_work *work, const ra_cuda_launch *at)
{
    int64_t chan = job->q.size[RA_CHAN], group = work->q_heads / work->kv_heads;
    int64_t units = group % 2 ? 2 * group : group; /* of one block of one KV head */
    bool fits = at->capability == 90 && chan >= CHAN_MIN && chan <= CHAN_MAX &&
                at->workspace_bytes >= (size_t)units * RA_BLOCK_BYTES &&
                ra_tensor_map_fits(&job->q) && ra_tensor_map_fits(&job->dout) &&
                ra_add_map_fits(&job->dq);
    for (int i = 0; i < RA_SOURCE_COUNT && fits; i++) {
        fits =
            !job->k[i].data || (ra_tensor_map_fits(&job->k[i]) && ra_tensor_map_fits(&job->v[i]) &&
                                ra_add_map_fits(&job->dk[i]) && ra_add_map_fits(&job->dv[i]));
    }
    const ra_tensor *const results[] = {&job->to.dq, &job->to.dk, &job->to.dv};
    for (int i = 0; i < 3 && fits; i++) {
        fits = !results[i]->data || ra_tensor_map_fits(results[i]);
    }
    return fits;
}

static ra_status launch(const ra_grad_job *job, const ra_cuda_work *work, const ra_cuda_launch *at)
{
    grad_lists *lists = NULL;
    RA_TRY(open_lists(job, work, at, &lists));
    if (lists->host.block_count > 0) {
        return run_chain(lists, job, work, at);
    }
    if (at->chunk_done) {
        RA_CUDA_TRY(cudaEventRecord(at->chunk_done, at->stream));
    }
    return RA_OK;
}

const ra_cuda_grad_kernel ra_cuda_block_grad = {"blocks", supports, launch, true, true};
