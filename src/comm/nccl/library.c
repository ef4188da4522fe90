/* Loads NCCL and looks its functions up. */
#include "comm/nccl/library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "ringattn_cuda.h"

static const char library_name[] = "libnccl.so.2";

static ra_status look_up(void *library, const char *name, void *member)
{
    void *function = dlsym(library, name);
    if (!function) {
        return RA_FAIL(RA_E_UNAVAILABLE, "%s: no function %s, expected NCCL 2.14 or newer",
                       library_name, name);
    }
    memcpy(member, &function, sizeof function);
    return RA_OK;
}

ra_status ra_nccl_load(ra_nccl_library *out)
{
    void *library = dlopen(library_name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    /* NCCL has threads that outlive its communicators: never unloaded. */
    library = library ? library : dlopen(library_name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) {
        return RA_FAIL(RA_E_UNAVAILABLE, "NCCL: %.400s", dlerror());
    }
#define LOOK_UP(member, name) RA_TRY(look_up(library, #name, &out->member));
    RA_NCCL_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
    return RA_OK;
}

const char *ra_nccl_version(void)
{
    static _Thread_local char text[32];
    ra_nccl_library nccl;
    int code = 0;
    if (ra_nccl_load(&nccl) || nccl.version(&code) != ncclSuccess) {
        return "";
    }
    /* From 2.9 on a version is 10000 major + 100 minor + patch. */
    snprintf(text, sizeof text, "%d.%d.%d", code / 10000, code / 100 % 100, code % 100);
    return text;
}
