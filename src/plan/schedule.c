/* Needs of all ranks to this rank's legs, and legs to hops. */
#include "plan/schedule.h"

#include "base/alloc.h"
#include "plan/backward.h"
#include "plan/need.h"
#include "plan/passes.h"

/* What a walk over one reader's needs adds to: rows by owner, and the ranges that concern this
 * rank. */
typedef struct gathering {
    int rank, reader;
    int64_t *rows;                  /* [rank_count] rows that the reader needs of each owner */
    ra_message *send, *recv;        /* [rank_count] by peer */
    int64_t *send_room, *recv_room; /* [rank_count] capacities */
} gathering;

static ra_status append(ra_message *message, int64_t *room, const ra_owned_piece *piece,
                        int64_t begin, int64_t end)
{
    int64_t index = piece->index + begin - piece->pos;
    message->row_count += end - begin;
    if (message->range_count > 0) {
        ra_key_rows *last = &message->range[message->range_count - 1];
        if (last->row == piece->row && last->doc == piece->doc &&
            last->pos + last->count == begin && last->index + last->count == index) {
            last->count += end - begin;
            return RA_OK;
        }
    }
    RA_TRY(RA_RESERVE(&message->range, room, message->range_count + 1));
    message->range[message->range_count++] =
        (ra_key_rows){piece->row, begin, end - begin, index, piece->doc};
    return RA_OK;
}

static ra_status gather_range(void *context, const ra_owned_piece *piece, int64_t begin,
                              int64_t end)
{
    gathering *g = context;
    g->rows[piece->owner] += end - begin;
    if (g->reader == g->rank) {
        return append(&g->recv[piece->owner], &g->recv_room[piece->owner], piece, begin, end);
    }
    if (piece->owner == g->rank) {
        return append(&g->send[g->reader], &g->send_room[g->reader], piece, begin, end);
    }
    return RA_OK;
}

/* Fills the messages of this rank by peer, and the largest message of every distance. */
static ra_status gather_needs(const ra_schedule_inputs *in, gathering *g, int64_t *rows_max,
                              int *n_prior)
{
    const ra_cover rule = {.tokens = in->tokens, .mask = in->mask};
    for (g->reader = 0; g->reader < in->rank_count; g->reader++) {
        for (int owner = 0; owner < in->rank_count; owner++) {
            g->rows[owner] = 0;
        }
        RA_TRY(ra_need_walk(&rule, in->pieces, g->reader, gather_range, g));
        for (int owner = 0; owner < in->rank_count; owner++) {
            int behind = g->reader - owner;
            int distance = behind < 0 ? behind + in->rank_count : behind;
            rows_max[distance] = ra_max_i64(rows_max[distance], g->rows[owner]);
            if (g->rows[owner] > 0 && behind > *n_prior) {
                *n_prior = behind;
            }
        }
    }
    return RA_OK;
}

/* One leg for every distance at which any rank needs anything; takes the messages over. */
static ra_status build_legs(const ra_schedule_inputs *in, ra_schedule *schedule)
{
    int size = in->rank_count;
    gathering g = {.rank = in->rank};
    int64_t *rows_max = NULL;
    ra_status status = RA_NEW(&g.rows, size);
    status = status ? status : RA_NEW(&g.send, size);
    status = status ? status : RA_NEW(&g.recv, size);
    status = status ? status : RA_NEW(&g.send_room, size);
    status = status ? status : RA_NEW(&g.recv_room, size);
    status = status ? status : RA_NEW(&rows_max, size);
    status = status ? status : gather_needs(in, &g, rows_max, &schedule->n_prior);
    status = status ? status : RA_NEW(&schedule->leg, size);
    for (int distance = 1; !status && distance < size; distance++) {
        if (rows_max[distance] == 0) {
            continue;
        }
        ra_leg *leg = &schedule->leg[schedule->leg_count++];
        int to = (in->rank + distance) % size, from = (in->rank - distance + size) % size;
        *leg = (ra_leg){distance, g.send[to], g.recv[from], rows_max[distance]};
        leg->send.peer = to;
        leg->recv.peer = from;
        g.send[to] = g.recv[from] = (ra_message){0};
        schedule->rows_received += leg->recv.row_count;
    }
    for (int peer = 0; peer < size; peer++) { /* what a failure left behind */
        ra_free(g.send ? g.send[peer].range : NULL);
        ra_free(g.recv ? g.recv[peer].range : NULL);
    }
    ra_free(g.rows);
    ra_free(g.send);
    ra_free(g.recv);
    ra_free(g.send_room);
    ra_free(g.recv_room);
    ra_free(rows_max);
    return status;
}

