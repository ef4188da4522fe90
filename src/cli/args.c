/* The option table and its three readers: the parser, the help pages, the suggestions. */
#include "cli/args.h"

#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sched.h>

#include "base/alloc.h"
#include "base/limits.h"

enum {
    CHECK = RA_COMMAND_CHECK,
    RUN = RA_COMMAND_RUN,
    PLAN = RA_COMMAND_PLAN,
    BENCH = RA_COMMAND_BENCH,
    RING = CHECK | RUN,
    ALL = RING | PLAN | BENCH,
};

/* A rank that waits sees no difference between one that still computes its hop and one that is
 * gone. Here a long computation is the more likely of the two. */
enum { TIMEOUT_MS_DEFAULT = 600 * 1000, TIMEOUT_SECONDS_MAX = 1000 * 1000 };

/* name, letter or 0, argument or NULL, commands, help */
#define OPTION_LIST(X)                                                                             \
    X(RANKS, "ranks", 'n', "N", RING | PLAN, "ranks to shard over (check, run: 2)")                \
    X(LAYOUT, "layout", 'l', "LAYOUT", RING | PLAN,                                                \
      "contiguous, zigzag, balanced[:align=N,equal], uneven[:SEED]\n"                              \
      "                             or runs:FILE (contiguous)")                                    \
    X(BACKEND, "backend", 0, "NAME", RING | PLAN,                                                  \
      "cpu, cuda or auto: cuda if there is a device (cpu)")                                        \
    X(TRANSPORT, "transport", 0, "NAME", RING,                                                     \
      "threads, mpi: the processes of mpirun, or nccl: one a GPU (threads)")                       \
    X(DTYPE, "dtype", 'd', "DTYPE", RING | PLAN, "file, f32, bf16 or f16: converts the inputs")    \
    X(OUT, "out", 'o', "OUT", RUN, "the safetensors file to write")                                \
    X(OUT_DTYPE, "out-dtype", 0, "DTYPE", RUN, "f32, bf16 or f16 of the results (the query's)")    \
    X(FORWARD_ONLY, "forward-only", 0, NULL, RING, "no backward")                                  \
    X(KEEP_KV, "keep-kv", 0, NULL, RING, "the backward reuses the keys and values received")       \
    X(NO_OVERLAP, "no-overlap", 0, NULL, RING, "exchange between computations, not beside them")   \
    X(THREADS, "threads", 't', "N", RING | BENCH, "threads per rank (the CPUs / ranks)")           \
    X(CPU_LEVEL, "cpu-level", 0, "NAME", RING | BENCH, "instruction set of the kernels (best)")    \
    X(TIMEOUT, "timeout", 0, "SECONDS", RING | PLAN, "longest wait for another rank (600)")        \
    X(TRACE, "trace", 0, "FILE", RING, "write a Chrome trace of the ring")                         \
    X(SEQ, "seq", 's', "N", PLAN, "positions of a row, instead of FILE")                           \
    X(DOCS, "docs", 0, "LIST", PLAN, "lengths L1,L2,... or a file of them; the rest is padding")   \
    X(IMAGES, "images", 0, "LIST", PLAN, "image blocks START:COUNT,...")                           \
    X(WINDOW, "window", 'w', "W", PLAN, "sliding window, the query counted; 0 = none")             \
    X(VISION, "vision", 0, "RULE", PLAN, "none, within_window or over_window")                     \
    X(HEADS, "heads", 0, "Q/KV", PLAN, "query and key heads (8/1; with a window 8/4)")             \
    X(HEAD_DIM, "head-dim", 0, "D", PLAN, "channels of a head (512; with a window 256)")           \
    X(ONLY, "only", 0, "TEXT", BENCH, "only the rows whose name contains TEXT")                    \
    X(LIST, "list", 0, NULL, BENCH, "the names of the rows, without running them")                 \
    X(QUICK, "quick", 'q', NULL, BENCH, "at most 2048 positions, instead of 8192")                 \
    X(JSON, "json", 'j', NULL, ALL, "results as JSON on standard output")                          \
    X(VERBOSE, "verbose", 'v', NULL, RING | PLAN, "also memory: scratch, plan and metadata")       \
    X(HELP, "help", 'h', NULL, ALL, "this text")

