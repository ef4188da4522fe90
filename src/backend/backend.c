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

void *ra_backend_no_event(void *self, int mark)
{
    (void)self;
    (void)mark;
    return NULL;
}

ra_status ra_backend_follow_nothing(void *self, void *event)
{
    (void)self;
    (void)event;
    return RA_OK;
}

ra_status ra_backend_wait_nothing(void *self)
{
    (void)self;
    return RA_OK;
}
