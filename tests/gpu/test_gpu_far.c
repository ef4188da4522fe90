/* Tensors of more than 2^31 elements: 36 heads of 131,072 positions of 512 channels under a short
 * window, forward and backward, with as many key heads and with half of them. Slices on both sides
 * of 2^31 elements, of 2^32 bytes and at the ends are compared with the oracle of the slice alone:
 * behind a window of it, it holds all that its rows see. */
#include <stdio.h>
#include <stdlib.h>

#include "on_device.h"
#include "oracle/tolerance.h"
#include "ringattn_cuda.h"
#include "support_problem.h"
#include "tensor/tensor.h"

/* Tensors stay on the device: no copies around the calls. */
#undef ra_attn_forward
#undef ra_attn_backward
#undef ra_backend_close

enum { HEADS = 36, SEQ = 131072, CHAN = 512, WINDOW = 64, LENGTH = 224 };
enum { PERIOD = 8209 }; /* rows of the data; prime, so that no far row looks like a near one */

enum { Q, K, V, DOUT, OUT, DQ, DK, DV, LSE, TENSORS };

typedef struct far_case {
    ra_layer layer;
    ra_tensor tensor[TENSORS];
} far_case;

static void expect(ra_status status)
{
    if (status) {
        fail_msg("%s: %s", support_case(), ra_last_error());
    }
}

/* ---- data */

static uint16_t *period_create(void)
{
    rng r = rng_of(support_seed());
    uint16_t *rows = malloc((size_t)PERIOD * CHAN * sizeof *rows);
    assert_non_null(rows);
    for (int i = 0; i < PERIOD * CHAN; i++) {
        rows[i] = ra_f32_to_bf16((float)rng_normal(&r));
    }
    return rows;
}

static void fill(const ra_tensor *t, const uint16_t *period, int64_t phase)
{
    int64_t rows = ra_tensor_count(t) / CHAN, row_bytes = CHAN * (int64_t)sizeof *period;
    for (int64_t at = 0; at < rows;) {
        int64_t from = (at + phase) % PERIOD;
        int64_t count = PERIOD - from < rows - at ? PERIOD - from : rows - at;
        expect(ra_cuda_copy((char *)t->data + at * row_bytes,
                            (const char *)period + from * row_bytes, (size_t)(count * row_bytes),
                            (ra_stream){0}));
        at += count;
    }
}

/* False if the device has not enough memory. */
static bool case_create(far_case *c, int kv_heads)
{
    *c = (far_case){.layer = layer_of(HEADS, kv_heads, CHAN, RA_BF16)};
    c->layer.window = WINDOW;
    c->layer.scale = 0.0442f; /* 1 / sqrt(CHAN) */
    for (int i = 0; i < TENSORS; i++) {
        bool of_keys = i == K || i == V || i == DK || i == DV;
        ra_tensor t = ra_tensor_bhsd(NULL, i == LSE ? RA_F32 : RA_BF16, 1,
                                     of_keys ? kv_heads : HEADS, SEQ, i == LSE ? 1 : CHAN);
        size_t bytes = (size_t)ra_tensor_count(&t) * ra_dtype_bytes(t.dtype);
        ra_status status = ra_cuda_alloc(0, bytes, &t.data);
        if (status == RA_E_NOMEM) {
            return false;
        }
        expect(status);
        c->tensor[i] = t;
    }
    return true;
}

static void case_free(far_case *c)
{
    for (int i = 0; i < TENSORS; i++) {
        ra_cuda_free(c->tensor[i].data);
    }
}

/* ---- computation */

/* False if the device has not enough memory. */
static bool compute(const far_case *c)
{
    ra_backend *backend = NULL;
    ra_comm *comm = NULL;
    ra_ctx *ctx = NULL;
    ra_step *step = NULL;
    const ra_tensor *t = c->tensor;
    ra_step_desc desc = {.size = sizeof desc, .rows = 1, .seq_local = SEQ};
    expect(ra_backend_open_cuda(0, NULL, &backend));
    expect(ra_comm_open_threads_cuda(1, &comm));
    expect(ra_ctx_create(backend, comm, &c->layer, 1, NULL, &ctx));
    ra_status status = ra_step_create(ctx, &desc, &step);
    if (!status) {
        const ra_plan *plan = ra_step_plan(step, 0);
        ra_forward_io forward = {
            .size = sizeof forward, .q = t[Q], .k = t[K], .v = t[V], .out = t[OUT], .lse = t[LSE]};
        ra_backward_io backward = {.size = sizeof backward,
                                   .q = t[Q],
                                   .k = t[K],
                                   .v = t[V],
                                   .out = t[OUT],
                                   .lse = t[LSE],
                                   .dout = t[DOUT],
                                   .dq = t[DQ],
                                   .dk = t[DK],
                                   .dv = t[DV]};
        expect(ra_attn_forward(ctx, plan, &forward, (ra_stream){0}));
        expect(ra_attn_backward(ctx, plan, &backward, (ra_stream){0}));
        expect(ra_cuda_wait((ra_stream){0}));
        printf("%d/%d heads: %s forward, %s backward\n", c->layer.q_heads, c->layer.kv_heads,
               ra_cuda_kernel(backend, false), ra_cuda_kernel(backend, true));
    }
    ra_step_free(step);
    ra_ctx_free(ctx);
    ra_comm_close(comm);
    ra_backend_close(backend);
    assert_true(status == RA_OK || status == RA_E_NOMEM);
    return !status;
}

