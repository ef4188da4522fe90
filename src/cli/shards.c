/* Five ways to deal the positions of a row to ranks. */
#include "cli/shards.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>
#include <inttypes.h>

#include "base/alloc.h"
#include "base/limits.h"
#include "base/mathx.h"
#include "cli/args.h"
#include "cli/files.h"

/* ":WORD,WORD" behind balanced, or nothing. */
static ra_status parse_balance(const char *text, ra_layout *out)
{
    while (*text) {
        char word[32];
        size_t length = strcspn(++text, ",");
        if (length >= sizeof word) {
            return RA_FAIL(RA_E_ARG, "--layout balanced: %.64s, expected align=N or equal", text);
        }
        snprintf(word, sizeof word, "%.*s", (int)length, text);
        if (strncmp(word, "align=", 6) == 0) {
            RA_TRY(
                ra_number_parse("--layout balanced:align", word + 6, 1, RA_SEQ_MAX, &out->align));
        } else if (strcmp(word, "equal") == 0) {
            out->equal_tokens = true;
        } else {
            return RA_FAIL(RA_E_ARG, "--layout balanced: %.64s, expected align=N or equal", text);
        }
        text += length;
    }
    return RA_OK;
}

ra_status ra_layout_parse(const char *text, ra_layout *out)
{
    int64_t seed = 1;
    *out = (ra_layout){0};
    if (strcmp(text, "contiguous") == 0) {
        out->kind = RA_LAYOUT_CONTIGUOUS;
    } else if (strcmp(text, "zigzag") == 0) {
        out->kind = RA_LAYOUT_ZIGZAG;
    } else if (strcmp(text, "uneven") == 0 || strncmp(text, "uneven:", 7) == 0) {
        if (text[6]) {
            RA_TRY(ra_number_parse("--layout uneven seed", text + 7, 0, INT64_MAX, &seed));
        }
        out->kind = RA_LAYOUT_UNEVEN;
        out->seed = (uint64_t)seed;
    } else if (strcmp(text, "balanced") == 0 || strncmp(text, "balanced:", 9) == 0) {
        out->kind = RA_LAYOUT_BALANCED;
        RA_TRY(parse_balance(text + strlen("balanced"), out));
    } else if (strncmp(text, "runs:", 5) == 0 && text[5]) {
        out->kind = RA_LAYOUT_RUNS;
        out->path = text + 5;
    } else {
        return RA_FAIL(RA_E_ARG,
                       "--layout: %.64s, expected contiguous, zigzag, balanced[:align=N,equal], "
                       "uneven[:SEED] or runs:FILE",
                       text);
    }
    return RA_OK;
}

ra_status ra_vision_parse(const char *name, const char *text, ra_vision *out)
{
    if (strcmp(text, "none") == 0) {
        *out = RA_VISION_OFF;
    } else if (strcmp(text, "within_window") == 0) {
        *out = RA_VISION_WITHIN_WINDOW;
    } else if (strcmp(text, "over_window") == 0) {
        *out = RA_VISION_OVER_WINDOW;
    } else {
        return RA_FAIL(RA_E_ARG, "%s: %.64s, expected none, within_window or over_window", name,
                       text);
    }
    return RA_OK;
}

static void print_balance(const ra_layout *layout, char *text, size_t text_bytes)
{
    char align[32] = "";
    if (layout->align > 0) {
        snprintf(align, sizeof align, ":align=%" PRId64, layout->align);
    }
    snprintf(text, text_bytes, "balanced%s%s", align,
             !layout->equal_tokens ? ""
             : *align              ? ",equal"
                                   : ":equal");
}

void ra_layout_print(const ra_layout *layout, char *text, size_t text_bytes)
{
    switch (layout->kind) {
    case RA_LAYOUT_CONTIGUOUS: snprintf(text, text_bytes, "contiguous"); break;
    case RA_LAYOUT_ZIGZAG: snprintf(text, text_bytes, "zigzag"); break;
    case RA_LAYOUT_UNEVEN: snprintf(text, text_bytes, "uneven:%" PRIu64, layout->seed); break;
    case RA_LAYOUT_RUNS: snprintf(text, text_bytes, "runs:%s", layout->path); break;
    case RA_LAYOUT_BALANCED: print_balance(layout, text, text_bytes); break;
    }
}

/* splitmix64: a seed gives the same layout everywhere. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static int64_t random_below(uint64_t *state, int64_t bound)
{
    return (int64_t)(next_random(state) % (uint64_t)bound);
}

static ra_status add_run(ra_deal *deal, int64_t *capacity, ra_run run)
{
    RA_TRY(RA_RESERVE(&deal->runs, capacity, deal->run_count + 1));
    deal->runs[deal->run_count++] = run;
    deal->length += run.count;
    return RA_OK;
}

/* Cuts the row into about three pieces a rank, of random lengths, and deals them at random: ranks
 * differ in length and run count, some may be empty, and a rank's runs come in random order. */
static ra_status deal_uneven(uint64_t seed, ra_deals *out)
{
    enum { PIECES_PER_RANK = 3 };
    uint64_t state = seed;
    int64_t mean = ra_max_i64(1, out->seq / ((int64_t)out->ranks * PIECES_PER_RANK));
    int64_t *capacity = NULL;
    RA_TRY(RA_NEW(&capacity, out->ranks));
    ra_status status = RA_OK;
    for (int64_t start = 0; start < out->seq && !status;) {
        int64_t count = ra_min_i64(1 + random_below(&state, 2 * mean), out->seq - start);
        int64_t rank = random_below(&state, out->ranks);
        status = add_run(&out->deal[rank], &capacity[rank], (ra_run){start, count});
        start += count;
    }
    for (int rank = 0; rank < out->ranks && !status; rank++) {
        ra_deal *deal = &out->deal[rank];
        for (int i = deal->run_count - 1; i > 0; i--) {
            int64_t other = random_below(&state, i + 1);
            ra_run swapped = deal->runs[i];
            deal->runs[i] = deal->runs[other];
            deal->runs[other] = swapped;
        }
    }
    ra_free(capacity);
    return status;
}

