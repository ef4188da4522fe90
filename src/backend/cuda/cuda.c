/*
 * The ops table for one GPU: streams, marks and memory around the kernels. Must not know how
 * anything is computed.
 *
 * Four streams: the caller's, for everything that computes; `side`, for uploads and zeroing, waited
 * for at once; `home`, for the additions of the thread that brings gradients home; `late`, where
 * work lists are freed behind their last use. `last` is recorded behind every operation on the
 * caller's stream: another stream of the caller and frees start behind it.
 */
#include "backend/cuda/check.h"
#include "backend/cuda/device.h"
#include "backend/cuda/elementwise.h"
#include "backend/cuda/forecast.h"
#include "base/alloc.h"
#include "ringattn_cuda.h"

#include <stdio.h>

enum { PIECE_ALIGN = 256 };

typedef struct cuda {
    int device, sm_count, capability;
    char level[16]; /* "sm_90" */
    bool simple_only;
    size_t workspace_bytes;
    void *workspace; /* NULL until a kernel asks for it */
    uint32_t *counters;
    cudaStream_t stream; /* the caller's */
    cudaStream_t side, home, late;
    cudaEvent_t last, mark[RA_MARK_COUNT];
    cudaMemPool_t pool; /* of work lists; the driver takes 32 MiB at a time for it */
    const char *fold_name, *grad_name;
} cuda;

/* What prepare makes of a cover. */
typedef struct prepared_lists {
    ra_cuda_work work;
    void *memory; /* of the device: all arrays */
    ra_cuda_kept kept;
} prepared_lists;

/* ---- streams and marks */

static void use_stream(void *self, ra_stream stream)
{
    cuda *c = self;
    cudaStream_t next = (cudaStream_t)stream.handle;
    cudaSetDevice(c->device);
    if (next != c->stream) {
        /* Scratch memory is shared by all calls, so they keep their order. A stream that is no
         * stream fails at the first launch. */
        cudaStreamWaitEvent(next, c->last, 0);
    }
    c->stream = next;
}

static ra_status enter(const cuda *c)
{
    RA_CUDA_TRY(cudaSetDevice(c->device));
    return RA_OK;
}

/* Behind an operation, also one that failed on its way: part of it may be queued. */
static ra_status leave(const cuda *c, ra_status status)
{
    cudaError_t error = cudaEventRecord(c->last, c->stream);
    return status ? status : error ? ra_cuda_fail(error, "recording an event") : RA_OK;
}

static ra_status mark(void *self, int at)
{
    const cuda *c = self;
    RA_TRY(enter(c));
    RA_CUDA_TRY(cudaEventRecord(c->mark[at], c->stream));
    return RA_OK;
}

static ra_status wait_mark(void *self, int at)
{
    const cuda *c = self;
    RA_TRY(enter(c));
    RA_CUDA_TRY(cudaEventSynchronize(c->mark[at]));
    return RA_OK;
}

static void *mark_event(void *self, int at)
{
    const cuda *c = self;
    return (void *)c->mark[at];
}

static ra_status follow(void *self, void *event)
{
    const cuda *c = self;
    RA_TRY(enter(c));
    RA_CUDA_TRY(cudaStreamWaitEvent(c->stream, (cudaEvent_t)event, 0));
    return ra_cuda_pause(c->stream);
}

/* ---- memory */

static ra_status alloc_memory(void *self, size_t bytes, void **out)
{
    const cuda *c = self;
    void *memory = NULL;
    RA_TRY(enter(c));
    if (bytes > 0) {
        RA_CUDA_TRY(cudaMalloc(&memory, bytes));
        cudaError_t error = cudaMemsetAsync(memory, 0, bytes, c->side);
        error = error ? error : cudaStreamSynchronize(c->side);
        if (error) {
            cudaFree(memory);
            return ra_cuda_fail(error, "zeroing device memory");
        }
    }
    *out = memory;
    return RA_OK;
}

static void free_memory(void *self, void *memory)
{
    const cuda *c = self;
    cudaSetDevice(c->device);
    cudaFree(memory); /* waits for the device */
}

