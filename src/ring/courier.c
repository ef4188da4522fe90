/* A queue of tasks and the thread that works it off. */
#include "ring/courier.h"

#include <pthread.h>
#include <stdio.h>

#include "base/alloc.h"
#include "base/limits.h"

struct ra_courier {
    bool own_thread, stop;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    ra_task queue[RA_COURIER_QUEUE];
    int64_t posted, begun, done; /* tasks so far; a ticket is `posted` after its post */
    void *handed;                /* by the task that has begun last */
    ra_status status;            /* the first failure */
    char message[RA_MESSAGE_BYTES];
};

/* Runs the next task unless one has failed; the lock is not held meanwhile. */
static void run_next(ra_courier *c)
{
    ra_task task = c->queue[c->done % RA_COURIER_QUEUE];
    bool runs = c->status == RA_OK;
    pthread_mutex_unlock(&c->lock);
    ra_status status = runs ? task.run(task.arg) : RA_OK;
    pthread_mutex_lock(&c->lock);
    if (status) {
        c->status = status;
        snprintf(c->message, sizeof c->message, "%s", ra_last_error());
    }
    c->done++;
    pthread_cond_broadcast(&c->changed);
}

static void *work(void *arg)
{
    ra_courier *c = arg;
    pthread_mutex_lock(&c->lock);
    while (!c->stop || c->done < c->posted) {
        if (c->done < c->posted) {
            run_next(c);
        } else {
            pthread_cond_wait(&c->changed, &c->lock);
        }
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

ra_status ra_courier_create(bool own_thread, ra_courier **out)
{
    ra_courier *c = NULL;
    RA_TRY(RA_NEW(&c, 1));
    c->own_thread = own_thread;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    if (own_thread && pthread_create(&c->thread, NULL, work, c)) {
        c->own_thread = false;
        ra_courier_free(c);
        return RA_FAIL(RA_E_NOMEM, "no thread for the exchanges");
    }
    *out = c;
    return RA_OK;
}

bool ra_courier_overlaps(const ra_courier *c)
{
    return c->own_thread;
}

int64_t ra_courier_post(ra_courier *c, ra_task task)
{
    pthread_mutex_lock(&c->lock);
    RA_CHECK(c->posted - c->done < RA_COURIER_QUEUE);
    c->queue[c->posted % RA_COURIER_QUEUE] = task;
    int64_t ticket = ++c->posted;
    if (c->own_thread) {
        pthread_cond_broadcast(&c->changed);
    } else {
        run_next(c);
    }
    pthread_mutex_unlock(&c->lock);
    return ticket;
}

void ra_courier_say_begun(ra_courier *c, void *handed)
{
    pthread_mutex_lock(&c->lock);
    c->begun = c->done + 1;
    c->handed = handed;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
}

void *ra_courier_wait_begun(ra_courier *c, int64_t ticket)
{
    pthread_mutex_lock(&c->lock);
    while (c->done == ticket - 1 && c->begun < ticket) {
        pthread_cond_wait(&c->changed, &c->lock);
    }
    void *handed = c->done == ticket - 1 ? c->handed : NULL;
    pthread_mutex_unlock(&c->lock);
    return handed;
}

ra_status ra_courier_wait(ra_courier *c, int64_t ticket)
{
    pthread_mutex_lock(&c->lock);
    while (c->done < ticket) {
        pthread_cond_wait(&c->changed, &c->lock);
    }
    ra_status status = c->status;
    if (status) {
        ra_fail(status, "%s", c->message);
    }
    pthread_mutex_unlock(&c->lock);
    return status;
}

void ra_courier_drain(ra_courier *c)
{
    pthread_mutex_lock(&c->lock);
    while (c->done < c->posted) {
        pthread_cond_wait(&c->changed, &c->lock);
    }
    c->status = RA_OK;
    pthread_mutex_unlock(&c->lock);
}

void ra_courier_free(ra_courier *c)
{
    if (!c) {
        return;
    }
    if (c->own_thread) {
        pthread_mutex_lock(&c->lock);
        c->stop = true;
        pthread_cond_broadcast(&c->changed);
        pthread_mutex_unlock(&c->lock);
        pthread_join(c->thread, NULL);
    }
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
    ra_free(c);
}
