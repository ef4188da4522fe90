/*
 * Speed of the CUDA backend on one rank, sustained: every shape is checked on sampled rows, run for
 * --seconds to warm up, then timed for as long; a cuBLAS bf16 product of 8192^3 is timed the same
 * way in the same process, before and after, as the measure of what the device can do at its power
 * limit. Goes through the public API, so that what is timed is what a caller gets.
 */
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "gpu_bench_check.h"
#include "ringattn_cuda.h"

struct shape {
    int64_t rows, seq;
    int q_heads, kv_heads, head_dim;
    bool causal;
    int64_t window;
};

static const shape shapes[] = {
    {1, 8192, 32, 4, 512, false, 0},    {1, 8192, 32, 4, 512, true, 0},
    {1, 32768, 32, 4, 512, true, 0},    {2, 8192, 8, 1, 512, true, 0},
    {1, 8192, 32, 16, 256, false, 0},   {1, 8192, 32, 16, 256, true, 0},
    {1, 8192, 32, 16, 256, true, 1024}, {1, 32768, 32, 16, 256, true, 1024},
    {1, 8192, 32, 16, 256, true, 512},  {1, 32768, 32, 16, 256, true, 512},
};

struct options {
    double seconds = 0.5;
    bool backward = false, simple = false;
    const char *only = "", *json = nullptr;
};

struct result {
    std::string name, kernel;
    bool backward, timed, pass;
    double error, milliseconds, tflops;
};

static void must(bool ok, const char *what, const char *why)
{
    if (!ok) {
        std::fprintf(stderr, "gpu_bench: %s: %s\n", what, why);
        std::exit(3);
    }
}
#define MUST_RA(call) must((call) == RA_OK, #call, ra_last_error())
#define MUST_CUDA(call)                                                                            \
    do {                                                                                           \
        cudaError_t error_ = (call);                                                               \
        must(error_ == cudaSuccess, #call, cudaGetErrorString(error_));                            \
    } while (0)
#define MUST_CUBLAS(call) must((call) == CUBLAS_STATUS_SUCCESS, #call, "cuBLAS failed")

/* ---- data */

static __device__ uint32_t hash(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((x ^ x >> 31) >> 32);
}

/* Normal deviates: data with few distinct bits would use less power. */
static __global__ void fill_normal(__nv_bfloat16 *to, int64_t count, uint64_t seed)
{
    int64_t step = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += step) {
        float u = ((float)hash(seed + 2 * (uint64_t)i) + 1.0f) * 0x1p-32f;
        float v = (float)hash(seed + 2 * (uint64_t)i + 1) * 0x1p-32f;
        to[i] = __float2bfloat16(sqrtf(-2.0f * logf(u)) * cospif(2.0f * v));
    }
}

static ra_tensor device_tensor(ra_dtype dtype, int64_t rows, int64_t heads, int64_t seq,
                               int64_t chan, uint64_t seed)
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

/* One problem on one rank. */
struct problem {
    ra_layer layer;
    ra_backend *backend;
    ra_comm *comm;
    ra_ctx *ctx;
    ra_step *step;
    const ra_plan *plan;
    ra_plan_info info;
    ra_forward_io forward;
    ra_backward_io backward;
};

static void problem_open(const shape &s, ra_backend *backend, bool backward, problem *p)
{
    *p = {};
    p->backend = backend;
    p->layer.size = sizeof p->layer;
    p->layer.q_heads = s.q_heads;
    p->layer.kv_heads = s.kv_heads;
    p->layer.head_dim = s.head_dim;
    p->layer.dtype = RA_BF16;
    p->layer.scale = 1.0f / sqrtf((float)s.head_dim);
    p->layer.causal = s.causal;
    p->layer.window = s.window;
    MUST_RA(ra_comm_open_threads(1, &p->comm));
    ra_ctx_options options = {};
    options.size = sizeof options;
    options.forward_only = !backward;
    MUST_RA(ra_ctx_create(backend, p->comm, &p->layer, 1, &options, &p->ctx));
    ra_step_desc desc = {};
    desc.size = sizeof desc;
    desc.rows = s.rows;
    desc.seq_local = s.seq;
    MUST_RA(ra_step_create(p->ctx, &desc, &p->step));
    p->plan = ra_step_plan(p->step, 0);
    p->info.size = sizeof p->info;
    MUST_RA(ra_plan_inspect(p->plan, &p->info));
    int64_t q = s.q_heads, k = s.kv_heads, d = s.head_dim;
    ra_forward_io &f = p->forward;
    f.size = sizeof f;
    f.q = device_tensor(RA_BF16, s.rows, q, s.seq, d, 1);
    f.k = device_tensor(RA_BF16, s.rows, k, s.seq, d, 2);
    f.v = device_tensor(RA_BF16, s.rows, k, s.seq, d, 3);
    f.out = device_tensor(RA_BF16, s.rows, q, s.seq, d, 0);
    f.lse = device_tensor(RA_F32, s.rows, q, s.seq, 1, 0);
    ra_backward_io &b = p->backward;
    b.size = sizeof b;
    b.q = f.q;
    b.k = f.k;
    b.v = f.v;
    b.out = f.out;
    b.lse = f.lse;
    if (backward) {
        b.dout = device_tensor(RA_BF16, s.rows, q, s.seq, d, 4);
        b.dq = device_tensor(RA_BF16, s.rows, q, s.seq, d, 0);
        b.dk = device_tensor(RA_BF16, s.rows, k, s.seq, d, 0);
        b.dv = device_tensor(RA_BF16, s.rows, k, s.seq, d, 0);
    }
}

