/* Exchanges of gradient rows as courier tasks: the legs of collect, backwards. */
#include "ring/route.h"

static int64_t count_pieces(const ra_schedule *schedule, int hop, int64_t rows)
{
    const ra_hop *h = &schedule->hop[hop];
    int64_t count = 0;
    for (int l = h->leg_first; l < h->leg_first + h->leg_count; l++) {
        count += ra_ceil_div(schedule->leg[l].rows_max, rows);
    }
    return count;
}

ra_landing ra_route_landing(const ra_schedule *schedule, int64_t heads, int64_t head_dim,
                            int64_t bytes)
{
    int64_t row_bytes = 2 * heads * head_dim * (int64_t)sizeof(float);
    int64_t piece = (bytes ? bytes : RA_LANDING_BYTES) / RA_LANDING_PIECES / row_bytes;
    int64_t rows = 0, most = 0;
    for (int l = 0; l < schedule->leg_count; l++) {
        rows = ra_max_i64(rows, schedule->leg[l].rows_max);
    }
    if (rows == 0) {
        return (ra_landing){0};
    }
    rows = ra_ceil_div(rows, ra_ceil_div(rows, ra_max_i64(1, piece))); /* in equal pieces */
    for (int h = 1; h < schedule->hop_count; h++) {
        most = ra_max_i64(most, count_pieces(schedule, h, rows));
    }
    return (ra_landing){rows, (int)ra_min_i64(most, RA_LANDING_PIECES)};
}

int ra_route_mark(int hop)
{
    return RA_MARK_ROUTE + hop % 2;
}

static ra_tensor partial_view(const ra_route *r, int hop, void *const *slot)
{
    return ra_tensor_bhsd(slot[hop % 2], RA_F32, 1, r->ring->heads,
                          r->ring->schedule->hop[hop].chunk_rows, r->ring->head_dim);
}

/* Rows of one leg's messages, both ways; pieces of a hop are numbered over all its legs. */
typedef struct piece {
    int hop;
    int64_t number;
    const ra_leg *leg;
    int64_t begin, end; /* messages may end before */
} piece;

/* Where a piece lands. */
static ra_tensor landing_view(const ra_route *r, void *landing, const piece *at)
{
    ra_tensor t = ra_tensor_bhsd(landing, RA_F32, r->landing.count, r->ring->heads, r->landing.rows,
                                 r->ring->head_dim);
    t.data = ra_tensor_at(&t, at->number % r->landing.count, 0, 0);
    t.size[RA_ROW] = 1;
    return t;
}

/* Lists rows [begin, end) of a message: where they are in a chunk's sums, or, if they land, from
 * row 0 of the landing on. */
static ra_xfer list_rows(const ra_ring *ring, const ra_message *message, const ra_tensor *k,
                         const ra_tensor *v, int64_t begin, int64_t end, bool send)
{
    int64_t first = ring->blocks->count;
    const ra_tensor *const pair[2] = {k, v};
    for (int i = 0; i < 2; i++) {
        ra_slice slice;
        ra_slice_walk walk = ra_slice_walk_start(message, begin, end);
        while (ra_slice_walk_next(&walk, &slice)) {
            int64_t index = send ? slice.index : slice.offset - begin;
            ra_blocks_add(ring->blocks, pair[i], 0, index, slice.count);
        }
    }
    return ra_blocks_xfer(ring->blocks, first, message->peer, send);
}

/* add: of the backend, beside the computation or behind it. */
static ra_status add_landed(const ra_route *r, const piece *at,
                            ra_status (*add)(void *self, const ra_tensor *to,
                                             const ra_tensor *from))
{
    void *backend = r->ring->backend->self;
    ra_tensor landed[2] = {landing_view(r, r->landing_k, at), landing_view(r, r->landing_v, at)};
    const ra_tensor *const own[2] = {&r->dk, &r->dv};
    for (int i = 0; i < 2; i++) {
        ra_slice slice;
        ra_slice_walk walk = ra_slice_walk_start(&at->leg->send, at->begin, at->end);
        while (ra_slice_walk_next(&walk, &slice)) {
            ra_tensor from = ra_tensor_slice_seq(&landed[i], slice.offset - at->begin, slice.count);
            ra_tensor to = ra_tensor_slice_seq(own[i], slice.index, slice.count);
            to.data = ra_tensor_at(&to, slice.row, 0, 0);
            to.size[RA_ROW] = 1;
            RA_TRY(add(backend, &to, &from));
        }
    }
    return RA_OK;
}

/* What collect received goes back, what it sent comes home. A hop's first exchange goes behind its
 * computation, the others behind that. */
static ra_status exchange(const ra_route *r, const piece *at)
{
    const ra_ring *ring = r->ring;
    ra_tensor partial_k = partial_view(r, at->hop, r->slot_k);
    ra_tensor partial_v = partial_view(r, at->hop, r->slot_v);
    ra_tensor landing_k = landing_view(r, r->landing_k, at);
    ra_tensor landing_v = landing_view(r, r->landing_v, at);
    int xfer_count = 0;
    ring->blocks->count = 0;
    if (at->begin < at->leg->recv.row_count) {
        ring->xfers[xfer_count++] =
            list_rows(ring, &at->leg->recv, &partial_k, &partial_v, at->begin, at->end, true);
    }
    if (at->begin < at->leg->send.row_count) {
        ring->xfers[xfer_count++] =
            list_rows(ring, &at->leg->send, &landing_k, &landing_v, at->begin, at->end, false);
    }
    return at->number == 0
               ? ra_ring_exchange(ring, ra_route_mark(at->hop), xfer_count)
               : ra_comm_exchange(ring->comm, ring->xfers, xfer_count, ring->timeout_ms);
}

