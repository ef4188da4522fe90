/* The handle around a backend's table, and what tables share. Must not know any backend. */
#include "backend/backend.h"

#include "base/alloc.h"

ra_status ra_backend_wrap(const ra_backend_ops *ops, void *self, ra_backend **out)
{
    ra_backend *backend = NULL;
    ra_status status = RA_NEW(&backend, 1);
    if (status) {
        ops->close(self);
        return status;
    }
    *backend = (ra_backend){ops, self};
    *out = backend;
    return RA_OK;
}

const char *ra_backend_name(const ra_backend *backend)
{
    return backend->ops->name;
}

const char *ra_backend_level(const ra_backend *backend)
{
    return backend->ops->level(backend->self);
}

void ra_backend_close(ra_backend *backend)
{
    if (backend) {
        backend->ops->close(backend->self);
        ra_free(backend);
    }
}

ra_status ra_backend_check(const ra_backend *backend, const ra_tensor *t, const char *name)
{
    return backend->ops->check(backend->self, t, name);
}

ra_status ra_backend_check_nothing(void *self, const ra_tensor *t, const char *name)
{
    (void)self;
    (void)t;
    (void)name;
    return RA_OK;
}

ra_status ra_backend_grad_by_sums(const ra_backend_ops *ops, void *self, const ra_grad_job *job,
                                  const ra_grad_results *to)
{
    const ra_tensor *dk = &job->dk[RA_SOURCE_OWN], *dv = &job->dv[RA_SOURCE_OWN];
    RA_TRY(ops->fill(self, &job->dq, 0.0f));
    RA_TRY(ops->fill(self, dk, 0.0f));
    RA_TRY(ops->fill(self, dv, 0.0f));
    RA_TRY(ops->grad(self, job));
    RA_TRY(ops->cast(self, &to->dq, &job->dq));
    RA_TRY(ops->cast(self, &to->dk, dk));
    return ops->cast(self, &to->dv, dv);
}
