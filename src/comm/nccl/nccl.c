/*
 * The table of callbacks over NCCL. Everything is queued on a stream of the comm's own and watched
 * from the host, so that a deadline or an abort from another thread ends it: the communicator never
 * blocks, its state and an event behind the last operation are polled. NCCL is called under the
 * lock. Gather and barrier go through device memory as well. Must not know what the bytes mean.
 */
#include <cuda_runtime_api.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "backend/cuda/check.h"
#include "base/alloc.h"
#include "base/clock.h"
#include "base/limits.h"
#include "comm/comm.h"
#include "comm/device_copy.h"
#include "comm/nccl/ending.h"
#include "comm/nccl/rounds.h"
#include "ringattn_cuda.h"

_Static_assert(sizeof(ra_nccl_id) == sizeof(ncclUniqueId), "an id is one of NCCL's");

enum {
    ABORT_MS = 1500, /* for what an abort frees; it is done at once but on a device that hangs */
    CLOSE_MS = 5000, /* for the other ranks to close theirs */
};

typedef struct member {
    ra_nccl_library nccl;
    int rank, size, device;
    pthread_mutex_t lock; /* of all below but the memory of an exchange */
    ncclComm_t comm;
    ra_nccl_ending *ending;
    bool ended;
    char why[RA_MESSAGE_BYTES]; /* it ended */
    cudaStream_t stream;
    cudaEvent_t start, done; /* before the first, and behind the last operation */
    char *staging;           /* of the device; one exchange or gather at a time */
    size_t staging_bytes;
    ra_nccl_rounds rounds;
} member;

/* What a call waits for. */
typedef struct watch {
    member *m;
    const ra_xfer *xfers; /* of an exchange */
    int xfer_count, timeout_ms;
    int64_t deadline_ns;
    const ra_order *order; /* of an exchange behind an event, else NULL */
} watch;

static int64_t deadline_of(int timeout_ms)
{
    return ra_clock_ns() + (int64_t)timeout_ms * 1000000;
}

static watch watch_begin(member *m, const ra_xfer *xfers, int count, int timeout_ms)
{
    return (watch){m, xfers, count, timeout_ms, deadline_of(timeout_ms), NULL};
}

/* ---- failure */

/* Under the lock. The first reason stays. */
static void end_locked(member *m, const char *why)
{
    if (!m->ended) {
        m->ended = true;
        snprintf(m->why, sizeof m->why, "%s", why);
        ra_nccl_end(m->ending, m->comm, true, 0);
    }
}

/* Under the lock. */
static ra_status check_ended(const member *m)
{
    return m->ended ? RA_FAIL(RA_E_COMM, "rank %d aborted: %.400s", m->rank, m->why) : RA_OK;
}

/* What NCCL says went wrong; in progress is no failure. */
static ra_status check(const member *m, ncclResult_t result, const char *what)
{
    if (result == ncclSuccess || result == ncclInProgress) {
        return RA_OK;
    }
    return RA_FAIL(RA_E_COMM, "%s: %.100s: %.300s", what, m->nccl.error_string(result),
                   m->comm ? m->nccl.last_error(m->comm) : "");
}

/* The ranks that an exchange waits for; NCCL does not tell them apart. */
static ra_status fail_late(const watch *w)
{
    char peers[128] = "";
    for (int i = 0; i < w->xfer_count; i++) {
        size_t used = strlen(peers);
        bool named = false;
        for (int j = 0; j < i; j++) {
            named = named || w->xfers[j].peer == w->xfers[i].peer;
        }
        if (!named) {
            snprintf(peers + used, sizeof peers - used, "%s%d", used ? ", " : "", w->xfers[i].peer);
        }
    }
    if (!w->xfers) {
        return RA_FAIL(RA_E_COMM, "not all of %d ranks came within %d ms", w->m->size,
                       w->timeout_ms);
    }
    return RA_FAIL(RA_E_COMM, "rank %s sent or took too little within %d ms", peers, w->timeout_ms);
}

/* ---- waiting */

/* The thread may be one that computes as well: soon it lets others run. */
static void rest(int64_t waited_ns)
{
    enum { SOON_NS = 2000000, LATE_NS = 20000000 };
    const struct timespec nap = {.tv_nsec = waited_ns < LATE_NS ? 50000 : 200000};
    if (waited_ns < SOON_NS) {
        sched_yield();
    } else {
        nanosleep(&nap, NULL);
    }
}

static ra_status is_past(cudaEvent_t event, bool *past)
{
    cudaError_t error = cudaEventQuery(event);
    if (error == cudaErrorNotReady) {
        cudaGetLastError();
    }
    *past = error == cudaSuccess;
    return *past || error == cudaErrorNotReady ? RA_OK
                                               : ra_cuda_fail(error, "waiting for an event");
}