/* This rank's pieces, in the sorted order of all pieces. */
static ra_status own_pieces(const ra_schedule_inputs *in, ra_piece **out, int64_t *count)
{
    int64_t first = in->pieces->owned_first[in->rank]; /* without tokens there is no list */
    *count = in->pieces->owned_first[in->rank + 1] - first;
    RA_TRY(RA_NEW(out, *count));
    for (int64_t i = 0; i < *count; i++) {
        const ra_owned_piece *piece = &in->pieces->piece[in->pieces->owned[first + i]];
        (*out)[i] = (ra_piece){.row = piece->row,
                               .pos = piece->pos,
                               .count = piece->count,
                               .index = piece->index,
                               .tensor_row = piece->row,
                               .doc = piece->doc,
                               .source = RA_SOURCE_OWN};
    }
    return RA_OK;
}

/* The rows of the hop's legs as key pieces of one chunk, in sorted order, behind those already in
 * the cover. The messages learn where their rows lie in the chunk. */
static ra_status add_chunk(ra_schedule *schedule, ra_hop *hop)
{
    int64_t ranges = 0, filled = hop->cover.k_count;
    for (int l = hop->leg_first; l < hop->leg_first + hop->leg_count; l++) {
        ranges += schedule->leg[l].recv.range_count;
    }
    RA_TRY(RA_RESERVE(&hop->cover.k, &filled, hop->cover.k_count + ranges));
    for (int l = hop->leg_first; l < hop->leg_first + hop->leg_count; l++) {
        ra_message *recv = &schedule->leg[l].recv;
        for (int64_t i = 0; i < recv->range_count; i++) {
            ra_key_rows *range = &recv->range[i];
            range->index = hop->chunk_rows;
            hop->chunk_rows += range->count;
            hop->cover.k[hop->cover.k_count++] = (ra_piece){.row = range->row,
                                                            .pos = range->pos,
                                                            .count = range->count,
                                                            .index = range->index,
                                                            .doc = range->doc,
                                                            .source = RA_SOURCE_CHUNK};
        }
    }
    ra_pieces_sort(hop->cover.k, hop->cover.k_count);
    return RA_OK;
}

static ra_status copy_pieces(const ra_piece *from, int64_t count, ra_piece **to, int64_t *to_count)
{
    RA_TRY(RA_NEW(to, count));
    for (int64_t i = 0; i < count; i++) {
        (*to)[i] = from[i];
    }
    *to_count = count;
    return RA_OK;
}

static ra_status build_chunked(ra_schedule *schedule, const ra_piece *own, int64_t own_count)
{
    schedule->hop_count = 1 + schedule->leg_count;
    int64_t kept = 0;
    for (int h = 0; h < schedule->hop_count; h++) {
        ra_hop *hop = &schedule->hop[h];
        hop->leg_first = h > 0 ? h - 1 : 0;
        hop->leg_count = h > 0;
        hop->kept_index = kept;
        RA_TRY(copy_pieces(own, own_count, &hop->cover.q, &hop->cover.q_count));
        if (h == 0) {
            RA_TRY(copy_pieces(own, own_count, &hop->cover.k, &hop->cover.k_count));
        } else {
            RA_TRY(add_chunk(schedule, hop));
        }
        ra_cover_link(&hop->cover);
        kept += hop->chunk_rows;
    }
    return RA_OK;
}

/* Position behind the last received key of the piece's document; far left if there is none. */
static int64_t halo_end(const ra_cover *cover, const ra_piece *q)
{
    int64_t end = -RA_SEQ_MAX;
    for (int64_t i = q->first; i < q->last; i++) {
        if (cover->k[i].source == RA_SOURCE_CHUNK) {
            end = cover->k[i].pos + cover->k[i].count;
        }
    }
    return end;
}

