/* Thread ranks whose exchanges are queued behind events of the device, as those of a transport with
 * a stream of its own are: what the ring does for such transports, tested on one GPU. */
#ifndef RA_TESTS_QUEUED_COMM_H
#define RA_TESTS_QUEUED_COMM_H

#include "ringattn.h"

/* Like ra_comm_open_threads_cuda. */
ra_status queued_comms_open(int size, ra_comm **out_by_rank);

#endif
