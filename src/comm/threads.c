/*
 * N ranks in one process. A receiver pulls: it copies from the sender's blocks straight into its
 * own, so nothing is staged; a copier does it, for host memory the one below. All state is under
 * one mutex; copies run outside it. A sender does not leave an exchange while someone copies from
 * it, whatever else has failed, because its memory may be gone afterwards.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/limits.h"
#include "base/mathx.h"
#include "comm/comm.h"
#include "comm/threads.h"

enum send_state { SEND_POSTED, SEND_COPYING, SEND_DONE, NOT_A_SEND };

typedef struct world world;

typedef struct member {
    world *world;
    int rank;
    bool closed;
    pthread_cond_t wake;
    const ra_xfer *xfers; /* posted; NULL outside an exchange */
    int xfer_count;
    unsigned char *state; /* [2 * size] enum send_state of each posted transfer */
    const void *gathered; /* what this rank gave to the gather under way */
} member;

struct world {
    pthread_mutex_t lock;
    ra_copier copier;
    int size, open;
    int aborted_by; /* rank + 1; 0 = nobody */
    char why[RA_MESSAGE_BYTES];
    int arrived;         /* at the barrier */
    uint64_t generation; /* barriers passed */
    member *member;      /* [size] */
};

static ra_status check_abort(const world *w)
{
    if (w->aborted_by) {
        return RA_FAIL(RA_E_COMM, "rank %d aborted: %.400s", w->aborted_by - 1, w->why);
    }
    return RA_OK;
}

static void wake_all(world *w)
{
    for (int rank = 0; rank < w->size; rank++) {
        pthread_cond_broadcast(&w->member[rank].wake);
    }
}

/* A place in a message: byte `used` of row `row` of a block. */
typedef struct cursor {
    const ra_block *block;
    int64_t row;
    size_t used;
} cursor;

static char *cursor_address(const cursor *at)
{
    return (char *)at->block->data + (size_t)at->row * at->block->stride + at->used;
}

static void cursor_advance(cursor *at, size_t width, int64_t rows)
{
    at->used += width;
    if (at->used == at->block->width) {
        at->used = 0;
        at->row += rows;
    }
    if (at->row == at->block->count) {
        at->row = 0;
        at->block++;
    }
}

/* Copies one message from the sender's blocks to the receiver's, as many whole rows at a time as
 * both have of one width; their cuts need not agree. */
static ra_status copy_message(const ra_copier *copier, int rank, const ra_xfer *xfer,
                              const ra_xfer *sent)
{
    cursor to = {.block = xfer->blocks}, from = {.block = sent->blocks};
    for (uint64_t left = xfer->bytes; left > 0;) {
        size_t to_left = to.block->width - to.used, from_left = from.block->width - from.used;
        bool whole = !to.used && !from.used && to_left == from_left;
        int64_t rows =
            whole ? ra_min_i64(to.block->count - to.row, from.block->count - from.row) : 1;
        ra_copy copy = {
            .to = cursor_address(&to),
            .from = cursor_address(&from),
            .width = to_left < from_left ? to_left : from_left,
            .to_stride = to.block->stride,
            .from_stride = from.block->stride,
            .rows = rows,
        };
        RA_TRY(copier->copy(copier->user, rank, &copy));
        left -= copy.width * (uint64_t)rows;
        cursor_advance(&to, copy.width, rows);
        cursor_advance(&from, copy.width, rows);
    }
    return RA_OK;
}

/* The transfer that `peer` posted for `rank` and nobody took; -1 if there is none. */
static int find_send(const member *peer, int rank)
{
    for (int i = 0; peer->xfers && i < peer->xfer_count; i++) {
        if (peer->state[i] == SEND_POSTED && peer->xfers[i].peer == rank) {
            return i;
        }
    }
    return -1;
}

/* Takes every message that is ready. `left` counts the receives still to come. */
static ra_status take_ready(member *me, bool *taken, int *left)
{
    world *w = me->world;
    for (int i = 0; i < me->xfer_count; i++) {
        const ra_xfer *xfer = &me->xfers[i];
        if (xfer->send || taken[i]) {
            continue;
        }
        member *peer = &w->member[xfer->peer];
        int at = find_send(peer, me->rank);
        if (at < 0 && peer->closed) {
            return RA_FAIL(RA_E_COMM, "rank %d closed its communicator", xfer->peer);
        }
        if (at < 0) {
            continue;
        }
        const ra_xfer *from = &peer->xfers[at];
        if (from->bytes != xfer->bytes) {
            return RA_FAIL(RA_E_COMM, "rank %d sends %llu bytes, expected %llu", xfer->peer,
                           (unsigned long long)from->bytes, (unsigned long long)xfer->bytes);
        }
        peer->state[at] = SEND_COPYING;
        pthread_mutex_unlock(&w->lock);
        ra_status status = copy_message(&w->copier, me->rank, xfer, from);
        ra_status finished = w->copier.finish(w->copier.user, me->rank);
        pthread_mutex_lock(&w->lock);
        peer->state[at] = SEND_DONE;
        pthread_cond_broadcast(&peer->wake);
        RA_TRY(status);
        RA_TRY(finished);
        taken[i] = true;
        --*left;
    }
    return RA_OK;
}

