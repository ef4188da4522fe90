/* See device_job.h. */
#include "device_job.h"

#include "ringattn_cuda.h"

#undef ra_backend_close /* what is opened here is closed, not kept */

ra_backend *device_job_open(bool simple_only)
{
    ra_backend *backend = NULL;
    ra_cuda_options options = {.size = sizeof options, .simple_only = simple_only};
    device_job_expect(ra_backend_open_cuda(0, &options, &backend));
    return backend;
}

void device_job_close(ra_backend *backend)
{
    ra_backend_close(backend);
}

void device_job_expect(ra_status status)
{
    if (status) {
        fail_msg("%s: %s", support_case(), ra_last_error());
    }
}

static void *prepare(const ra_backend *backend, const ra_cover *cover, const cover_case *c)
{
    void *prepared = NULL;
    ra_layer layer = {
        .size = sizeof layer,
        .q_heads = (int)c->q_heads,
        .kv_heads = (int)c->kv_heads,
        .head_dim = (int)c->chan,
        .dtype = c->dtype,
        .scale = c->scale,
    };
    device_job_expect(backend->ops->prepare(backend->self, cover, &layer, &prepared));
    return prepared;
}

void device_job_fold(const ra_backend *backend, const cover_case *c, ra_fold_job *job)
{
    ra_tensor *list[] = {&job->q,    &job->k[0], &job->k[1], &job->v[0],
                         &job->v[1], &job->acc,  &job->lse,  &job->out};
    device_copy copy;
    void *prepared = prepare(backend, job->cover, c);
    device_job_expect(device_copy_put(&copy, list, sizeof list / sizeof *list));
    job->prepared = prepared;
    ra_status status = backend->ops->fold(backend->self, job);
    backend->ops->discard(backend->self, prepared);
    device_job_expect(status);
    device_job_expect(device_copy_get(&copy));
}

void device_job_grad(const ra_backend *backend, const cover_case *c, ra_grad_job *job)
{
    ra_tensor *list[] = {&job->q,     &job->dout,  &job->k[0],  &job->k[1],
                         &job->v[0],  &job->v[1],  &job->lse,   &job->delta,
                         &job->dq,    &job->dk[0], &job->dk[1], &job->dv[0],
                         &job->dv[1], &job->to.dq, &job->to.dk, &job->to.dv};
    device_copy copy;
    void *prepared = prepare(backend, job->cover, c);
    device_job_expect(device_copy_put(&copy, list, sizeof list / sizeof *list));
    job->prepared = prepared;
    ra_status status = backend->ops->grad(backend->self, job);
    backend->ops->discard(backend->self, prepared);
    device_job_expect(status);
    device_job_expect(device_copy_get(&copy));
}

double device_job_tolerance(ra_dtype dtype, bool simple)
{
    double unit = dtype == RA_BF16 ? 0x1p-8 : 0x1p-11;
    return simple || dtype == RA_F32 ? 2e-5 : 2 * unit;
}
