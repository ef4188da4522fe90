/* One process a rank, started by the command line: ranks learn who they are and share bytes; one
 * that fails, or is killed, ends the others. The children are this program again. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/launch.h"
#include "support.h"

enum { RANKS = 5 };

/* What a rank does; its exit status. */
static int be_rank(const char *what, int rank, int size)
{
    unsigned char bytes[100];
    for (int turn = 0; turn < 3; turn++) {
        memset(bytes, rank == 0 ? 10 + turn : 0, sizeof bytes);
        if (size != RANKS || ra_launch_share(bytes, sizeof bytes)) {
            return RA_EXIT_USE;
        }
        for (size_t i = 0; i < sizeof bytes; i++) {
            if (bytes[i] != 10 + turn) {
                return RA_EXIT_USE;
            }
        }
    }
    if (strcmp(what, "differs") == 0 && rank == 0) {
        return RA_EXIT_DIFFERS;
    }
    if (strcmp(what, "fails") == 0) {
        sleep(rank == 3 ? 0 : 600); /* the others wait for rank 3 for ever */
        return RA_EXIT_MACHINE;
    }
    if (strcmp(what, "killed") == 0) {
        sleep(rank == 1 ? 0 : 600);
        kill(getpid(), SIGKILL);
    }
    return RA_EXIT_OK;
}

static char *program;

static int launch(const char *what)
{
    char word[16];
    strcpy(word, what);
    char *argv[] = {program, word, NULL};
    return ra_launch(RANKS, argv);
}

static void test_all_end_well(void **state)
{
    (void)state;
    assert_int_equal(launch("well"), RA_EXIT_OK);
    assert_int_equal(launch("differs"), RA_EXIT_DIFFERS);
}

static void test_one_ends_all(void **state)
{
    (void)state;
    double start = support_now();
    support_limit(60, "a rank fails, the others wait for it");
    assert_int_equal(launch("fails"), RA_EXIT_MACHINE);
    assert_non_null(strstr(ra_last_error(), "rank 3: its process ended with status 3"));
    support_limit(60, "a rank is killed, the others wait for it");
    assert_int_equal(launch("killed"), RA_EXIT_MACHINE);
    assert_true(support_now() - start < 40);
    assert_non_null(strstr(ra_last_error(), "rank 1: its process was ended by signal 9"));
}

/* A variable that ra_launch did not write: no rank outside the ring, no bytes from nowhere. */
static void test_a_variable_of_others(void **state)
{
    (void)state;
    static const char *const words[] = {"", "x", "3", "2 2", "-1 2", "0 0", "0 -4"};
    int rank, size;
    unsigned char byte = 5;
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        setenv("RINGATTN_LAUNCHED", words[i], 1);
        assert_false(ra_launched(&rank, &size));
    }
    setenv("RINGATTN_LAUNCHED", "1 2", 1); /* and no pipes */
    assert_int_equal(ra_launch_share(&byte, 1), RA_E_COMM);
    assert_int_equal(byte, 5);
    unsetenv("RINGATTN_LAUNCHED");
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_end_well),
        cmocka_unit_test(test_one_ends_all),
        cmocka_unit_test(test_a_variable_of_others),
    };
    int rank, size;
    if (ra_launched(&rank, &size)) {
        return be_rank(argc > 1 ? argv[1] : "", rank, size);
    }
    program = argv[0];
    support_start(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
