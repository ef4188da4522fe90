/* What the CUDA backend must refuse, with a status that says why: no device, one that is too old,
 * memory that is not the device's, too little memory, a device that failed. Strides that tuned
 * kernels cannot take are no error: the plain kernel runs, and is named. What ends the process' use
 * of the device, or hides the device, happens in a child. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "backend/cuda/dispatch.h"
#include "on_device.h"
#include "ringattn_cuda.h"
#include "support.h"

/* Tensors are what each test makes them. */
#undef ra_attn_forward
#undef ra_attn_backward
#undef ra_varlen_forward
#undef ra_backend_close

enum { SEQ = 64, CHAN = 512, Q_HEADS = 2 };

/* ---- one rank on one device */

enum { Q, K, V, OUT, LSE, DOUT, DQ, DK, DV, TENSORS };
static const char *const names[] = {"q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv"};

typedef struct rig {
    ra_backend *backend;
    ra_comm *comm;
    ra_ctx *ctx;
    ra_step *step;
    ra_tensor tensor[TENSORS];
} rig;

static ra_layer some_layer(void)
{
    return (ra_layer){.size = sizeof(ra_layer),
                      .q_heads = Q_HEADS,
                      .kv_heads = 1,
                      .head_dim = CHAN,
                      .dtype = RA_BF16,
                      .scale = 0.04f,
                      .causal = true};
}

static ra_tensor some_tensor(int i)
{
    int64_t heads = i == K || i == V || i == DK || i == DV ? 1 : Q_HEADS;
    return ra_tensor_bhsd(NULL, i == LSE ? RA_F32 : RA_BF16, 1, heads, SEQ, i == LSE ? 1 : CHAN);
}

static size_t bytes_of(const ra_tensor *t)
{
    return (size_t)(t->size[RA_HEAD] * t->size[RA_SEQ] * t->size[RA_CHAN]) *
           ra_dtype_bytes(t->dtype);
}

static ra_status rig_open(rig *x)
{
    ra_layer layer = some_layer();
    ra_step_desc desc = {.size = sizeof desc, .rows = 1, .seq_local = SEQ};
    *x = (rig){0};
    for (int i = 0; i < TENSORS; i++) {
        x->tensor[i] = some_tensor(i);
        /* Room for strides with gaps. */
        RA_TRY(ra_cuda_alloc(0, 2 * bytes_of(&x->tensor[i]), &x->tensor[i].data));
    }
    RA_TRY(ra_backend_open_cuda(0, NULL, &x->backend));
    RA_TRY(ra_comm_open_threads_cuda(1, &x->comm));
    RA_TRY(ra_ctx_create(x->backend, x->comm, &layer, 1, NULL, &x->ctx));
    return ra_step_create(x->ctx, &desc, &x->step);
}

static void rig_close(rig *x, const ra_tensor *owned)
{
    ra_step_free(x->step);
    ra_ctx_free(x->ctx);
    ra_comm_close(x->comm);
    ra_backend_close(x->backend);
    for (int i = 0; i < TENSORS; i++) {
        ra_cuda_free(owned[i].data);
    }
}

static ra_status forward(const rig *x)
{
    const ra_tensor *t = x->tensor;
    ra_forward_io io = {
        .size = sizeof io, .q = t[Q], .k = t[K], .v = t[V], .out = t[OUT], .lse = t[LSE]};
    return ra_attn_forward(x->ctx, ra_step_plan(x->step, 0), &io, (ra_stream){0});
}

static ra_status backward(const rig *x)
{
    const ra_tensor *t = x->tensor;
    ra_backward_io io = {.size = sizeof io,
                         .q = t[Q],
                         .k = t[K],
                         .v = t[V],
                         .out = t[OUT],
                         .lse = t[LSE],
                         .dout = t[DOUT],
                         .dq = t[DQ],
                         .dk = t[DK],
                         .dv = t[DV]};
    return ra_attn_backward(x->ctx, ra_step_plan(x->step, 0), &io, (ra_stream){0});
}

static ra_status varlen(const rig *x)
{
    static const int32_t cu[] = {0, SEQ};
    const ra_tensor *t = x->tensor;
    ra_layer layer = some_layer();
    ra_varlen lens = {sizeof lens, cu, cu, 1};
    ra_forward_io io = {
        .size = sizeof io, .q = t[Q], .k = t[K], .v = t[V], .out = t[OUT], .lse = t[LSE]};
    return ra_varlen_forward(x->backend, &layer, &lens, &io);
}

