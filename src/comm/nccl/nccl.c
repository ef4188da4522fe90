/*
 * The table of callbacks over NCCL. Everything is queued on a stream of the comm's own and watched
 * from the host, so that a deadline or an abort from another thread ends it: the communicator never
 * blocks, its state and an event behind the last operation are polled. NCCL is called under the
 * lock. Gather and barrier go through device memory as well. Must not know what the bytes mean.
 */
#include <string.h>

#include "backend/cuda/check.h"
#include "base/alloc.h"
#include "comm/device_copy.h"
#include "comm/nccl/watch.h"
#include "ringattn_cuda.h"

_Static_assert(sizeof(ra_nccl_id) == sizeof(ncclUniqueId), "an id is one of NCCL's");

enum {
    ABORT_MS = 1500, /* for what an abort frees; it is done at once but on a device that hangs */
    CLOSE_MS = 5000, /* for the other ranks to close theirs */
    /* Processors that a transfer may take from the computation; docs/ring.md has what two H200
     * reach with as many. */
    CTAS_MAX = 24,
};

/* ---- operations; all under the lock */

static ra_status reserve_staging(const ra_nccl_watch *w, size_t bytes)
{
    ra_nccl_member *m = w->m;
    void *memory = NULL;
    if (bytes <= m->staging_bytes) {
        return RA_OK;
    }
    RA_TRY(ra_nccl_wait_done(w)); /* what is queued uses the old one */
    RA_CUDA_TRY(cudaFree(m->staging));
    m->staging = NULL;
    m->staging_bytes = 0;
    RA_CUDA_TRY(cudaMalloc(&memory, bytes));
    m->staging = memory;
    m->staging_bytes = bytes;
    return RA_OK;
}

/* The bytes of a piece to or from its place in staging memory. */
static ra_status copy_piece(const ra_nccl_member *m, const ra_nccl_piece *piece)
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

static ra_status copy_pieces(const ra_nccl_member *m, bool send)
{
    for (int i = 0; i < m->rounds.piece_count; i++) {
        const ra_nccl_piece *piece = &m->rounds.piece[i];
        if (!piece->direct && piece->send == send) {
            RA_TRY(copy_piece(m, piece));
        }
    }
    return RA_OK;
}

static ra_status post_pieces(const ra_nccl_member *m)
{
    for (int i = 0; i < m->rounds.piece_count; i++) {
        const ra_nccl_piece *piece = &m->rounds.piece[i];
        char *memory = piece->direct ? piece->direct : m->staging + piece->staging;
        RA_TRY(piece->send ? ra_nccl_check(m,
                                           m->nccl.send(memory, piece->bytes, ncclUint8,
                                                        piece->peer, m->comm, m->stream),
                                           "ncclSend")
                           : ra_nccl_check(m,
                                           m->nccl.recv(memory, piece->bytes, ncclUint8,
                                                        piece->peer, m->comm, m->stream),
                                           "ncclRecv"));
    }
    return RA_OK;
}

/* Sends and receives of a round, together. The start is marked where NCCL's kernel can begin: what
 * follows it leaves that the processors, as copies would not. */
static ra_status run_round(const ra_nccl_watch *w, bool first)
{
    ra_nccl_member *m = w->m;
    RA_TRY(reserve_staging(w, m->rounds.staging_bytes));
    RA_TRY(copy_pieces(m, true));
    if (first) {
        RA_CUDA_TRY(cudaEventRecord(m->start, m->stream));
    }
    RA_TRY(ra_nccl_check(m, m->nccl.group_start(), "ncclGroupStart"));
    ra_status posted = post_pieces(m);
    RA_TRY(posted ? (m->nccl.group_end(), posted)
                  : ra_nccl_check(m, m->nccl.group_end(), "ncclGroupEnd"));
    RA_TRY(ra_nccl_wait_ready(w));
    return copy_pieces(m, false);
}

/* Queues all rounds. */
static ra_status queue_exchange(const ra_nccl_watch *w)
{
    ra_nccl_member *m = w->m;
    RA_TRY(ra_nccl_check_ended(m));
    RA_CUDA_TRY(cudaSetDevice(m->device));
    RA_TRY(ra_nccl_rounds_start(&m->rounds, w->xfers, w->xfer_count));
    if (w->order) {
        RA_CUDA_TRY(cudaStreamWaitEvent(m->stream, (cudaEvent_t)w->order->after, 0));
    }
    for (bool first = true;; first = false) {
        RA_TRY(ra_nccl_rounds_next(&m->rounds));
        if (m->rounds.piece_count == 0) {
            return RA_OK;
        }
        RA_TRY(run_round(w, first));
    }
}

static ra_status run_exchange(ra_nccl_watch *w)
{
    RA_TRY(queue_exchange(w));
    if (w->order) {
        w->order->queued(w->order->arg, w->m->start);
        RA_TRY(ra_nccl_wait_due(w));
    }
    return ra_nccl_wait_done(w);
}