/* A kernel that reads what it cannot reach ends the process' use of the device. */
static ra_status check_memory(void *self, const ra_tensor *t, const char *name)
{
    const cuda *c = self;
    struct cudaPointerAttributes at;
    if (!t->data || ra_tensor_count(t) == 0) {
        return RA_OK;
    }
    RA_TRY(enter(c));
    RA_CUDA_TRY(cudaPointerGetAttributes(&at, t->data));
    if (at.type == cudaMemoryTypeUnregistered || at.type == cudaMemoryTypeHost) {
        return RA_FAIL(RA_E_ARG, "%s: host memory at %p, expected memory of device %d", name,
                       t->data, c->device);
    }
    if (at.type == cudaMemoryTypeDevice && at.device != c->device) {
        return RA_FAIL(RA_E_ARG, "%s: memory of device %d, expected memory of device %d", name,
                       at.device, c->device);
    }
    return RA_OK;
}

/* ---- work lists */

/* The arrays of the lists, one behind the other. */
typedef struct part {
    const void *from;
    const void **to; /* gets the address on the device */
    size_t bytes;
} part;

enum { PART_COUNT = 5 };

static size_t rounded(size_t bytes)
{
    return (bytes + PIECE_ALIGN - 1) / PIECE_ALIGN * PIECE_ALIGN;
}

static ra_status upload(const cuda *c, const part *parts, size_t bytes, void **memory)
{
    char *staging = NULL;
    size_t at = 0;
    RA_TRY(ra_alloc(bytes, 1, &staging));
    for (int i = 0; i < PART_COUNT; i++) {
        if (parts[i].bytes > 0) {
            memcpy(staging + at, parts[i].from, parts[i].bytes);
        }
        at += rounded(parts[i].bytes);
    }
    cudaError_t error = cudaMallocFromPoolAsync(memory, bytes, c->pool, c->side);
    if (!error) {
        error = cudaMemcpyAsync(*memory, staging, bytes, cudaMemcpyHostToDevice, c->side);
        error = error ? error : cudaStreamSynchronize(c->side);
        if (error) {
            cudaFreeAsync(*memory, c->side);
        }
    }
    ra_free(staging);
    return error ? ra_cuda_fail(error, "uploading work lists") : RA_OK;
}

static ra_status prepare_lists(const cuda *c, prepared_lists *lists)
{
    ra_cuda_work *w = &lists->work;
    const ra_work *host = &w->host;
    const void *at[PART_COUNT] = {0};
    const part parts[PART_COUNT] = {
        {host->item, &at[0], (size_t)host->item_count * sizeof *host->item},
        {host->run, &at[1], (size_t)host->run_count * sizeof *host->run},
        {host->key_item, &at[2], (size_t)host->key_item_count * sizeof *host->key_item},
        {host->key_run, &at[3], (size_t)host->key_run_count * sizeof *host->key_run},
        {host->reach, &at[4], (size_t)host->reach_count * sizeof *host->reach},
    };
    size_t bytes = 0;
    for (int i = 0; i < PART_COUNT; i++) {
        bytes += rounded(parts[i].bytes);
    }
    if (bytes == 0) {
        return RA_OK;
    }
    RA_TRY(upload(c, parts, bytes, &lists->memory));
    const char *next = lists->memory;
    for (int i = 0; i < PART_COUNT; i++) {
        *parts[i].to = next;
        next += rounded(parts[i].bytes);
    }
    w->item = at[0];
    w->run = at[1];
    w->key_item = at[2];
    w->key_run = at[3];
    w->reach = at[4];
    return RA_OK;
}

static void discard(void *self, void *prepared)
{
    const cuda *c = self;
    prepared_lists *lists = prepared;
    if (!lists) {
        return;
    }
    if (lists->memory) {
        cudaSetDevice(c->device);
        cudaStreamWaitEvent(c->late, c->last, 0);
        cudaFreeAsync(lists->memory, c->late);
    }
    if (lists->kept.memory) {
        lists->kept.discard(lists->kept.memory, c->late);
    }
    ra_work_free(&lists->work.host);
    ra_free(lists);
}

static ra_status prepare(void *self, const ra_cover *cover, const ra_layer *layer, void **prepared)
{
    cuda *c = self;
    prepared_lists *lists = NULL;
    RA_TRY(enter(c));
    RA_TRY(RA_NEW(&lists, 1));
    lists->work.q_heads = layer->q_heads;
    lists->work.kv_heads = layer->kv_heads;
    lists->work.kept = &lists->kept;
    ra_status status =
        ra_work_build(cover, ra_cuda_q_tile(layer->head_dim), RA_CUDA_K_TILE, &lists->work.host);
    status = status ? status : prepare_lists(c, lists);
    if (status) {
        discard(c, lists);
        return status;
    }
    *prepared = lists;
    return RA_OK;
}

