/* A caller's transport carries the ring: ranks are forked processes that talk over socket pairs.
 * The results have the bits of thread ranks; a process that is killed ends the others in time. */
#include "support_socket.h"
#include "support_world.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TIMEOUT_MS = 4000 };

/* What processes share. */
typedef struct board {
    rank_report reports[SOCKET_RANKS_MAX];
    double seconds[SOCKET_RANKS_MAX];
} board;

static board *board_create(void)
{
    void *memory =
        mmap(NULL, sizeof(board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    return memory;
}

/* One rank's process. Never returns. */
static void be_rank(socket_net *net, int rank, const problem *p, const layout *l,
                    const world_options *o, int repeats, answer *a, board *b)
{
    ra_comm *comm = NULL;
    socket_net_close(net, rank);
    double start = support_now();
    if (report_keep(&b->reports[rank], socket_comm_open(net, rank, &comm), "open")) {
        for (int i = 0; i < repeats && b->reports[rank].status == RA_OK; i++) {
            rank_run(comm, p, l, o, rank, a, &b->reports[rank]);
        }
    }
    b->seconds[rank] = support_now() - start;
    ra_comm_close(comm);
    socket_net_close(net, -1);
    _exit(0);
}

static void fork_ranks(socket_net *net, const problem *p, const layout *l, const world_options *o,
                       int repeats, answer *a, board *b, pid_t *child)
{
    memset(b, 0, sizeof *b);
    assert_true(socket_net_open(net, l->ranks));
    fflush(stdout);
    fflush(stderr);
    for (int rank = 0; rank < l->ranks; rank++) {
        child[rank] = fork();
        assert_true(child[rank] >= 0);
        if (child[rank] == 0) {
            be_rank(net, rank, p, l, o, repeats, a, b);
        }
    }
    socket_net_close(net, -1);
}

static void same_bits_as_threads(void **state)
{
    (void)state;
    board *b = board_create();
    rng r = rng_of(support_seed());
    for (int turn = 0; turn < 24; turn++) {
        problem p;
        int ranks = turn % 2 ? 4 : 2;
        ra_layer layer = layer_of(4, 2, 64, turn % 3 ? RA_BF16 : RA_F32);
        layer.window = turn % 4 == 2 ? 9 : 0;
        layer.causal = turn % 5 != 4;
        problem_create(&p, layer, 2, 50);
        problem_fill_unit(&p, &r);
        layout l = layout_kind(turn % LAYOUT_KINDS, ranks, p.seq, &r);
        world_options o = {.strides = (strides)(turn % STRIDES_COUNT)};
        o.ctx.keep_kv = turn % 3 == 1;
        o.ctx.no_overlap = turn % 4 == 3;
        answer threads, processes;
        support_limit(30, "%d processes, %s, turn %d", ranks, l.name, turn);
        world_run(&p, &l, &o, &threads, NULL);
        answer_create(&processes, &p, layer.dtype, RA_F32, true);
        socket_net net;
        pid_t child[SOCKET_RANKS_MAX];
        fork_ranks(&net, &p, &l, &o, 1, &processes, b, child);
        for (int rank = 0; rank < ranks; rank++) {
            int status = 0;
            assert_int_equal(waitpid(child[rank], &status, 0), child[rank]);
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
            if (b->reports[rank].status != RA_OK) {
                fail_msg("%s: rank %d: %s: %s", support_case(), rank, b->reports[rank].call,
                         b->reports[rank].message);
            }
        }
        assert_true(answer_same_bits(&threads, &processes));
        answer_free(&threads, false);
        answer_free(&processes, true);
        problem_free(&p);
    }
    munmap(b, sizeof *b);
}

static void killed_process(void **state)
{
    (void)state;
    board *b = board_create();
    rng r = rng_of(support_seed());
    problem p;
    problem_create(&p, layer_of(4, 2, 64, RA_F32), 1, 256);
    problem_fill_unit(&p, &r);
    for (int turn = 0; turn < 8; turn++) {
        int ranks = turn % 2 ? 4 : 2, victim = turn % ranks;
        layout l = layout_zigzag(ranks, p.seq);
        world_options o = {0};
        o.ctx.timeout_ms = TIMEOUT_MS;
        answer a;
        socket_net net;
        pid_t child[SOCKET_RANKS_MAX];
        support_limit(30, "rank %d of %d killed, turn %d", victim, ranks, turn);
        answer_create(&a, &p, RA_F32, RA_F32, true);
        fork_ranks(&net, &p, &l, &o, 1 << 20, &a, b, child); /* they would run for hours */
        usleep(20000u + (useconds_t)turn * 3000u);
        double killed = support_now();
        assert_int_equal(kill(child[victim], SIGKILL), 0);
        for (int rank = 0; rank < ranks; rank++) {
            int status = 0;
            assert_int_equal(waitpid(child[rank], &status, 0), child[rank]);
            if (rank == victim) {
                assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
                continue;
            }
            assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
            if (b->reports[rank].status != RA_E_COMM || !strstr(b->reports[rank].message, "rank")) {
                fail_msg("%s: rank %d: %s: %s", support_case(), rank,
                         ra_status_name(b->reports[rank].status), b->reports[rank].message);
            }
        }
        assert_true(support_now() - killed < TIMEOUT_MS * 1e-3 + 2);
        answer_free(&a, true);
    }
    problem_free(&p);
    munmap(b, sizeof *b);
}

/* Tables that are not whole are refused before anything is taken over. */
static void bad_tables(void **state)
{
    (void)state;
    ra_comm *comm = NULL;
    ra_comm_callbacks none = {.size = sizeof none}, unsized = {0};
    assert_int_equal(ra_comm_open_custom(0, 1, &none, &comm), RA_E_ARG);
    assert_int_equal(ra_comm_open_custom(0, 1, &unsized, &comm), RA_E_ARG);
    assert_int_equal(ra_comm_open_custom(0, 1, NULL, &comm), RA_E_ARG);
    assert_int_equal(ra_comm_open_custom(2, 2, &none, &comm), RA_E_ARG);
    assert_int_equal(ra_comm_open_custom(-1, 2, &none, &comm), RA_E_ARG);
    assert_int_equal(ra_comm_open_custom(0, 0, &none, &comm), RA_E_ARG);
    assert_null(comm);
    ra_comm_close(NULL);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(same_bits_as_threads),
        cmocka_unit_test(killed_process),
        cmocka_unit_test(bad_tables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