enum {
#define OPTION_ID(id, ...) OPTION_##id,
    OPTION_LIST(OPTION_ID)
#undef OPTION_ID
        OPTION_COUNT,
    OPTION_BASE = 256, /* getopt values past every letter */
};

static const struct {
    const char *name;
    int letter;
    const char *argument;
    int commands;
    const char *help;
} table[OPTION_COUNT] = {
#define OPTION_ROW(id, ...) {__VA_ARGS__},
    OPTION_LIST(OPTION_ROW)
#undef OPTION_ROW
};

static const struct {
    const char *name;
    ra_command command;
    const char *usage, *summary;
} commands[] = {
    {"check", RA_COMMAND_CHECK, "FILE...", "run cases through the ring and compare the results"},
    {"run", RA_COMMAND_RUN, "IN -o OUT", "run a case through the ring and write the results"},
    {"plan", RA_COMMAND_PLAN, "(FILE | --seq N) --ranks N", "who computes and sends what"},
    {"bench", RA_COMMAND_BENCH, "", "speed of one rank, as a share of the machine's peak"},
};
enum { COMMAND_COUNT = sizeof commands / sizeof commands[0] };

int ra_cpu_count(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

ra_status ra_number_parse(const char *name, const char *text, int64_t low, int64_t high,
                          int64_t *out)
{
    char *end;
    errno = 0;
    long long value = strtoll(text, &end, 10);
    bool is_number = *text && strchr("+-0123456789", *text) && !*end && errno == 0;
    if (!is_number || value < low || value > high) {
        return RA_FAIL(RA_E_ARG, "%s: %.64s, expected an integer from %lld to %lld", name, text,
                       (long long)low, (long long)high);
    }
    *out = value;
    return RA_OK;
}

static ra_status parse_pair(const char *name, char *item, char separator, ra_run *out)
{
    char *second = separator ? strchr(item, separator) : NULL;
    if (separator && !second) {
        return RA_FAIL(RA_E_ARG, "%s: %.64s, expected START%cCOUNT", name, item, separator);
    }
    if (second) {
        *second++ = 0;
        RA_TRY(ra_number_parse(name, item, 0, RA_SEQ_MAX, &out->start));
    }
    return ra_number_parse(name, second ? second : item, 1, RA_SEQ_MAX, &out->count);
}

ra_status ra_pairs_parse(const char *name, const char *text, char separator, ra_run **out,
                         int *count)
{
    char *copy = NULL;
    ra_run *pairs = NULL;
    int items = 1;
    for (const char *c = text; *c; c++) {
        items += *c == ',';
    }
    RA_TRY(RA_NEW(&copy, strlen(text) + 1));
    strcpy(copy, text);
    ra_status status = RA_NEW(&pairs, items);
    char *rest = copy;
    for (int i = 0; i < items && !status; i++) {
        status = parse_pair(name, strsep(&rest, ","), separator, &pairs[i]);
    }
    ra_free(copy);
    if (status) {
        ra_free(pairs);
        return status;
    }
    *out = pairs;
    *count = items;
    return RA_OK;
}

static ra_status parse_int(const char *name, const char *text, int64_t low, int64_t high, int *out)
{
    int64_t value;
    RA_TRY(ra_number_parse(name, text, low, high, &value));
    *out = (int)value;
    return RA_OK;
}

static ra_status parse_timeout(const char *text, int *out)
{
    char *end;
    double seconds = strtod(text, &end);
    bool is_number = *text && strchr("0123456789.", *text) && !*end;
    /* The negation also refuses NaN. */
    if (!is_number || !(seconds >= 1e-3 && seconds <= TIMEOUT_SECONDS_MAX)) {
        return RA_FAIL(RA_E_ARG, "--timeout: %.64s, expected seconds from 0.001 to %d", text,
                       TIMEOUT_SECONDS_MAX);
    }
    *out = (int)(seconds * 1e3 + 0.5);
    return RA_OK;
}

static ra_status parse_dtype(const char *name, const char *text, bool file_allowed, ra_dtype *out)
{
    const ra_dtype offered[] = {RA_F32, RA_BF16, RA_F16};
    if (file_allowed && strcmp(text, "file") == 0) {
        *out = 0;
        return RA_OK;
    }
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, ra_dtype_name(offered[i])) == 0) {
            *out = offered[i];
            return RA_OK;
        }
    }
    return RA_FAIL(RA_E_ARG, "%s: %.64s, expected %sf32, bf16 or f16", name, text,
                   file_allowed ? "file, " : "");
}