/* ---- computations */

static ra_cuda_launch launch_of(const cuda *c)
{
    return (ra_cuda_launch){
        .stream = c->stream,
        .pool = c->pool,
        .device = c->device,
        .sm_count = c->sm_count,
        .capability = c->capability,
        .counters = c->counters,
        .workspace_bytes = c->workspace_bytes,
    };
}

static ra_status fold(void *self, const ra_fold_job *job)
{
    cuda *c = self;
    const prepared_lists *lists = job->prepared;
    ra_cuda_launch at = launch_of(c);
    RA_TRY(enter(c));
    if (lists->work.host.item_count == 0) {
        return RA_OK;
    }
    const ra_cuda_fold_kernel *kernel = ra_cuda_fold_choose(job, &lists->work, &at, c->simple_only);
    c->fold_name = kernel->name;
    return leave(c, kernel->launch(job, &lists->work, &at));
}

static ra_status grad(void *self, const ra_grad_job *job)
{
    cuda *c = self;
    const prepared_lists *lists = job->prepared;
    ra_cuda_launch at = launch_of(c);
    RA_TRY(enter(c));
    if (lists->work.host.run_count == 0) {
        return job->chunk_mark ? mark(self, job->chunk_mark) : RA_OK;
    }
    const ra_cuda_grad_kernel *kernel = ra_cuda_grad_choose(job, &lists->work, &at, c->simple_only);
    if (kernel->workspace && !c->workspace) {
        RA_CUDA_TRY(cudaMalloc(&c->workspace, c->workspace_bytes));
    }
    at.workspace = kernel->workspace ? c->workspace : NULL;
    at.chunk_done = job->chunk_mark ? c->mark[job->chunk_mark] : NULL;
    c->grad_name = kernel->name;
    ra_status status = kernel->launch(job, &lists->work, &at);
    if (!status && job->chunk_mark && !kernel->marks_chunk) {
        status = mark(self, job->chunk_mark);
    }
    return leave(c, status);
}

static ra_status fill(void *self, const ra_tensor *t, float value)
{
    const cuda *c = self;
    RA_TRY(enter(c));
    return leave(c, ra_cuda_fill(t, value, c->stream));
}

static ra_status add(void *self, const ra_tensor *to, const ra_tensor *from)
{
    const cuda *c = self;
    RA_TRY(enter(c));
    return ra_cuda_add(to, from, c->home);
}

static ra_status wait_add(void *self)
{
    const cuda *c = self;
    RA_TRY(enter(c));
    RA_CUDA_TRY(cudaStreamSynchronize(c->home));
    return RA_OK;
}

static ra_status add_behind(void *self, const ra_tensor *to, const ra_tensor *from)
{
    const cuda *c = self;
    RA_TRY(enter(c));
    return leave(c, ra_cuda_add(to, from, c->stream));
}

static ra_status cast(void *self, const ra_tensor *to, const ra_tensor *from)
{
    const cuda *c = self;
    RA_TRY(enter(c));
    return leave(c, ra_cuda_cast(to, from, c->stream));
}

static ra_status row_dot(void *self, const ra_tensor *a, const ra_tensor *b, const ra_tensor *dot)
{
    const cuda *c = self;
    RA_TRY(enter(c));
    return leave(c, ra_cuda_row_dot(a, b, dot, c->stream));
}

/* ---- opening and closing */

static const char *level(void *self)
{
    const cuda *c = self;
    return c->level;
}

/* Also closes what opened only in part. */
static void close_cuda(void *self)
{
    cuda *c = self;
    cudaSetDevice(c->device);
    if (c->last) {
        cudaEventSynchronize(c->last);
        cudaEventDestroy(c->last);
    }
    for (int i = 0; i < RA_MARK_COUNT; i++) {
        if (c->mark[i]) {
            cudaEventDestroy(c->mark[i]);
        }
    }
    cudaStream_t streams[] = {c->side, c->home, c->late};
    for (int i = 0; i < 3; i++) {
        if (streams[i]) {
            cudaStreamSynchronize(streams[i]);
            cudaStreamDestroy(streams[i]);
        }
    }
    if (c->pool) {
        cudaMemPoolDestroy(c->pool);
    }
    cudaFree(c->workspace);
    cudaFree(c->counters);
    ra_free(c);
}

