/* Every maximum of the library in one place. A request past one of them is refused with its name
 * and value. */
#ifndef RA_BASE_LIMITS_H
#define RA_BASE_LIMITS_H

#include <stdint.h>

enum {
    RA_RANKS_MAX = 4096,
    RA_THREAD_RANKS_MAX = 1024, /* ranks of one process */
    RA_LAYERS_MAX = 16,
    RA_HEADS_MAX = 1024,
    RA_HEAD_DIM_MAX = 512,
    RA_HEAD_DIM_STEP = 8,
    RA_RUNS_MAX = 1 << 20, /* runs of one rank */
    RA_THREADS_MAX = 1024,
    RA_MESSAGE_BYTES = 512, /* of an error message, its end included */
    RA_TIMEOUT_MS_DEFAULT = 30000,
};

/* Batch rows, and positions of a row. Their product with heads and channels is checked by a step.
 */
#define RA_ROWS_MAX ((int64_t)1 << 24)
#define RA_SEQ_MAX ((int64_t)1 << 31)

#endif
