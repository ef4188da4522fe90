/* The command line and the layouts: what words mean, and what is said about those that mean
 * nothing.
 */
#include "support.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/args.h"

/* Splits a line at spaces and parses it; the words live until the next call. */
static ra_status parse(const char *line, ra_args *out)
{
    static char copy[512];
    static char *words[32];
    int count = 0;
    snprintf(copy, sizeof copy, "ringattn %s", line);
    for (char *word = strtok(copy, " "); word && count < 31; word = strtok(NULL, " ")) {
        words[count++] = word;
    }
    words[count] = NULL;
    return ra_args_parse(count, words, out);
}

static void understands_check(void **state)
{
    (void)state;
    ra_args args;
    assert_int_equal(
        parse("check a.st --ranks 4 --layout uneven:7 b.st -t3 --json --keep-kv", &args), RA_OK);
    assert_int_equal(args.command, RA_COMMAND_CHECK);
    assert_int_equal(args.file_count, 2);
    assert_string_equal(args.files[0], "a.st");
    assert_string_equal(args.files[1], "b.st");
    assert_int_equal(args.ranks, 4);
    assert_int_equal(args.layout.kind, RA_LAYOUT_UNEVEN);
    assert_int_equal(args.layout.seed, 7);
    assert_int_equal(args.threads, 3);
    assert_true(args.json && args.keep_kv && !args.no_overlap && !args.forward_only);
    assert_int_equal(args.dtype, 0);
    assert_int_equal(args.timeout_ms, 600000);
    assert_int_equal(parse("run a -o b --timeout 2.5", &args), RA_OK);
    assert_int_equal(args.timeout_ms, 2500);
    assert_int_equal(parse("plan --seq 5 --ranks 1024 --timeout 1000000", &args), RA_OK);
    assert_int_equal(args.timeout_ms, 1000000000);
    assert_int_equal(parse("check --dtype=bf16 --backend cpu --transport threads -- --a", &args),
                     RA_OK);
    assert_int_equal(args.dtype, RA_BF16);
    assert_int_equal(args.ranks, 2);
    assert_string_equal(args.files[0], "--a");
}

static void understands_the_others(void **state)
{
    (void)state;
    ra_args args;
    assert_int_equal(parse("run in -o out --out-dtype f32 --layout runs:x.json", &args), RA_OK);
    assert_string_equal(args.out, "out");
    assert_int_equal(args.out_dtype, RA_F32);
    assert_string_equal(args.layout.path, "x.json");
    assert_int_equal(parse("plan --seq 1000000 --ranks 64 --heads 16/2 --head-dim 128 --window 9 "
                           "--vision over_window --docs 1,2 --layout zigzag",
                           &args),
                     RA_OK);
    assert_int_equal(args.seq, 1000000);
    assert_int_equal(args.q_heads, 16);
    assert_int_equal(args.kv_heads, 2);
    assert_int_equal(args.window, 9);
    assert_int_equal(args.vision, RA_VISION_OVER_WINDOW);
    assert_int_equal(parse("bench --quick", &args), RA_OK);
    assert_true(args.quick);
    assert_int_equal(args.ranks, 1);
    assert_int_equal(parse("bench --list --only causal", &args), RA_OK);
    assert_true(args.list);
    assert_string_equal(args.only, "causal");
    assert_int_equal(parse("--version", &args), RA_OK);
    assert_true(args.version);
    assert_int_equal(parse("plan --help", &args), RA_OK);
    assert_true(args.help && args.command == RA_COMMAND_PLAN);
}

