/* Makes, calls and frees what a benchmark runs. */
#include "gpu_bench_job.h"

#include <cmath>

#include "gpu_bench.h"

ra_layer job_layer(int q_heads, int kv_heads, int head_dim, bool causal, int64_t window)
{
    ra_layer layer = {};
    layer.size = sizeof layer;
    layer.q_heads = q_heads;
    layer.kv_heads = kv_heads;
    layer.head_dim = head_dim;
    layer.dtype = RA_BF16;
    layer.scale = 1.0f / sqrtf((float)head_dim);
    layer.causal = causal;
    layer.window = window;
    return layer;
}

void job_make_tensors(job *j, const job_allocator &tensor, bool backward)
{
    const int64_t q = j->layer.q_heads, k = j->layer.kv_heads, d = j->layer.head_dim;
    ra_forward_io &f = j->forward;
    f.size = sizeof f;
    f.q = tensor(RA_BF16, q, d, 1);
    f.k = tensor(RA_BF16, k, d, 2);
    f.v = tensor(RA_BF16, k, d, 3);
    f.out = tensor(RA_BF16, q, d, 0);
    f.lse = tensor(RA_F32, q, 1, 0);
    ra_backward_io &b = j->backward;
    b.size = sizeof b;
    b.q = f.q;
    b.k = f.k;
    b.v = f.v;
    b.out = f.out;
    b.lse = f.lse;
    if (backward) {
        b.dout = tensor(RA_BF16, q, d, 4);
        b.dq = tensor(RA_BF16, q, d, 0);
        b.dk = tensor(RA_BF16, k, d, 0);
        b.dv = tensor(RA_BF16, k, d, 0);
    }
}

void job_call(const job &j, bool backward)
{
    if (backward) {
        MUST_RA(ra_attn_backward(j.ctx, j.plan, &j.backward, ra_stream{}));
    } else {
        MUST_RA(ra_attn_forward(j.ctx, j.plan, &j.forward, ra_stream{}));
    }
}

void job_close(job *j)
{
    ra_step_free(j->step);
    ra_ctx_free(j->ctx);
    ra_tensor *owned[] = {&j->forward.q,   &j->forward.k,   &j->forward.v,
                          &j->forward.out, &j->forward.lse, &j->backward.dout,
                          &j->backward.dq, &j->backward.dk, &j->backward.dv};
    for (ra_tensor *t : owned) {
        ra_cuda_free(t->data);
    }
}