static void problem_close(problem *p)
{
    ra_step_free(p->step);
    ra_ctx_free(p->ctx);
    ra_comm_close(p->comm);
    ra_tensor *owned[] = {&p->forward.q,   &p->forward.k,   &p->forward.v,
                          &p->forward.out, &p->forward.lse, &p->backward.dout,
                          &p->backward.dq, &p->backward.dk, &p->backward.dv};
    for (ra_tensor *t : owned) {
        ra_cuda_free(t->data);
    }
}

/* ---- time */

static double now()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Milliseconds of one call, once warm: calls are queued in batches, so that the device never waits
 * for the host. */
template <typename Call> static double time_sustained(double seconds, Call call)
{
    cudaEvent_t begin, end;
    MUST_CUDA(cudaEventCreate(&begin));
    MUST_CUDA(cudaEventCreate(&end));
    int64_t calls = 0;
    double start = now(), elapsed = 0;
    for (; elapsed < seconds; calls++) {
        call();
        MUST_CUDA(cudaStreamSynchronize(nullptr));
        elapsed = now() - start;
    }
    int64_t batch = (int64_t)((double)calls * seconds / elapsed) + 1;
    MUST_CUDA(cudaEventRecord(begin, nullptr));
    for (int64_t i = 0; i < batch; i++) {
        call();
    }
    MUST_CUDA(cudaEventRecord(end, nullptr));
    MUST_CUDA(cudaEventSynchronize(end));
    float milliseconds = 0;
    MUST_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
    MUST_CUDA(cudaEventDestroy(begin));
    MUST_CUDA(cudaEventDestroy(end));
    return (double)milliseconds / (double)batch;
}

