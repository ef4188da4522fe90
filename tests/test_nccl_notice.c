/* How ranks over NCCL learn of each other's failures: between processes, without a GPU. */
#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "comm/nccl/notice.h"
#include "support.h"

enum { RANKS = 3 };

static const char id[] = "what only these ranks know";

static ra_nccl_notice *open_rank(const char *name, int rank)
{
    ra_nccl_notice *n = NULL;
    assert_int_equal(ra_nccl_notice_open(name, strlen(name), rank, RANKS, &n), RA_OK);
    return n;
}

static ra_status check_peers(ra_nccl_notice *n, const ra_xfer *xfers, int count, double seconds)
{
    const struct timespec nap = {0, 5000000};
    ra_status status = RA_OK;
    for (double end = support_now() + seconds; !status && support_now() < end;) {
        status = ra_nccl_notice_check(n, xfers, count);
        nanosleep(&nap, NULL);
    }
    return status;
}

static ra_status check_for(ra_nccl_notice *n, double seconds)
{
    return check_peers(n, NULL, 0, seconds);
}

static void test_told(void **state)
{
    (void)state;
    ra_nccl_notice *n[RANKS], *other = open_rank("another communicator", 0);
    for (int rank = 0; rank < RANKS; rank++) {
        n[rank] = open_rank(id, rank);
    }
    for (int rank = 0; rank < RANKS; rank++) {
        ra_nccl_notice_meet(n[rank]);
        assert_int_equal(check_for(n[rank], 0.3), RA_OK);
    }
    ra_nccl_notice_tell(n[1], "the card caught fire");
    for (int rank = 0; rank < RANKS; rank += 2) {
        assert_int_equal(check_for(n[rank], 1), RA_E_COMM);
        assert_string_equal(ra_last_error(), "rank 1 aborted: the card caught fire");
        ra_nccl_notice_tell(n[rank], ra_last_error()); /* no echo */
    }
    assert_int_equal(check_for(n[1], 0.2), RA_OK);
    assert_int_equal(check_for(other, 0.2), RA_OK);
    for (int rank = 0; rank < RANKS; rank++) {
        ra_nccl_notice_close(n[rank]);
    }
    ra_nccl_notice_close(other);
}

/* Rank 2 is another process. */
static void test_killed(void **state)
{
    (void)state;
    int ready[2];
    char byte = 0;
    ra_nccl_notice *mine = open_rank(id, 0);
    assert_int_equal(pipe(ready), 0);
    pid_t child = fork();
    if (child == 0) {
        ra_nccl_notice *n = NULL;
        byte = ra_nccl_notice_open(id, strlen(id), 2, RANKS, &n) == RA_OK ? 1 : 0;
        _exit(write(ready[1], &byte, 1) == 1 && pause());
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    assert_int_equal(byte, 1);
    ra_nccl_notice_meet(mine); /* rank 1 is nowhere: on another machine, so not gone */
    assert_int_equal(check_for(mine, 0.5), RA_OK);
    kill(child, SIGSTOP);
    assert_int_equal(check_for(mine, 0.5), RA_OK);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    const ra_xfer with_another = {.peer = 1}, with_it = {.peer = 2};
    assert_int_equal(check_peers(mine, &with_another, 1, 0.5), RA_OK);
    double start = support_now();
    assert_int_equal(check_peers(mine, &with_it, 1, 5), RA_E_COMM);
    assert_non_null(strstr(ra_last_error(), "rank 2: its process has ended"));
    assert_true(support_now() - start < 1);
    ra_nccl_notice_close(mine);
    close(ready[0]);
    close(ready[1]);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_told),
        cmocka_unit_test(test_killed),
    };
    support_start(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