static ra_status parse_heads(const char *text, ra_args *out)
{
    char query[16];
    const char *slash = strchr(text, '/');
    if (!slash || (size_t)(slash - text) >= sizeof query) {
        return RA_FAIL(RA_E_ARG, "--heads: %.64s, expected QUERY/KEY heads such as 8/1", text);
    }
    memcpy(query, text, (size_t)(slash - text));
    query[slash - text] = 0;
    RA_TRY(parse_int("--heads", query, 1, RA_HEADS_MAX, &out->q_heads));
    return parse_int("--heads", slash + 1, 1, RA_HEADS_MAX, &out->kv_heads);
}

static ra_status parse_cpu_level(const char *text, ra_args *out)
{
    char known[128] = "";
    for (int i = 0; ra_cpu_level_name(i); i++) {
        if (strcmp(text, ra_cpu_level_name(i)) == 0) {
            out->cpu_level = text;
            return RA_OK;
        }
        size_t used = strlen(known);
        snprintf(known + used, sizeof known - used, "%s%s", i ? ", " : "", ra_cpu_level_name(i));
    }
    return RA_FAIL(RA_E_ARG, "--cpu-level: %.64s, expected one of %s", text, known);
}

static ra_status apply(int id, const char *text, ra_args *out)
{
    switch (id) {
    case OPTION_RANKS: return parse_int("--ranks", text, 1, RA_RANKS_MAX, &out->ranks);
    case OPTION_LAYOUT: return ra_layout_parse(text, &out->layout);
    case OPTION_BACKEND: return ra_device_parse(text, &out->device);
    case OPTION_TRANSPORT: return ra_transport_parse(text, &out->transport);
    case OPTION_DTYPE: return parse_dtype("--dtype", text, true, &out->dtype);
    case OPTION_OUT_DTYPE: return parse_dtype("--out-dtype", text, false, &out->out_dtype);
    case OPTION_THREADS: return parse_int("--threads", text, 1, RA_THREADS_MAX, &out->threads);
    case OPTION_CPU_LEVEL: return parse_cpu_level(text, out);
    case OPTION_TIMEOUT: return parse_timeout(text, &out->timeout_ms);
    case OPTION_SEQ: return ra_number_parse("--seq", text, 1, RA_SEQ_MAX, &out->seq);
    case OPTION_WINDOW: return ra_number_parse("--window", text, 0, RA_SEQ_MAX, &out->window);
    case OPTION_VISION: return ra_vision_parse("--vision", text, &out->vision);
    case OPTION_HEADS: return parse_heads(text, out);
    case OPTION_HEAD_DIM:
        return parse_int("--head-dim", text, RA_HEAD_DIM_STEP, RA_HEAD_DIM_MAX, &out->head_dim);
    case OPTION_OUT: out->out = text; break;
    case OPTION_ONLY: out->only = text; break;
    case OPTION_LIST: out->list = true; break;
    case OPTION_TRACE: out->trace = text; break;
    case OPTION_DOCS: out->docs = text; break;
    case OPTION_IMAGES: out->images = text; break;
    case OPTION_FORWARD_ONLY: out->forward_only = true; break;
    case OPTION_KEEP_KV: out->keep_kv = true; break;
    case OPTION_NO_OVERLAP: out->no_overlap = true; break;
    case OPTION_QUICK: out->quick = true; break;
    case OPTION_JSON: out->json = true; break;
    case OPTION_VERBOSE: out->verbose = true; break;
    case OPTION_HELP: out->help = true; break;
    default: RA_CHECK(false);
    }
    return RA_OK;
}

