/* Starts, uses and ends MPI and NCCL; each is left out of builds without it. */
#include "cli/processes.h"

#include <string.h>

#include "cli/launch.h"

#ifdef RA_WITH_MPI
#include <mpi.h>

#include "ringattn_mpi.h"
#define EXPECTED_MPI ", mpi"
#else
#define EXPECTED_MPI ""
#endif
#ifdef RA_WITH_CUDA
#include "ringattn_cuda.h"
#define EXPECTED_NCCL ", nccl"
#else
#define EXPECTED_NCCL ""
#endif

ra_status ra_transport_parse(const char *text, ra_transport *out)
{
    static const struct {
        const char *name;
        ra_transport transport;
    } known[] = {
        {"threads", RA_TRANSPORT_THREADS},
#ifdef RA_WITH_MPI
        {"mpi", RA_TRANSPORT_MPI},
#endif
#ifdef RA_WITH_CUDA
        {"nccl", RA_TRANSPORT_NCCL},
#endif
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(text, known[i].name) == 0) {
            *out = known[i].transport;
            return RA_OK;
        }
    }
    return RA_FAIL(RA_E_ARG, "--transport: %.64s, expected threads%s%s (what this build has)", text,
                   EXPECTED_MPI, EXPECTED_NCCL);
}

ra_status ra_transport_check(ra_transport transport, ra_device device, int ranks)
{
    int devices = ra_device_count(device);
    if (transport == RA_TRANSPORT_NCCL && device != RA_DEVICE_CUDA) {
        return RA_FAIL(RA_E_ARG, "--transport: nccl moves device memory, expected --backend cuda");
    }
    if (transport == RA_TRANSPORT_NCCL && devices < 1) {
        return RA_FAIL(RA_E_UNAVAILABLE, "--transport: nccl, but this machine has no CUDA device");
    }
    if (transport == RA_TRANSPORT_NCCL && ranks > devices) {
        return RA_FAIL(RA_E_ARG, "--ranks: %d, expected at most %d: NCCL takes one rank a GPU",
                       ranks, devices);
    }
    return RA_OK;
}

static ra_status refuse(void)
{
    return RA_FAIL(RA_E_UNAVAILABLE, "--transport: not in this build");
}

/* ---- MPI */

#ifdef RA_WITH_MPI

static ra_status start_mpi(int *rank, int *size)
{
    int level = MPI_THREAD_SINGLE;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS) {
        return RA_FAIL(RA_E_COMM, "--transport: MPI could not be started");
    }
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, size);
    return RA_OK;
}

static ra_status open_mpi(ra_comm **out)
{
    MPI_Comm world = MPI_COMM_WORLD;
    return ra_comm_open_mpi(&world, out);
}

static ra_status agree_mpi(ra_status own)
{
    int any = own ? 1 : 0;
    MPI_Allreduce(MPI_IN_PLACE, &any, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
    return own || !any ? own
                       : RA_FAIL(RA_E_COMM, "another rank could not begin, its message says why");
}

static void end_mpi(bool failed)
{
    if (!failed) {
        MPI_Finalize();
    }
}

#else

static ra_status start_mpi(int *rank, int *size)
{
    (void)rank;
    (void)size;
    return refuse();
}

static ra_status open_mpi(ra_comm **out)
{
    (void)out;
    return refuse();
}

static ra_status agree_mpi(ra_status own)
{
    return own;
}

static void end_mpi(bool failed)
{
    (void)failed;
}

#endif

/* ---- NCCL */

#ifdef RA_WITH_CUDA

static ra_status open_nccl(ra_comm **out)
{
    ra_nccl_id id;
    int rank = 0, size = 1;
    ra_launched(&rank, &size);
    if (rank == 0) {
        RA_TRY(ra_nccl_id_create(&id));
    }
    RA_TRY(ra_launch_share(&id, sizeof id));
    return ra_comm_open_nccl(&id, rank, size, ra_device_index(rank), out);
}

#else

static ra_status open_nccl(ra_comm **out)
{
    (void)out;
    return refuse();
}

#endif

/* ---- both */

/* Opening takes a while, so one comm serves all cases, until a failure. */
static ra_comm *kept;

ra_status ra_processes_start(ra_transport transport, int *rank, int *size)
{
    if (transport == RA_TRANSPORT_MPI) {
        return start_mpi(rank, size);
    }
    return ra_launched(rank, size) ? RA_OK : refuse();
}

/* Processes with NCCL are of one machine and read the same files; who ends early ends the others,
 * see cli/launch.h. */
ra_status ra_processes_agree(ra_transport transport, ra_status own)
{
    return transport == RA_TRANSPORT_MPI ? agree_mpi(own) : own;
}

ra_status ra_processes_run(ra_transport transport, ra_world_body body, void *user)
{
    if (!kept) {
        RA_TRY(transport == RA_TRANSPORT_MPI ? open_mpi(&kept) : open_nccl(&kept));
    }
    ra_status status = body(kept, user);
    if (status) {
        /* The failure may have been outside a collective call; peers must not wait for it. */
        ra_comm_abort(kept, ra_last_error());
        ra_comm_close(kept);
        kept = NULL;
    }
    return status;
}

void ra_processes_end(ra_transport transport, bool failed)
{
    ra_comm_close(kept);
    kept = NULL;
    if (transport == RA_TRANSPORT_MPI) {
        end_mpi(failed);
    }
}
