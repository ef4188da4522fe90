/* Ranks as forked processes, each with a GPU of its own and a communicator over NCCL. The parent
 * never touches CUDA, which does not survive a fork. Must not know what the ranks do. */
#ifndef RA_TESTS_NCCL_WORLD_H
#define RA_TESTS_NCCL_WORLD_H

#include <sys/types.h>

#include "ringattn_cuda.h"
#include "support_world.h"

enum { NCCL_RANKS_MAX = 8 };

/* Zeroed memory that forked processes share. */
void *shared_memory(size_t bytes);

int nccl_devices(void);             /* GPUs here */
const char *nccl_unavailable(void); /* why NCCL cannot be used, or NULL */

/* A rank's process: opens the comm and calls fn, which closes it. What fails is said in report;
 * nothing here or there asserts, for a failed assertion would go on as a second test program. */
typedef void (*nccl_fn)(int rank, ra_comm *comm, void *arg, rank_report *report);

/* A world under way. */
typedef struct nccl_world {
    int size;
    pid_t child[NCCL_RANKS_MAX];
    rank_report *report; /* [size] shared */
} nccl_world;

/* Rank r is on device r. */
void nccl_world_start(nccl_world *w, int size, nccl_fn fn, void *arg);
/* Waits for every process that has not been waited for; a process that ended badly is a failure of
 * its rank. */
void nccl_world_wait(nccl_world *w);
/* Fails the test for the first report of a failure. */
void nccl_world_check(const nccl_world *w);
/* All three. */
void nccl_world_run(int size, nccl_fn fn, void *arg);

/* In a rank's process: reports what is wrong instead of asserting it; false if it is. */
bool nccl_expect(rank_report *report, bool right, const char *what);

#endif