/* Letters to change, insert or drop to turn one word into the other. */
static int edit_distance(const char *a, const char *b)
{
    enum { LONGEST = 32 };
    int row[LONGEST + 1];
    int a_length = (int)strnlen(a, LONGEST), b_length = (int)strnlen(b, LONGEST);
    for (int j = 0; j <= b_length; j++) {
        row[j] = j;
    }
    for (int i = 1; i <= a_length; i++) {
        int diagonal = row[0];
        row[0] = i;
        for (int j = 1; j <= b_length; j++) {
            int replaced = diagonal + (a[i - 1] != b[j - 1]);
            int shifted = (row[j] < row[j - 1] ? row[j] : row[j - 1]) + 1;
            diagonal = row[j];
            row[j] = replaced < shifted ? replaced : shifted;
        }
    }
    return row[b_length];
}

static ra_status refuse_option(const char *word, ra_command command)
{
    enum { NEAR = 3 };
    const char *name = word + strspn(word, "-"), *nearest = NULL;
    int best = NEAR;
    char stem[64];
    snprintf(stem, sizeof stem, "%.*s", (int)strcspn(name, "="), name);
    for (int i = 0; i < OPTION_COUNT; i++) {
        int distance = edit_distance(stem, table[i].name);
        if ((table[i].commands & (int)command) && distance < best) {
            best = distance;
            nearest = table[i].name;
        }
    }
    return nearest
               ? RA_FAIL(RA_E_ARG, "%.64s: no such option here, did you mean --%s?", word, nearest)
               : RA_FAIL(RA_E_ARG, "%.64s: no such option here, see --help", word);
}

static int option_of(int code)
{
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (code == OPTION_BASE + i || code == table[i].letter) {
            return i;
        }
    }
    return -1;
}

static ra_status parse_options(int argc, char **argv, ra_args *out)
{
    struct option options[OPTION_COUNT + 1] = {0};
    char letters[2 * OPTION_COUNT + 2] = ":";
    int count = 0, code;
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (!(table[i].commands & (int)out->command)) {
            continue;
        }
        int argument = table[i].argument ? required_argument : no_argument;
        options[count++] = (struct option){table[i].name, argument, NULL, OPTION_BASE + i};
        size_t used = strlen(letters);
        if (table[i].letter) {
            letters[used] = (char)table[i].letter;
            letters[used + 1] = argument == required_argument ? ':' : 0;
        }
    }
    opterr = 0;
    optind = 0; /* a full reset: tests parse more than once in a process */
    while ((code = getopt_long(argc, argv, letters, options, NULL)) != -1) {
        if (code == ':') {
            int id = option_of(optopt);
            return RA_FAIL(RA_E_ARG, "--%s: argument missing, expected %s", table[id].name,
                           table[id].argument);
        }
        if (code == '?' && optopt > 0 && optopt < OPTION_BASE) {
            char word[] = {'-', (char)optopt, 0};
            return refuse_option(word, out->command);
        }
        if (code == '?') {
            return optopt ? RA_FAIL(RA_E_ARG, "%.64s: takes no argument", argv[optind - 1])
                          : refuse_option(argv[optind - 1], out->command);
        }
        RA_TRY(apply(option_of(code), optarg, out));
    }
    out->files = argv + optind;
    out->file_count = argc - optind;
    return RA_OK;
}

static ra_status check_plan(const ra_args *args, bool shape_given)
{
    if ((args->seq > 0) == (args->file_count > 0)) {
        return RA_FAIL(RA_E_ARG, "plan: expected either one FILE or --seq N");
    }
    if (args->file_count > 0 && shape_given) {
        return RA_FAIL(RA_E_ARG, "plan: --docs, --images, --window, --vision, --heads and "
                                 "--head-dim go with --seq, a FILE brings its own");
    }
    if (args->ranks == 0) {
        return RA_FAIL(RA_E_ARG, "--ranks: missing, expected the number of ranks");
    }
    if (args->vision != RA_VISION_OFF && args->window == 0) {
        return RA_FAIL(RA_E_ARG, "--vision: given without --window, but a global layer ignores it");
    }
    if (args->images && args->vision == RA_VISION_OFF) {
        return RA_FAIL(RA_E_ARG, "--images: given without --vision within_window or over_window, "
                                 "but a layer without a rule for images ignores them");
    }
    return RA_OK;
}