/* While one piece is added to this rank's sums, the next one travels. */
static ra_status exchange_and_add(const ra_route *r, const piece *at)
{
    const ra_backend *backend = r->ring->backend;
    RA_TRY(exchange(r, at));
    RA_TRY(backend->ops->wait_add(backend->self)); /* of the one before: the next may land there */
    return add_landed(r, at, backend->ops->add);
}

static ra_status add_behind(const ra_route *r, const piece *at)
{
    return add_landed(r, at, r->ring->backend->ops->add_behind);
}

/* Does something with the pieces [first, last) of a hop. */
static ra_status with_pieces(const ra_route *r, int hop, int64_t first, int64_t last,
                             ra_status (*work)(const ra_route *r, const piece *at))
{
    const ra_hop *h = &r->ring->schedule->hop[hop];
    int64_t rows = r->landing.rows;
    piece at = {.hop = hop};
    for (int l = h->leg_first; l < h->leg_first + h->leg_count; l++) {
        at.leg = &r->ring->schedule->leg[l];
        for (at.begin = 0; at.begin < at.leg->rows_max; at.begin += rows, at.number++) {
            at.end = at.begin + rows;
            if (at.number >= first && at.number < last) {
                RA_TRY(work(r, &at));
            }
        }
    }
    return RA_OK;
}

static ra_status exchange_all(const ra_route *r, int hop)
{
    RA_TRY(with_pieces(r, hop, 0, INT64_MAX, exchange_and_add));
    return r->ring->backend->ops->wait_add(r->ring->backend->self);
}

static ra_status exchange_landing(const ra_route *r, int hop)
{
    return with_pieces(r, hop, 0, r->landing.count, exchange);
}

/* Behind the additions of ra_route_add. */
static ra_status exchange_rest(const ra_route *r, int hop)
{
    const ra_backend *backend = r->ring->backend;
    RA_TRY(backend->ops->wait_mark(backend->self, ra_route_mark(hop)));
    RA_TRY(with_pieces(r, hop, r->landing.count, INT64_MAX, exchange_and_add));
    return backend->ops->wait_add(backend->self);
}

static ra_status run_task(const ra_route_task *task, ra_status (*run)(const ra_route *r, int hop))
{
    const ra_ring *ring = task->route->ring;
    int64_t started = ra_trace_begin(ring->trace);
    ra_status status = run(task->route, task->hop);
    ra_trace_end(ring->trace, started, "return gradients", RA_LANE_COMM, ra_comm_rank(ring->comm),
                 task->hop);
    if (status) {
        return RA_FAIL(status, "hop %d, gradients: %.400s", task->hop, ra_last_error());
    }
    return RA_OK;
}

static ra_status run_all(void *arg)
{
    return run_task(arg, exchange_all);
}

static ra_status run_landing(void *arg)
{
    return run_task(arg, exchange_landing);
}

static ra_status run_rest(void *arg)
{
    return run_task(arg, exchange_rest);
}

ra_status ra_route_slot(ra_route *route, int hop, ra_tensor *dk, ra_tensor *dv)
{
    RA_TRY(ra_ring_wait(route->ring, route->ticket[hop % 2], "wait for a gradient slot", hop));
    *dk = partial_view(route, hop, route->slot_k);
    *dv = partial_view(route, hop, route->slot_v);
    return RA_OK;
}

static ra_status mark(const ra_route *route, int hop)
{
    const ra_backend *backend = route->ring->backend;
    return backend->ops->mark(backend->self, ra_route_mark(hop));
}

static ra_status post(ra_route *route, int hop, ra_status (*run)(void *arg))
{
    route->task[hop % 2] = (ra_route_task){route, hop};
    route->ticket[hop % 2] = ra_ring_post(route->ring, (ra_task){run, &route->task[hop % 2]}, hop);
    return RA_OK;
}

static int last_hop(const ra_route *route)
{
    return route->ring->schedule->hop_count - 1;
}

ra_status ra_route_send(ra_route *route, int hop, bool marked)
{
    RA_TRY(marked ? RA_OK : mark(route, hop));
    return post(route, hop, hop == last_hop(route) ? run_landing : run_all);
}

ra_status ra_route_settle(ra_route *route)
{
    int before = last_hop(route) - 1;
    return before > 0
               ? ra_ring_wait(route->ring, route->ticket[before % 2], "wait for additions", before)
               : RA_OK;
}

/* The landed rows are added in the order of the computations, so that a device that is behind them
 * does not wait for this thread. */
ra_status ra_route_add(ra_route *route)
{
    const ra_ring *ring = route->ring;
    int hop = last_hop(route);
    RA_TRY(ra_ring_wait(ring, route->ticket[hop % 2], "wait for gradients", hop));
    RA_TRY(with_pieces(route, hop, 0, route->landing.count, add_behind));
    if (count_pieces(ring->schedule, hop, route->landing.rows) <= route->landing.count) {
        return RA_OK;
    }
    RA_TRY(mark(route, hop));
    return post(route, hop, run_rest);
}

ra_status ra_route_finish(ra_route *route)
{
    int last = last_hop(route);
    RA_TRY(ra_ring_wait(route->ring, route->ticket[0], "wait for gradients", last));
    return ra_ring_wait(route->ring, route->ticket[1], "wait for gradients", last);
}
