/* Shards of equal cost, on random batches: every position once, aligned, as equal as promised, in
 * as few runs as promised, by a count of pairs that knows nothing of intervals. And the helpers for
 * runs. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "support_random.h"

enum { STEPS = 4000, LONG_STEPS = 200, RANKS_MAX = 12, LAYERS = 2 };

/* One request and what it should weigh. */
typedef struct request {
    problem p;
    ra_layer layer[LAYERS];
    int layer_count, ranks;
    double weight[LAYERS];
    ra_balance_options options;
    double *cost; /* [seq] */
} request;

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            problem_print(&q->p, NULL);                                                            \
            fail_msg("%s: %d ranks, align %lld, equal %d: %s", support_case(), q->ranks,           \
                     (long long)q->options.align, q->options.equal_tokens, #condition);            \
        }                                                                                          \
    } while (0)

static void request_create(request *q, rng *r, int64_t seq, int rows)
{
    memset(q, 0, sizeof *q);
    q->ranks = (int)rng_int(r, 1, RANKS_MAX);
    q->layer_count = (int)rng_int(r, 1, LAYERS);
    problem_create(&q->p, layer_of(1, 1, 8, RA_F32), rows, seq);
    random_metadata(r, &q->p);
    q->options = (ra_balance_options){
        .size = sizeof q->options,
        .align = rng_chance(r, 50) ? rng_int(r, 0, 2) : rng_int(r, 3, 32),
        .equal_tokens = rng_chance(r, 50),
        .weight = rng_chance(r, 50) ? q->weight : NULL,
    };
    q->cost = calloc((size_t)seq + 1, sizeof *q->cost);
    assert_non_null(q->cost);
    int32_t *group = problem_groups(&q->p);
    for (int i = 0; i < q->layer_count; i++) {
        q->layer[i] = layer_of((int)rng_int(r, 1, 3), 1, 8 * (int)rng_int(r, 1, 3), RA_F32);
        random_mask(r, seq, &q->layer[i]);
        q->weight[i] = (double)rng_int(r, 0, 3);
        double weight =
            q->options.weight ? q->weight[i] : q->layer[i].q_heads * q->layer[i].head_dim;
        q->p.layer = q->layer[i];
        for (int64_t row = 0; row < rows; row++) {
            for (int64_t pos = 0; pos < seq; pos++) {
                for (int64_t key = 0; key < seq; key++) {
                    q->cost[pos] += weight * problem_allows(&q->p, group, row, pos, key);
                }
            }
        }
    }
    free(group);
}

static void request_free(request *q)
{
    free(q->cost);
    problem_free(&q->p);
}

static ra_balance solve(const request *q)
{
    ra_balance b;
    ra_step_desc whole = problem_desc(&q->p);
    EXPECT(ra_runs_balanced(&whole, q->layer, q->layer_count, q->ranks, &q->options, &b) == RA_OK);
    return b;
}

/* The cost of the most expensive aligned piece, as a share of a rank's mean; 0 without any cost. */
static double largest_piece(const request *q)
{
    double total = 0, largest = 0, piece = 0;
    int64_t align = q->options.align > 0 ? q->options.align : 1;
    for (int64_t pos = 0; pos < q->p.seq; pos++) {
        piece = pos % align == 0 ? q->cost[pos] : piece + q->cost[pos];
        largest = fmax(largest, piece);
        total += q->cost[pos];
    }
    return total > 0 ? largest * q->ranks / total : 0;
}

/* Runs that cover every position once, each aligned and ascending in its rank. */
static void check_cover(const request *q, const ra_balance *b)
{
    int64_t seq = q->p.seq, align = q->options.align > 0 ? q->options.align : 1;
    uint8_t *seen = calloc((size_t)seq + 1, 1);
    assert_non_null(seen);
    EXPECT(b->ranks == q->ranks && b->run_first[0] == 0);
    for (int rank = 0; rank < b->ranks; rank++) {
        int64_t before = -1;
        EXPECT(b->run_first[rank] <= b->run_first[rank + 1]);
        for (int64_t i = b->run_first[rank]; i < b->run_first[rank + 1]; i++) {
            ra_run run = b->run[i];
            EXPECT(run.count > 0 && run.start > before && run.start % align == 0);
            EXPECT((run.start + run.count) % align == 0 || run.start + run.count == seq);
            before = run.start + run.count; /* touching runs would be one */
            for (int64_t pos = run.start; pos < run.start + run.count; pos++) {
                EXPECT(pos < seq && !seen[pos]++);
            }
        }
    }
    for (int64_t pos = 0; pos < seq; pos++) {
        EXPECT(seen[pos]);
    }
    free(seen);
}

