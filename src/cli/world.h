/*
 * Ranks as threads of this process: one function runs once per rank, and many statuses become one.
 * Must not know what the ranks compute.
 */
#ifndef RA_CLI_WORLD_H
#define RA_CLI_WORLD_H

#include "cli/device.h"

typedef ra_status (*ra_world_body)(ra_comm *comm, void *user);

/* Runs body on `ranks` threads and waits for all. A rank that fails aborts the others; of several
 * failures the first that is not the echo of another rank's (RA_E_COMM) is returned, with its rank
 * in the message. */
ra_status ra_world_run(ra_device device, int ranks, ra_world_body body, void *user);

#endif