/* ---- in a child */

/* Runs `body` in a process that has not used the device; nonzero is the line that failed. */
static void in_child(const char *name, int (*body)(void))
{
    int status = 0;
    support_limit(60, "%s", name);
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        int line = body();
        if (line) {
            fprintf(stderr, "%s: line %d: %s\n", name, line, ra_last_error());
        }
        fflush(NULL);
        _exit(line ? 1 : 0);
    }
    assert_true(waitpid(child, &status, 0) == child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

#define CHILD_CHECK(condition)                                                                     \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            return __LINE__;                                                                       \
        }                                                                                          \
    } while (0)

static int without_device(void)
{
    ra_backend *backend = NULL;
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    CHILD_CHECK(ra_cuda_device_count() == 0);
    CHILD_CHECK(ra_backend_open_cuda(0, NULL, &backend) == RA_E_UNAVAILABLE);
    CHILD_CHECK(strstr(ra_last_error(), "no CUDA device"));
    CHILD_CHECK(!backend);
    return 0;
}

/* A stride that leaves the address space: the device fails and stays so. */
static int with_failed_device(void)
{
    rig x;
    ra_backend *other = NULL;
    void *memory = NULL;
    CHILD_CHECK(rig_open(&x) == RA_OK);
    CHILD_CHECK(forward(&x) == RA_OK);
    CHILD_CHECK(ra_cuda_wait((ra_stream){0}) == RA_OK);
    ra_tensor wild = x.tensor[Q];
    wild.stride[RA_SEQ] = (int64_t)1 << 45;
    x.backend->ops->fill(x.backend->self, &wild, 1);
    CHILD_CHECK(ra_cuda_wait((ra_stream){0}) == RA_E_DEVICE);
    CHILD_CHECK(forward(&x) == RA_E_DEVICE);
    CHILD_CHECK(ra_last_error()[0] != 0);
    CHILD_CHECK(ra_ctx_status(x.ctx) == RA_E_DEVICE);
    CHILD_CHECK(backward(&x) != RA_OK);
    CHILD_CHECK(varlen(&x) == RA_E_DEVICE);
    CHILD_CHECK(ra_cuda_alloc(0, 64, &memory) == RA_E_DEVICE);
    CHILD_CHECK(ra_backend_open_cuda(0, NULL, &other) == RA_E_DEVICE);
    rig_close(&x, x.tensor);
    return 0;
}

static void test_no_device(void **state)
{
    (void)state;
    in_child("no device", without_device);
}

static void test_failed_device(void **state)
{
    (void)state;
    in_child("a device that failed", with_failed_device);
}

/* ---- in this process */

static void expect(ra_status status)
{
    if (status) {
        fail_msg("%s: %s", support_case(), ra_last_error());
    }
}

static void expect_refused(ra_status status, ra_status wanted, const char *name, const char *part)
{
    if (status != wanted || strncmp(ra_last_error(), name, strlen(name)) != 0 ||
        !strstr(ra_last_error(), part)) {
        fail_msg("%s: %s: %s, \"%s\"; expected %s, \"%s: ... %s\"", support_case(), name,
                 ra_status_name(status), ra_last_error(), ra_status_name(wanted), name, part);
    }
}

/* Each tensor in turn is at `data`; the call that reads it first refuses it by name. */
static void refuse_memory(void *data, const char *part)
{
    for (int i = 0; i < TENSORS; i++) {
        rig x;
        char name[16];
        expect(rig_open(&x));
        ra_tensor owned[TENSORS];
        memcpy(owned, x.tensor, sizeof owned);
        x.tensor[i].data = data;
        snprintf(name, sizeof name, "%s: ", names[i]);
        if (i <= LSE) {
            expect_refused(varlen(&x), RA_E_ARG, name, part);
        }
        expect_refused(i <= LSE ? forward(&x) : backward(&x), RA_E_ARG, name, part);
        rig_close(&x, owned);
    }
}

static void test_host_memory(void **state)
{
    (void)state;
    static uint16_t plain[2 * Q_HEADS * SEQ * CHAN];
    void *pinned = NULL;
    support_limit(60, "host memory");
    refuse_memory(plain, "host memory");
    assert_true(cudaMallocHost(&pinned, sizeof plain) == cudaSuccess);
    refuse_memory(pinned, "host memory");
    cudaFreeHost(pinned);
}

