/* The callbacks of the wire, and the blows. */
#include "support_fault.h"

#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "comm/comm.h"
#include "support_relay.h"

bool fault_network_set(bool up)
{
    struct ifreq lo = {.ifr_name = "lo"};
    int any = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    bool done = any >= 0 && ioctl(any, SIOCGIFFLAGS, &lo) == 0;
    lo.ifr_flags = (short)(up ? lo.ifr_flags | IFF_UP : lo.ifr_flags & ~IFF_UP);
    done = done && ioctl(any, SIOCSIFFLAGS, &lo) == 0;
    if (any >= 0) {
        close(any);
    }
    return done;
}

bool fault_network_own(void)
{
    return unshare(CLONE_NEWNET) == 0 && fault_network_set(true);
}

static bool is_moment(const fault_wire *w, const char *moment)
{
    const fault *f = w->plan;
    return w->rank == f->victim && w->phase == f->phase && w->calls == f->call &&
           strcmp(moment, f->moment) == 0;
}

/* Whoever may cut the network sees one file and answers with the other, within 10 s. */
static void ask_for_cut(const char *folder)
{
    char asked[4096], done[4096];
    const struct timespec nap = {0, 2000000};
    snprintf(asked, sizeof asked, "%s/cut.asked", folder);
    snprintf(done, sizeof done, "%s/cut.done", folder);
    FILE *file = fopen(asked, "w");
    for (int waited = 0; file && waited < 5000 && access(done, F_OK) != 0; waited++) {
        nanosleep(&nap, NULL);
    }
    if (file) {
        fclose(file);
    }
}

static ra_status strike(const fault_wire *w, const char *moment)
{
    const fault *f = w->plan;
    if (!is_moment(w, moment)) {
        return RA_OK;
    }
    if (strcmp(f->kind, "kill") == 0) {
        kill(getpid(), SIGKILL);
    } else if (strcmp(f->kind, "stop") == 0) {
        kill(getpid(), SIGSTOP);
    } else if (strcmp(f->kind, "slow") == 0) {
        struct timespec t = {f->late_ms / 1000, (long)(f->late_ms % 1000) * 1000000};
        nanosleep(&t, NULL);
    } else if (strcmp(f->kind, "error") == 0) {
        return ra_fail(RA_E_COMM, "the network card caught fire");
    } else if (strcmp(f->kind, "cut") == 0 && f->folder) {
        ask_for_cut(f->folder);
    } else if (strcmp(f->kind, "cut") == 0) {
        fault_network_set(false);
    }
    return RA_OK;
}

/* In the middle of an exchange, from a thread beside it. */
static void *strike_at(void *arg)
{
    const fault_wire *w = arg;
    struct timespec t = {0, 100000};
    nanosleep(&t, NULL);
    if (strike(w, "at")) {
        ra_comm_abort(w->inner, ra_last_error());
    }
    return NULL;
}

static ra_status exchange(fault_wire *w, const ra_xfer *xfers, int count, int timeout_ms,
                          const ra_order *order)
{
    return order ? ra_comm_exchange_behind(w->inner, xfers, count, timeout_ms, order)
                 : ra_comm_exchange(w->inner, xfers, count, timeout_ms);
}

static ra_status wire_exchange_behind(void *user, const ra_xfer *xfers, int count, int timeout_ms,
                                      const ra_order *order)
{
    fault_wire *w = user;
    pthread_t thread;
    w->calls++;
    bool beside = is_moment(w, "at") && !pthread_create(&thread, NULL, strike_at, w);
    ra_status status = strike(w, "before");
    status = status ? status : exchange(w, xfers, count, timeout_ms, order);
    if (beside) {
        pthread_join(thread, NULL);
    }
    return status ? status : strike(w, "after");
}

static ra_status wire_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    return wire_exchange_behind(user, xfers, count, timeout_ms, NULL);
}

ra_status fault_comm_open(fault_wire *wire, ra_comm **out)
{
    ra_comm_callbacks callbacks = relay_callbacks(wire);
    callbacks.exchange = wire_exchange;
    callbacks.close = wire->borrowed ? relay_close_nothing : callbacks.close;
    wire->rank = ra_comm_rank(wire->inner);
    ra_status status = ra_comm_open_custom(wire->rank, ra_comm_size(wire->inner), &callbacks, out);
    if (!status && ra_comm_has_exchange_behind(wire->inner)) {
        ra_comm_set_exchange_behind(*out, wire_exchange_behind);
    }
    return status;
}