static int sends_in(const member *me, enum send_state state)
{
    int count = 0;
    for (int i = 0; i < me->xfer_count; i++) {
        count += me->state[i] == state;
    }
    return count;
}

/* Names a rank that this one waits for. */
static ra_status fail_late(const member *me, const bool *taken, int timeout_ms)
{
    for (int i = 0; i < me->xfer_count; i++) {
        if (!me->xfers[i].send && !taken[i]) {
            return RA_FAIL(RA_E_COMM, "nothing came from rank %d within %d ms", me->xfers[i].peer,
                           timeout_ms);
        }
    }
    for (int i = 0; i < me->xfer_count; i++) {
        if (me->state[i] == SEND_POSTED) {
            return RA_FAIL(RA_E_COMM, "rank %d took nothing within %d ms", me->xfers[i].peer,
                           timeout_ms);
        }
    }
    return RA_FAIL(RA_E_COMM, "exchange not done within %d ms", timeout_ms);
}

/* The body of an exchange, under the lock. */
static ra_status run_posted(member *me, bool *taken, int receives, int timeout_ms)
{
    world *w = me->world;
    struct timespec deadline = ra_deadline(timeout_ms);
    bool late = false;
    for (;;) {
        int before = receives;
        RA_TRY(check_abort(w));
        RA_TRY(take_ready(me, taken, &receives));
        if (receives == 0 && sends_in(me, SEND_POSTED) + sends_in(me, SEND_COPYING) == 0) {
            return RA_OK;
        }
        if (receives < before) {
            continue; /* the lock was released meanwhile: look again before sleeping */
        }
        if (late) {
            return fail_late(me, taken, timeout_ms);
        }
        late = pthread_cond_timedwait(&me->wake, &w->lock, &deadline) == ETIMEDOUT;
    }
}

static ra_status threads_exchange(void *user, const ra_xfer *xfers, int xfer_count, int timeout_ms)
{
    member *me = user;
    world *w = me->world;
    int receives = 0;
    RA_CHECK(xfer_count <= 2 * w->size);
    bool taken[2 * RA_THREAD_RANKS_MAX] = {false};
    pthread_mutex_lock(&w->lock);
    me->xfers = xfers;
    me->xfer_count = xfer_count;
    for (int i = 0; i < xfer_count; i++) {
        me->state[i] = xfers[i].send ? SEND_POSTED : NOT_A_SEND;
        receives += !xfers[i].send;
    }
    for (int i = 0; i < xfer_count; i++) {
        if (xfers[i].send) {
            pthread_cond_broadcast(&w->member[xfers[i].peer].wake);
        }
    }
    ra_status status = run_posted(me, taken, receives, timeout_ms);
    for (int i = 0; i < xfer_count; i++) { /* nobody may begin to copy from a rank that leaves */
        me->state[i] = me->state[i] == SEND_POSTED ? NOT_A_SEND : me->state[i];
    }
    while (sends_in(me, SEND_COPYING) > 0) {
        pthread_cond_wait(&me->wake, &w->lock);
    }
    me->xfers = NULL;
    me->xfer_count = 0;
    pthread_mutex_unlock(&w->lock);
    return status;
}

/* Under the lock. */
static ra_status wait_for_all(member *me, int timeout_ms)
{
    world *w = me->world;
    struct timespec deadline = ra_deadline(timeout_ms);
    uint64_t generation = w->generation;
    bool late = false;
    if (++w->arrived == w->size) {
        w->arrived = 0;
        w->generation++;
        wake_all(w);
    }
    while (w->generation == generation) {
        RA_TRY(check_abort(w));
        for (int rank = 0; rank < w->size; rank++) {
            if (w->member[rank].closed) {
                return RA_FAIL(RA_E_COMM, "rank %d closed its communicator", rank);
            }
        }
        if (late) {
            return RA_FAIL(RA_E_COMM, "only %d of %d ranks arrived within %d ms", w->arrived,
                           w->size, timeout_ms);
        }
        late = pthread_cond_timedwait(&me->wake, &w->lock, &deadline) == ETIMEDOUT;
    }
    return RA_OK;
}

static ra_status threads_barrier(void *user, int timeout_ms)
{
    member *me = user;
    pthread_mutex_lock(&me->world->lock);
    ra_status status = check_abort(me->world);
    status = status ? status : wait_for_all(me, timeout_ms);
    pthread_mutex_unlock(&me->world->lock);
    return status;
}

/* Under the lock, once every rank has arrived. A rank that gave up meanwhile has taken its pointer
 * back. */
static ra_status copy_gathered(const world *w, size_t bytes, char *all)
{
    RA_TRY(check_abort(w));
    for (int rank = 0; bytes > 0 && rank < w->size; rank++) {
        if (!w->member[rank].gathered) {
            return RA_FAIL(RA_E_COMM, "rank %d left the gather", rank);
        }
        memcpy(all + (size_t)rank * bytes, w->member[rank].gathered, bytes);
    }
    return RA_OK;
}

