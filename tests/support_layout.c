/* Ways to shard a row over ranks, from the plain to the perverse. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "support_problem.h"

static layout layout_empty(const char *name, int ranks)
{
    assert_true(ranks >= 1 && ranks <= PROBLEM_RANKS_MAX);
    layout l;
    memset(&l, 0, sizeof l);
    l.name = name;
    l.ranks = ranks;
    return l;
}

static void layout_add(layout *l, int rank, int64_t start, int64_t count)
{
    assert_true(l->run_count[rank] < PROBLEM_RUNS_MAX);
    l->run[rank][l->run_count[rank]++] = (ra_run){start, count};
    l->length[rank] += count;
}

layout layout_contiguous(int ranks, int64_t seq)
{
    layout l = layout_empty("contiguous", ranks);
    for (int rank = 0; rank < ranks; rank++) {
        ra_run run[1];
        int count = ra_runs_contiguous(rank, ranks, seq, run);
        for (int i = 0; i < count; i++) {
            layout_add(&l, rank, run[i].start, run[i].count);
        }
    }
    return l;
}

layout layout_zigzag(int ranks, int64_t seq)
{
    layout l = layout_empty("zigzag", ranks);
    for (int rank = 0; rank < ranks; rank++) {
        ra_run run[2];
        int count = ra_runs_zigzag(rank, ranks, seq, run);
        for (int i = 0; i < count; i++) {
            layout_add(&l, rank, run[i].start, run[i].count);
        }
    }
    return l;
}

layout layout_cuts(int ranks, int64_t seq, rng *r)
{
    layout l = layout_empty("cuts", ranks);
    l.implicit = true;
    int64_t begin = 0;
    for (int rank = 0; rank < ranks; rank++) {
        int64_t most = seq - begin;
        int64_t count = rank == ranks - 1
                            ? most
                            : rng_int(r, 0, most < 2 * seq / ranks ? most : 2 * seq / ranks);
        if (count > 0) {
            layout_add(&l, rank, begin, count);
        }
        begin += count;
    }
    return l;
}

layout layout_uneven(int ranks, int64_t seq, rng *r)
{
    layout l = layout_empty("uneven", ranks);
    int64_t begin = 0;
    int64_t longest = 1 + seq / (1 + rng_int(r, 0, 7));
    int idle = rng_chance(r, 20) ? (int)rng_int(r, 0, ranks - 1) : -1;
    while (begin < seq) {
        int64_t count = rng_int(r, 1, longest < seq - begin ? longest : seq - begin);
        int rank = (int)rng_int(r, 0, ranks - 1);
        if (rank == idle) {
            rank = (rank + 1) % ranks;
        }
        if (l.run_count[rank] == PROBLEM_RUNS_MAX) {
            rank = 0;
            count = l.run_count[0] == PROBLEM_RUNS_MAX - 1 ? seq - begin : count;
        }
        layout_add(&l, rank, begin, count);
        begin += count;
    }
    for (int rank = 0; rank < ranks; rank++) { /* runs need not ascend: shuffle them */
        for (int i = l.run_count[rank] - 1; i > 0 && rng_chance(r, 50); i--) {
            int j = (int)rng_int(r, 0, i);
            ra_run other = l.run[rank][i];
            l.run[rank][i] = l.run[rank][j];
            l.run[rank][j] = other;
        }
    }
    return l;
}

layout layout_kind(int kind, int ranks, int64_t seq, rng *r)
{
    switch (kind) {
    case 0: return layout_contiguous(ranks, seq);
    case 1: return layout_zigzag(ranks, seq);
    case 2: return layout_cuts(ranks, seq, r);
    default: return layout_uneven(ranks, seq, r);
    }
}

int64_t *layout_positions(const layout *l, int rank)
{
    int64_t *pos = calloc((size_t)l->length[rank] + 1, sizeof *pos);
    assert_non_null(pos);
    int64_t index = 0;
    for (int i = 0; i < l->run_count[rank]; i++) {
        for (int64_t j = 0; j < l->run[rank][i].count; j++) {
            pos[index++] = l->run[rank][i].start + j;
        }
    }
    return pos;
}

void problem_print(const problem *p, const layout *l)
{
    const ra_layer *layer = &p->layer;
    fprintf(stderr,
            "problem: seed %llu, rows %lld, seq %lld, heads %d/%d, head_dim %d, %s, causal %d, "
            "window %lld, right %lld, vision %d\n",
            (unsigned long long)support_seed(), (long long)p->rows, (long long)p->seq,
            layer->q_heads, layer->kv_heads, layer->head_dim, ra_dtype_name(layer->dtype),
            layer->causal, (long long)layer->window, (long long)layer->window_right,
            (int)layer->vision);
    for (int64_t row = 0; row < p->rows; row++) {
        fprintf(stderr, "  row %lld (document, i = vision, . = padding):", (long long)row);
        for (int64_t pos = 0; pos < p->seq; pos++) {
            int64_t i = row * p->seq + pos;
            int doc = p->doc_id ? p->doc_id[i] : 1;
            bool pad = (p->is_pad && p->is_pad[i]) || doc <= 0;
            bool image = p->token_type && (p->token_type[i] == 1 || p->token_type[i] == 2);
            fprintf(stderr, pad ? " ." : " %d", doc);
            fprintf(stderr, image ? "i" : "");
        }
        fprintf(stderr, "\n");
    }
    for (int rank = 0; l && rank < l->ranks; rank++) {
        fprintf(stderr, "  rank %d (%s):", rank, l->name);
        for (int i = 0; i < l->run_count[rank]; i++) {
            fprintf(stderr, " %lld+%lld", (long long)l->run[rank][i].start,
                    (long long)l->run[rank][i].count);
        }
        fprintf(stderr, "\n");
    }
}