static void test_other_device(void **state)
{
    (void)state;
    void *there = NULL;
    support_limit(60, "another device");
    if (ra_cuda_device_count() < 2) {
        print_message("skipped: memory of another device, there is but one\n");
        return;
    }
    expect(ra_cuda_alloc(1, 2 * Q_HEADS * SEQ * CHAN * sizeof(uint16_t), &there));
    refuse_memory(there, "memory of device 1, expected memory of device 0");
    ra_cuda_free(there);
}

/* One element of gap a row is more than a tensor map can skip. */
static void test_strides(void **state)
{
    (void)state;
    support_limit(60, "strides");
    for (int i = 0; i < 2; i++) {
        rig x;
        expect(rig_open(&x));
        int64_t row = CHAN + (i == 0 ? 8 : 1);
        x.tensor[K].stride[RA_SEQ] = row;
        x.tensor[K].stride[RA_HEAD] = x.tensor[K].stride[RA_ROW] = row * SEQ;
        expect(forward(&x));
        expect(ra_cuda_wait((ra_stream){0}));
        bool simple = strcmp(ra_cuda_kernel(x.backend, false), "simple") == 0;
        assert_int_equal(simple, i == 1);
        expect(backward(&x));
        expect(ra_cuda_wait((ra_stream){0}));
        assert_true(i == 0 || strcmp(ra_cuda_kernel(x.backend, true), "simple") == 0);
        rig_close(&x, x.tensor);
    }
}

static void test_dtypes(void **state)
{
    (void)state;
    rig x;
    ra_ctx *ctx = NULL;
    ra_layer layer = some_layer();
    support_limit(60, "dtypes");
    expect(rig_open(&x));
    layer.dtype = RA_F64;
    expect_refused(ra_ctx_create(x.backend, x.comm, &layer, 1, NULL, &ctx), RA_E_ARG, "layer 0",
                   "f64");
    assert_null(ctx);
    x.tensor[K].dtype = RA_F16;
    expect_refused(forward(&x), RA_E_SHAPE, "k: dtype f16", "bf16");
    rig_close(&x, x.tensor);
}

/* Sums of 400 GiB do not fit; afterwards the same ctx goes on with less. */
static void test_memory(void **state)
{
    (void)state;
    rig x;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    ra_layer layer = some_layer();
    ra_step_desc desc = {.size = sizeof desc, .rows = 1, .seq_local = (int64_t)1 << 20};
    void *memory = NULL;
    support_limit(60, "memory");
    expect(rig_open(&x));
    layer.q_heads = layer.kv_heads = 64;
    expect(ra_ctx_create(x.backend, x.comm, &layer, 1, NULL, &ctx));
    assert_int_equal(ra_step_create(ctx, &desc, &step), RA_E_NOMEM);
    assert_null(step);
    desc.seq_local = SEQ;
    expect(ra_step_create(ctx, &desc, &step));
    ra_step_free(step);
    ra_ctx_free(ctx);
    expect(forward(&x));
    assert_int_equal(ra_cuda_alloc(0, (size_t)1 << 50, &memory), RA_E_NOMEM);
    assert_null(memory);
    rig_close(&x, x.tensor);
}

static void test_opening(void **state)
{
    (void)state;
    ra_backend *none = NULL;
    ra_cuda_options wrong = {.size = 1};
    support_limit(60, "opening");
    assert_int_equal(ra_backend_open_cuda(-1, NULL, &none), RA_E_ARG);
    assert_int_equal(ra_backend_open_cuda(ra_cuda_device_count(), NULL, &none), RA_E_ARG);
    assert_int_equal(ra_backend_open_cuda(0, &wrong, &none), RA_E_ARG);
    assert_int_equal(ra_backend_open_cuda(0, NULL, NULL), RA_E_ARG);
    assert_null(none);
    expect_refused(ra_cuda_capability_check(0, 80), RA_E_UNSUPPORTED, "device: 0", "8.0");
    expect(ra_cuda_capability_check(0, 90));
    rig x;
    expect(rig_open(&x));
    assert_string_equal(ra_backend_name(x.backend), "cuda");
    assert_string_equal(ra_cuda_kernel(x.backend, false), "");
    rig_close(&x, x.tensor);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    /* Those with a child first: a child of a process that uses the device cannot. */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_device),    cmocka_unit_test(test_failed_device),
        cmocka_unit_test(test_opening),      cmocka_unit_test(test_host_memory),
        cmocka_unit_test(test_other_device), cmocka_unit_test(test_strides),
        cmocka_unit_test(test_dtypes),       cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
