/* Turns a row of the benchmark into tensors, a plan and calls, and checks what the calls compute.
 * Must not know time. */
#include <cmath>
#include <cstring>

#include <cuda_bf16.h>

#include "gpu_bench.h"
#include "gpu_bench_check.h"
#include "gpu_bench_random.cuh"

std::string name_of(const shape &s)
{
    static const char *const contents[] = {"", " 64 documents", " random documents", " images",
                                           " middle hop"};
    char text[128], mask[32], workspace[32] = "";
    std::snprintf(mask, sizeof mask, "%s", s.causal ? "causal" : "full");
    if (s.window) {
        std::snprintf(mask, sizeof mask, "window%lld", (long long)s.window);
    }
    if (s.workspace_mib) {
        std::snprintf(workspace, sizeof workspace, " %d MiB", s.workspace_mib);
    }
    std::snprintf(text, sizeof text, "d%d %d/%d %s b%lld s%lld%s%s", s.head_dim, s.q_heads,
                  s.kv_heads, mask, (long long)s.rows, (long long)s.seq, contents[s.holds],
                  workspace);
    return text;
}

/* ---- data */

static __global__ void fill_normal(__nv_bfloat16 *to, int64_t count, uint64_t seed)
{
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        to[i] = __float2bfloat16(bench_normal(seed, i));
    }
}

ra_tensor device_tensor(ra_dtype dtype, int64_t rows, int64_t heads, int64_t seq, int64_t chan,
                        uint64_t seed)
{
    void *data = nullptr;
    int64_t count = rows * heads * seq * chan;
    MUST_RA(ra_cuda_alloc(0, (size_t)count * ra_dtype_bytes(dtype), &data));
    if (seed) {
        fill_normal<<<1024, 256>>>(static_cast<__nv_bfloat16 *>(data), count, seed << 40);
        MUST_CUDA(cudaGetLastError());
    }
    return ra_tensor_bhsd(data, dtype, rows, heads, seq, chan);
}

/* ---- metadata */

/* Lengths from 64 to 8,192, as many between 2^n and 2^(n + 1) for every n. */
static int64_t random_length(uint64_t i)
{
    uint32_t bits = bench_hash(((uint64_t)DOCUMENT_SEED << 32) + i);
    return (int64_t)(64.0 * std::exp2(7.0 * bits / 4294967296.0));
}

static void make_metadata(const shape &s, problem *p)
{
    size_t tokens = (size_t)(s.rows * s.seq);
    if (s.holds == DOCUMENTS || s.holds == RANDOM) {
        p->doc.resize(tokens);
        for (int64_t row = 0; row < s.rows; row++) {
            int32_t doc = 0;
            for (int64_t pos = 0, end = 0; pos < s.seq; pos++) {
                if (pos == end) {
                    doc++;
                    end += s.holds == DOCUMENTS ? (int64_t)DOCUMENT : random_length((uint64_t)doc);
                }
                p->doc[(size_t)(row * s.seq + pos)] = doc;
            }
        }
    }
    if (s.holds == IMAGES) {
        p->type.resize(tokens);
        p->group.resize(tokens);
        for (size_t i = 0; i < tokens; i++) {
            int64_t pos = (int64_t)i % s.seq % IMAGE_EVERY;
            p->type[i] = pos >= IMAGE_EVERY / 2 && pos < IMAGE_EVERY / 2 + IMAGE;
        }
        MUST_RA(ra_vision_groups(p->type.data(), s.rows, s.seq, p->group.data()));
    }
}

/* ---- problems */

static void make_step(const shape &s, problem *p)
{
    ra_ctx_options options = {};
    options.size = sizeof options;
    options.forward_only = !s.backward;
    MUST_RA(ra_comm_open_threads(1, &p->comm));
    MUST_RA(ra_ctx_create(p->backend, p->comm, &p->layer, 1, &options, &p->ctx));
    ra_step_desc desc = {};
    desc.size = sizeof desc;
    desc.rows = s.rows;
    desc.seq_local = s.seq;
    desc.doc_id = p->doc.empty() ? nullptr : p->doc.data();
    desc.token_type = p->type.empty() ? nullptr : p->type.data();
    MUST_RA(ra_step_create(p->ctx, &desc, &p->step));
    p->plan = ra_step_plan(p->step, 0);
    p->info.size = sizeof p->info;
    MUST_RA(ra_plan_inspect(p->plan, &p->info));
}

