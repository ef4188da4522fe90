/* The commands. Each prints its own results and failures and returns the exit status. Must not
 * parse words. */
#ifndef RA_CLI_COMMANDS_H
#define RA_CLI_COMMANDS_H

#include "cli/args.h"

enum {
    RA_EXIT_OK = 0,
    RA_EXIT_DIFFERS = 1, /* a comparison failed */
    RA_EXIT_USE = 2,     /* bad input or use */
    RA_EXIT_MACHINE = 3, /* device, transport or memory failure */
};

int ra_exit_of(ra_status status);

int ra_command_check(const ra_args *args);
int ra_command_run(const ra_args *args);
int ra_command_plan(const ra_args *args);
int ra_command_bench(const ra_args *args);

#endif