/* TFLOP/s of a cuBLAS product of 8192^3 in bf16. */
static double time_cublas(double seconds)
{
    enum { N = 8192 };
    cublasHandle_t handle;
    ra_tensor a = device_tensor(RA_BF16, 1, 1, N, N, 5), b = device_tensor(RA_BF16, 1, 1, N, N, 6);
    ra_tensor c = device_tensor(RA_BF16, 1, 1, N, N, 0);
    float one = 1, zero = 0;
    MUST_CUBLAS(cublasCreate(&handle));
    double milliseconds = time_sustained(seconds, [&] {
        MUST_CUBLAS(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, N, N, N, &one, a.data,
                                 CUDA_R_16BF, N, b.data, CUDA_R_16BF, N, &zero, c.data, CUDA_R_16BF,
                                 N, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    });
    MUST_CUBLAS(cublasDestroy(handle));
    for (ra_tensor *t : {&a, &b, &c}) {
        ra_cuda_free(t->data);
    }
    return 2.0 * N * N * N / milliseconds * 1e-9;
}

/* ---- shapes */

static std::string name_of(const shape &s)
{
    char text[96], mask[32];
    std::snprintf(mask, sizeof mask, "%s", s.causal ? "causal" : "full");
    if (s.window) {
        std::snprintf(mask, sizeof mask, "window%lld", (long long)s.window);
    }
    std::snprintf(text, sizeof text, "d%d %d/%d %s b%lld s%lld", s.head_dim, s.q_heads, s.kv_heads,
                  mask, (long long)s.rows, (long long)s.seq);
    return text;
}

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

/* The largest error of sampled rows as a share of what is allowed. */
static double check(const problem &p, bool backward)
{
    std::vector<std::vector<char>> memory;
    gpu_bench_sample sample = {};
    sample.layer = p.layer;
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
    return gpu_bench_check(&sample, backward);
}

static void call(const problem &p, bool backward)
{
    if (backward) {
        MUST_RA(ra_attn_backward(p.ctx, p.plan, &p.backward, ra_stream{}));
    } else {
        MUST_RA(ra_attn_forward(p.ctx, p.plan, &p.forward, ra_stream{}));
    }
}

static result run_shape(const shape &s, ra_backend *backend, bool backward, const options &o,
                        bool time)
{
    problem p;
    result r = {};
    problem_open(s, backend, backward, &p);
    call(p, false);
    if (backward) {
        call(p, true);
    }
    r.name = name_of(s);
    r.backward = backward;
    r.kernel = ra_cuda_kernel(backend, backward);
    r.error = check(p, backward);
    r.pass = r.error <= 1;
    if (time && r.pass) {
        r.timed = true;
        r.milliseconds = time_sustained(o.seconds, [&] { call(p, backward); });
        r.tflops =
            (backward ? p.info.flops_backward : p.info.flops_forward) / r.milliseconds * 1e-9;
    }
    problem_close(&p);
    return r;
}

/* The shape cut short first: what is wrong there is not run at length, and a plain kernel is not
 * timed. */
static result bench_shape(const shape &s, ra_backend *backend, bool backward, const options &o)
{
    shape cut = s;
    cut.seq = 1000;
    result first = run_shape(cut, backend, backward, o, false);
    if (!first.pass || (first.kernel == "simple" && !o.simple)) {
        first.name = name_of(s);
        return first;
    }
    return run_shape(s, backend, backward, o, true);
}

/* ---- output */

static void print(const result &r, double cublas)
{
    std::printf("%-34s %-8s %-10s", r.name.c_str(), r.backward ? "backward" : "forward",
                r.kernel.c_str());
    if (!r.pass) {
        std::printf("  WRONG: error %.3g of what is allowed; not timed\n", r.error);
    } else if (!r.timed) {
        std::printf("  right, not timed: no tuned kernel\n");
    } else {
        std::printf(" %9.3f ms %7.1f TFLOP/s  %.3f of cuBLAS\n", r.milliseconds, r.tflops,
                    r.tflops / cublas);
    }
    std::fflush(stdout);
}

static void write_json(const char *path, const std::vector<result> &results, double before,
                       double after)
{
    std::FILE *file = std::fopen(path, "w");
    must(file != nullptr, path, "cannot be written");
    std::fprintf(file, "{\"cublas_before\": %.1f, \"cublas_after\": %.1f, \"rows\": [", before,
                 after);
    for (size_t i = 0; i < results.size(); i++) {
        const result &r = results[i];
        std::fprintf(file,
                     "%s\n  {\"shape\": \"%s\", \"backward\": %s, \"kernel\": \"%s\", \"pass\": "
                     "%s, \"error_share\": %.4g, \"ms\": %.5g, \"tflops\": %.5g, \"ratio\": %.4g}",
                     i ? "," : "", r.name.c_str(), r.backward ? "true" : "false", r.kernel.c_str(),
                     r.pass ? "true" : "false", r.error, r.milliseconds, r.tflops,
                     r.tflops / ((before + after) / 2));
    }
    std::fprintf(file, "\n]}\n");
    must(std::fclose(file) == 0, path, "cannot be written");
}

static options parse(int argc, char **argv)
{
    options o;
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (!std::strcmp(argv[i], "--backward")) {
            o.backward = true;
        } else if (!std::strcmp(argv[i], "--simple")) {
            o.simple = true;
        } else if (!std::strcmp(argv[i], "--seconds") && more) {
            o.seconds = std::atof(argv[++i]);
        } else if (!std::strcmp(argv[i], "--only") && more) {
            o.only = argv[++i];
        } else if (!std::strcmp(argv[i], "--json") && more) {
            o.json = argv[++i];
        } else {
            std::fprintf(stderr, "usage: gpu_bench [--backward] [--only TEXT] [--seconds S] "
                                 "[--json FILE] [--simple]\n");
            std::exit(2);
        }
    }
    return o;
}

int main(int argc, char **argv)
{
    options o = parse(argc, argv);
    std::vector<result> results;
    ra_backend *backend = nullptr;
    bool pass = true;
    MUST_RA(ra_backend_open_cuda(0, nullptr, &backend));
    double before = time_cublas(o.seconds);
    std::printf("cuBLAS bf16 8192^3: %.1f TFLOP/s before\n", before);
    for (const shape &s : shapes) {
        for (int backward = 0; backward <= (o.backward ? 1 : 0); backward++) {
            if (name_of(s).find(o.only) != std::string::npos) {
                results.push_back(bench_shape(s, backend, backward, o));
                print(results.back(), before);
                pass = pass && results.back().pass;
            }
        }
    }
    double after = time_cublas(o.seconds);
    std::printf("cuBLAS bf16 8192^3: %.1f TFLOP/s after\n", after);
    if (o.json) {
        write_json(o.json, results, before, after);
    }
    ra_backend_close(backend);
    return pass ? 0 : 1;
}
