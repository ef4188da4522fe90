/*
 * Ranks as processes, of MPI, or with a GPU each and NCCL between them: each runs the command line,
 * and a function runs once in each. A build without either knows threads only. Must not know what
 * the ranks compute.
 */
#ifndef RA_CLI_PROCESSES_H
#define RA_CLI_PROCESSES_H

#include "cli/world.h"

typedef enum ra_transport {
    RA_TRANSPORT_THREADS,
    RA_TRANSPORT_MPI,
    RA_TRANSPORT_NCCL
} ra_transport;

/* "threads", and "mpi" and "nccl" if this build has them. */
ra_status ra_transport_parse(const char *text, ra_transport *out);
/* Can ranks on this device use it? */
ra_status ra_transport_check(ra_transport transport, ra_device device, int ranks);

/* What every rank does first. NCCL: in a process that ra_launch started. */
ra_status ra_processes_start(ra_transport transport, int *rank, int *size);
/* Before what is collective: own, or RA_E_COMM if a rank of another machine has failed, whose files
 * may differ. Collective itself. */
ra_status ra_processes_agree(ra_transport transport, ra_status own);
/* Runs body as this process's rank; collective. */
ra_status ra_processes_run(ra_transport transport, ra_world_body body, void *user);
/* The last; failed: as if a rank were gone, without waiting for it. */
void ra_processes_end(ra_transport transport, bool failed);

#endif