/* The first query of the piece that sees nothing before `end`: reaches move forward only. */
static int64_t first_free_query(const ra_cover *cover, const ra_piece *q, int64_t end)
{
    int64_t low = q->pos, high = q->pos + q->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (ra_cover_reach(cover, q->row, middle).begin >= end) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

static void push_part(ra_cover *cover, const ra_piece *whole, int64_t begin, int64_t end)
{
    if (begin < end) {
        ra_piece part = *whole;
        part.pos = begin;
        part.count = end - begin;
        part.index = whole->index + begin - whole->pos;
        cover->q[cover->q_count++] = part;
    }
}

static ra_status build_neighbourhood(ra_schedule *schedule, const ra_piece *own, int64_t own_count)
{
    ra_hop *inner = &schedule->hop[0], *outer = &schedule->hop[1];
    schedule->hop_count = schedule->leg_count > 0 ? 2 : 1;
    RA_TRY(copy_pieces(own, own_count, &inner->cover.k, &inner->cover.k_count));
    RA_TRY(RA_NEW(&inner->cover.q, own_count));
    RA_TRY(RA_NEW(&outer->cover.q, own_count));
    RA_TRY(copy_pieces(own, own_count, &outer->cover.k, &outer->cover.k_count));
    outer->leg_count = schedule->leg_count;
    RA_TRY(add_chunk(schedule, outer));

    ra_cover probe = outer->cover; /* all queries against all keys, to see which need the halo */
    probe.q = NULL;
    RA_TRY(copy_pieces(own, own_count, &probe.q, &probe.q_count));
    ra_cover_link(&probe);
    for (int64_t i = 0; i < own_count; i++) {
        const ra_piece *q = &probe.q[i];
        int64_t cut = first_free_query(&probe, q, halo_end(&probe, q));
        push_part(&outer->cover, &own[i], q->pos, cut);
        push_part(&inner->cover, &own[i], cut, q->pos + q->count);
    }
    ra_free(probe.q);
    ra_cover_link(&inner->cover);
    ra_cover_link(&outer->cover);
    return RA_OK;
}

/* In the order of the forward, which keys do not care about. */
static ra_status mark_hops(ra_schedule *schedule)
{
    const ra_piece_set nothing = {0};
    ra_cover **covers = NULL;
    RA_TRY(RA_NEW(&covers, schedule->hop_count));
    for (int h = 0; h < schedule->hop_count; h++) {
        covers[h] = &schedule->hop[h].cover;
    }
    ra_status status = ra_passes_mark(covers, schedule->hop_count, &nothing, &nothing);
    for (int h = 0; h < schedule->hop_count && !status; h++) {
        for (int64_t i = 0; i < covers[h]->q_count; i++) {
            const ra_piece *q = &covers[h]->q[i];
            schedule->resumes = schedule->resumes || !q->fresh || !q->final;
        }
    }
    ra_free(covers);
    return status;
}

ra_status ra_schedule_build(const ra_schedule_inputs *in, ra_schedule *out)
{
    ra_schedule schedule = {0};
    ra_piece *own = NULL;
    int64_t own_count = 0;
    ra_status status = build_legs(in, &schedule);
    status = status ? status : own_pieces(in, &own, &own_count);
    status = status ? status : RA_NEW(&schedule.hop, 2 + schedule.leg_count);
    for (int h = 0; !status && h < 2 + schedule.leg_count; h++) {
        schedule.hop[h].cover = (ra_cover){.tokens = in->tokens, .mask = in->mask};
    }
    if (!status) {
        schedule.hop_count = 2 + schedule.leg_count; /* all of them, should building fail */
        status = in->neighbourhood ? build_neighbourhood(&schedule, own, own_count)
                                   : build_chunked(&schedule, own, own_count);
        ra_backward_order order = !in->neighbourhood ? RA_BACKWARD_HALVES
                                  : in->joined       ? RA_BACKWARD_JOINED
                                                     : RA_BACKWARD_LAST;
        status =
            status || in->forward_only ? status : ra_backward_build(&schedule, order, in->tile);
        status = status ? status : mark_hops(&schedule);
    }
    ra_free(own);
    if (status) {
        schedule.hop_count = schedule.hop ? 2 + schedule.leg_count : 0;
        ra_schedule_free(&schedule);
        return status;
    }
    *out = schedule;
    return RA_OK;
}

void ra_schedule_free(ra_schedule *schedule)
{
    for (int l = 0; l < schedule->leg_count; l++) {
        ra_free(schedule->leg[l].send.range);
        ra_free(schedule->leg[l].recv.range);
    }
    /* Of the neighbourhood's two hops the second exists also where nothing is exchanged. */
    for (int h = 0; schedule->hop && h < 2 + schedule->leg_count; h++) {
        ra_cover_free(&schedule->hop[h].cover);
    }
    ra_free(schedule->leg);
    for (int i = 0; schedule->pass_cover && i < schedule->pass_count; i++) {
        ra_cover_free(&schedule->pass_cover[i]);
    }
    ra_free(schedule->hop);
    ra_free(schedule->pass);
    ra_free(schedule->pass_cover);
    ra_free(schedule->returned);
    ra_free(schedule->empty);
    *schedule = (ra_schedule){0};
}

uint64_t ra_schedule_bytes(const ra_schedule *schedule)
{
    uint64_t bytes = ra_alloc_bytes(schedule->leg) + ra_alloc_bytes(schedule->hop) +
                     ra_alloc_bytes(schedule->pass) + ra_alloc_bytes(schedule->pass_cover) +
                     ra_alloc_bytes(schedule->returned) + ra_alloc_bytes(schedule->empty);
    for (int l = 0; l < schedule->leg_count; l++) {
        bytes += ra_alloc_bytes(schedule->leg[l].send.range);
        bytes += ra_alloc_bytes(schedule->leg[l].recv.range);
    }
    for (int h = 0; h < 2 + schedule->leg_count; h++) {
        bytes += ra_alloc_bytes(schedule->hop[h].cover.q);
        bytes += ra_alloc_bytes(schedule->hop[h].cover.k);
    }
    for (int i = 0; schedule->pass_cover && i < schedule->pass_count; i++) {
        bytes += ra_alloc_bytes(schedule->pass_cover[i].q);
        bytes += ra_alloc_bytes(schedule->pass_cover[i].k);
    }
    return bytes;
}