static ra_status deal_even(ra_layout_kind kind, ra_deals *out)
{
    for (int rank = 0; rank < out->ranks; rank++) {
        ra_deal *deal = &out->deal[rank];
        RA_TRY(RA_NEW(&deal->runs, 2));
        deal->run_count = kind == RA_LAYOUT_ZIGZAG
                              ? ra_runs_zigzag(rank, out->ranks, out->seq, deal->runs)
                              : ra_runs_contiguous(rank, out->ranks, out->seq, deal->runs);
        for (int i = 0; i < deal->run_count; i++) {
            deal->length += deal->runs[i].count;
        }
    }
    return RA_OK;
}

static ra_status read_runs_of(const char *path, int rank, const json_t *list, ra_deals *out)
{
    ra_deal *deal = &out->deal[rank];
    size_t count = json_array_size(list);
    if (!json_is_array(list) || count > RA_RUNS_MAX) {
        return RA_FAIL(RA_E_ARG, "%s: entry %d, expected a list of [start, count]", path, rank);
    }
    RA_TRY(RA_NEW(&deal->runs, count + 1));
    for (size_t i = 0; i < count; i++) {
        const json_t *pair = json_array_get(list, i);
        const json_t *start = json_array_get(pair, 0), *length = json_array_get(pair, 1);
        ra_run run = {json_integer_value(start), json_integer_value(length)};
        if (json_array_size(pair) != 2 || !json_is_integer(start) || !json_is_integer(length) ||
            run.start < 0 || run.count < 0 || run.start > out->seq ||
            run.count > out->seq - run.start) {
            return RA_FAIL(RA_E_ARG,
                           "%s: run %zu of rank %d, expected [start, count] inside the %lld "
                           "positions of the row",
                           path, i, rank, (long long)out->seq);
        }
        deal->runs[deal->run_count++] = run;
        deal->length += run.count;
    }
    return RA_OK;
}

/* Gaps and overlaps are found by ra_step_create, on all ranks; but the slices are taken before, so
 * the sum is checked here: no rank allocates more than the row. */
static ra_status deal_file(const char *path, ra_deals *out)
{
    json_error_t error;
    char *text = NULL;
    size_t bytes = 0;
    RA_TRY(ra_text_file_read(path, &text, &bytes));
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    ra_free(text);
    if (!root) {
        return RA_FAIL(RA_E_IO, "%s: %s", path, error.text);
    }
    ra_status status = RA_OK;
    if (!json_is_array(root) || json_array_size(root) != (size_t)out->ranks) {
        status =
            RA_FAIL(RA_E_ARG, "%s: expected a JSON list with one list of runs for each of %d ranks",
                    path, out->ranks);
    }
    for (int rank = 0; rank < out->ranks && !status; rank++) {
        status = read_runs_of(path, rank, json_array_get(root, (size_t)rank), out);
        if (!status && out->deal[rank].length > out->seq) {
            status = RA_FAIL(RA_E_ARG, "%s: rank %d has %lld positions, the row has %lld", path,
                             rank, (long long)out->deal[rank].length, (long long)out->seq);
        }
    }
    json_decref(root);
    return status;
}

static ra_status deal_balanced(const ra_layout *layout, const ra_step_desc *whole,
                               const ra_layer *layer, ra_deals *out)
{
    const ra_balance_options options = {
        .size = sizeof options,
        .align = layout->align,
        .equal_tokens = layout->equal_tokens,
    };
    ra_balance balance;
    int64_t capacity;
    RA_TRY(ra_runs_balanced(whole, layer, 1, out->ranks, &options, &balance));
    ra_status status = RA_OK;
    for (int rank = 0; rank < out->ranks && !status; rank++) {
        capacity = 0;
        for (int64_t i = balance.run_first[rank]; i < balance.run_first[rank + 1] && !status; i++) {
            status = add_run(&out->deal[rank], &capacity, balance.run[i]);
        }
    }
    ra_balance_free(&balance);
    return status;
}

ra_status ra_deals_build(const ra_layout *layout, int ranks, const ra_step_desc *whole,
                         const ra_layer *layer, ra_deals *out)
{
    *out = (ra_deals){ranks, whole->seq_local, NULL};
    ra_status status = RA_NEW(&out->deal, ranks);
    if (status) {
        return status;
    }
    switch (layout->kind) {
    case RA_LAYOUT_CONTIGUOUS:
    case RA_LAYOUT_ZIGZAG: status = deal_even(layout->kind, out); break;
    case RA_LAYOUT_UNEVEN: status = deal_uneven(layout->seed, out); break;
    case RA_LAYOUT_BALANCED: status = deal_balanced(layout, whole, layer, out); break;
    case RA_LAYOUT_RUNS: status = deal_file(layout->path, out); break;
    }
    for (int rank = 0; rank < ranks && !status; rank++) {
        if (!out->deal[rank].runs) {
            status = RA_NEW(&out->deal[rank].runs, 1);
        }
    }
    if (status) {
        ra_deals_free(out);
    }
    return status;
}

void ra_deals_free(ra_deals *deals)
{
    for (int rank = 0; deals->deal && rank < deals->ranks; rank++) {
        ra_free(deals->deal[rank].runs);
    }
    ra_free(deals->deal);
    *deals = (ra_deals){0};
}
