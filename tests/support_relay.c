/* Callbacks that hand on what they are given. */
#include "support_relay.h"

#include "comm/comm.h"

static ra_comm *inner_of(void *user)
{
    return *(ra_comm **)user;
}

static ra_status relay_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    return ra_comm_exchange(inner_of(user), xfers, count, timeout_ms);
}

static ra_status relay_gather(void *user, const void *mine, size_t bytes, void *all, int timeout_ms)
{
    return ra_comm_gather(inner_of(user), mine, bytes, all, timeout_ms);
}

static ra_status relay_barrier(void *user, int timeout_ms)
{
    return relay_gather(user, NULL, 0, NULL, timeout_ms);
}

static void relay_abort(void *user, const char *why)
{
    ra_comm_abort(inner_of(user), why);
}

static void relay_close(void *user)
{
    ra_comm_close(inner_of(user));
}

void relay_close_nothing(void *user)
{
    (void)user;
}

ra_comm_callbacks relay_callbacks(void *user)
{
    return (ra_comm_callbacks){.size = sizeof(ra_comm_callbacks),
                               .user = user,
                               .exchange = relay_exchange,
                               .gather = relay_gather,
                               .barrier = relay_barrier,
                               .abort = relay_abort,
                               .close = relay_close};
}
