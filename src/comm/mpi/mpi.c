/*
 * The table of callbacks over MPI. Every call is polled, so that a deadline or a notice from a rank
 * that failed ends it; gather and barrier are exchanges with everybody, so that a rank that is
 * missing can be named. A notice is a message of its own tag, awaited from the start. All MPI calls
 * of a comm are made under its lock, because abort may come from another thread. Must not know what
 * the bytes mean.
 */
#include <mpi.h>
#if defined(OPEN_MPI) && __has_include(<mpi-ext.h>)
#include <mpi-ext.h>
#endif
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "base/alloc.h"
#include "base/clock.h"
#include "base/limits.h"
#include "comm/mpi/flow.h"
#include "ringattn_mpi.h"

/* Why a rank ended the communicator. */
typedef struct notice {
    int32_t rank;
    char why[RA_MESSAGE_BYTES];
} notice;

typedef struct process {
    MPI_Comm comm;
    int rank, size;
    bool direct; /* MPI takes memory of a GPU */
    pthread_mutex_t lock;
    uint64_t call;
    ra_mpi_flow *flow; /* [flow_capacity] */
    int64_t flow_capacity;
    ra_xfer *xfers;   /* [2 * size] of a gather */
    ra_block *blocks; /* [size] */
    bool ended;       /* by `end`: this rank's own notice or the first that came */
    notice end, incoming;
    MPI_Request listening;
    MPI_Request *told;    /* [size] this rank's notices */
    struct process *next; /* among the parked */
} process;

/* What MPI may still write to or read from belongs to it for good. Kept in a list, so that it is
 * not lost; beside the thread's message the only state that outlives a comm. */
static _Atomic(process *) parked;
static atomic_llong parked_requests;

int64_t ra_mpi_parked(void)
{
    return atomic_load(&parked_requests);
}

/* Has a rank ended this communicator? Listens for a notice. */
static bool is_ended(process *p)
{
    if (!p->ended && p->listening != MPI_REQUEST_NULL && ra_mpi_done(&p->listening)) {
        p->end = p->incoming;
        p->end.why[RA_MESSAGE_BYTES - 1] = '\0';
        p->ended = true;
    }
    return p->ended;
}

static ra_status check_ended(process *p)
{
    return is_ended(p) ? RA_FAIL(RA_E_COMM, "rank %d aborted: %.400s", p->end.rank, p->end.why)
                       : RA_OK;
}

/* Names a rank that this one waits for. */
static ra_status fail_late(const process *p, int count, int timeout_ms)
{
    for (int send = 0; send < 2; send++) {
        for (int i = 0; i < count; i++) {
            const ra_mpi_flow *f = &p->flow[i];
            if (f->send == (send == 1) && f->done < f->total) {
                uint64_t moved = f->done > 0 ? f->done - sizeof f->header : 0;
                return RA_FAIL(RA_E_COMM, "rank %d %s %llu of %llu bytes within %d ms",
                               f->xfer->peer, send ? "took" : "sent", (unsigned long long)moved,
                               (unsigned long long)f->xfer->bytes, timeout_ms);
            }
        }
    }
    return RA_FAIL(RA_E_COMM, "exchange not done within %d ms", timeout_ms);
}

/* Lets others run: ranks may outnumber cores. Bytes come soon or, while a rank computes, late. */
static void rest(int64_t idle_ns)
{
    enum { SOON_NS = 50000, LATE_NS = 1000000 };
    const struct timespec nap = {.tv_nsec = idle_ns < LATE_NS ? 20000 : 200000};
    if (idle_ns < SOON_NS) {
        sched_yield();
    } else {
        nanosleep(&nap, NULL);
    }
}

/* One look at everything; under the lock. */
static ra_status step_all(process *p, int count, int *left, bool *moved)
{
    *left = 0;
    RA_TRY(check_ended(p));
    for (int i = 0; i < count; i++) {
        RA_TRY(ra_mpi_flow_step(&p->flow[i], p->comm, moved));
        *left += p->flow[i].done < p->flow[i].total;
    }
    return RA_OK;
}

static ra_status start_all(process *p, const ra_xfer *xfers, int count)
{
    int64_t before = p->flow_capacity;
    RA_TRY(check_ended(p));
    RA_TRY(RA_RESERVE(&p->flow, &p->flow_capacity, count));
    for (int64_t i = before; i < p->flow_capacity; i++) {
        ra_mpi_flow_init(&p->flow[i]);
    }
    p->call++;
    for (int i = 0; i < count; i++) {
        RA_TRY(ra_mpi_flow_start(&p->flow[i], p->comm, p->call, &xfers[i], p->direct));
    }
    return RA_OK;
}