/* Is NCCL done with what it was told? Under the lock. */
static ra_status is_ready(const watch *w, bool *ready)
{
    const member *m = w->m;
    ncclResult_t state = ncclSuccess;
    RA_TRY(check_ended(m));
    RA_TRY(check(m, m->nccl.async_error(m->comm, &state), "ncclCommGetAsyncError"));
    RA_TRY(check(m, state, "NCCL"));
    *ready = state == ncclSuccess;
    return RA_OK;
}

/* Is the device done with what was queued? Under the lock. */
static ra_status is_done(const watch *w, bool *done)
{
    bool ready;
    RA_TRY(is_ready(w, &ready));
    return is_past(w->m->done, done);
}

/* Has the event come behind which the exchange may begin? Under the lock. */
static ra_status is_due(const watch *w, bool *due)
{
    RA_TRY(check_ended(w->m));
    return is_past((cudaEvent_t)w->order->after, due);
}

/* Polls until true, an end or the deadline. Called and left under the lock. */
static ra_status wait_for(const watch *w, ra_status (*is_true)(const watch *w, bool *yes))
{
    int64_t begin = ra_clock_ns();
    bool yes = false;
    for (;;) {
        RA_TRY(is_true(w, &yes));
        if (yes) {
            return RA_OK;
        }
        int64_t now = ra_clock_ns();
        if (now >= w->deadline_ns) {
            return fail_late(w);
        }
        pthread_mutex_unlock(&w->m->lock);
        rest(now - begin);
        pthread_mutex_lock(&w->m->lock);
    }
}

/* Until the device has done everything. */
static ra_status wait_done(const watch *w)
{
    RA_CUDA_TRY(cudaEventRecord(w->m->done, w->m->stream));
    return wait_for(w, is_done);
}

/* ---- operations; all under the lock */

static ra_status reserve_staging(const watch *w, size_t bytes)
{
    member *m = w->m;
    void *memory = NULL;
    if (bytes <= m->staging_bytes) {
        return RA_OK;
    }
    RA_TRY(wait_done(w)); /* what is queued uses the old one */
    RA_CUDA_TRY(cudaFree(m->staging));
    m->staging = NULL;
    m->staging_bytes = 0;
    RA_CUDA_TRY(cudaMalloc(&memory, bytes));
    m->staging = memory;
    m->staging_bytes = bytes;
    return RA_OK;
}

/* The bytes of a piece to or from its place in staging memory. */
static ra_status copy_piece(const member *m, const ra_nccl_piece *piece)
{
    ra_cursor at = piece->at;
    char *place = m->staging + piece->staging;
    for (size_t passed = 0; passed < piece->bytes;) {
        ra_stretch s = ra_cursor_take(&at, piece->bytes - passed);
        RA_TRY(piece->send ? ra_device_copy_rows(place, s.width, s.data, s.stride, s.width, s.rows,
                                                 m->stream)
                           : ra_device_copy_rows(s.data, s.stride, place, s.width, s.width, s.rows,
                                                 m->stream));
        place += ra_stretch_bytes(&s);
        passed += ra_stretch_bytes(&s);
    }
    return RA_OK;
}

static ra_status copy_pieces(const member *m, bool send)
{
    for (int i = 0; i < m->rounds.piece_count; i++) {
        const ra_nccl_piece *piece = &m->rounds.piece[i];
        if (!piece->direct && piece->send == send) {
            RA_TRY(copy_piece(m, piece));
        }
    }
    return RA_OK;
}

static ra_status post_pieces(const member *m)
{
    for (int i = 0; i < m->rounds.piece_count; i++) {
        const ra_nccl_piece *piece = &m->rounds.piece[i];
        char *memory = piece->direct ? piece->direct : m->staging + piece->staging;
        RA_TRY(piece->send ? check(m,
                                   m->nccl.send(memory, piece->bytes, ncclUint8, piece->peer,
                                                m->comm, m->stream),
                                   "ncclSend")
                           : check(m,
                                   m->nccl.recv(memory, piece->bytes, ncclUint8, piece->peer,
                                                m->comm, m->stream),
                                   "ncclRecv"));
    }
    return RA_OK;
}

/* Sends and receives of a round, together. */
static ra_status run_round(const watch *w)
{
    member *m = w->m;
    RA_TRY(reserve_staging(w, m->rounds.staging_bytes));
    RA_TRY(copy_pieces(m, true));
    RA_TRY(check(m, m->nccl.group_start(), "ncclGroupStart"));
    ra_status posted = post_pieces(m);
    RA_TRY(posted ? (m->nccl.group_end(), posted) : check(m, m->nccl.group_end(), "ncclGroupEnd"));
    RA_TRY(wait_for(w, is_ready));
    return copy_pieces(m, false);
}

