/* Exchanges of gradient rows as courier tasks: the legs of collect, backwards. */
#include "ring/route.h"

ra_landing ra_route_landing(const ra_schedule *schedule, int64_t heads, int64_t head_dim,
                            int64_t bytes)
{
    int64_t rows = 0;
    for (int l = 0; l < schedule->leg_count; l++) {
        rows = ra_max_i64(rows, schedule->leg[l].rows_max);
    }
    int64_t row_bytes = 2 * heads * head_dim * (int64_t)sizeof(float);
    int64_t half = ra_max_i64(1, (bytes ? bytes : RA_LANDING_BYTES) / (2 * row_bytes));
    return rows <= half ? (ra_landing){rows, 1}
                        : (ra_landing){ra_min_i64(half, ra_ceil_div(rows, 2)), 2};
}

static ra_tensor partial_view(const ra_route *r, int hop, void *const *slot)
{
    return ra_tensor_bhsd(slot[hop % 2], RA_F32, 1, r->ring->heads,
                          r->ring->schedule->hop[hop].chunk_rows, r->ring->head_dim);
}

/* Where piece `piece` of a leg lands. */
static ra_tensor landing_view(const ra_route *r, void *landing, int64_t piece)
{
    ra_tensor t = ra_tensor_bhsd(landing, RA_F32, r->landing.count, r->ring->heads, r->landing.rows,
                                 r->ring->head_dim);
    t.data = ra_tensor_at(&t, piece % r->landing.count, 0, 0);
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
static ra_status add_landed(const ra_route *r, const ra_message *message, int64_t piece,
                            ra_status (*add)(void *self, const ra_tensor *to,
                                             const ra_tensor *from))
{
    void *backend = r->ring->backend->self;
    int64_t begin = piece * r->landing.rows, end = begin + r->landing.rows;
    ra_tensor landed[2] = {landing_view(r, r->landing_k, piece),
                           landing_view(r, r->landing_v, piece)};
    const ra_tensor *const own[2] = {&r->dk, &r->dv};
    for (int i = 0; i < 2; i++) {
        ra_slice slice;
        ra_slice_walk walk = ra_slice_walk_start(message, begin, end);
        while (ra_slice_walk_next(&walk, &slice)) {
            ra_tensor from = ra_tensor_slice_seq(&landed[i], slice.offset - begin, slice.count);
            ra_tensor to = ra_tensor_slice_seq(own[i], slice.index, slice.count);
            to.data = ra_tensor_at(&to, slice.row, 0, 0);
            to.size[RA_ROW] = 1;
            RA_TRY(add(backend, &to, &from));
        }
    }
    return RA_OK;
}

/* Piece of both directions of one leg: what collect received goes back, what it sent comes home.
 * The hop's first exchange goes behind its computation, the others behind that. */
static ra_status exchange_piece(const ra_route *r, const ra_leg *leg, int hop, int64_t piece)
{
    const ra_ring *ring = r->ring;
    int64_t begin = piece * r->landing.rows, end = begin + r->landing.rows;
    ra_tensor partial_k = partial_view(r, hop, r->slot_k);
    ra_tensor partial_v = partial_view(r, hop, r->slot_v);
    ra_tensor landing_k = landing_view(r, r->landing_k, piece);
    ra_tensor landing_v = landing_view(r, r->landing_v, piece);
    int xfer_count = 0;
    ring->blocks->count = 0;
    if (begin < leg->recv.row_count) {
        ring->xfers[xfer_count++] =
            list_rows(ring, &leg->recv, &partial_k, &partial_v, begin, end, true);
    }
    if (begin < leg->send.row_count) {
        ring->xfers[xfer_count++] =
            list_rows(ring, &leg->send, &landing_k, &landing_v, begin, end, false);
    }
    bool first = piece == 0 && leg == &ring->schedule->leg[ring->schedule->hop[hop].leg_first];
    return first ? ra_ring_exchange(ring, RA_MARK_ROUTE + hop % 2, xfer_count)
                 : ra_comm_exchange(ring->comm, ring->xfers, xfer_count, ring->timeout_ms);
}

/* Piece by piece: while one is added to this rank's sums, the next one travels. */
static ra_status exchange_leg(const ra_route *r, const ra_leg *leg, int hop, int64_t piece)
{
    const ra_backend_ops *ops = r->ring->backend->ops;
    void *self = r->ring->backend->self;
    for (; piece * r->landing.rows < leg->rows_max; piece++) {
        RA_TRY(exchange_piece(r, leg, hop, piece));
        RA_TRY(ops->wait_add(self)); /* the piece after this lands there */
        RA_TRY(add_landed(r, &leg->send, piece, ops->add));
    }
    return ops->wait_add(self);
}

/* All pieces of a hop from this one of the first leg on. */
static ra_status exchange_from(const ra_route *r, int hop, int64_t piece)
{
    const ra_hop *h = &r->ring->schedule->hop[hop];
    for (int l = 0; l < h->leg_count; l++) {
        const ra_leg *leg = &r->ring->schedule->leg[h->leg_first + l];
        RA_TRY(exchange_leg(r, leg, hop, l > 0 ? 0 : piece));
    }
    return RA_OK;
}

static ra_status exchange_all(const ra_route *r, int hop)
{
    return exchange_from(r, hop, 0);
}

/* Where this rank's own sums are not complete, the first piece lands and is added later. */
static ra_status exchange_first(const ra_route *r, int hop)
{
    return exchange_piece(r, &r->ring->schedule->leg[r->ring->schedule->hop[hop].leg_first], hop,
                          0);
}

/* Behind the additions of ra_route_add. */
static ra_status exchange_rest(const ra_route *r, int hop)
{
    const ra_backend *backend = r->ring->backend;
    RA_TRY(backend->ops->wait_mark(backend->self, RA_MARK_ROUTE + hop % 2));
    return exchange_from(r, hop, 1);
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

static ra_status run_first(void *arg)
{
    return run_task(arg, exchange_first);
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

static ra_status post(ra_route *route, int hop, ra_status (*run)(void *arg))
{
    const ra_backend *backend = route->ring->backend;
    RA_TRY(backend->ops->mark(backend->self, RA_MARK_ROUTE + hop % 2));
    route->task[hop % 2] = (ra_route_task){route, hop};
    route->ticket[hop % 2] = ra_ring_post(route->ring, (ra_task){run, &route->task[hop % 2]}, hop);
    return RA_OK;
}

ra_status ra_route_send(ra_route *route, int hop)
{
    return post(route, hop, route->ring->schedule->backwards ? run_first : run_all);
}

/* The landed rows are added in the order of the computations, so that a device that is behind them
 * does not wait for this thread. */
ra_status ra_route_add(ra_route *route, int hop)
{
    const ra_ring *ring = route->ring;
    const ra_hop *h = &ring->schedule->hop[hop];
    const ra_leg *leg = &ring->schedule->leg[h->leg_first];
    RA_TRY(ra_ring_wait(ring, route->ticket[hop % 2], "wait for gradients", hop));
    RA_TRY(add_landed(route, &leg->send, 0, ring->backend->ops->add_behind));
    return h->leg_count > 1 || leg->rows_max > route->landing.rows ? post(route, hop, run_rest)
                                                                   : RA_OK;
}

ra_status ra_route_finish(ra_route *route)
{
    int last = route->ring->schedule->hop_count - 1;
    RA_TRY(ra_ring_wait(route->ring, route->ticket[0], "wait for gradients", last));
    return ra_ring_wait(route->ring, route->ticket[1], "wait for gradients", last);
}
