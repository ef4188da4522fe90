/*
 * Runs exchanges in the order they are posted, beside the computation: on a thread of its own, or,
 * without overlap, at once on the caller's. Because every rank posts the same sequence, the order
 * alone pairs sends with receives. The first failure is final: later tasks are not run and report
 * the same. Must not know what a task does.
 */
#ifndef RA_RING_COURIER_H
#define RA_RING_COURIER_H

#include "base/status.h"

typedef struct ra_courier ra_courier;

/* The task's memory stays untouched until ra_courier_wait has returned for it. */
typedef struct ra_task {
    ra_status (*run)(void *arg);
    void *arg;
} ra_task;

enum {
    RA_COURIER_QUEUE = 8
}; /* tasks posted and not yet waited for: two slots of two kinds, and room */

ra_status ra_courier_create(bool own_thread, ra_courier **out);
/* Do exchanges run beside the computation? */
bool ra_courier_overlaps(const ra_courier *courier);
/* Returns the ticket to wait for. Never fails: a failure is reported by the wait. */
int64_t ra_courier_post(ra_courier *courier, ra_task task);
/* Says, within a task, that it is under way, and hands something to who waits for that. */
void ra_courier_say_begun(ra_courier *courier, void *handed);
/* Waits until the ticket's task has said so, for what it hands out; NULL if it is done already, or
 * others are still before it. */
void *ra_courier_wait_begun(ra_courier *courier, int64_t ticket);
/* Waits until the ticket's task and all before it are done; hands the failure and its message to
 * this thread. */
ra_status ra_courier_wait(ra_courier *courier, int64_t ticket);
/* Waits for everything posted, then forgets a failure. */
void ra_courier_drain(ra_courier *courier);
void ra_courier_free(ra_courier *courier);

#endif
