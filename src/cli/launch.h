/*
 * Starts this program once for each rank, on this machine, and waits for all: if one process ends
 * badly, the others are ended too, and its rank is said. Must not know what the ranks do.
 */
#ifndef RA_CLI_LAUNCH_H
#define RA_CLI_LAUNCH_H

#include "base/status.h"

/* Runs the command line in `ranks` processes. The exit status: the largest of theirs. */
int ra_launch(int ranks, char **argv);

/* Is this one of the processes that ra_launch started? */
bool ra_launched(int *rank, int *size);
/* Brings rank 0's bytes, at most 512, to all ranks; a call of every rank. */
ra_status ra_launch_share(void *bytes, size_t count);

#endif
