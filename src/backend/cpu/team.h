/* A persistent team of threads that shares out numbered items. Turns a function of an item into a
 * parallel loop. Must not know what the items are. */
#ifndef RA_BACKEND_CPU_TEAM_H
#define RA_BACKEND_CPU_TEAM_H

#include <stdatomic.h>

#include "base/status.h"

typedef struct ra_team ra_team;

/* worker: 0 is the caller of ra_team_run, the others are below ra_team_size. */
typedef void ra_team_work(void *arg, int64_t item, int worker);

/* threads includes the caller: a team of 1 starts no thread. RA_E_NOMEM if one cannot start. */
ra_status ra_team_open(int threads, ra_team **out);
int ra_team_size(const ra_team *team);

/* Calls work once for every item of [0, count), in ascending order as workers become free, and
 * returns when all are done. One call at a time. */
void ra_team_run(ra_team *team, int64_t count, ra_team_work *work, void *arg);
void ra_team_close(ra_team *team);

/* Inside an item: waits until `progress` is at least `wanted`, which only items before this one
 * may have to bring about. */
void ra_team_await(const atomic_llong *progress, int64_t wanted);

#endif