/* Queues all rounds. */
static ra_status queue_exchange(const watch *w)
{
    member *m = w->m;
    RA_TRY(check_ended(m));
    RA_CUDA_TRY(cudaSetDevice(m->device));
    RA_TRY(ra_nccl_rounds_start(&m->rounds, w->xfers, w->xfer_count));
    if (w->order) {
        RA_CUDA_TRY(cudaStreamWaitEvent(m->stream, (cudaEvent_t)w->order->after, 0));
        RA_CUDA_TRY(cudaEventRecord(m->start, m->stream));
    }
    for (;;) {
        RA_TRY(ra_nccl_rounds_next(&m->rounds));
        if (m->rounds.piece_count == 0) {
            return RA_OK;
        }
        RA_TRY(run_round(w));
    }
}

static ra_status run_exchange(watch *w)
{
    RA_TRY(queue_exchange(w));
    if (w->order) {
        w->order->queued(w->order->arg, w->m->start);
        w->deadline_ns = INT64_MAX; /* this rank's own computation is not late */
        RA_TRY(wait_for(w, is_due));
        w->deadline_ns = deadline_of(w->timeout_ms);
    }
    return wait_done(w);
}

static ra_status run_gather(const watch *w, const void *mine, size_t bytes, void *all)
{
    member *m = w->m;
    size_t total = bytes * (size_t)m->size;
    RA_TRY(check_ended(m));
    RA_CUDA_TRY(cudaSetDevice(m->device));
    RA_TRY(reserve_staging(w, total));
    char *place = m->staging + (size_t)m->rank * bytes;
    RA_CUDA_TRY(cudaMemcpyAsync(place, mine, bytes, cudaMemcpyHostToDevice, m->stream));
    RA_TRY(check(m, m->nccl.all_gather(place, m->staging, bytes, ncclUint8, m->comm, m->stream),
                 "ncclAllGather"));
    RA_TRY(wait_for(w, is_ready));
    RA_TRY(wait_done(w));
    RA_CUDA_TRY(cudaMemcpyAsync(all, m->staging, total, cudaMemcpyDeviceToHost, m->stream));
    RA_CUDA_TRY(cudaStreamSynchronize(m->stream));
    return RA_OK;
}

/* ---- the table */

/* Unlocks. When a call has failed nothing of it may touch the caller's memory any more. */
static ra_status leave(member *m, ra_status status)
{
    if (status) {
        end_locked(m, ra_last_error());
    }
    pthread_mutex_unlock(&m->lock);
    if (status && !ra_nccl_ended(m->ending, ABORT_MS)) {
        return RA_FAIL(status, "%.300s; NCCL's abort has not returned either", m->why);
    }
    return status;
}

static ra_status nccl_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    member *m = user;
    watch w = watch_begin(m, xfers, count, timeout_ms);
    pthread_mutex_lock(&m->lock);
    return leave(m, run_exchange(&w));
}

static ra_status nccl_exchange_behind(void *user, const ra_xfer *xfers, int count, int timeout_ms,
                                      const ra_order *order)
{
    member *m = user;
    watch w = watch_begin(m, xfers, count, timeout_ms);
    w.order = order;
    pthread_mutex_lock(&m->lock);
    return leave(m, run_exchange(&w));
}

static ra_status nccl_gather(void *user, const void *mine, size_t bytes, void *all, int timeout_ms)
{
    member *m = user;
    watch w = watch_begin(m, NULL, 0, timeout_ms);
    if (bytes == 0) {
        return RA_OK;
    }
    pthread_mutex_lock(&m->lock);
    return leave(m, run_gather(&w, mine, bytes, all));
}

static ra_status nccl_barrier(void *user, int timeout_ms)
{
    member *m = user;
    char mine = 0, *all = NULL;
    RA_TRY(RA_NEW(&all, m->size));
    ra_status status = nccl_gather(user, &mine, sizeof mine, all, timeout_ms);
    ra_free(all);
    return status;
}

static void nccl_abort(void *user, const char *why)
{
    member *m = user;
    pthread_mutex_lock(&m->lock);
    end_locked(m, why);
    pthread_mutex_unlock(&m->lock);
}

/* Also closes what opened only in part. Memory that NCCL may still use is left to it. */
static void nccl_close(void *user)
{
    member *m = user;
    bool quiet = true;
    cudaSetDevice(m->device);
    if (m->ending) {
        if (!m->ended) {
            ra_nccl_end(m->ending, m->comm, false, CLOSE_MS);
        }
        quiet = ra_nccl_ended(m->ending, CLOSE_MS + ABORT_MS);
        ra_nccl_ending_free(m->ending);
    }
    if (quiet) {
        cudaFree(m->staging);
        if (m->start) {
            cudaEventDestroy(m->start);
        }
        if (m->done) {
            cudaEventDestroy(m->done);
        }
        if (m->stream) {
            cudaStreamDestroy(m->stream);
        }
    }
    ra_nccl_rounds_free(&m->rounds);
    pthread_mutex_destroy(&m->lock);
    ra_free(m);
}

