/* Copies the covers of the hops in the order of the backward. Queries are halved, not keys: so a
 * query's gradient is in as few computations as without. */
#include "plan/backward.h"

#include "base/alloc.h"
#include "plan/passes.h"

/* ---- rows whose gradients come home */

/* Own rows of the messages that this rank sends in legs before `end`. */
static ra_status gather_sent(const ra_schedule *schedule, int end, ra_piece_set *sent)
{
    for (int l = 0; l < end; l++) {
        const ra_message *send = &schedule->leg[l].send;
        ra_piece *pieces = NULL;
        RA_TRY(RA_NEW(&pieces, send->range_count));
        for (int64_t i = 0; i < send->range_count; i++) {
            const ra_key_rows *range = &send->range[i];
            pieces[i] = (ra_piece){.row = range->row,
                                   .pos = range->pos,
                                   .count = range->count,
                                   .index = range->index,
                                   .doc = range->doc,
                                   .source = RA_SOURCE_OWN};
        }
        ra_status status = ra_piece_set_add(sent, pieces, send->range_count);
        ra_free(pieces);
        RA_TRY(status);
    }
    return RA_OK;
}

/* Rows to which other ranks add: a tile is theirs or not, as one cut in two costs more than a row
 * that is rounded at the end like theirs. */
static ra_status gather_returned(const ra_schedule *schedule, int64_t tile, ra_piece_set *returned)
{
    const ra_cover *cover = &schedule->hop[0].cover;
    ra_piece_set own = {0};
    RA_TRY(gather_sent(schedule, schedule->leg_count, returned));
    ra_status status = ra_piece_set_add(&own, cover->k, cover->k_count);
    status = status ? status : ra_piece_set_fill(returned, &own, tile);
    ra_piece_set_free(&own);
    return status;
}

/* Neighbours of different documents become one. */
static ra_status list_rows(const ra_piece_set *set, ra_local_rows **out, int64_t *count)
{
    RA_TRY(RA_NEW(out, set->count));
    for (int64_t i = 0; i < set->count; i++) {
        const ra_piece *piece = &set->piece[i];
        ra_local_rows *last = *count > 0 ? &(*out)[*count - 1] : NULL;
        if (last && last->row == piece->row && last->index + last->count == piece->index) {
            last->count += piece->count;
        } else {
            (*out)[(*count)++] = (ra_local_rows){piece->row, piece->index, piece->count};
        }
    }
    return RA_OK;
}

/* ---- passes */

static int64_t count_queries(const ra_cover *cover)
{
    int64_t count = 0;
    for (int64_t i = 0; i < cover->q_count; i++) {
        count += cover->q[i].count;
    }
    return count;
}

/* All keys of a cover against its queries [begin, end), counted piece after piece. */
static ra_status copy_part(const ra_cover *from, int64_t begin, int64_t end, ra_cover *to)
{
    *to = (ra_cover){.tokens = from->tokens, .mask = from->mask};
    RA_TRY(RA_NEW(&to->k, from->k_count));
    RA_TRY(RA_NEW(&to->q, from->q_count));
    for (int64_t i = 0; i < from->k_count; i++) {
        to->k[to->k_count++] = from->k[i];
    }
    for (int64_t i = 0, passed = 0; i < from->q_count; passed += from->q[i++].count) {
        ra_piece part = from->q[i];
        int64_t first = ra_clamp_i64(begin - passed, 0, part.count);
        int64_t last = ra_clamp_i64(end - passed, 0, part.count);
        part.pos += first;
        part.index += first;
        part.count = last - first;
        if (part.count > 0) {
            to->q[to->q_count++] = part;
        }
    }
    ra_cover_link(to);
    return RA_OK;
}

/* The queries [begin, end) of a hop, as its computation in the backward. */
static ra_status build_pass(ra_schedule *schedule, int at, int hop, int64_t begin, int64_t end)
{
    schedule->pass[at] = (ra_pass){hop, &schedule->pass_cover[at]};
    return copy_part(&schedule->hop[hop].cover, begin, end, &schedule->pass_cover[at]);
}

/* Hop 1 with all of this rank's queries: pieces that hop 0 has as keys. */
static ra_status build_joined(ra_schedule *schedule)
{
    ra_cover all = schedule->hop[1].cover;
    all.q = schedule->hop[0].cover.k;
    all.q_count = schedule->hop[0].cover.k_count;
    RA_CHECK(schedule->hop_count == 2);
    RA_TRY(build_pass(schedule, 0, 0, 0, 0));
    schedule->pass[1] = (ra_pass){1, &schedule->pass_cover[1]};
    RA_TRY(copy_part(&all, 0, INT64_MAX, &schedule->pass_cover[1]));
    return build_pass(schedule, 2, 0, 0, 0);
}

static ra_status build_passes(ra_schedule *schedule, bool halves)
{
    int64_t half = halves ? count_queries(&schedule->hop[0].cover) / 2 : 0;
    RA_TRY(build_pass(schedule, 0, 0, 0, half));
    for (int h = 1; h < schedule->hop_count; h++) {
        RA_TRY(build_pass(schedule, h, h, 0, INT64_MAX));
    }
    return build_pass(schedule, schedule->hop_count, 0, half, INT64_MAX);
}

/* Gradients of all hops but the last come home before the last pass. */
static ra_status gather_empty(ra_schedule *schedule, ra_piece_set *empty)
{
    ra_cover *first = &schedule->pass_cover[0];
    RA_TRY(gather_sent(schedule, schedule->hop[schedule->hop_count - 1].leg_first, empty));
    RA_TRY(ra_cover_trim(first));
    return ra_piece_set_subtract(empty, first->k, first->k_count);
}

static ra_status mark_passes(ra_schedule *schedule, int64_t tile)
{
    ra_piece_set returned = {0}, empty = {0};
    ra_cover **covers = NULL;
    ra_status status = RA_NEW(&covers, schedule->pass_count);
    for (int i = 0; i < schedule->pass_count && !status; i++) {
        covers[i] = &schedule->pass_cover[i];
    }
    status = status ? status : gather_returned(schedule, tile, &returned);
    status = status ? status : list_rows(&returned, &schedule->returned, &schedule->returned_count);
    status = status ? status : gather_empty(schedule, &empty);
    status = status ? status : list_rows(&empty, &schedule->empty, &schedule->empty_count);
    status = status ? status : ra_passes_mark(covers, schedule->pass_count, &empty, &returned);
    ra_piece_set_free(&returned);
    ra_piece_set_free(&empty);
    ra_free(covers);
    return status;
}

ra_status ra_backward_build(ra_schedule *schedule, ra_backward_order order, int64_t tile)
{
    int count = schedule->leg_count > 0 ? schedule->hop_count + 1 : 1;
    RA_TRY(RA_NEW(&schedule->pass, count));
    schedule->pass_count = count;
    if (schedule->leg_count == 0) { /* nothing travels: the forward's order */
        schedule->pass[0] = (ra_pass){0, &schedule->hop[0].cover};
        return RA_OK;
    }
    RA_TRY(RA_NEW(&schedule->pass_cover, count));
    schedule->joined = order == RA_BACKWARD_JOINED;
    RA_TRY(schedule->joined ? build_joined(schedule)
                            : build_passes(schedule, order == RA_BACKWARD_HALVES));
    return mark_passes(schedule, tile);
}