/* Cost of the busiest rank / mean, counted here; and the numbers of aligned pieces. */
static double check_loads(const request *q, const ra_balance *b)
{
    double total = 0, busiest = 0;
    int64_t align = q->options.align > 0 ? q->options.align : 1, fewest = INT64_MAX, most = 0;
    for (int rank = 0; rank < b->ranks; rank++) {
        double load = 0;
        int64_t pieces = 0;
        for (int64_t i = b->run_first[rank]; i < b->run_first[rank + 1]; i++) {
            pieces += (b->run[i].count + align - 1) / align;
            for (int64_t pos = b->run[i].start; pos < b->run[i].start + b->run[i].count; pos++) {
                load += q->cost[pos];
            }
        }
        total += load;
        busiest = fmax(busiest, load);
        fewest = pieces < fewest ? pieces : fewest;
        most = pieces > most ? pieces : most;
    }
    EXPECT(!q->options.equal_tokens || most - fewest <= 1);
    return total > 0 ? busiest * q->ranks / total : 1;
}

/* The guarantee of the header. Returns whether it applied. */
static bool check_request(const request *q)
{
    ra_balance b = solve(q), again = solve(q);
    check_cover(q, &b);
    double imbalance = check_loads(q, &b), piece = largest_piece(q);
    bool cost_free = piece == 0;
    EXPECT(cost_free || fabs(imbalance - b.imbalance) < 1e-9);
    bool promised = piece <= 0.01;
    if (promised && !cost_free) {
        int64_t runs = b.run_first[b.ranks];
        EXPECT(imbalance <= 1.03);
        EXPECT(runs <= (q->options.equal_tokens ? 2 * q->ranks - 1 : q->ranks));
    }
    /* Whatever the pieces, a greedy deal without a limit on numbers is no further away than one. */
    EXPECT(cost_free || q->options.equal_tokens || imbalance <= 1.03 + piece);
    EXPECT(memcmp(b.run_first, again.run_first, sizeof(int64_t) * (size_t)(b.ranks + 1)) == 0);
    EXPECT(memcmp(b.run, again.run, sizeof(ra_run) * (size_t)b.run_first[b.ranks]) == 0);
    ra_balance_free(&b);
    ra_balance_free(&again);
    return promised && !cost_free;
}

static void random_batches(void **state)
{
    (void)state;
    for (int64_t step = 0; step < support_steps(STEPS); step++) {
        rng r = rng_of(support_seed() * 1000003 + (uint64_t)step);
        request q;
        support_limit(60, "balance, step %lld", (long long)step);
        request_create(&q, &r, rng_int(&r, 1, 60), (int)rng_int(&r, 1, 2));
        check_request(&q);
        request_free(&q);
    }
}

/* Rows so long that the promise applies to many. */
static void long_batches(void **state)
{
    (void)state;
    int64_t promised = 0, steps = support_steps(LONG_STEPS);
    for (int64_t step = 0; step < steps; step++) {
        rng r = rng_of(support_seed() * 1000003 + (uint64_t)step);
        request q;
        support_limit(60, "balance of long rows, step %lld", (long long)step);
        request_create(&q, &r, rng_int(&r, 600, 1000), 1);
        q.ranks = 2 + q.ranks % 3;
        q.options.align %= 3;
        promised += check_request(&q);
        request_free(&q);
    }
    print_message("the promise applied to %lld of %lld batches\n", (long long)promised,
                  (long long)steps);
    assert_true(promised > steps / 4);
}

