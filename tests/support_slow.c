/* A transport and a backend that pass everything on, later. */
#include "support_slow.h"

#include <stdatomic.h>
#include <time.h>

#include "comm/comm.h"
#include "support_relay.h"

static void sleep_us(int64_t us)
{
    struct timespec t = {us / 1000000, (us % 1000000) * 1000};
    nanosleep(&t, NULL);
}

static uint64_t fold_in(uint64_t sum, uint64_t value)
{
    return (sum ^ value) * 0x100000001b3u + 1;
}

static ra_status slow_exchange(void *user, const ra_xfer *xfers, int count, int timeout_ms)
{
    slow_comm *s = user;
    int64_t operation = s->tally.operations++;
    s->tally.kinds = fold_in(s->tally.kinds, 'x');
    for (int i = 0; i < count; i++) {
        uint64_t *sum =
            xfers[i].send ? &s->tally.sent[xfers[i].peer] : &s->tally.received[xfers[i].peer];
        *sum = fold_in(fold_in(*sum, (uint64_t)operation), xfers[i].bytes);
    }
    if (s->delay_us > 0 && rng_chance(&s->r, s->chance_percent)) {
        sleep_us(s->always_longest ? s->delay_us : rng_int(&s->r, 0, s->delay_us));
    }
    return ra_comm_exchange(s->inner, xfers, count, timeout_ms);
}

static ra_status slow_gather(void *user, const void *mine, size_t bytes, void *all, int timeout_ms)
{
    slow_comm *s = user;
    s->tally.operations++;
    s->tally.kinds = fold_in(fold_in(s->tally.kinds, 'g'), bytes);
    return ra_comm_gather(s->inner, mine, bytes, all, timeout_ms);
}

ra_status slow_comm_open(slow_comm *s, ra_comm *inner, ra_comm **out)
{
    ra_comm_callbacks callbacks = relay_callbacks(s);
    callbacks.exchange = slow_exchange;
    callbacks.gather = slow_gather;
    callbacks.close = relay_close_nothing;
    s->inner = inner;
    return ra_comm_open_custom(ra_comm_rank(inner), ra_comm_size(inner), &callbacks, out);
}

static const ra_backend_ops *_Atomic inner_ops; /* of the CPU backend: one for all */
static atomic_int compute_delay_us;
static atomic_ullong next_seed;

static void begin_late(void)
{
    static _Thread_local rng r;
    static _Thread_local bool seeded;
    int delay_us = atomic_load(&compute_delay_us);
    if (!seeded) {
        r = rng_of(atomic_fetch_add(&next_seed, 1));
        seeded = true;
    }
    if (delay_us > 0 && rng_chance(&r, 20)) {
        sleep_us(rng_int(&r, 0, delay_us));
    }
}

static ra_status slow_fold(void *self, const ra_fold_job *job)
{
    begin_late();
    return atomic_load(&inner_ops)->fold(self, job);
}

static ra_status slow_grad(void *self, const ra_grad_job *job)
{
    begin_late();
    return atomic_load(&inner_ops)->grad(self, job);
}

void slow_backend_wrap(slow_backend *s, const ra_backend *inner)
{
    atomic_store(&inner_ops, inner->ops);
    s->ops = *inner->ops;
    s->ops.fold = slow_fold;
    s->ops.grad = slow_grad;
    s->backend = (ra_backend){&s->ops, inner->self};
}

void slow_backend_delay(int delay_us)
{
    atomic_store(&compute_delay_us, delay_us);
}