static void refuses_with_a_reason(void **state)
{
    (void)state;
    static const struct {
        const char *line, *word;
    } cases[] = {
        {"", "COMMAND"},
        {"chekc", "no such command"},
        {"check", "FILE"},
        {"check a --rank-s 2", "--ranks"},
        {"check a --laoyut zigzag", "did you mean --layout"},
        {"check a --quick", "--quick"},
        {"check a --only b", "--only"},
        {"check a --xyzzyplugh", "see --help"},
        {"check a -Z", "-Z"},
        {"check a --ranks", "--ranks: argument missing"},
        {"check a --ranks 0", "--ranks: 0"},
        {"check a --ranks 4097", "--ranks: 4097"},
        {"check a --ranks 1025", "--ranks: 1025, expected at most 1024"},
        {"plan --seq 5 --ranks 1025", "--ranks: 1025, expected at most 1024"},
        {"check a --timeout 0", "--timeout: 0, expected seconds"},
        {"check a --timeout nan", "--timeout: nan"},
        {"check a --timeout 1e9", "--timeout: 1e9"},
        {"check a --timeout 5s", "--timeout: 5s"},
        {"check a --timeout -1", "--timeout: -1"},
        {"bench --timeout 5", "no such option"},
        {"check a --ranks 2x", "--ranks: 2x"},
        {"check a --ranks 99999999999999999999", "--ranks"},
        {"check a --json=1", "takes no argument"},
        {"check a --threads -1", "--threads"},
        {"check a --backend tpu", "--backend: tpu, expected cpu"},
        {"check a --transport fax", "expected threads"},
        {"check a --dtype f64", "expected file, f32"},
        {"check a --layout ring", "--layout: ring"},
        {"check a --layout uneven:x", "seed"},
        {"check a --layout runs:", "runs:FILE"},
        {"check a --layout balanced:align=0", "align: 0"},
        {"check a --layout balanced:equal,", "align=N or equal"},
        {"check a --layout balanced:align=0000000000000000000000008tail", "align=N or equal"},
        {"check a --layout balanced:even", "align=N or equal"},
        {"check a --layout balancedx", "--layout: balancedx"},
        {"check a --cpu-level z80", "expected one of"},
        {"run a", "no OUT"},
        {"run -o b", "0 input files"},
        {"run a b -o c", "2 input files"},
        {"run a -o b --out-dtype file", "expected f32"},
        {"plan --ranks 2", "either one FILE or --seq"},
        {"plan a --seq 5 --ranks 2", "either one FILE or --seq"},
        {"plan a --ranks 2 --window 5", "go with --seq"},
        {"plan a b --ranks 2", "too many"},
        {"plan --seq 5", "--ranks: missing"},
        {"plan --seq 0 --ranks 2", "--seq: 0"},
        {"plan --seq 5 --ranks 2 --heads 8", "--heads: 8"},
        {"plan --seq 5 --ranks 2 --heads /8", "--heads"},
        {"plan --seq 5 --ranks 2 --vision none2", "--vision: none2"},
        {"plan --seq 5 --ranks 2 --vision within_window", "without --window"},
        {"plan --seq 5 --ranks 2 --images 0:2", "--images: given without --vision"},
        {"plan --seq 5 --ranks 2 --window 3 --images 0:2 --vision none", "--images: given without"},
        {"plan --seq 5 --ranks 2 --head-dim 513", "--head-dim: 513"},
        {"bench a", "reads no file"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        ra_args args;
        ra_status status = parse(cases[i].line, &args);
        if (status != RA_E_ARG || !strstr(ra_last_error(), cases[i].word)) {
            fail_msg("%s: status %d, message \"%s\", expected RA_E_ARG with \"%s\"", cases[i].line,
                     status, ra_last_error(), cases[i].word);
        }
    }
}

/* Deals a row of one causal document. */
static ra_status build(const ra_layout *layout, int ranks, int64_t seq, ra_deals *deals)
{
    const ra_step_desc whole = {.size = sizeof whole, .rows = 1, .seq_local = seq};
    const ra_layer layer = {.size = sizeof layer,
                            .q_heads = 1,
                            .kv_heads = 1,
                            .head_dim = 8,
                            .dtype = RA_F32,
                            .scale = 1,
                            .causal = true};
    return ra_deals_build(layout, ranks, &whole, &layer, deals);
}

/* Every position once; the sum of lengths is right; taking and putting are inverse. */
static void check_deals(const ra_layout *layout, int ranks, int64_t seq)
{
    ra_deals deals;
    assert_int_equal(build(layout, ranks, seq, &deals), RA_OK);
    enum { OUTER = 2, SEQ_MAX = 200 };
    int32_t whole[OUTER * SEQ_MAX], back[OUTER * SEQ_MAX] = {0}, slice[OUTER * SEQ_MAX];
    assert_in_range(seq, 1, SEQ_MAX);
    for (int64_t i = 0; i < OUTER * seq; i++) {
        whole[i] = (int32_t)i + 1;
    }
    int64_t total = 0;
    for (int rank = 0; rank < ranks; rank++) {
        const ra_deal *deal = &deals.deal[rank];
        int64_t length = 0;
        assert_non_null(deal->runs);
        for (int i = 0; i < deal->run_count; i++) {
            length += deal->runs[i].count;
        }
        assert_int_equal(length, deal->length);
        total += length;
        assert_int_equal(
            ra_runs_take(deal->runs, deal->run_count, whole, OUTER, seq, sizeof whole[0], slice),
            RA_OK);
        if (deal->length > 0) {
            assert_int_equal(slice[0], deal->runs[0].start + 1);
        }
        assert_int_equal(
            ra_runs_put(deal->runs, deal->run_count, slice, OUTER, seq, sizeof whole[0], back),
            RA_OK);
    }
    assert_int_equal(total, seq);
    assert_memory_equal(back, whole, (size_t)(OUTER * seq) * sizeof whole[0]);
    ra_deals_free(&deals);
}

static void deals_every_position_once(void **state)
{
    (void)state;
    for (int ranks = 1; ranks <= 9; ranks++) {
        for (int64_t seq = 1; seq <= 40; seq += 3) {
            check_deals(&(ra_layout){.kind = RA_LAYOUT_CONTIGUOUS}, ranks, seq);
            check_deals(&(ra_layout){.kind = RA_LAYOUT_ZIGZAG}, ranks, seq);
            check_deals(&(ra_layout){.kind = RA_LAYOUT_BALANCED}, ranks, seq);
            check_deals(&(ra_layout){.kind = RA_LAYOUT_BALANCED, .align = 3, .equal_tokens = true},
                        ranks, seq);
            for (uint64_t seed = 0; seed < 5; seed++) {
                check_deals(&(ra_layout){.kind = RA_LAYOUT_UNEVEN, .seed = seed}, ranks, seq);
            }
        }
    }
}

/* The layout is worth its name: lengths and run counts differ, runs go back, ranks are empty. */
static void uneven_is_uneven(void **state)
{
    (void)state;
    bool lengths_differ = false, counts_differ = false, goes_back = false, empty = false;
    for (uint64_t seed = 0; seed < 20; seed++) {
        ra_layout layout = {.kind = RA_LAYOUT_UNEVEN, .seed = seed};
        ra_deals deals;
        assert_int_equal(build(&layout, 4, 103, &deals), RA_OK);
        for (int rank = 0; rank < 4; rank++) {
            const ra_deal *deal = &deals.deal[rank];
            lengths_differ |= deal->length != deals.deal[0].length;
            counts_differ |= deal->run_count != deals.deal[0].run_count;
            empty |= deal->length == 0;
            for (int i = 1; i < deal->run_count; i++) {
                goes_back |= deal->runs[i].start < deal->runs[i - 1].start;
            }
        }
        ra_deals_free(&deals);
    }
    assert_true(lengths_differ && counts_differ && goes_back && empty);
}

static void reads_runs_from_json(void **state)
{
    (void)state;
    static const struct {
        const char *text, *word; /* NULL: accepted */
    } cases[] = {
        {"[[[4, 6]], [[0, 4]]]", NULL},
        {"[[[0, 10]], []]", NULL},
        {"[[[0, 10]]]", "2 ranks"},
        {"{}", "2 ranks"},
        {"[1, 2]", "entry 0"},
        {"[[[0]], [[0, 4]]]", "run 0 of rank 0"},
        {"[[[0, 4]], [[4, 7]]]", "run 0 of rank 1"},
        {"[[[-1, 4]], [[4, 6]]]", "run 0 of rank 0"},
        {"[[[0, 4.5]], [[4, 6]]]", "run 0 of rank 0"},
        {"[[[0, 9], [0, 9]], []]", "the row has 10"},
        {"[[[0, 4]]", ""},
    };
    char path[] = "/tmp/ra_runs_XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        size_t bytes = strlen(cases[i].text);
        assert_int_equal(ftruncate(fd, 0), 0);
        assert_int_equal(pwrite(fd, cases[i].text, bytes, 0), bytes);
        ra_layout layout = {.kind = RA_LAYOUT_RUNS, .path = path};
        ra_deals deals;
        ra_status status = build(&layout, 2, 10, &deals);
        if (!cases[i].word) {
            assert_int_equal(status, RA_OK);
            ra_deals_free(&deals);
        } else if (status == RA_OK || !strstr(ra_last_error(), cases[i].word)) {
            fail_msg("%s: status %d, message \"%s\", expected \"%s\"", cases[i].text, status,
                     ra_last_error(), cases[i].word);
        }
    }
    close(fd);
    unlink(path);
    ra_layout layout = {.kind = RA_LAYOUT_RUNS, .path = path};
    ra_deals deals;
    assert_int_equal(build(&layout, 2, 10, &deals), RA_E_IO);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(understands_check),     cmocka_unit_test(understands_the_others),
        cmocka_unit_test(refuses_with_a_reason), cmocka_unit_test(deals_every_position_once),
        cmocka_unit_test(uneven_is_uneven),      cmocka_unit_test(reads_runs_from_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
