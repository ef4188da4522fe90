/* The CPU backend's state, and the operations of its table. Must not know kernels' insides. */
#ifndef RA_BACKEND_CPU_CPU_H
#define RA_BACKEND_CPU_CPU_H

#include <pthread.h>

#include "backend/backend.h"
#include "backend/cpu/level.h"
#include "backend/cpu/team.h"

/* Memory of a tiling. */
typedef struct ra_tile_counts {
    int64_t *first;
    int64_t capacity;
} ra_tile_counts;

typedef struct ra_cpu {
    const ra_level *level;
    ra_team *team;
    pthread_mutex_t busy; /* one operation at a time, so that ranks may share a backend */
    /* Kept from call to call, grown at need, before anything is computed. */
    char *scratch; /* team size parts of scratch_part bytes */
    int64_t scratch_bytes, scratch_part;
    ra_tile_counts tiles[2];
    atomic_llong *progress; /* of the items of a grad */
    int64_t progress_capacity;
} ra_cpu;

/* Makes every worker's scratch at least `part` bytes; its content is undefined. */
ra_status ra_cpu_scratch_reserve(ra_cpu *cpu, int64_t part);

static inline char *ra_cpu_scratch(const ra_cpu *cpu, int worker)
{
    return cpu->scratch + worker * cpu->scratch_part;
}

/* Of the ops table; the caller holds `busy`. */
ra_status ra_cpu_fold(ra_cpu *cpu, const ra_fold_job *job);
ra_status ra_cpu_grad(ra_cpu *cpu, const ra_grad_job *job);
void ra_cpu_fill(ra_cpu *cpu, const ra_tensor *t, float value);
void ra_cpu_add(const ra_tensor *to, const ra_tensor *from);
void ra_cpu_cast(ra_cpu *cpu, const ra_tensor *to, const ra_tensor *from);
void ra_cpu_row_dot(ra_cpu *cpu, const ra_tensor *a, const ra_tensor *b, const ra_tensor *dot);

#endif
