/* See on_device.h; built with RA_TESTS_ON_DEVICE_ITSELF, so that its own calls are the real ones.
 * RA_TEST_SIMPLE=1 opens backends without tuned kernels, RA_TEST_QUEUED=1 comms as queued_comm.h
 * describes. */
#include "on_device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "queued_comm.h"
#include "ringattn_cuda.h"
#include "tensor/tensor.h"

enum { KEPT_MAX = 64, ALIGNMENT = 256 };

static int device;

void device_choose(int index)
{
    device = index;
}

/* ---- backends */

static pthread_mutex_t kept_lock = PTHREAD_MUTEX_INITIALIZER;
static ra_backend *kept[KEPT_MAX];
static int kept_count;

static bool simple_only(void)
{
    const char *simple = getenv("RA_TEST_SIMPLE");
    return simple && *simple == '1';
}

ra_plain_sum device_sum(const ra_layer *layer)
{
    bool tuned = !simple_only() && layer->dtype != RA_F32 && layer->head_dim % 64 == 0;
    return tuned ? RA_PLAIN_SUM_TENSOR : RA_PLAIN_SUM_F32;
}

ra_status device_backend_open(int threads, const char *level, ra_backend **out)
{
    (void)threads;
    (void)level;
    pthread_mutex_lock(&kept_lock);
    ra_backend *backend = kept_count > 0 ? kept[--kept_count] : NULL;
    pthread_mutex_unlock(&kept_lock);
    if (backend) {
        *out = backend;
        return RA_OK;
    }
    ra_cuda_options options = {.size = sizeof options, .simple_only = simple_only()};
    ra_alloc_probe *probe = ra_alloc_watch(NULL); /* a kept backend outlives the caller's probe */
    ra_status status = ra_backend_open_cuda(device, &options, out);
    ra_alloc_watch(probe);
    return status;
}

void device_backend_close(ra_backend *backend)
{
    bool keep = false;
    pthread_mutex_lock(&kept_lock);
    if (backend && kept_count < KEPT_MAX) {
        kept[kept_count++] = backend;
        keep = true;
    }
    pthread_mutex_unlock(&kept_lock);
    if (!keep) {
        ra_backend_close(backend);
    }
}

ra_status device_comms_open(int size, ra_comm **out_by_rank)
{
    const char *as_queued = getenv("RA_TEST_QUEUED");
    return as_queued && *as_queued == '1' ? queued_comms_open(size, out_by_rank)
                                          : ra_comm_open_threads_cuda(size, out_by_rank);
}

/* ---- tensors */

static size_t extent_bytes(const ra_tensor *t)
{
    int64_t elements = t->size[RA_CHAN];
    for (int axis = 0; axis < RA_CHAN; axis++) {
        elements += (t->size[axis] - 1) * t->stride[axis];
    }
    return t->data && ra_tensor_count(t) > 0 ? (size_t)elements * ra_dtype_bytes(t->dtype) : 0;
}

/* Of the copy i, and for i the count where they end. */
static size_t place_of(const device_copy *copy, int i)
{
    size_t at = 0;
    for (int j = 0; j < i; j++) {
        size_t bytes = copy->owner[j] == j ? copy->bytes[j] : 0;
        at += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    }
    return at;
}

/* The first tensor of a data address owns the copy, as long as the longest of them. */
static int owner_of(device_copy *copy, int i)
{
    for (int j = 0; j < i; j++) {
        if (copy->bytes[i] > 0 && copy->bytes[j] > 0 && copy->host_data[j] == copy->host_data[i]) {
            copy->bytes[j] = copy->bytes[j] > copy->bytes[i] ? copy->bytes[j] : copy->bytes[i];
            return j;
        }
    }
    return i;
}