static ra_status run_gather(const ra_nccl_watch *w, const void *mine, size_t bytes, void *all)
{
    ra_nccl_member *m = w->m;
    size_t total = bytes * (size_t)m->size;
    RA_TRY(ra_nccl_check_ended(m));
    RA_CUDA_TRY(cudaSetDevice(m->device));
    RA_TRY(reserve_staging(w, total));
    char *place = m->staging + (size_t)m->rank * bytes;
    RA_CUDA_TRY(cudaMemcpyAsync(place, mine, bytes, cudaMemcpyHostToDevice, m->stream));
    RA_TRY(ra_nccl_check(
        m, m->nccl.all_gather(place, m->staging, bytes, ncclUint8, m->comm, m->stream),
        "ncclAllGather"));
    RA_TRY(ra_nccl_wait_ready(w));
    RA_TRY(ra_nccl_wait_done(w));
    RA_CUDA_TRY(cudaMemcpyAsync(all, m->staging, total, cudaMemcpyDeviceToHost, m->stream));
    RA_CUDA_TRY(cudaStreamSynchronize(m->stream));
    return RA_OK;
}

/* ---- the table */

/* Unlocks. When a call has failed nothing of it may touch the caller's memory any more. */
static ra_status leave(ra_nccl_member *m, ra_status status)
{
    if (status) {
        ra_nccl_fail(m, ra_last_error());
    }
    pthread_mutex_unlock(&m->lock);
    if (status && !ra_nccl_ended(m->ending, ABORT_MS)) {
        return RA_FAIL(status, "%.300s; NCCL's abort has not returned either", m->why);
    }
    return status;
}

static ra_status nccl_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    ra_nccl_member *m = user;
    ra_nccl_watch w = ra_nccl_watch_begin(m, xfers, count, timeout_ms);
    pthread_mutex_lock(&m->lock);
    return leave(m, run_exchange(&w));
}

static ra_status nccl_exchange_behind(void *user, const ra_xfer *xfers, int count, int timeout_ms,
                                      const ra_order *order)
{
    ra_nccl_member *m = user;
    ra_nccl_watch w = ra_nccl_watch_begin(m, xfers, count, timeout_ms);
    w.order = order;
    pthread_mutex_lock(&m->lock);
    return leave(m, run_exchange(&w));
}

static ra_status nccl_gather(void *user, const void *mine, size_t bytes, void *all, int timeout_ms)
{
    ra_nccl_member *m = user;
    ra_nccl_watch w = ra_nccl_watch_begin(m, NULL, 0, timeout_ms);
    if (bytes == 0) {
        return RA_OK;
    }
    pthread_mutex_lock(&m->lock);
    return leave(m, run_gather(&w, mine, bytes, all));
}

static ra_status nccl_barrier(void *user, int timeout_ms)
{
    ra_nccl_member *m = user;
    char mine = 0, *all = NULL;
    RA_TRY(RA_NEW(&all, m->size));
    ra_status status = nccl_gather(user, &mine, sizeof mine, all, timeout_ms);
    ra_free(all);
    return status;
}

static void nccl_abort(void *user, const char *why)
{
    ra_nccl_member *m = user;
    pthread_mutex_lock(&m->lock);
    ra_nccl_fail(m, why);
    pthread_mutex_unlock(&m->lock);
}

/* Also closes what opened only in part. Memory that NCCL may still use is left to it. */
static void nccl_close(void *user)
{
    ra_nccl_member *m = user;
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
    ra_nccl_notice_close(m->notice);
    ra_nccl_rounds_free(&m->rounds);
    pthread_mutex_destroy(&m->lock);
    ra_free(m);
}

/* ---- opening */

static ra_status open_resources(ra_nccl_member *m)
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

static ra_status open_nccl(ra_nccl_member *m, const ra_nccl_id *id)
{
    ncclUniqueId unique;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    config.maxCTAs = CTAS_MAX;
    memcpy(&unique, id, sizeof unique);
    RA_TRY(ra_nccl_notice_open(id, sizeof *id, m->rank, m->size, &m->notice));
    RA_TRY(ra_nccl_ending_create(&m->nccl, m->device, &m->ending));
    return ra_nccl_check(m, m->nccl.init(&m->comm, m->size, unique, m->rank, &config),
                         "ncclCommInitRankConfig");
}

/* Waits for all ranks. The barrier also makes NCCL connect them. */
static ra_status join(ra_nccl_member *m)
{
    ra_nccl_watch w = ra_nccl_watch_begin(m, NULL, 0, RA_TIMEOUT_MS_DEFAULT);
    pthread_mutex_lock(&m->lock);
    RA_TRY(leave(m, ra_nccl_wait_ready(&w)));
    RA_TRY(nccl_barrier(m, RA_TIMEOUT_MS_DEFAULT));
    ra_nccl_notice_meet(m->notice);
    return RA_OK;
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
    ra_nccl_member *m = NULL;
    RA_TRY(check_open(id, rank, size, device, out));
    RA_TRY(ra_nccl_load(&nccl));
    RA_TRY(RA_NEW(&m, 1));
    m->nccl = nccl;
    m->rank = rank;
    m->size = size;
    m->device = device;
    m->rounds.small_bytes = RA_NCCL_SMALL_BYTES;
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