static ra_status mpi_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    process *p = user;
    int64_t seen = ra_clock_ns(), deadline = seen + (int64_t)timeout_ms * 1000000;
    int left = count;
    pthread_mutex_lock(&p->lock);
    ra_status status = start_all(p, xfers, count);
    while (!status) {
        bool moved = false;
        status = step_all(p, count, &left, &moved);
        int64_t now = ra_clock_ns();
        if (status || left == 0) {
            break;
        }
        if (now >= deadline) {
            status = fail_late(p, count, timeout_ms);
            break;
        }
        seen = moved ? now : seen;
        pthread_mutex_unlock(&p->lock);
        rest(now - seen);
        pthread_mutex_lock(&p->lock);
    }
    if (status) {
        for (int64_t i = 0; i < p->flow_capacity; i++) {
            ra_mpi_flow_cancel(&p->flow[i]);
        }
    }
    pthread_mutex_unlock(&p->lock);
    return status;
}

static ra_status mpi_gather(void *user, const void *mine, size_t bytes, void *all, int timeout_ms)
{
    process *p = user;
    int count = 0;
    for (int rank = 0; rank < p->size; rank++) {
        char *place = bytes > 0 ? (char *)all + (size_t)rank * bytes : NULL;
        p->blocks[rank] = (ra_block){
            .data = rank == p->rank ? (void *)(uintptr_t)mine : place,
            .width = bytes,
            .stride = bytes,
            .count = 1,
        };
    }
    for (int i = 1; i < p->size; i++) { /* begins at the next rank: not all at one */
        int to = (p->rank + i) % p->size, from = (p->rank + p->size - i) % p->size;
        p->xfers[count++] = (ra_xfer){to, true, &p->blocks[p->rank], 1, bytes};
        p->xfers[count++] = (ra_xfer){from, false, &p->blocks[from], 1, bytes};
    }
    if (bytes > 0) {
        memcpy((char *)all + (size_t)p->rank * bytes, mine, bytes);
    }
    return mpi_exchange(user, p->xfers, count, timeout_ms);
}

static ra_status mpi_barrier(void *user, int timeout_ms)
{
    return mpi_gather(user, NULL, 0, NULL, timeout_ms);
}

static bool mpi_is_over(void)
{
    int over = 0;
    return MPI_Finalized(&over) != MPI_SUCCESS || over;
}

/* Only the first rank that fails tells the others; they need not tell again. */
static void mpi_abort(void *user, const char *why)
{
    process *p = user;
    pthread_mutex_lock(&p->lock);
    if (!mpi_is_over() && !is_ended(p)) {
        p->ended = true;
        p->end.rank = p->rank;
        snprintf(p->end.why, sizeof p->end.why, "%s", why);
        for (int rank = 0; rank < p->size; rank++) {
            if (rank != p->rank &&
                MPI_Isend(&p->end, (int)sizeof p->end, MPI_BYTE, rank, RA_MPI_TAG_NOTICE, p->comm,
                          &p->told[rank]) != MPI_SUCCESS) {
                p->told[rank] = MPI_REQUEST_NULL;
            }
        }
    }
    pthread_mutex_unlock(&p->lock);
}

/* Requests that are still under way, after a moment's wait: those of ranks that live end soon. */
static int settle(process *p)
{
    enum { SETTLE_NS = 100000000 };
    int64_t begin = ra_clock_ns();
    int pending;
    for (;;) {
        pending = !ra_mpi_done(&p->listening);
        for (int64_t i = 0; i < p->flow_capacity; i++) {
            pending += ra_mpi_flow_pending(&p->flow[i]);
        }
        for (int rank = 0; rank < p->size; rank++) {
            pending += !ra_mpi_done(&p->told[rank]);
        }
        int64_t waited = ra_clock_ns() - begin;
        if (pending == 0 || waited > SETTLE_NS) {
            return pending;
        }
        rest(waited);
    }
}

static void process_free(process *p)
{
    for (int64_t i = 0; i < p->flow_capacity; i++) {
        ra_mpi_flow_free(&p->flow[i]);
    }
    pthread_mutex_destroy(&p->lock);
    ra_free(p->flow);
    ra_free(p->xfers);
    ra_free(p->blocks);
    ra_free(p->told);
    ra_free(p);
}

static void park(process *p, int requests)
{
    process *first = atomic_load(&parked);
    atomic_fetch_add(&parked_requests, requests);
    do {
        p->next = first;
    } while (!atomic_compare_exchange_weak(&parked, &first, p));
}

/* Frees the communicator only where no rank failed: that is collective. */
static void mpi_close(void *user)
{
    process *p = user;
    int pending = 0;
    if (!mpi_is_over()) {
        bool failed = is_ended(p);
        if (p->listening != MPI_REQUEST_NULL) {
            MPI_Cancel(&p->listening);
        }
        pending = settle(p);
        if (!failed && pending == 0 && p->comm != MPI_COMM_NULL) {
            MPI_Comm_free(&p->comm);
        }
    }
    if (pending > 0) {
        park(p, pending);
    } else {
        process_free(p);
    }
}