static ra_balance balance_of(const problem *p, int ranks, int64_t align, bool equal_tokens)
{
    ra_balance b;
    ra_step_desc whole = problem_desc(p);
    ra_balance_options options = {
        .size = sizeof options, .align = align, .equal_tokens = equal_tokens};
    assert_int_equal(ra_runs_balanced(&whole, &p->layer, 1, ranks, &options, &b), RA_OK);
    return b;
}

static void expect_runs(ra_balance *b, int rank, int count, const ra_run *runs)
{
    assert_int_equal(b->run_first[rank + 1] - b->run_first[rank], count);
    for (int i = 0; i < count; i++) {
        assert_int_equal(b->run[b->run_first[rank] + i].start, runs[i].start);
        assert_int_equal(b->run[b->run_first[rank] + i].count, runs[i].count);
    }
}

/* Batches whose best shards are known. */
static void known_shards(void **state)
{
    (void)state;
    problem p;
    support_limit(60, "known shards");
    problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, 4096);
    ra_balance zigzag = balance_of(&p, 2, 1024, true); /* a causal document: outside and inside */
    expect_runs(&zigzag, 0, 2, (ra_run[]){{0, 1024}, {3072, 1024}});
    expect_runs(&zigzag, 1, 1, (ra_run[]){{1024, 2048}});
    ra_balance halves = balance_of(&p, 2, 1, false); /* half of the pairs lie before 1/sqrt(2) */
    assert_int_equal(halves.run_first[2], 2);
    assert_in_range(halves.run[0].count, 2880, 2912);
    p.layer.causal = false; /* all positions cost the same: contiguous shards, even so or so */
    for (int equal = 0; equal < 2; equal++) {
        ra_balance even = balance_of(&p, 4, 0, equal);
        for (int rank = 0; rank < 4; rank++) {
            expect_runs(&even, rank, 1, (ra_run[]){{rank * 1024, 1024}});
        }
        assert_true(even.imbalance == 1);
        ra_balance_free(&even);
    }
    ra_balance_free(&zigzag);
    ra_balance_free(&halves);
    problem_free(&p);
}

/* Pieces of more than 1 % of a mean: a few exchanges still balance, where dealing each piece anew
 * would make as many runs as there are pieces. */
static void coarse_alignment(void **state)
{
    (void)state;
    enum { SEQ = 8192, RANKS = 8, ALIGN = 64 };
    int32_t docs[SEQ];
    problem p;
    rng r = rng_of(support_seed());
    support_limit(60, "coarse alignment");
    for (int turn = 0; turn < 20; turn++) {
        int32_t doc = 0;
        for (int64_t pos = 0; pos < SEQ;) {
            doc++;
            for (int64_t left = rng_int(&r, 20, 900); left > 0 && pos < SEQ; left--) {
                docs[pos++] = doc;
            }
        }
        problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, SEQ);
        problem_set_docs(&p, docs);
        for (int equal = 0; equal < 2; equal++) {
            ra_balance b = balance_of(&p, RANKS, ALIGN, equal);
            assert_true(b.imbalance <= 1.03);
            assert_true(b.run_first[RANKS] <= (equal ? 4 * RANKS : 3 * RANKS));
            ra_balance_free(&b);
        }
        problem_free(&p);
    }
}

static void nothing_to_weigh(void **state)
{
    (void)state;
    problem p;
    int32_t padding[6] = {0};
    support_limit(60, "nothing to weigh");
    problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, 6);
    problem_set_docs(&p, padding);
    for (int equal = 0; equal < 2; equal++) {
        ra_balance b = balance_of(&p, 3, 1, equal); /* by numbers */
        for (int rank = 0; rank < 3; rank++) {
            expect_runs(&b, rank, 1, (ra_run[]){{rank * 2, 2}});
        }
        assert_true(b.imbalance == 1);
        ra_balance_free(&b);
        b = balance_of(&p, 9, 4, equal); /* two pieces for nine ranks */
        assert_int_equal(b.run_first[9], 2);
        ra_balance_free(&b);
    }
    problem_free(&p);
    problem_create(&p, layer_of(1, 1, 8, RA_F32), 1, 0);
    ra_balance b = balance_of(&p, 3, 1, true);
    assert_int_equal(b.run_first[3], 0);
    assert_non_null(b.run); /* NULL would mean contiguous shards to a step */
    ra_balance_free(&b);
    problem_free(&p);
}