void problem_open(const shape &s, ra_backend *backend, problem *p)
{
    *p = {};
    p->backend = backend;
    p->layer = job_layer(s.q_heads, s.kv_heads, s.head_dim, s.causal, s.window);
    p->layer.vision = s.holds == IMAGES ? RA_VISION_WITHIN_WINDOW : RA_VISION_OFF;
    make_metadata(s, p);
    const job_allocator tensor = [&](ra_dtype dtype, int64_t heads, int64_t chan, uint64_t seed) {
        return device_tensor(dtype, s.rows, heads, s.seq, chan, seed);
    };
    job_make_tensors(p, tensor, s.backward);
    make_step(s, p);
    if (s.holds == HOP) {
        MUST_RA(gpu_bench_hop_open(backend, &p->layer, &p->forward, &p->hop));
    }
}

void problem_close(problem *p)
{
    gpu_bench_hop_close(p->hop);
    job_close(p);
    ra_comm_close(p->comm);
}

void problem_call(const problem &p, bool backward)
{
    if (p.hop) {
        MUST_RA(gpu_bench_hop_run(p.hop));
    } else {
        job_call(p, backward);
    }
}

double problem_flops(const problem &p, bool backward)
{
    return backward ? p.info.flops_backward : p.info.flops_forward;
}

double problem_tile_flops(const problem &p, bool backward)
{
    double tiles = (double)(p.info.tiles_full + p.info.tiles_partial);
    return (backward ? 10.0 : 4.0) * p.layer.head_dim * p.layer.q_heads * tiles * 64 * 64;
}

/* ---- what was computed */

static ra_tensor downloaded(const ra_tensor &t, std::vector<std::vector<char>> *memory)
{
    ra_tensor host = t;
    size_t bytes = ra_dtype_bytes(t.dtype);
    for (int axis = 0; axis < RA_NDIM; axis++) {
        bytes *= (size_t)t.size[axis];
    }
    memory->emplace_back(t.data ? bytes : 0);
    if (t.data) {
        host.data = memory->back().data();
        MUST_RA(ra_cuda_copy(host.data, t.data, bytes, ra_stream{}));
    }
    return host;
}

/* times: how often the keys were folded in. */
static double check_results(const problem &p, bool backward, int times)
{
    std::vector<std::vector<char>> memory;
    gpu_bench_sample sample = {};
    sample.layer = p.layer;
    sample.doc = p.doc.empty() ? nullptr : p.doc.data();
    sample.group = p.group.empty() ? nullptr : p.group.data();
    sample.q = downloaded(p.forward.q, &memory);
    sample.k = downloaded(p.forward.k, &memory);
    sample.v = downloaded(p.forward.v, &memory);
    sample.out = downloaded(p.forward.out, &memory);
    sample.lse = downloaded(p.forward.lse, &memory);
    if (backward) {
        sample.dout = downloaded(p.backward.dout, &memory);
        sample.dq = downloaded(p.backward.dq, &memory);
        sample.dk = downloaded(p.backward.dk, &memory);
        sample.dv = downloaded(p.backward.dv, &memory);
    }
    float *lse = static_cast<float *>(sample.lse.data);
    for (int64_t i = 0; i < sample.lse.size[RA_ROW] * sample.lse.stride[RA_ROW]; i++) {
        lse[i] -= logf((float)times);
    }
    return gpu_bench_check(&sample, backward);
}

double problem_check(const problem &p, bool backward)
{
    if (!p.hop) {
        problem_call(p, false);
        if (backward) {
            problem_call(p, true);
        }
        return check_results(p, backward, 1);
    }
    double worst = 0;
    for (int times = 1; times <= 2; times++) {
        MUST_RA(gpu_bench_hop_run(p.hop));
        MUST_RA(gpu_bench_hop_result(p.hop, &p.forward));
        worst = std::fmax(worst, check_results(p, false, times));
    }
    return worst;
}