/* What a command needs beyond its options one by one. */
static ra_status check_command(ra_args *args)
{
    bool shape_given = args->docs || args->images || args->window || args->vision ||
                       args->q_heads || args->head_dim;
    switch (args->command) {
    case RA_COMMAND_CHECK:
        if (args->file_count == 0) {
            return RA_FAIL(RA_E_ARG, "FILE: missing, expected the cases to check");
        }
        break;
    case RA_COMMAND_RUN:
        if (args->file_count != 1 || !args->out) {
            return RA_FAIL(RA_E_ARG, "run: %d input files%s, expected IN -o OUT", args->file_count,
                           args->out ? "" : " and no OUT");
        }
        break;
    case RA_COMMAND_PLAN:
        if (args->file_count > 1) {
            return RA_FAIL(RA_E_ARG, "%.64s: one FILE too many", args->files[1]);
        }
        RA_TRY(check_plan(args, shape_given));
        break;
    case RA_COMMAND_BENCH:
        if (args->file_count > 0) {
            return RA_FAIL(RA_E_ARG, "%.64s: bench reads no file", args->files[0]);
        }
        break;
    case RA_COMMAND_NONE: break;
    }
    if (args->ranks == 0 && args->transport != RA_TRANSPORT_MPI) {
        args->ranks = args->command == RA_COMMAND_BENCH ? 1 : 2;
    }
    if (args->ranks > RA_THREAD_RANKS_MAX && args->transport == RA_TRANSPORT_THREADS) {
        return RA_FAIL(RA_E_ARG, "--ranks: %d, expected at most %d where ranks are threads",
                       args->ranks, RA_THREAD_RANKS_MAX);
    }
    return ra_transport_check(args->transport, args->device, args->ranks);
}

ra_status ra_args_parse(int argc, char **argv, ra_args *out)
{
    *out = (ra_args){.timeout_ms = TIMEOUT_MS_DEFAULT};
    const char *word = argc > 1 ? argv[1] : NULL;
    if (!word) {
        return RA_FAIL(RA_E_ARG, "COMMAND: missing, expected check, run, plan or bench");
    }
    out->help = strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0;
    out->version = strcmp(word, "--version") == 0;
    if (out->help || out->version) {
        return RA_OK;
    }
    for (int i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(word, commands[i].name) == 0) {
            out->command = commands[i].command;
        }
    }
    if (out->command == RA_COMMAND_NONE) {
        return RA_FAIL(RA_E_ARG, "%.64s: no such command, expected check, run, plan or bench",
                       word);
    }
    RA_TRY(parse_options(argc - 1, argv + 1, out));
    return out->help ? RA_OK : check_command(out);
}

void ra_args_help(FILE *to, ra_command command)
{
    if (command == RA_COMMAND_NONE) {
        fprintf(to, "usage: ringattn COMMAND [OPTIONS]\n\n"
                    "Exact context-parallel (ring) attention, forward and backward.\n\n");
        for (int i = 0; i < COMMAND_COUNT; i++) {
            fprintf(to, "  %-6s %-27s %s\n", commands[i].name, commands[i].usage,
                    commands[i].summary);
        }
        fprintf(to, "\n  ringattn COMMAND --help    options of a command\n"
                    "  ringattn --version\n\n"
                    "exit status: 0 success, 1 a comparison failed, 2 bad input or use,\n"
                    "3 a device, transport or memory failure\n");
        return;
    }
    for (int i = 0; i < COMMAND_COUNT; i++) {
        if (commands[i].command == command) {
            fprintf(to, "usage: ringattn %s %s%s[OPTIONS]\n\n%s\n\n", commands[i].name,
                    commands[i].usage, *commands[i].usage ? " " : "", commands[i].summary);
        }
    }
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (table[i].commands & (int)command) {
            char letter[] = {table[i].letter ? '-' : ' ',
                             (char)(table[i].letter ? table[i].letter : ' '), 0};
            fprintf(to, "  %s --%-12s %-7s %s\n", letter, table[i].name,
                    table[i].argument ? table[i].argument : "", table[i].help);
        }
    }
}
