/*
 * Bytes become the shards and metadata of a step, a layer and a moment at which memory runs out,
 * and those become the plans of every rank. Whatever the bytes say: no crash, no hang, no leak; and
 * where a step is accepted, every send has its receive and every allowed pair is counted once.
 */
#include <stdlib.h>
#include <string.h>

#include "base/alloc.h"
#include "plan/cost.h"
#include "plan/desc.h"

enum { RANKS_MAX = 6, ROWS_MAX = 3, RUNS_MAX = 6, LOCAL_MAX = 96, BRUTE_MAX = 160 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

typedef struct source {
    const uint8_t *data;
    size_t size, at;
} source;

/* One rank's claim. */
typedef struct claim {
    ra_step_desc desc;
    ra_run run[RUNS_MAX];
    int32_t doc_id[ROWS_MAX * LOCAL_MAX], token_type[ROWS_MAX * LOCAL_MAX];
    uint8_t is_pad[ROWS_MAX * LOCAL_MAX];
    ra_token_run *tokens;
} claim;

typedef struct step {
    int rank_count;
    ra_mask mask;
    claim claim[RANKS_MAX];
    int run_counts[RANKS_MAX];
    int64_t token_counts[RANKS_MAX];
    ra_run runs[RANKS_MAX * RUNS_MAX];
    ra_token_run *token_runs;
    ra_shards shards;
    ra_tokens tokens;
    ra_pieces pieces;
    ra_schedule schedule[RANKS_MAX];
} step;

static void expect(bool condition)
{
    if (!condition) {
        abort();
    }
}

static uint8_t take(source *s)
{
    return s->at < s->size ? s->data[s->at++] : 0;
}

/* Mostly small; now and then any 64-bit number. */
static int64_t take_number(source *s)
{
    int64_t small = take(s);
    if (small < 250) {
        return small % 48;
    }
    uint64_t large = 0;
    for (int i = 0; i < 8; i++) {
        large = large << 8 | take(s);
    }
    int64_t number;
    memcpy(&number, &large, sizeof number);
    return number;
}

static void take_claim(source *s, int64_t rows, bool explicit_runs, claim *c)
{
    int64_t length = 0;
    c->desc = (ra_step_desc){.size = sizeof c->desc, .rows = rows};
    int run_count = explicit_runs ? take(s) % (RUNS_MAX + 1) : 0;
    for (int i = 0; i < run_count; i++) {
        c->run[i].start = take_number(s);
        c->run[i].count = take_number(s);
        length = c->run[i].count >= 0 && c->run[i].count <= LOCAL_MAX ? length + c->run[i].count
                                                                      : length;
    }
    c->desc.seq_local = explicit_runs && take(s) < 240 ? length : take_number(s);
    c->desc.runs = explicit_runs ? c->run : NULL;
    c->desc.run_count = run_count;
    uint8_t present = take(s);
    if (c->desc.seq_local < 0 || c->desc.seq_local > LOCAL_MAX) {
        return; /* such lengths meet the checks without arrays behind them */
    }
    for (int64_t i = 0; i < rows * c->desc.seq_local; i++) {
        uint8_t token = take(s);
        c->doc_id[i] = token % 5 == 4 ? INT32_MIN : token % 5;
        c->token_type[i] = token / 5 % 4;
        c->is_pad[i] = token / 20 % 8 == 7;
    }
    c->desc.doc_id = present & 1 ? c->doc_id : NULL;
    c->desc.token_type = present & 2 ? c->token_type : NULL;
    c->desc.is_pad = present & 4 ? c->is_pad : NULL;
}

static ra_status build(step *w)
{
    int64_t count = 0, capacity = 0;
    int runs = 0;
    bool implicit = !w->claim[0].desc.runs;
    int64_t begin = 0;
    for (int rank = 0; rank < w->rank_count; rank++) {
        claim *c = &w->claim[rank];
        RA_TRY(ra_step_desc_check(&c->desc));
        if (c->desc.seq_local > LOCAL_MAX) {
            return RA_E_ARG;
        }
        RA_TRY(ra_token_runs_encode(&c->desc, &c->tokens, &w->token_counts[rank]));
        RA_TRY(RA_RESERVE(&w->token_runs, &capacity, count + w->token_counts[rank]));
        for (int64_t i = 0; i < w->token_counts[rank]; i++) {
            w->token_runs[count++] = c->tokens[i];
        }
        w->run_counts[rank] = implicit ? 1 : c->desc.run_count;
        for (int i = 0; i < w->run_counts[rank]; i++) {
            w->runs[runs++] = implicit ? (ra_run){begin, c->desc.seq_local} : c->run[i];
        }
        begin += c->desc.seq_local;
    }
    RA_TRY(ra_shards_build(w->rank_count, w->run_counts, w->runs, &w->shards));
    RA_TRY(ra_tokens_build(&w->shards, w->claim[0].desc.rows, w->token_counts, w->token_runs,
                           &w->tokens));
    RA_TRY(ra_pieces_build(&w->shards, &w->tokens, &w->pieces));
    bool near = w->shards.contiguous && w->mask.causal && w->mask.window > 0 &&
                w->mask.vision == RA_VISION_OFF;
    for (int rank = 0; rank < w->rank_count; rank++) {
        const ra_schedule_inputs in = {.tokens = &w->tokens,
                                       .pieces = &w->pieces,
                                       .mask = w->mask,
                                       .rank = rank,
                                       .rank_count = w->rank_count,
                                       .neighbourhood = near,
                                       .joined = w->mask.window % 2,
                                       .tile = RA_SCHEDULE_TILE};
        RA_TRY(ra_schedule_build(&in, &w->schedule[rank]));
    }
    return RA_OK;
}

static void check_messages(const step *w)
{
    for (int rank = 0; rank < w->rank_count; rank++) {
        const ra_schedule *mine = &w->schedule[rank];
        int64_t rows = 0;
        expect(mine->leg_count == w->schedule[0].leg_count);
        for (int l = 0; l < mine->leg_count; l++) {
            const ra_message *send = &mine->leg[l].send;
            const ra_message *recv = &w->schedule[send->peer].leg[l].recv;
            expect(recv->peer == rank && recv->row_count == send->row_count);
            expect(recv->range_count == send->range_count);
            for (int64_t i = 0; i < send->range_count; i++) {
                const ra_key_rows *range = &send->range[i];
                expect(range->pos == recv->range[i].pos && range->count == recv->range[i].count);
                expect(range->index >= 0 && range->index + range->count <= w->shards.length[rank]);
            }
            rows += mine->leg[l].recv.row_count;
        }
        expect(rows == mine->rows_received);
    }
}

static ra_token token_at(const step *w, int64_t row, int64_t pos)
{
    ra_token token = {pos, 0, -1};
    for (int64_t i = 0; i < w->tokens.span_count; i++) {
        const ra_doc_span *span = &w->tokens.span[i];
        if (span->row == row && span->begin <= pos && pos < span->end) {
            token.doc = span->doc;
        }
    }
    for (int64_t i = w->tokens.block_first[row]; i < w->tokens.block_first[row + 1]; i++) {
        if (w->tokens.block[i].begin <= pos && pos < w->tokens.block[i].end) {
            token.group = (int32_t)i;
        }
    }
    return token;
}

/* Pairs in tiles: the full columns and those that each query's reach holds. */
static int64_t count_tiles(const ra_cover *cover)
{
    int64_t pairs = 0;
    for (int64_t i = 0; i < cover->q_count; i++) {
        const ra_piece *q = &cover->q[i];
        for (int64_t j = q->first; j < q->last; j++) {
            for (int64_t begin = q->pos; begin < q->pos + q->count; begin += 8) {
                int64_t end = ra_min_i64(begin + 8, q->pos + q->count);
                ra_tile tile = ra_cover_tile(cover, q, begin, end, &cover->k[j]);
                for (int64_t pos = begin; pos < end; pos++) {
                    ra_range reach = ra_cover_reach(cover, q->row, pos);
                    int64_t first = ra_max_i64(reach.begin, tile.begin);
                    pairs += ra_max_i64(0, ra_min_i64(reach.end, tile.end) - first);
                }
            }
        }
    }
    return pairs;
}

static void check_pairs(const step *w)
{
    static ra_token token[BRUTE_MAX];
    int64_t brute = 0, tiles = 0, counted[RANKS_MAX] = {0}, total = 0;
    int64_t seq = w->tokens.seq, rows = w->tokens.rows;
    const ra_cover rule = {.tokens = &w->tokens, .mask = w->mask};
    if (rows * seq > BRUTE_MAX) {
        return;
    }
    for (int64_t i = 0; i < rows * seq; i++) {
        token[i] = token_at(w, i / seq, i % seq);
    }
    for (int64_t i = 0; i < rows * seq * seq; i++) {
        int64_t row = i / seq / seq;
        brute +=
            ra_mask_rule(&w->mask, token[row * seq + i / seq % seq], token[row * seq + i % seq]);
    }
    ra_cost_pairs(&rule, &w->pieces, counted);
    for (int rank = 0; rank < w->rank_count; rank++) {
        total += counted[rank];
        for (int h = 0; h < w->schedule[rank].hop_count; h++) {
            tiles += count_tiles(&w->schedule[rank].hop[h].cover);
        }
    }
    expect(brute == total && brute == tiles);
}

static void step_free(step *w)
{
    for (int rank = 0; rank < w->rank_count; rank++) {
        ra_schedule_free(&w->schedule[rank]);
        ra_free(w->claim[rank].tokens);
    }
    ra_pieces_free(&w->pieces);
    ra_tokens_free(&w->tokens);
    ra_shards_free(&w->shards);
    ra_free(w->token_runs);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static step w;
    source s = {data, size, 0};
    ra_alloc_probe probe;
    memset(&w, 0, sizeof w);
    memset(&probe, 0, sizeof probe);
    uint8_t flags = take(&s), fail_at = take(&s);
    w.rank_count = 1 + flags % RANKS_MAX;
    int64_t rows = 1 + flags / RANKS_MAX % ROWS_MAX;
    ra_layer layer = {.causal = take(&s) % 8 != 0, .vision = (ra_vision)(take(&s) % 3)};
    layer.window = ra_max_i64(0, take_number(&s));
    layer.window_right = take(&s) % 8 == 0 ? ra_max_i64(0, take_number(&s)) : 0;
    w.mask = ra_mask_of_layer(&layer);
    bool explicit_runs = take(&s) % 4 != 0;
    for (int rank = 0; rank < w.rank_count; rank++) {
        take_claim(&s, rows, explicit_runs, &w.claim[rank]);
    }
    atomic_store(&probe.fail_at, fail_at > 127 ? fail_at - 127 : 0);
    ra_alloc_probe *before = ra_alloc_watch(&probe);
    if (build(&w) == RA_OK) {
        check_messages(&w);
        check_pairs(&w);
    }
    step_free(&w);
    ra_alloc_watch(before);
    expect(atomic_load(&probe.live_bytes) == 0);
    return 0;
}
