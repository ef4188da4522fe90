/* Monotonic time, and deadlines for condition variables. */
#ifndef RA_BASE_CLOCK_H
#define RA_BASE_CLOCK_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

static inline int64_t ra_clock_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The moment timeout_ms from now, for a condition that ra_cond_init made. */
static inline struct timespec ra_deadline(int timeout_ms)
{
    int64_t at = ra_clock_ns() + (int64_t)timeout_ms * 1000000;
    return (struct timespec){.tv_sec = at / 1000000000, .tv_nsec = at % 1000000000};
}

/* A condition whose deadlines are monotonic: setting the wall clock neither hangs nor wakes it. */
static inline int ra_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    int error = pthread_condattr_init(&attributes);
    if (!error) {
        pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
        error = pthread_cond_init(cond, &attributes);
        pthread_condattr_destroy(&attributes);
    }
    return error;
}

#endif