static ra_status threads_gather(void *user, const void *mine, size_t bytes, void *all,
                                int timeout_ms)
{
    member *me = user;
    world *w = me->world;
    pthread_mutex_lock(&w->lock);
    me->gathered = mine;
    ra_status status = check_abort(w);
    status = status ? status : wait_for_all(me, timeout_ms);
    status = status ? status : copy_gathered(w, bytes, all);
    status = status ? status : wait_for_all(me, timeout_ms);
    me->gathered = NULL;
    pthread_mutex_unlock(&w->lock);
    return status;
}

static void threads_abort(void *user, const char *why)
{
    member *me = user;
    world *w = me->world;
    pthread_mutex_lock(&w->lock);
    if (!w->aborted_by) {
        w->aborted_by = me->rank + 1;
        snprintf(w->why, sizeof w->why, "%s", why);
    }
    wake_all(w);
    pthread_mutex_unlock(&w->lock);
}

static void free_world(world *w)
{
    for (int rank = 0; w->member && rank < w->size; rank++) {
        if (w->member[rank].world) {
            pthread_cond_destroy(&w->member[rank].wake);
        }
        ra_free(w->member[rank].state);
    }
    w->copier.close(w->copier.user);
    pthread_mutex_destroy(&w->lock);
    ra_free(w->member);
    ra_free(w);
}

static void threads_close(void *user)
{
    member *me = user;
    world *w = me->world;
    pthread_mutex_lock(&w->lock);
    me->closed = true;
    bool last = --w->open == 0;
    wake_all(w);
    pthread_mutex_unlock(&w->lock);
    if (last) {
        free_world(w);
    }
}

static ra_status open_world(int size, const ra_copier *copier, world **out)
{
    world *w = NULL;
    ra_status status = RA_NEW(&w, 1);
    if (status) {
        copier->close(copier->user);
        return status;
    }
    w->size = size;
    w->copier = *copier;
    pthread_mutex_init(&w->lock, NULL);
    status = RA_NEW(&w->member, size);
    for (int rank = 0; !status && rank < size; rank++) {
        member *m = &w->member[rank];
        status = RA_NEW(&m->state, 2 * size);
        if (!status && ra_cond_init(&m->wake)) {
            status = RA_FAIL(RA_E_NOMEM, "rank %d: no condition variable", rank);
        }
        if (!status) {
            m->world = w;
            m->rank = rank;
        }
    }
    if (status) {
        free_world(w);
        return status;
    }
    *out = w;
    return RA_OK;
}

ra_status ra_comm_threads_check(int size, ra_comm *const *out_by_rank)
{
    if (!out_by_rank) {
        return RA_FAIL(RA_E_ARG, "out_by_rank: NULL");
    }
    if (size < 1 || size > RA_THREAD_RANKS_MAX) {
        return RA_FAIL(RA_E_ARG, "size: %d ranks, expected 1 to %d in one process", size,
                       RA_THREAD_RANKS_MAX);
    }
    return RA_OK;
}

ra_status ra_comm_open_threads_with(int size, const ra_copier *copier, ra_comm **out_by_rank)
{
    world *w = NULL;
    RA_TRY(open_world(size, copier, &w));
    w->open = size;
    ra_status status = RA_OK;
    for (int rank = 0; rank < size; rank++) {
        const ra_comm_callbacks callbacks = {
            .size = sizeof callbacks,
            .user = &w->member[rank],
            .exchange = threads_exchange,
            .gather = threads_gather,
            .barrier = threads_barrier,
            .abort = threads_abort,
            .close = threads_close,
        };
        status = ra_comm_open_custom(rank, size, &callbacks, &out_by_rank[rank]);
        if (status) {
            /* Those that opened hold the world; the rest never will. */
            w->open = rank;
            for (int opened = 0; opened < rank; opened++) {
                ra_comm_close(out_by_rank[opened]);
                out_by_rank[opened] = NULL;
            }
            if (rank == 0) {
                free_world(w);
            }
            return status;
        }
    }
    return RA_OK;
}

static ra_status copy_host(void *user, int rank, const ra_copy *copy)
{
    (void)user;
    (void)rank;
    for (int64_t row = 0; row < copy->rows; row++) {
        memcpy((char *)copy->to + (size_t)row * copy->to_stride,
               (const char *)copy->from + (size_t)row * copy->from_stride, copy->width);
    }
    return RA_OK;
}

static ra_status finish_host(void *user, int rank)
{
    (void)user;
    (void)rank;
    return RA_OK;
}

static void close_host(void *user)
{
    (void)user;
}

ra_status ra_comm_open_threads(int size, ra_comm **out_by_rank)
{
    const ra_copier copier = {.copy = copy_host, .finish = finish_host, .close = close_host};
    RA_TRY(ra_comm_threads_check(size, out_by_rank));
    return ra_comm_open_threads_with(size, &copier, out_by_rank);
}
