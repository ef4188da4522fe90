/*
 * Progress of long work on standard error: a bar on a terminal, a plain line now and then
 * elsewhere, nothing at all for work of less than two seconds. Must not know what is worked on.
 */
#ifndef RA_CLI_PROGRESS_H
#define RA_CLI_PROGRESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct ra_progress {
    pthread_mutex_t lock;
    const char *label; /* borrowed */
    int64_t done, total, begin_ns, shown_ns;
    bool terminal, drawn;
} ra_progress;

void ra_progress_begin(ra_progress *progress, const char *label, int64_t total);
void ra_progress_add(ra_progress *progress, int64_t count); /* any thread */
void ra_progress_end(ra_progress *progress);                /* removes the bar */

#endif
