/* Every element depends on its place in the whole sequence only, so shards of any layout hold the
 * same problem. */
#include <cmath>
#include <cstring>

#include <cuda_bf16.h>

#include "gpu_bench_random.cuh"
#include "gpu_bench_shard.h"

/* Rows of a shard in the order of its runs. */
struct place {
    int64_t seq, length, first_count, start[2];
};

static __global__ void fill_shard(__nv_bfloat16 *to, int heads, int dim, place at, uint64_t seed)
{
    int64_t count = heads * at.length * dim, step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        int64_t head = i / dim / at.length, row = i / dim % at.length;
        int64_t pos = row < at.first_count ? at.start[0] + row : at.start[1] + row - at.first_count;
        to[i] = __float2bfloat16(bench_normal(seed, (head * at.seq + pos) * dim + i % dim));
    }
}

static ra_tensor tensor_of(const shard &p, int64_t seq, ra_dtype dtype, int64_t heads, int64_t chan,
                           uint64_t seed)
{
    void *data = nullptr;
    int64_t count = heads * p.length * chan;
    MUST_RA(ra_cuda_alloc(p.device, (size_t)count * ra_dtype_bytes(dtype), &data));
    if (seed && p.length > 0) {
        place at = {seq, p.length, p.runs[0].count, {p.runs[0].start, p.runs[1].start}};
        fill_shard<<<1024, 256>>>(static_cast<__nv_bfloat16 *>(data), (int)heads, (int)chan, at,
                                  seed << 40);
        MUST_CUDA(cudaGetLastError());
    }
    return ra_tensor_bhsd(data, dtype, 1, heads, p.length, chan);
}

static std::vector<int32_t> documents_of(const ring_shape &s, const shard &p)
{
    std::vector<int32_t> doc;
    for (int run = 0; s.documents && run < p.run_count; run++) {
        for (int64_t i = 0; i < p.runs[run].count; i++) {
            doc.push_back((int32_t)((p.runs[run].start + i) * s.documents / s.seq + 1));
        }
    }
    return doc;
}

void shard_open(const ring_shape &s, ra_backend *backend, ra_comm *comm, int device,
                ra_trace *trace, shard *p)
{
    int rank = ra_comm_rank(comm), size = ra_comm_size(comm);
    *p = {};
    p->device = device;
    p->layer = job_layer(s.q_heads, s.kv_heads, s.head_dim, true, s.window);
    p->run_count = s.zigzag && size > 1 ? ra_runs_zigzag(rank, size, s.seq, p->runs)
                                        : ra_runs_contiguous(rank, size, s.seq, p->runs);
    for (int run = 0; run < p->run_count; run++) {
        p->length += p->runs[run].count;
    }
    ra_ctx_options options = {};
    options.size = sizeof options;
    options.trace = trace;
    MUST_RA(ra_ctx_create(backend, comm, &p->layer, 1, &options, &p->ctx));
    std::vector<int32_t> doc = documents_of(s, *p);
    ra_step_desc desc = {};
    desc.size = sizeof desc;
    desc.rows = 1;
    desc.seq_local = p->length;
    /* Contiguous shards in rank order are what the plan of a window knows best. */
    desc.runs = s.zigzag ? p->runs : nullptr;
    desc.run_count = s.zigzag ? p->run_count : 0;
    desc.doc_id = doc.empty() ? nullptr : doc.data();
    MUST_RA(ra_step_create(p->ctx, &desc, &p->step));
    p->plan = ra_step_plan(p->step, 0);
    const job_allocator tensor = [&](ra_dtype dtype, int64_t heads, int64_t chan, uint64_t seed) {
        return tensor_of(*p, s.seq, dtype, heads, chan, seed);
    };
    job_make_tensors(p, tensor, true);
    shard_wait(*p);
}

void shard_wait(const shard &p)
{
    MUST_CUDA(cudaSetDevice(p.device));
    MUST_CUDA(cudaStreamSynchronize(nullptr));
}

/* ---- results */

static std::vector<__nv_bfloat16> downloaded(const ra_tensor &t)
{
    std::vector<__nv_bfloat16> host((size_t)(t.size[RA_HEAD] * t.size[RA_SEQ] * t.size[RA_CHAN]));
    MUST_RA(ra_cuda_copy(host.data(), t.data, host.size() * sizeof host[0], ra_stream{}));
    return host;
}

static double difference(const shard &part, const ra_tensor &mine, const ra_tensor &all)
{
    std::vector<__nv_bfloat16> a = downloaded(mine), b = downloaded(all);
    int64_t dim = mine.size[RA_CHAN], seq = all.size[RA_SEQ];
    double wrong = 0, size = 0;
    for (int64_t head = 0; head < mine.size[RA_HEAD]; head++) {
        int64_t row = 0;
        for (int run = 0; run < part.run_count; run++) {
            for (int64_t i = 0; i < part.runs[run].count * dim; i++) {
                size_t at = (size_t)((head * part.length + row) * dim + i);
                size_t of = (size_t)((head * seq + part.runs[run].start) * dim + i);
                double x = (double)__bfloat162float(a[at]), y = (double)__bfloat162float(b[of]);
                wrong += (x - y) * (x - y);
                size += y * y;
            }
            row += part.runs[run].count;
        }
    }
    /* A NaN compares false everywhere and must not pass. */
    return wrong <= 1e30 ? std::sqrt(wrong / (size + 1e-30)) : 1e30;
}

double shard_difference(const shard &part, const shard &whole)
{
    const ra_tensor *mine[] = {&part.forward.out, &part.backward.dq, &part.backward.dk,
                               &part.backward.dv};
    const ra_tensor *all[] = {&whole.forward.out, &whole.backward.dq, &whole.backward.dk,
                              &whole.backward.dv};
    double worst = 0;
    for (int i = 0; i < 4; i++) {
        worst = std::fmax(worst, difference(part, *mine[i], *all[i]));
    }
    return worst;
}
