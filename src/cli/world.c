/* Starts, joins and judges the rank threads. */
#include "cli/world.h"

#include <pthread.h>
#include <string.h>

#include "base/alloc.h"
#include "base/limits.h"

typedef struct rank_thread {
    pthread_t thread;
    ra_comm *comm;
    ra_world_body body;
    void *user;
    ra_status status;
    char message[RA_MESSAGE_BYTES];
} rank_thread;

static void *run_rank(void *argument)
{
    rank_thread *self = argument;
    self->status = self->body(self->comm, self->user);
    if (self->status) {
        strncpy(self->message, ra_last_error(), sizeof self->message - 1);
        /* The failure may have been outside a collective call; peers must not wait for it. */
        ra_comm_abort(self->comm, self->message);
    }
    return NULL;
}

static ra_status judge(const rank_thread *threads, int count)
{
    int worst = -1;
    for (int i = 0; i < count; i++) {
        if (threads[i].status &&
            (worst < 0 || (threads[worst].status == RA_E_COMM && threads[i].status != RA_E_COMM))) {
            worst = i;
        }
    }
    if (worst < 0) {
        return RA_OK;
    }
    /* What all ranks agree on already names the rank that it is about. */
    const char *message = threads[worst].message;
    return strncmp(message, "rank ", 5) == 0
               ? RA_FAIL(threads[worst].status, "%s", message)
               : RA_FAIL(threads[worst].status, "rank %d: %s", worst, message);
}

ra_status ra_world_run(ra_device device, int ranks, ra_world_body body, void *user)
{
    ra_comm **comms = NULL;
    rank_thread *threads = NULL;
    int started = 0;
    RA_TRY(RA_NEW(&comms, ranks));
    ra_status status = RA_NEW(&threads, ranks);
    if (status || (status = ra_device_comms(device, ranks, comms))) {
        goto done;
    }
    for (; started < ranks; started++) {
        rank_thread *self = &threads[started];
        *self = (rank_thread){.comm = comms[started], .body = body, .user = user};
        if (pthread_create(&self->thread, NULL, run_rank, self) != 0) {
            status = RA_FAIL(RA_E_NOMEM, "rank %d: thread could not be started", started);
            ra_comm_abort(comms[started], ra_last_error());
            break;
        }
    }
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i].thread, NULL);
    }
    if (!status) {
        status = judge(threads, started);
    }
done:
    for (int i = 0; i < ranks; i++) {
        ra_comm_close(comms[i]);
    }
    ra_free(comms);
    ra_free(threads);
    return status;
}
