/*
 * Uses an installed ringattn as any program would: one rank, one causal head, forward only. With
 * all keys equal to zero every visible key weighs the same, so row i of the output is the mean of
 * the values 0 to i, and its lse is ln(i + 1). Must not know the project's build tree.
 */
#include <math.h>
#include <stdio.h>

#include <ringattn.h>

enum { SEQ = 4, DIM = 8 };

static int fail(const char *what)
{
    fprintf(stderr, "consumer: %s: %s\n", what, ra_last_error());
    return 1;
}

static int check(const float *out, const float *lse)
{
    for (int i = 0; i < SEQ; i++) {
        double mean = i / 2.0;
        if (fabs(out[i * DIM] - mean) > 1e-6 || fabs(lse[i] - log(i + 1.0)) > 1e-6) {
            fprintf(stderr, "consumer: row %d: out %g, expected %g; lse %g, expected %g\n", i,
                    (double)out[i * DIM], mean, (double)lse[i], log(i + 1.0));
            return 1;
        }
    }
    printf("ringattn %s: %d rows as expected\n", ra_version(), SEQ);
    return 0;
}

static int run(ra_ctx *ctx)
{
    static float q[SEQ * DIM], k[SEQ * DIM], v[SEQ * DIM], out[SEQ * DIM], lse[SEQ];
    for (int i = 0; i < SEQ * DIM; i++) {
        v[i] = (float)(i / DIM);
    }
    ra_step *step = NULL;
    ra_step_desc desc = {.size = sizeof desc, .rows = 1, .seq_local = SEQ};
    if (ra_step_create(ctx, &desc, &step)) {
        return fail("step");
    }
    ra_forward_io io = {
        .size = sizeof io,
        .q = ra_tensor_bhsd(q, RA_F32, 1, 1, SEQ, DIM),
        .k = ra_tensor_bhsd(k, RA_F32, 1, 1, SEQ, DIM),
        .v = ra_tensor_bhsd(v, RA_F32, 1, 1, SEQ, DIM),
        .out = ra_tensor_bhsd(out, RA_F32, 1, 1, SEQ, DIM),
        .lse = ra_tensor_bhsd(lse, RA_F32, 1, 1, SEQ, 1),
    };
    ra_status status = ra_attn_forward(ctx, ra_step_plan(step, 0), &io, (ra_stream){NULL});
    ra_step_free(step);
    return status ? fail("forward") : check(out, lse);
}

int main(void)
{
    ra_layer layer = {.size = sizeof layer,
                      .q_heads = 1,
                      .kv_heads = 1,
                      .head_dim = DIM,
                      .dtype = RA_F32,
                      .scale = 1.0f,
                      .causal = true};
    ra_backend *backend = NULL;
    ra_comm *comm = NULL;
    ra_ctx *ctx = NULL;
    int result;
    if (ra_backend_open_cpu(1, NULL, &backend)) {
        result = fail("backend");
    } else if (ra_comm_open_threads(1, &comm)) {
        result = fail("comm");
    } else if (ra_ctx_create(backend, comm, &layer, 1, NULL, &ctx)) {
        result = fail("ctx");
    } else {
        result = run(ctx);
    }
    ra_ctx_free(ctx);
    ra_comm_close(comm);
    ra_backend_close(backend);
    return result;
}