/* ---- opening */

static ra_status open_resources(member *m)
{
    int lowest = 0, highest = 0;
    RA_CUDA_TRY(cudaSetDevice(m->device));
    RA_CUDA_TRY(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    /* A transfer that is ready goes before a computation that is: it needs few processors, and
     * another rank waits for it. */
    RA_CUDA_TRY(cudaStreamCreateWithPriority(&m->stream, cudaStreamNonBlocking, highest));
    RA_CUDA_TRY(cudaEventCreateWithFlags(&m->start, cudaEventDisableTiming));
    RA_CUDA_TRY(cudaEventCreateWithFlags(&m->done, cudaEventDisableTiming));
    return RA_OK;
}

static ra_status open_nccl(member *m, const ra_nccl_id *id)
{
    ncclUniqueId unique;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    memcpy(&unique, id, sizeof unique);
    RA_TRY(ra_nccl_ending_create(&m->nccl, m->device, &m->ending));
    return check(m, m->nccl.init(&m->comm, m->size, unique, m->rank, &config),
                 "ncclCommInitRankConfig");
}

/* Waits for all ranks. The barrier also makes NCCL connect them. */
static ra_status join(member *m)
{
    watch w = watch_begin(m, NULL, 0, RA_TIMEOUT_MS_DEFAULT);
    pthread_mutex_lock(&m->lock);
    RA_TRY(leave(m, wait_for(&w, is_ready)));
    return nccl_barrier(m, RA_TIMEOUT_MS_DEFAULT);
}

static ra_status check_open(const ra_nccl_id *id, int rank, int size, int device,
                            ra_comm *const *out)
{
    if (!id || !out) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", id ? "out" : "id");
    }
    if (size < 1 || size > RA_RANKS_MAX) {
        return RA_FAIL(RA_E_ARG, "size: %d ranks, expected 1 to %d", size, RA_RANKS_MAX);
    }
    if (rank < 0 || rank >= size) {
        return RA_FAIL(RA_E_ARG, "rank: %d, expected 0 to %d", rank, size - 1);
    }
    int count = ra_cuda_device_count();
    if (count == 0) {
        return RA_FAIL(RA_E_UNAVAILABLE, "device: no CUDA device or driver on this machine");
    }
    if (device < 0 || device >= count) {
        return RA_FAIL(RA_E_ARG, "device: %d, expected 0 to %d", device, count - 1);
    }
    return RA_OK;
}

ra_status ra_nccl_id_create(ra_nccl_id *out)
{
    ra_nccl_library nccl;
    ncclUniqueId unique;
    if (!out) {
        return RA_FAIL(RA_E_ARG, "out: NULL, expected where to put the id");
    }
    RA_TRY(ra_nccl_load(&nccl));
    ncclResult_t result = nccl.unique_id(&unique);
    if (result != ncclSuccess) {
        return RA_FAIL(RA_E_COMM, "ncclGetUniqueId: %.100s: %.300s", nccl.error_string(result),
                       nccl.last_error(NULL));
    }
    memcpy(out, &unique, sizeof *out);
    return RA_OK;
}

ra_status ra_comm_open_nccl(const ra_nccl_id *id, int rank, int size, int device, ra_comm **out)
{
    ra_nccl_library nccl;
    member *m = NULL;
    RA_TRY(check_open(id, rank, size, device, out));
    RA_TRY(ra_nccl_load(&nccl));
    RA_TRY(RA_NEW(&m, 1));
    m->nccl = nccl;
    m->rank = rank;
    m->size = size;
    m->device = device;
    m->rounds.piece_bytes = RA_NCCL_PIECE_BYTES;
    m->rounds.round_bytes = RA_NCCL_ROUND_BYTES;
    pthread_mutex_init(&m->lock, NULL);
    const ra_comm_callbacks callbacks = {
        .size = sizeof callbacks,
        .user = m,
        .exchange = nccl_exchange,
        .gather = nccl_gather,
        .barrier = nccl_barrier,
        .abort = nccl_abort,
        .close = nccl_close,
    };
    ra_status status;
    if ((status = open_resources(m)) || (status = open_nccl(m, id)) || (status = join(m)) ||
        (status = ra_comm_open_custom(rank, size, &callbacks, out))) {
        nccl_close(m);
        return status;
    }
    ra_comm_set_exchange_behind(*out, nccl_exchange_behind);
    return RA_OK;
}