static void bad_requests(void **state)
{
    (void)state;
    const double nan_weight = NAN, negative = -1;
    ra_balance b;
    ra_step_desc whole = {.size = sizeof whole, .rows = 1, .seq_local = 8};
    ra_layer layer = layer_of(1, 1, 8, RA_F32), bad_layer = layer_of(2, 3, 8, RA_F32);
    ra_balance_options good = {.size = sizeof good};
    const struct {
        const ra_step_desc *whole;
        const ra_layer *layers;
        int layer_count, ranks;
        ra_balance_options options;
        ra_balance *out;
        const char *word;
    } cases[] = {
        {NULL, &layer, 1, 2, good, &b, "whole"},
        {&whole, &layer, 1, 2, good, NULL, "out"},
        {&whole, NULL, 1, 2, good, &b, "layers"},
        {&whole, &layer, 0, 2, good, &b, "layers"},
        {&whole, &bad_layer, 1, 2, good, &b, "layer 0"},
        {&whole, &layer, 1, 0, good, &b, "ranks: 0"},
        {&whole, &layer, 1, 5000, good, &b, "ranks: 5000"},
        {&whole, &layer, 1, 2, {.size = 1}, &b, "options.size"},
        {&whole, &layer, 1, 2, {.size = sizeof good, .align = -1}, &b, "options.align"},
        {&whole, &layer, 1, 2, {.size = sizeof good, .weight = &nan_weight}, &b, "weight[0]"},
        {&whole, &layer, 1, 2, {.size = sizeof good, .weight = &negative}, &b, "weight[0]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ra_status status = ra_runs_balanced(cases[i].whole, cases[i].layers, cases[i].layer_count,
                                            cases[i].ranks, &cases[i].options, cases[i].out);
        assert_true(status == RA_E_ARG || status == RA_E_SHAPE);
        assert_non_null(strstr(ra_last_error(), cases[i].word));
    }
    assert_int_equal(ra_runs_balanced(&whole, &layer, 1, 2, NULL, &b), RA_OK);
    ra_balance_free(&b);
    ra_balance_free(NULL);
}

/* A batch into the order of ranks and back; a rank's position ids. */
static void permutes(void **state)
{
    (void)state;
    enum { OUTER = 3, SEQ = 50, CHAN = 2 };
    float whole[OUTER][SEQ][CHAN], permuted[OUTER][SEQ][CHAN], back[OUTER][SEQ][CHAN];
    rng r = rng_of(support_seed());
    for (int i = 0; i < OUTER * SEQ * CHAN; i++) {
        ((float *)whole)[i] = (float)i;
    }
    for (int turn = 0; turn < 100; turn++) {
        layout l = layout_kind(turn % LAYOUT_KINDS, (int)rng_int(&r, 1, 6), SEQ, &r);
        ra_run all[PROBLEM_RANKS_MAX * PROBLEM_RUNS_MAX];
        int64_t count = 0, at = 0;
        for (int rank = 0; rank < l.ranks; rank++) {
            int64_t *pos = layout_positions(&l, rank), ids[SEQ];
            assert_int_equal(ra_runs_positions(l.run[rank], l.run_count[rank], ids),
                             l.length[rank]);
            assert_memory_equal(ids, pos, (size_t)l.length[rank] * sizeof *pos);
            free(pos);
            for (int i = 0; i < l.run_count[rank]; i++) {
                all[count++] = l.run[rank][i];
            }
        }
        assert_int_equal(ra_runs_positions(all, count, NULL), SEQ);
        memset(back, 0, sizeof back);
        assert_int_equal(ra_runs_take(all, count, whole, OUTER, SEQ, sizeof whole[0][0], permuted),
                         RA_OK);
        for (int rank = 0; rank < l.ranks; rank++) {
            int64_t *pos = layout_positions(&l, rank);
            for (int64_t i = 0; i < l.length[rank]; i++, at++) {
                for (int o = 0; o < OUTER; o++) {
                    assert_memory_equal(permuted[o][at], whole[o][pos[i]], sizeof whole[0][0]);
                }
            }
            free(pos);
        }
        assert_int_equal(ra_runs_put(all, count, permuted, OUTER, SEQ, sizeof whole[0][0], back),
                         RA_OK);
        assert_memory_equal(back, whole, sizeof whole);
    }
}

