/*
 * Workers take items from one atomic counter, so that a disturbed core does not set the pace. A job
 * is published under the mutex; a worker enters and leaves it under the mutex too, and the caller
 * waits only for those who entered: one that wakes after the items ran out is not waited for.
 * Waiting is a short spin, which covers the gap between the passes of one computation, then sleep,
 * because teams may outnumber cores.
 */
#include "backend/cpu/team.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "base/alloc.h"

/* A few microseconds. */
enum { SPINS = 256 };

struct ra_team {
    int size;    /* the caller included */
    int started; /* threads to join */
    pthread_t *thread;
    pthread_mutex_t mutex;
    pthread_cond_t job_posted, all_left;
    /* The rest is written under the mutex; the atomics are also read without it, by spinners. */
    atomic_long generation; /* of the newest job; negative asks the workers to end */
    atomic_int inside;      /* workers that entered the job and have not left */
    bool open;              /* may workers still enter? */
    int names;              /* worker numbers given out so far */
    ra_team_work *work;
    void *arg;
    int64_t count;
    atomic_llong next; /* the next item */
};

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

static void take_items(ra_team *team, ra_team_work *work, void *arg, int64_t count, int worker)
{
    int64_t item;
    while ((item = atomic_fetch_add(&team->next, 1)) < count) {
        work(arg, item, worker);
    }
}

/* Items are handed out in ascending order, so the lowest one at work waits for nobody. Its thread
 * may be without a core, however: then give it ours. */
void ra_team_await(const atomic_llong *progress, int64_t wanted)
{
    for (int i = 0; atomic_load_explicit(progress, memory_order_acquire) < wanted; i++) {
        if (i < SPINS) {
            relax();
        } else {
            sched_yield();
        }
    }
}

/* Waits for a job other than `seen`; returns its generation with the mutex held. */
static long await_job(ra_team *team, long seen)
{
    for (int i = 0; i < SPINS && atomic_load(&team->generation) == seen; i++) {
        relax();
    }
    pthread_mutex_lock(&team->mutex);
    while (atomic_load(&team->generation) == seen) {
        pthread_cond_wait(&team->job_posted, &team->mutex);
    }
    return atomic_load(&team->generation);
}

static void *worker_main(void *arg)
{
    ra_team *team = arg;
    pthread_mutex_lock(&team->mutex);
    int worker = ++team->names;
    pthread_mutex_unlock(&team->mutex);
    long seen = 0;
    while ((seen = await_job(team, seen)) >= 0) {
        if (team->open) {
            ra_team_work *work = team->work;
            void *work_arg = team->arg;
            int64_t count = team->count;
            atomic_fetch_add(&team->inside, 1);
            pthread_mutex_unlock(&team->mutex);
            take_items(team, work, work_arg, count, worker);
            pthread_mutex_lock(&team->mutex);
            if (atomic_fetch_sub(&team->inside, 1) == 1) {
                pthread_cond_signal(&team->all_left);
            }
        }
        pthread_mutex_unlock(&team->mutex);
    }
    pthread_mutex_unlock(&team->mutex);
    return NULL;
}

static ra_status start_threads(ra_team *team)
{
    for (; team->started < team->size - 1; team->started++) {
        int error = pthread_create(&team->thread[team->started], NULL, worker_main, team);
        if (error) {
            return RA_FAIL(RA_E_NOMEM, "thread %d of a team of %d: %s", team->started + 2,
                           team->size, strerror(error));
        }
    }
    return RA_OK;
}

ra_status ra_team_open(int threads, ra_team **out)
{
    ra_team *team = NULL;
    RA_TRY(RA_NEW(&team, 1));
    team->size = threads;
    ra_status status = RA_NEW(&team->thread, threads - 1);
    if (status) {
        ra_free(team);
        return status;
    }
    /* These three cannot fail with default attributes. */
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->job_posted, NULL);
    pthread_cond_init(&team->all_left, NULL);
    status = start_threads(team);
    if (status) {
        ra_team_close(team);
        return status;
    }
    *out = team;
    return RA_OK;
}

int ra_team_size(const ra_team *team)
{
    return team->size;
}

void ra_team_run(ra_team *team, int64_t count, ra_team_work *work, void *arg)
{
    if (team->size == 1 || count <= 1) {
        for (int64_t item = 0; item < count; item++) {
            work(arg, item, 0);
        }
        return;
    }
    pthread_mutex_lock(&team->mutex);
    team->work = work;
    team->arg = arg;
    team->count = count;
    team->open = true;
    atomic_store(&team->next, 0);
    atomic_fetch_add(&team->generation, 1);
    pthread_cond_broadcast(&team->job_posted);
    pthread_mutex_unlock(&team->mutex);

    take_items(team, work, arg, count, 0);

    for (int i = 0; i < SPINS && atomic_load(&team->inside) > 0; i++) {
        relax();
    }
    pthread_mutex_lock(&team->mutex);
    team->open = false;
    while (atomic_load(&team->inside) > 0) {
        pthread_cond_wait(&team->all_left, &team->mutex);
    }
    pthread_mutex_unlock(&team->mutex);
}

void ra_team_close(ra_team *team)
{
    if (!team) {
        return;
    }
    pthread_mutex_lock(&team->mutex);
    atomic_store(&team->generation, -1);
    pthread_cond_broadcast(&team->job_posted);
    pthread_mutex_unlock(&team->mutex);
    for (int i = 0; i < team->started; i++) {
        pthread_join(team->thread[i], NULL);
    }
    pthread_cond_destroy(&team->all_left);
    pthread_cond_destroy(&team->job_posted);
    pthread_mutex_destroy(&team->mutex);
    ra_free(team->thread);
    ra_free(team);
}
