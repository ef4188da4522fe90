/* Starts, uses and ends MPI; left out of builds without it. */
#include "cli/processes.h"

#include <string.h>

#ifdef RA_WITH_MPI
#include <mpi.h>

#include "ringattn_mpi.h"
#endif

ra_status ra_transport_parse(const char *text, ra_transport *out)
{
#ifdef RA_WITH_MPI
    const char *expected = "threads or mpi";
    bool is_mpi = strcmp(text, "mpi") == 0;
#else
    const char *expected = "threads (built without MPI)";
    bool is_mpi = false;
#endif
    if (!is_mpi && strcmp(text, "threads") != 0) {
        return RA_FAIL(RA_E_ARG, "--transport: %.64s, expected %s", text, expected);
    }
    *out = is_mpi ? RA_TRANSPORT_MPI : RA_TRANSPORT_THREADS;
    return RA_OK;
}

#ifdef RA_WITH_MPI

ra_status ra_processes_start(int *rank, int *size)
{
    int level = MPI_THREAD_SINGLE;
    if (MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS) {
        return RA_FAIL(RA_E_COMM, "--transport: MPI could not be started");
    }
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, size);
    return RA_OK;
}

ra_status ra_processes_run(ra_world_body body, void *user)
{
    MPI_Comm world = MPI_COMM_WORLD;
    ra_comm *comm = NULL;
    RA_TRY(ra_comm_open_mpi(&world, &comm));
    ra_status status = body(comm, user);
    if (status) {
        /* The failure may have been outside a collective call; peers must not wait for it. */
        ra_comm_abort(comm, ra_last_error());
    }
    ra_comm_close(comm);
    return status;
}

void ra_processes_end(bool failed)
{
    if (!failed) {
        MPI_Finalize();
    }
}

#else

ra_status ra_processes_start(int *rank, int *size)
{
    (void)rank;
    (void)size;
    return RA_FAIL(RA_E_UNAVAILABLE, "--transport: built without MPI");
}

ra_status ra_processes_run(ra_world_body body, void *user)
{
    (void)body;
    (void)user;
    return RA_FAIL(RA_E_UNAVAILABLE, "--transport: built without MPI");
}

void ra_processes_end(bool failed)
{
    (void)failed;
}

#endif
