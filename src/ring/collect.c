/* Exchanges of key and value rows as courier tasks. */
#include "ring/collect.h"

static ra_tensor chunk_view(const ra_collect *c, int hop, const ra_tensor *kept, void *const *slot)
{
    const ra_hop *h = &c->ring->schedule->hop[hop];
    if (kept->data) {
        return ra_tensor_slice_seq(kept, h->kept_index, h->chunk_rows);
    }
    return ra_tensor_bhsd(slot[hop % 2], c->k.dtype, 1, c->ring->heads, h->chunk_rows,
                          c->ring->head_dim);
}

/* Lists one direction of a leg: all key rows, then all value rows. */
static ra_xfer list_message(const ra_ring *ring, const ra_message *message, const ra_tensor *k,
                            const ra_tensor *v, bool send)
{
    int64_t first = ring->blocks->count;
    const ra_tensor *const pair[2] = {k, v};
    for (int i = 0; i < 2; i++) {
        ra_slice slice;
        ra_slice_walk walk = ra_slice_walk_start(message, 0, message->row_count);
        while (ra_slice_walk_next(&walk, &slice)) {
            ra_blocks_add(ring->blocks, pair[i], send ? slice.row : 0, slice.index, slice.count);
        }
    }
    return ra_blocks_xfer(ring->blocks, first, message->peer, send);
}

static ra_status exchange_hop(void *arg)
{
    const ra_collect_task *task = arg;
    const ra_collect *c = task->collect;
    const ra_ring *ring = c->ring;
    const ra_hop *hop = &ring->schedule->hop[task->hop];
    ra_tensor k = chunk_view(c, task->hop, &c->kept_k, c->slot_k);
    ra_tensor v = chunk_view(c, task->hop, &c->kept_v, c->slot_v);
    int xfer_count = 0;
    ring->blocks->count = 0;
    for (int l = hop->leg_first; l < hop->leg_first + hop->leg_count; l++) {
        const ra_leg *leg = &ring->schedule->leg[l];
        if (leg->send.row_count > 0) {
            ring->xfers[xfer_count++] = list_message(ring, &leg->send, &c->k, &c->v, true);
        }
        if (leg->recv.row_count > 0) {
            ring->xfers[xfer_count++] = list_message(ring, &leg->recv, &k, &v, false);
        }
    }
    int64_t begin = ra_trace_begin(ring->trace);
    ra_status status = ra_ring_exchange(ring, RA_MARK_COLLECT + task->hop % 2, xfer_count);
    ra_trace_end(ring->trace, begin, "exchange keys and values", RA_LANE_COMM,
                 ra_comm_rank(ring->comm), task->hop);
    if (status) {
        return RA_FAIL(status, "hop %d, keys and values: %.400s", task->hop, ra_last_error());
    }
    return RA_OK;
}

/* The other slot is free, and this rank's rows are there, once everything called so far is done.
 * fills: the next computation fills the device for long. */
static ra_status post(ra_collect *c, int hop, bool fills)
{
    const ra_backend *backend = c->ring->backend;
    if (!c->arrived && hop < c->ring->schedule->hop_count) {
        RA_TRY(backend->ops->mark(backend->self, RA_MARK_COLLECT + hop % 2));
        c->task[hop % 2] = (ra_collect_task){c, hop};
        c->ticket[hop % 2] = ra_ring_post(c->ring, (ra_task){exchange_hop, &c->task[hop % 2]}, hop);
        if (fills) {
            return ra_ring_let_begin(c->ring, c->ticket[hop % 2], RA_MARK_COLLECT + hop % 2);
        }
    }
    return RA_OK;
}

ra_status ra_collect_start(ra_collect *collect, bool fills)
{
    return post(collect, 1, fills);
}

ra_status ra_collect_next(ra_collect *collect, int hop, ra_tensor *k, ra_tensor *v)
{
    if (!collect->arrived) {
        RA_TRY(
            ra_ring_wait(collect->ring, collect->ticket[hop % 2], "wait for keys and values", hop));
    }
    RA_TRY(post(collect, hop + 1, true));
    *k = chunk_view(collect, hop, &collect->kept_k, collect->slot_k);
    *v = chunk_view(collect, hop, &collect->kept_v, collect->slot_v);
    return RA_OK;
}
