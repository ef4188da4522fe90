/*
 * Ranks as processes of MPI: each runs the command line, and a function runs once in each. A build
 * without MPI knows threads only. Must not know what the ranks compute.
 */
#ifndef RA_CLI_PROCESSES_H
#define RA_CLI_PROCESSES_H

#include "cli/world.h"

typedef enum ra_transport { RA_TRANSPORT_THREADS, RA_TRANSPORT_MPI } ra_transport;

/* "threads", or "mpi" if this build has it. */
ra_status ra_transport_parse(const char *text, ra_transport *out);

/* Starts MPI. */
ra_status ra_processes_start(int *rank, int *size);
/* Runs body as this process's rank; collective. */
ra_status ra_processes_run(ra_world_body body, void *user);
/* Ends MPI; failed: as if a rank were gone, without waiting for it. */
void ra_processes_end(bool failed);

#endif
