/* Entry of the program: hands the command line to its command. Must not know any command's work. */
#include <errno.h>
#include <string.h>

#include "cli/commands.h"
#include "cli/launch.h"
#include "cli/processes.h"
#include "cli/report.h"

int ra_exit_of(ra_status status)
{
    switch (status) {
    case RA_OK: return RA_EXIT_OK;
    case RA_E_UNAVAILABLE:
    case RA_E_NOMEM:
    case RA_E_DEVICE:
    case RA_E_COMM: return RA_EXIT_MACHINE;
    case RA_E_ARG:
    case RA_E_SHAPE:
    case RA_E_UNSUPPORTED:
    case RA_E_MISMATCH:
    case RA_E_IO: return RA_EXIT_USE;
    }
    return RA_EXIT_MACHINE;
}

static int run_command(const ra_args *args)
{
    switch (args->command) {
    case RA_COMMAND_CHECK: return ra_command_check(args);
    case RA_COMMAND_RUN: return ra_command_run(args);
    case RA_COMMAND_PLAN: return ra_command_plan(args);
    case RA_COMMAND_BENCH: return ra_command_bench(args);
    case RA_COMMAND_NONE: break;
    }
    return RA_EXIT_USE;
}

static void print_version(void)
{
    printf("ringattn %s\ncpu levels of this machine:", ra_version());
    for (int i = 0; ra_cpu_level_name(i); i++) {
        if (ra_cpu_level_runs(i)) {
            printf(" %s", ra_cpu_level_name(i));
        }
    }
    printf("\n");
}

/* One of several processes, each of which is a rank and runs the whole command. */
static int run_process(ra_args *args)
{
    int ranks = args->ranks, status;
    if (ra_processes_start(args->transport, &args->rank, &args->ranks)) {
        ra_error_print();
        return RA_EXIT_MACHINE;
    }
    if (ranks == 0 || ranks == args->ranks) {
        status = run_command(args);
    } else {
        ra_fail(RA_E_ARG, "--ranks: %d, but there are %d processes", ranks, args->ranks);
        ra_error_print();
        status = RA_EXIT_USE;
    }
    ra_processes_end(args->transport, status == RA_EXIT_MACHINE);
    return status;
}

int main(int argc, char **argv)
{
    ra_args args;
    int status = ra_exit_of(ra_args_parse(argc, argv, &args));
    if (status) {
        ra_error_print();
        return status;
    }
    if (args.help) {
        ra_args_help(stdout, args.command);
    } else if (args.version) {
        print_version();
    } else if (args.transport == RA_TRANSPORT_NCCL && !ra_launched(&args.rank, &args.ranks)) {
        status = ra_launch(args.ranks, argv);
    } else if (args.transport != RA_TRANSPORT_THREADS) {
        status = run_process(&args);
    } else {
        status = run_command(&args);
    }
    errno = 0;
    if (fflush(stdout) != 0 || ferror(stdout)) {
        fprintf(stderr, "ringattn: standard output: %s\n", strerror(errno));
        return status > RA_EXIT_USE ? status : RA_EXIT_USE;
    }
    return status;
}
