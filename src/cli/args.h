/*
 * The command line: words become a checked struct of options. One table holds every option, its
 * commands and its help line; getopt_long, the help pages and the suggestions read that table. Must
 * not open files, and prints only what ra_args_help is asked for.
 */
#ifndef RA_CLI_ARGS_H
#define RA_CLI_ARGS_H

#include <stdio.h>

#include "cli/device.h"
#include "cli/processes.h"
#include "cli/shards.h"

typedef enum ra_command {
    RA_COMMAND_NONE = 0, /* --help or --version alone */
    RA_COMMAND_CHECK = 1,
    RA_COMMAND_RUN = 2,
    RA_COMMAND_PLAN = 4,
    RA_COMMAND_BENCH = 8,
} ra_command;

typedef struct ra_args {
    ra_command command;
    bool help, version;
    char **files; /* in argv */
    int file_count;
    int ranks; /* 0 with MPI, which brings their number, until it is started */
    int rank;  /* of this process; 0 with threads. Others than 0 print only failures */
    ra_transport transport;
    ra_layout layout;
    ra_device device;
    ra_dtype dtype, out_dtype; /* 0 = that of the file */
    int threads;               /* per rank; 0 = the CPUs shared by the ranks */
    int timeout_ms;            /* of one exchange */
    const char *cpu_level, *trace, *out, *only;
    bool forward_only, keep_kv, no_overlap, json, verbose, quick, list;
    /* plan without a file */
    int64_t seq, window; /* seq 0 = a file is given */
    ra_vision vision;
    const char *docs, *images;
    int q_heads, kv_heads, head_dim; /* 0 = those of the layer kind */
} ra_args;

/* argv[0] is the program; argv may be reordered. */
ra_status ra_args_parse(int argc, char **argv, ra_args *out);
void ra_args_help(FILE *to, ra_command command);

/* The whole text is one number in [low, high], else RA_E_ARG naming `name`. */
ra_status ra_number_parse(const char *name, const char *text, int64_t low, int64_t high,
                          int64_t *out);
/* A comma-separated list of pairs "A:B" (separator ':') or of numbers (separator 0, count only).
 * Free *out with ra_free. */
ra_status ra_pairs_parse(const char *name, const char *text, char separator, ra_run **out,
                         int *count);
int ra_cpu_count(void);

#endif