/* Waits for the other ranks to come, no longer than an exchange would. */
static ra_status duplicate(process *p, MPI_Comm comm)
{
    MPI_Request request;
    int64_t begin = ra_clock_ns(), waited = 0;
    RA_TRY(ra_mpi_check(MPI_Comm_idup(comm, &p->comm, &request), "MPI_Comm_idup", p->rank));
    while (!ra_mpi_done(&request)) {
        rest(waited);
        waited = ra_clock_ns() - begin;
        if (waited > (int64_t)RA_TIMEOUT_MS_DEFAULT * 1000000) {
            /* Not to be freed: MPI writes to p->comm when the last rank comes. */
            return RA_FAIL(RA_E_COMM, "not all %d ranks opened the communicator within %d ms",
                           p->size, RA_TIMEOUT_MS_DEFAULT);
        }
    }
    RA_TRY(ra_mpi_check(MPI_Comm_set_errhandler(p->comm, MPI_ERRORS_RETURN),
                        "MPI_Comm_set_errhandler", p->rank));
    return ra_mpi_check(MPI_Irecv(&p->incoming, (int)sizeof p->incoming, MPI_BYTE, MPI_ANY_SOURCE,
                                  RA_MPI_TAG_NOTICE, p->comm, &p->listening),
                        "MPI_Irecv", p->rank);
}

static ra_status check_mpi(const MPI_Comm *comm)
{
    int started = 0, level = MPI_THREAD_SINGLE, inter = 0, size = 0;
    MPI_Initialized(&started);
    if (!started || mpi_is_over()) {
        return RA_FAIL(RA_E_ARG, "mpi_comm: MPI is not running, expected a call between "
                                 "MPI_Init_thread and MPI_Finalize");
    }
    if (*comm == MPI_COMM_NULL) {
        return RA_FAIL(RA_E_ARG, "mpi_comm: MPI_COMM_NULL");
    }
    MPI_Query_thread(&level);
    if (level != MPI_THREAD_MULTIPLE && level != MPI_THREAD_SERIALIZED) {
        return RA_FAIL(RA_E_UNSUPPORTED,
                       "mpi_comm: MPI was started with MPI_THREAD_%s, expected "
                       "MPI_THREAD_MULTIPLE or MPI_THREAD_SERIALIZED: exchanges run on a thread of "
                       "their own",
                       level == MPI_THREAD_FUNNELED ? "FUNNELED" : "SINGLE");
    }
    MPI_Comm_test_inter(*comm, &inter);
    MPI_Comm_size(*comm, &size);
    if (inter || size > RA_RANKS_MAX) {
        return RA_FAIL(RA_E_ARG, "mpi_comm: %d ranks%s, expected at most %d of one group", size,
                       inter ? " of an intercommunicator" : "", RA_RANKS_MAX);
    }
    return RA_OK;
}

static bool takes_device_memory(void)
{
#if defined(RA_WITH_CUDA) && defined(MPIX_CUDA_AWARE_SUPPORT)
    return MPIX_Query_cuda_support() == 1;
#else
    return false;
#endif
}

static ra_status process_create(MPI_Comm comm, process **out)
{
    process *p = NULL;
    RA_TRY(RA_NEW(&p, 1));
    pthread_mutex_init(&p->lock, NULL);
    p->comm = MPI_COMM_NULL;
    p->direct = takes_device_memory();
    p->listening = MPI_REQUEST_NULL;
    MPI_Comm_rank(comm, &p->rank);
    MPI_Comm_size(comm, &p->size);
    ra_status status;
    if ((status = RA_NEW(&p->xfers, 2 * p->size)) || (status = RA_NEW(&p->blocks, p->size)) ||
        (status = RA_NEW(&p->told, p->size))) {
        process_free(p);
        return status;
    }
    for (int rank = 0; rank < p->size; rank++) {
        p->told[rank] = MPI_REQUEST_NULL;
    }
    *out = p;
    return RA_OK;
}

ra_status ra_comm_open_mpi(const void *mpi_comm, ra_comm **out)
{
    const MPI_Comm *comm = mpi_comm;
    process *p = NULL;
    if (!comm || !out) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", comm ? "out" : "mpi_comm");
    }
    RA_TRY(check_mpi(comm));
    RA_TRY(process_create(*comm, &p));
    ra_status status = duplicate(p, *comm);
    if (status) {
        park(p, 1);
        return status;
    }
    const ra_comm_callbacks callbacks = {
        .size = sizeof callbacks,
        .user = p,
        .exchange = mpi_exchange,
        .gather = mpi_gather,
        .barrier = mpi_barrier,
        .abort = mpi_abort,
        .close = mpi_close,
    };
    status = ra_comm_open_custom(p->rank, p->size, &callbacks, out);
    if (status) {
        mpi_close(p);
    }
    return status;
}
