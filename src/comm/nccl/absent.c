/* What a build without nccl.h answers. */
#include "base/status.h"
#include "ringattn_cuda.h"

static ra_status refuse(void)
{
    return RA_FAIL(RA_E_UNAVAILABLE, "NCCL: built without nccl.h");
}

ra_status ra_nccl_id_create(ra_nccl_id *out)
{
    (void)out;
    return refuse();
}

ra_status ra_comm_open_nccl(const ra_nccl_id *id, int rank, int size, int device, ra_comm **out)
{
    (void)id;
    (void)rank;
    (void)size;
    (void)device;
    (void)out;
    return refuse();
}

const char *ra_nccl_version(void)
{
    return "";
}