/* All copies at once: several processes may share the device, and every transfer waits its turn. */
ra_status device_copy_put(device_copy *copy, ra_tensor *const *tensors, int count)
{
    *copy = (device_copy){.count = count};
    for (int i = 0; i < count; i++) {
        copy->host[i] = tensors[i];
        copy->host_data[i] = tensors[i]->data;
        copy->bytes[i] = extent_bytes(tensors[i]);
        copy->owner[i] = owner_of(copy, i);
    }
    copy->total = place_of(copy, count) + ALIGNMENT;
    copy->staging = calloc(1, copy->total);
    if (!copy->staging) {
        return RA_FAIL(RA_E_NOMEM, "staging memory");
    }
    for (int i = 0; i < count; i++) {
        if (copy->bytes[i] > 0 && copy->owner[i] == i) {
            memcpy(copy->staging + place_of(copy, i), copy->host_data[i], copy->bytes[i]);
        }
    }
    RA_TRY(ra_cuda_alloc(device, copy->total, &copy->memory));
    for (int i = 0; i < count; i++) {
        if (copy->bytes[i] > 0) {
            tensors[i]->data = (char *)copy->memory + place_of(copy, copy->owner[i]);
        }
    }
    return ra_cuda_copy(copy->memory, copy->staging, copy->total, (ra_stream){0});
}

ra_status device_copy_get(device_copy *copy)
{
    ra_status status = RA_OK;
    if (copy->memory) {
        status = ra_cuda_copy(copy->staging, copy->memory, copy->total, (ra_stream){0});
    }
    for (int i = 0; i < copy->count; i++) {
        bool back = copy->memory && !status && copy->bytes[i] > 0 && copy->owner[i] == i;
        if (back) {
            memcpy(copy->host_data[i], copy->staging + place_of(copy, i), copy->bytes[i]);
        }
        copy->host[i]->data = copy->host_data[i];
    }
    ra_cuda_free(copy->memory);
    free(copy->staging);
    return status;
}

/* ---- calls; those without tensors go through as they are */

static ra_status put_forward(const ra_forward_io *io, ra_forward_io *there, device_copy *copy)
{
    *there = *io;
    ra_tensor *list[] = {&there->q,   &there->k,      &there->v,     &there->out,
                         &there->lse, &there->kept_k, &there->kept_v};
    return device_copy_put(copy, list, sizeof list / sizeof *list);
}

static ra_status put_backward(const ra_backward_io *io, ra_backward_io *there, device_copy *copy)
{
    *there = *io;
    ra_tensor *list[] = {&there->q,   &there->k,      &there->v,      &there->out,
                         &there->lse, &there->kept_k, &there->kept_v, &there->dout,
                         &there->dq,  &there->dk,     &there->dv};
    return device_copy_put(copy, list, sizeof list / sizeof *list);
}

/* The call's own failure comes first, its message kept. */
static ra_status finish(device_copy *copy, ra_status status)
{
    char message[512];
    strncpy(message, ra_last_error(), sizeof message - 1);
    message[sizeof message - 1] = 0;
    ra_status got = device_copy_get(copy);
    return status ? RA_FAIL(status, "%s", message) : got;
}

ra_status device_forward(ra_ctx *ctx, const ra_plan *plan, const ra_forward_io *io,
                         ra_stream stream)
{
    device_copy copy;
    ra_forward_io there;
    if (!io) {
        return ra_attn_forward(ctx, plan, io, stream);
    }
    ra_status status = put_forward(io, &there, &copy);
    return finish(&copy, status ? status : ra_attn_forward(ctx, plan, &there, stream));
}

ra_status device_backward(ra_ctx *ctx, const ra_plan *plan, const ra_backward_io *io,
                          ra_stream stream)
{
    device_copy copy;
    ra_backward_io there;
    if (!io) {
        return ra_attn_backward(ctx, plan, io, stream);
    }
    ra_status status = put_backward(io, &there, &copy);
    return finish(&copy, status ? status : ra_attn_backward(ctx, plan, &there, stream));
}

ra_status device_varlen_forward(ra_backend *backend, const ra_layer *layer, const ra_varlen *lens,
                                const ra_forward_io *io)
{
    device_copy copy;
    ra_forward_io there;
    if (!io) {
        return ra_varlen_forward(backend, layer, lens, io);
    }
    ra_status status = put_forward(io, &there, &copy);
    return finish(&copy, status ? status : ra_varlen_forward(backend, layer, lens, &there));
}

ra_status device_varlen_backward(ra_backend *backend, const ra_layer *layer, const ra_varlen *lens,
                                 const ra_backward_io *io)
{
    device_copy copy;
    ra_backward_io there;
    if (!io) {
        return ra_varlen_backward(backend, layer, lens, io);
    }
    ra_status status = put_backward(io, &there, &copy);
    return finish(&copy, status ? status : ra_varlen_backward(backend, layer, lens, &there));
}
