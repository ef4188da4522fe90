/* Draws at most ten times a second on a terminal and once in ten seconds elsewhere. */
#include "cli/progress.h"

#include <stdio.h>
#include <unistd.h>

#include "base/clock.h"

#define SECOND_NS ((int64_t)1000000000)

void ra_progress_begin(ra_progress *progress, const char *label, int64_t total)
{
    *progress = (ra_progress){.label = label, .total = total, .begin_ns = ra_clock_ns()};
    progress->terminal = isatty(STDERR_FILENO) == 1;
    pthread_mutex_init(&progress->lock, NULL);
}

static void draw(ra_progress *progress, int64_t elapsed_ns)
{
    enum { WIDTH = 30 };
    char bar[WIDTH + 1];
    double share = progress->total > 0 ? (double)progress->done / (double)progress->total : 0;
    for (int i = 0; i < WIDTH; i++) {
        bar[i] = i < (int)(share * WIDTH) ? '#' : '.';
    }
    bar[WIDTH] = 0;
    if (progress->terminal) {
        fprintf(stderr, "\r\033[K%.48s [%s] %3.0f %% %lld s", progress->label, bar, 100 * share,
                (long long)(elapsed_ns / SECOND_NS));
        progress->drawn = true;
    } else {
        fprintf(stderr, "ringattn: %.48s: %.0f %% after %lld s\n", progress->label, 100 * share,
                (long long)(elapsed_ns / SECOND_NS));
    }
}

void ra_progress_add(ra_progress *progress, int64_t count)
{
    pthread_mutex_lock(&progress->lock);
    progress->done += count;
    int64_t now = ra_clock_ns(), elapsed = now - progress->begin_ns;
    int64_t pause = progress->terminal ? SECOND_NS / 10 : 10 * SECOND_NS;
    if (elapsed > 2 * SECOND_NS && now - progress->shown_ns > pause) {
        progress->shown_ns = now;
        draw(progress, elapsed);
    }
    pthread_mutex_unlock(&progress->lock);
}

void ra_progress_end(ra_progress *progress)
{
    if (progress->drawn) {
        fputs("\r\033[K", stderr);
    }
    pthread_mutex_destroy(&progress->lock);
}