/* ---- comparison */

/* Positions [begin, begin + LENGTH) of heads [head, head + to->heads). */
static void download(const ra_tensor *from, int64_t head, int64_t begin, const ra_tensor *to)
{
    size_t bytes = (size_t)(LENGTH * to->size[RA_CHAN]) * ra_dtype_bytes(to->dtype);
    for (int64_t h = 0; h < to->size[RA_HEAD]; h++) {
        expect(ra_cuda_copy(ra_tensor_at(to, 0, h, 0), ra_tensor_at(from, 0, head + h, begin),
                            bytes, (ra_stream){0}));
    }
}

static void compare(const char *name, const ra_tensor *got, const ra_tensor *plain,
                    const ra_tensor *oracle, ra_dtype rule, int64_t begin)
{
    int64_t first = begin == 0 ? 0 : WINDOW - 1;
    int64_t count = (begin + LENGTH == SEQ ? LENGTH : LENGTH - WINDOW + 1) - first;
    ra_tensor slice[] = {ra_tensor_slice_seq(got, first, count),
                         ra_tensor_slice_seq(plain, first, count),
                         ra_tensor_slice_seq(oracle, first, count)};
    ra_comparison c;
    expect(ra_compare(&slice[0], &slice[1], &slice[2], rule, &c));
    if (!c.pass) {
        fail_msg("%s: %s: max error %.3g (allowed %.3g), rms %.3g (%.3g)", support_case(), name,
                 c.max_error, c.max_allowed, c.rms_error, c.rms_allowed);
    }
}

static void check_slice(const far_case *c, int kv_head, int64_t begin)
{
    int group = c->layer.q_heads / c->layer.kv_heads;
    int64_t head = (int64_t)kv_head * group;
    problem p;
    reference ref;
    answer got;
    ra_layer layer = c->layer;
    layer.q_heads = group;
    layer.kv_heads = 1;
    problem_create(&p, layer, 1, LENGTH);
    answer_create(&got, &p, RA_BF16, RA_F32, false);
    const ra_tensor *to[TENSORS] = {&p.q,    &p.k,    &p.v,    &p.dout, &got.out,
                                    &got.dq, &got.dk, &got.dv, &got.lse};
    for (int i = 0; i < TENSORS; i++) {
        bool of_keys = i == K || i == V || i == DK || i == DV;
        download(&c->tensor[i], of_keys ? kv_head : head, begin, to[i]);
    }
    reference_create(&ref, &p);
    compare("out", &got.out, &ref.plain.out, &ref.oracle.out, RA_BF16, begin);
    compare("lse", &got.lse, &ref.plain.lse, &ref.oracle.lse, RA_F32, begin);
    compare("dq", &got.dq, &ref.plain.dq, &ref.oracle.dq, RA_BF16, begin);
    compare("dk", &got.dk, &ref.plain.dk, &ref.oracle.dk, RA_BF16, begin);
    compare("dv", &got.dv, &ref.plain.dv, &ref.oracle.dv, RA_BF16, begin);
    reference_free(&ref);
    answer_free(&got, false);
    problem_free(&p);
}

static void check_far(const uint16_t *period, int kv_heads)
{
    /* Heads of 2^26 elements: element 2^31 begins head 32, byte 2^32 of f32 sums head 16. */
    static const int samples[] = {0, 15, 16, 31, 32, 35};
    static const int64_t begins[] = {0, SEQ / 2 - 37, SEQ - LENGTH};
    far_case c;
    support_limit(100, "far offsets, %d key heads", kv_heads);
    bool fits = case_create(&c, kv_heads);
    for (int i = Q; fits && i <= DOUT; i++) {
        fill(&c.tensor[i], period, 1000 * i);
    }
    fits = fits && compute(&c);
    if (!fits) {
        print_message("skipped: %d key heads, the device has not enough memory\n", kv_heads);
    }
    for (int i = 0; fits && i < 6; i++) {
        for (int j = 0; j < 3; j++) {
            check_slice(&c, samples[i] * kv_heads / HEADS, begins[j]);
        }
    }
    case_free(&c);
}

static void test_far(void **state)
{
    (void)state;
    uint16_t *period = period_create();
    check_far(period, HEADS);
    check_far(period, HEADS / 2);
    free(period);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_far)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