static const ra_backend_ops ops = {
    .name = "cuda",
    .use_stream = use_stream,
    .prepare = prepare,
    .discard = discard,
    .check = check_memory,
    .mark = mark,
    .wait_mark = wait_mark,
    .alloc = alloc_memory,
    .free = free_memory,
    .fold = fold,
    .grad = grad,
    .fill = fill,
    .add = add,
    .wait_add = wait_add,
    .add_behind = add_behind,
    .cast = cast,
    .row_dot = row_dot,
    .level = level,
    .close = close_cuda,
    .mark_event = mark_event,
    .follow = follow,
    .marks_chunk = true,
    .landing_bytes = (int64_t)1 << 30, /* few exchanges: each has a launch and a wait */
};

/* Memory that is free again is used again, but never by making an upload wait for a kernel. */
static ra_status open_pool(cuda *c)
{
    struct cudaMemPoolProps properties = {
        .allocType = cudaMemAllocationTypePinned,
        .location = {.type = cudaMemLocationTypeDevice, .id = c->device},
    };
    uint64_t keeps = (uint64_t)64 << 20;
    int no = 0;
    RA_CUDA_TRY(cudaMemPoolCreate(&c->pool, &properties));
    RA_CUDA_TRY(cudaMemPoolSetAttribute(c->pool, cudaMemPoolAttrReleaseThreshold, &keeps));
    RA_CUDA_TRY(cudaMemPoolSetAttribute(c->pool, cudaMemPoolReuseAllowInternalDependencies, &no));
    return RA_OK;
}

static ra_status open_resources(cuda *c)
{
    RA_CUDA_TRY(cudaSetDevice(c->device));
    RA_CUDA_TRY(cudaDeviceGetAttribute(&c->sm_count, cudaDevAttrMultiProcessorCount, c->device));
    RA_CUDA_TRY(cudaStreamCreateWithFlags(&c->side, cudaStreamNonBlocking));
    RA_CUDA_TRY(cudaStreamCreateWithFlags(&c->home, cudaStreamNonBlocking));
    RA_CUDA_TRY(cudaStreamCreateWithFlags(&c->late, cudaStreamNonBlocking));
    RA_CUDA_TRY(cudaEventCreateWithFlags(&c->last, cudaEventDisableTiming));
    for (int i = 0; i < RA_MARK_COUNT; i++) {
        /* A thread that waits for a mark sleeps: the hops are long, the CPUs are the caller's. */
        RA_CUDA_TRY(
            cudaEventCreateWithFlags(&c->mark[i], cudaEventDisableTiming | cudaEventBlockingSync));
    }
    RA_TRY(open_pool(c));
    void *counters = NULL;
    RA_TRY(alloc_memory(c, RA_CUDA_COUNTERS * sizeof *c->counters, &counters));
    c->counters = counters;
    return RA_OK;
}

ra_status ra_backend_open_cuda(int device, const ra_cuda_options *options, ra_backend **out)
{
    int capability = 0;
    if (!out) {
        return RA_FAIL(RA_E_ARG, "out: NULL, expected where to put the backend");
    }
    if (options && options->size != sizeof *options) {
        return RA_FAIL(RA_E_ARG, "options.size: %zu, expected %zu", options->size, sizeof *options);
    }
    RA_TRY(ra_cuda_device_check(device, &capability));
    cuda *c = NULL;
    RA_TRY(RA_NEW(&c, 1));
    c->device = device;
    c->capability = capability;
    c->simple_only = options && options->simple_only;
    c->workspace_bytes =
        options && options->workspace_bytes ? options->workspace_bytes : RA_CUDA_WORKSPACE_BYTES;
    c->fold_name = c->grad_name = "";
    snprintf(c->level, sizeof c->level, "sm_%d", capability);
    ra_status status = open_resources(c);
    if (status) {
        close_cuda(c);
        return status;
    }
    return ra_backend_wrap(&ops, c, out);
}

const char *ra_cuda_kernel(const ra_backend *backend, bool backward)
{
    if (!backend || backend->ops != &ops) {
        return "";
    }
    const cuda *c = backend->self;
    return backward ? c->grad_name : c->fold_name;
}