static void bad_runs(void **state)
{
    (void)state;
    char whole[8] = {0}, slice[8] = {0};
    const ra_run bad[] = {{-1, 2}, {0, -1}, {7, 2}, {9, 0}, {1, INT64_MAX}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        assert_int_equal(ra_runs_take(&bad[i], 1, whole, 1, 8, 1, slice), RA_E_ARG);
        assert_int_equal(ra_runs_put(&bad[i], 1, slice, 1, 8, 1, whole), RA_E_ARG);
    }
    const ra_run good = {2, 3};
    assert_int_equal(ra_runs_take(&good, 1, NULL, 1, 8, 1, slice), RA_E_ARG);
    assert_int_equal(ra_runs_put(&good, 1, slice, 1, 8, 1, NULL), RA_E_ARG);
    assert_int_equal(ra_runs_take(&good, -1, whole, 1, 8, 1, slice), RA_E_ARG);
    assert_int_equal(ra_runs_take(&good, 1, NULL, 0, 8, 1, NULL), RA_OK);
    assert_int_equal(ra_runs_take(NULL, 1, whole, 1, 8, 1, slice), RA_E_ARG);
    assert_int_equal(ra_runs_put(NULL, 1, slice, 1, 8, 1, whole), RA_E_ARG);
    assert_int_equal(ra_runs_take(&good, 1, whole, INT64_MAX, INT64_MAX, 1, slice), RA_E_ARG);
    assert_int_equal(ra_runs_put(&good, 1, slice, INT64_MAX, 8, SIZE_MAX, whole), RA_E_ARG);
    /* Nothing to move takes no time, however often. */
    assert_int_equal(ra_runs_take(&good, 1, whole, INT64_MAX / 8, 8, 0, slice), RA_OK);
    assert_int_equal(ra_runs_put(&good, 0, slice, INT64_MAX / 8, 8, 1, whole), RA_OK);

    int64_t pos[4] = {-1, -1, -1, -1};
    const ra_run backwards[] = {{4, -3}, {5, 2}};
    assert_int_equal(ra_runs_positions(NULL, 0, NULL), 0);
    assert_int_equal(ra_runs_positions(NULL, 2, pos), 0);
    assert_int_equal(ra_runs_positions(backwards, 2, pos + 1), 2);
    const int64_t expected[] = {-1, 5, 6, -1};
    assert_memory_equal(pos, expected, sizeof pos);
}

/* Only the ratios of weights count, however large or small they are. */
static void extreme_weights(void **state)
{
    (void)state;
    const double scale[] = {1, 0x1p-1070, 0x1p1020};
    ra_layer layer[] = {layer_of(1, 1, 8, RA_F32), layer_of(1, 1, 8, RA_F32)};
    layer[1].window = 10;
    const ra_step_desc whole = {.size = sizeof whole, .rows = 1, .seq_local = 1000};
    ra_balance expected = {0}, b;
    for (int i = 0; i < 3; i++) {
        const double weight[] = {scale[i], 8 * scale[i]};
        const ra_balance_options options = {.size = sizeof options, .weight = weight};
        assert_int_equal(ra_runs_balanced(&whole, layer, 2, 7, &options, &b), RA_OK);
        if (i == 0) {
            expected = b;
            continue;
        }
        assert_memory_equal(b.run_first, expected.run_first, 8 * sizeof b.run_first[0]);
        assert_memory_equal(b.run, expected.run, 7 * sizeof b.run[0]);
        assert_true(b.imbalance == expected.imbalance && b.imbalance >= 1);
        ra_balance_free(&b);
    }
    ra_balance_free(&expected);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_batches),   cmocka_unit_test(long_batches),
        cmocka_unit_test(known_shards),     cmocka_unit_test(nothing_to_weigh),
        cmocka_unit_test(coarse_alignment), cmocka_unit_test(bad_requests),
        cmocka_unit_test(permutes),         cmocka_unit_test(bad_runs),
        cmocka_unit_test(extreme_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
