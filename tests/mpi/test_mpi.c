/* The MPI transport, run by several processes: every process makes the same calls and checks what
 * came to it. --level NAME starts MPI with another thread level. */
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "comm/comm.h"
#include "ringattn_mpi.h"
#include "support_world.h"

enum { TIMEOUT_MS = 20000, SHORT_MS = 400, GAP = 3, POISON = 0xee };

static int world_rank, world_size;

static ra_comm *open_world(void)
{
    MPI_Comm world = MPI_COMM_WORLD;
    ra_comm *comm = NULL;
    if (ra_comm_open_mpi(&world, &comm)) {
        fail_msg("rank %d: %s", world_rank, ra_last_error());
    }
    assert_int_equal(ra_comm_rank(comm), world_rank);
    assert_int_equal(ra_comm_size(comm), world_size);
    return comm;
}

/* ---- exchange ------------------------------------------------------------------------------- */

/* A message in memory with gaps. */
typedef struct parcel {
    unsigned char *memory;
    size_t bytes;
    ra_block *blocks;
    ra_xfer xfer;
} parcel;

static unsigned char content(int turn, int from, int to, uint64_t at)
{
    uint64_t x = (at + 1) * 0x9e3779b97f4a7c15u + (uint64_t)(turn * 64 + from * 8 + to) * 0xd1b5u;
    return (unsigned char)(x >> 40);
}

/* Cuts `total` bytes into blocks with gaps; each side cuts in its own way. */
static void parcel_create(parcel *p, rng *r, int peer, bool send, uint64_t total)
{
    enum { BLOCKS_MAX = 12 };
    *p = (parcel){.blocks = calloc(BLOCKS_MAX + 1, sizeof *p->blocks)};
    p->memory = malloc((size_t)total * (1 + GAP) + 4096);
    assert_true(p->blocks && p->memory);
    uint64_t left = total;
    int64_t count = 0;
    while (left > 0) {
        ra_block *b = &p->blocks[count++];
        uint64_t most = count == BLOCKS_MAX ? left : (uint64_t)rng_int(r, 1, (int64_t)left);
        b->width = count == BLOCKS_MAX ? most : (size_t)rng_int(r, 1, (int64_t)most);
        b->count = (int64_t)(most / b->width);
        b->stride = b->width + (rng_chance(r, 50) ? 0 : (size_t)rng_int(r, 0, GAP));
        b->data = p->memory + p->bytes;
        p->bytes += (size_t)b->count * b->stride + 5;
        left -= b->width * (uint64_t)b->count;
    }
    memset(p->memory, POISON, p->bytes);
    p->xfer = (ra_xfer){peer, send, p->blocks, count, total};
}

static void parcel_free(parcel *p)
{
    free(p->memory);
    free(p->blocks);
}

/* Writes the content, or checks it and poisons it. */
static bool parcel_walk(parcel *p, int turn, int from, int to)
{
    uint64_t at = 0;
    bool same = true;
    for (int64_t b = 0; b < p->xfer.block_count; b++) {
        const ra_block *block = &p->blocks[b];
        for (int64_t row = 0; row < block->count; row++) {
            unsigned char *byte = (unsigned char *)block->data + (size_t)row * block->stride;
            for (size_t i = 0; i < block->width; i++, at++) {
                same = same && (p->xfer.send || byte[i] == content(turn, from, to, at));
                byte[i] = p->xfer.send ? content(turn, from, to, at) : POISON;
            }
        }
    }
    for (size_t i = 0; !p->xfer.send && i < p->bytes; i++) {
        same = same && p->memory[i] == POISON;
    }
    return same;
}

static void exchanges(void **state)
{
    (void)state;
    ra_comm *comm = open_world();
    rng shared = rng_of(support_seed()), own = rng_of(support_seed() + (uint64_t)world_rank);
    uint64_t sent = 0;
    support_limit(120, "exchanges on %d processes", world_size);
    for (int turn = 0; turn < 60; turn++) {
        parcel parcels[2 * PROBLEM_RANKS_MAX];
        ra_xfer xfers[2 * PROBLEM_RANKS_MAX];
        int count = 0;
        for (int from = 0; from < world_size; from++) {
            for (int to = 0; to < world_size; to++) {
                bool there = from != to && rng_chance(&shared, 70);
                int64_t bytes = rng_chance(&shared, 15) ? rng_int(&shared, 0, 5 << 20)
                                                        : rng_int(&shared, 0, 4000);
                if (there && (from == world_rank || to == world_rank)) {
                    bool send = from == world_rank;
                    parcel *p = &parcels[count];
                    parcel_create(p, &own, send ? to : from, send, (uint64_t)bytes);
                    if (send) {
                        parcel_walk(p, turn, from, to);
                        sent += (uint64_t)bytes;
                    }
                    xfers[count++] = p->xfer;
                }
            }
        }
        if (ra_comm_exchange(comm, xfers, count, TIMEOUT_MS)) {
            fail_msg("rank %d, turn %d: %s", world_rank, turn, ra_last_error());
        }
        for (int i = 0; i < count; i++) {
            bool send = xfers[i].send;
            int peer = xfers[i].peer;
            assert_true(
                parcel_walk(&parcels[i], turn, send ? world_rank : peer, send ? peer : world_rank));
            parcel_free(&parcels[i]);
        }
    }
    assert_true(ra_comm_bytes_sent(comm) == sent);
    ra_comm_close(comm);
}

static void gathers(void **state)
{
    (void)state;
    const size_t sizes[] = {1, 24, 1000, 0, (3 << 20) + 1};
    ra_comm *comm = open_world();
    support_limit(60, "gathers on %d processes", world_size);
    for (int i = 0; i < 5; i++) {
        size_t bytes = sizes[i];
        unsigned char *mine = malloc(bytes + 1), *all = malloc(bytes * (size_t)world_size + 1);
        memset(mine, 16 * i + world_rank, bytes + 1);
        assert_int_equal(ra_comm_gather(comm, mine, bytes, all, TIMEOUT_MS), RA_OK);
        for (int rank = 0; rank < world_size; rank++) {
            for (size_t at = 0; at < bytes; at++) {
                assert_int_equal(all[(size_t)rank * bytes + at], 16 * i + rank);
            }
        }
        free(mine);
        free(all);
    }
    ra_comm_close(comm);
}

/* One message past 2 GiB, from and to one mebibyte that is every row of it. */
static void past_two_gibibytes(void **state)
{
    (void)state;
    enum { WIDTH = 1 << 20, ROWS = 2100 };
    if (world_size != 2 || support_thin()) {
        print_message("SKIPPED: past 2 GiB, only on 2 processes and without a sanitizer\n");
        return;
    }
    unsigned char *row = malloc(WIDTH);
    ra_comm *comm = open_world();
    memset(row, world_rank == 0 ? 77 : 0, WIDTH);
    ra_block block = {row, WIDTH, 0, ROWS};
    ra_xfer xfer = {1 - world_rank, world_rank == 0, &block, 1, (uint64_t)WIDTH * ROWS};
    support_limit(120, "a message past 2 GiB");
    if (ra_comm_exchange(comm, &xfer, 1, 100000)) {
        fail_msg("rank %d: %s", world_rank, ra_last_error());
    }
    assert_true(row[0] == 77 && row[WIDTH - 1] == 77);
    ra_comm_close(comm);
    free(row);
}

/* ---- the ring ------------------------------------------------------------------------------- */

/* Every position of a result was written by one rank; the others hold zeros there. */
static void combine(const answer *a, bool begin)
{
    const ra_tensor *tensor[] = {&a->out, &a->lse, &a->dq, &a->dk, &a->dv};
    for (int i = 0; i < 5; i++) {
        const ra_tensor *t = tensor[i];
        size_t bytes = ra_dtype_bytes(t->dtype);
        for (int axis = 0; axis < RA_NDIM; axis++) {
            bytes *= (size_t)t->size[axis];
        }
        if (begin) {
            memset(t->data, 0, bytes);
        } else {
            MPI_Allreduce(MPI_IN_PLACE, t->data, (int)bytes, MPI_BYTE, MPI_BOR, MPI_COMM_WORLD);
        }
    }
}

static void same_bits_as_threads(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    for (int turn = 0; turn < 24; turn++) {
        problem p;
        ra_layer layer = layer_of(4, 2, 64, turn % 3 ? RA_BF16 : RA_F32);
        layer.window = turn % 4 == 2 ? 9 : 0;
        layer.causal = turn % 5 != 4;
        problem_create(&p, layer, 2, 50);
        problem_fill_unit(&p, &r);
        layout l = layout_kind(turn % LAYOUT_KINDS, world_size, p.seq, &r);
        world_options o = {.strides = (strides)(turn % STRIDES_COUNT)};
        o.ctx.keep_kv = turn % 3 == 1;
        o.ctx.no_overlap = turn % 4 == 3;
        answer threads, processes;
        rank_report report = {.status = RA_OK};
        support_limit(60, "%d processes, %s, turn %d", world_size, l.name, turn);
        world_run(&p, &l, &o, &threads, NULL);
        answer_create(&processes, &p, layer.dtype, RA_F32, false);
        combine(&processes, true);
        ra_comm *comm = open_world();
        rank_run(comm, &p, &l, &o, world_rank, &processes, &report);
        if (report.status) {
            fail_msg("%s: rank %d: %s: %s", support_case(), world_rank, report.call,
                     report.message);
        }
        combine(&processes, false);
        assert_true(answer_same_bits(&threads, &processes));
        assert_true(report.forward_bytes == report.info.forward_bytes_sent);
        assert_true(report.backward_bytes == report.info.backward_bytes_sent);
        ra_comm_close(comm);
        answer_free(&threads, false);
        answer_free(&processes, false);
        problem_free(&p);
    }
}

/* All memory of a comm goes with it. Exchanges on this thread, whose allocations are counted. */
static void nothing_leaks(void **state)
{
    (void)state;
    ra_alloc_probe probe = {0}, *before = ra_alloc_watch(&probe);
    problem p;
    rng r = rng_of(support_seed());
    world_options o = {.ctx = {.no_overlap = true}};
    answer a;
    rank_report report = {.status = RA_OK};
    support_limit(60, "memory of a comm");
    problem_create(&p, layer_of(1, 1, 512, RA_F32), 1, 1536); /* messages of several pieces */
    problem_fill_unit(&p, &r);
    layout l = layout_contiguous(world_size, p.seq);
    answer_create(&a, &p, RA_F32, RA_F32, false);
    ra_comm *comm = open_world();
    rank_run(comm, &p, &l, &o, world_rank, &a, &report);
    assert_int_equal(report.status, RA_OK);
    ra_comm_close(comm);
    answer_free(&a, false);
    problem_free(&p);
    ra_alloc_watch(before);
    assert_true(atomic_load(&probe.peak_bytes) > 0);
    assert_true(atomic_load(&probe.live_bytes) == 0);
}

/* ---- failures that every process survives ---------------------------------------------------- */

static void sleep_ms(int ms)
{
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    nanosleep(&t, NULL);
}

static void expect_failure(ra_status status, const char *text)
{
    if (status != RA_E_COMM || !strstr(ra_last_error(), text)) {
        fail_msg("%s: rank %d: %s: %s, expected '%s' in it", support_case(), world_rank,
                 ra_status_name(status), ra_last_error(), text);
    }
}

/* Rank 0 and rank 1 do not agree about a length; the others hear of it. */
static void different_lengths(void **state)
{
    (void)state;
    const uint64_t lengths[][2] = {
        {8, 12}, {12, 8}, {3 << 20, 5}, {5, 3 << 20}, {2 << 20, 3 << 20}};
    char *memory = calloc(3, 1 << 20);
    for (int i = 0; i < 5; i++) {
        ra_comm *comm = open_world();
        support_limit(20, "lengths %d", i);
        uint64_t bytes = lengths[i][world_rank == 1];
        ra_block block = {memory, bytes, bytes, 1};
        ra_xfer xfer = {world_rank == 0, world_rank == 0, &block, 1, bytes};
        ra_status status = ra_comm_exchange(comm, &xfer, world_rank < 2, SHORT_MS);
        if (!status) { /* a sender may be done before the receiver looks */
            status = ra_comm_gather(comm, NULL, 0, NULL, TIMEOUT_MS);
        }
        expect_failure(status, world_rank == 1 ? "rank 0 sends" : "rank 1");
        ra_comm_close(comm);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    free(memory);
}

/* A rank that aborts, or is late: the others name it, in time. */
static void told_and_late(void **state)
{
    (void)state;
    for (int turn = 0; turn < 4; turn++) {
        int victim = turn % world_size;
        bool late = turn >= 2;
        ra_comm *comm = open_world();
        char victim_name[32];
        snprintf(victim_name, sizeof victim_name, "rank %d", victim);
        support_limit(20, "rank %d %s", victim, late ? "is late" : "aborts");
        assert_int_equal(ra_comm_gather(comm, NULL, 0, NULL, TIMEOUT_MS), RA_OK);
        MPI_Barrier(MPI_COMM_WORLD); /* an abort also ends calls that a rank is still in */
        double start = support_now();
        if (world_rank == victim && !late) {
            ra_comm_abort(comm, "the job was cancelled");
            ra_comm_abort(comm, "and again");
        } else if (world_rank == victim) {
            sleep_ms(3 * SHORT_MS);
        }
        ra_status status = ra_comm_gather(comm, NULL, 0, NULL, late ? SHORT_MS : TIMEOUT_MS);
        expect_failure(status, world_rank == victim ? "" : victim_name);
        if (!late && world_rank != victim) {
            expect_failure(status, "the job was cancelled");
        }
        assert_true(support_now() - start < 2 + (late ? SHORT_MS * 1e-3 : 0));
        assert_int_equal(ra_comm_gather(comm, NULL, 0, NULL, SHORT_MS), RA_E_COMM);
        ra_comm_close(comm);
        MPI_Barrier(MPI_COMM_WORLD);
    }
}

static void *cancel(void *comm)
{
    sleep_ms(5);
    ra_comm_abort(comm, "cancelled from outside");
    return NULL;
}

static void abort_from_another_thread(void **state)
{
    (void)state;
    problem p;
    rng r = rng_of(support_seed());
    world_options o = {.ctx = {.timeout_ms = TIMEOUT_MS}};
    support_limit(60, "abort from another thread");
    problem_create(&p, layer_of(2, 1, 64, RA_F32), 1, 64);
    problem_fill_unit(&p, &r);
    layout l = layout_zigzag(world_size, p.seq);
    for (int turn = 0; turn < 10; turn++) {
        ra_comm *comm = open_world();
        answer a;
        rank_report report = {.status = RA_OK};
        pthread_t thread;
        answer_create(&a, &p, RA_F32, RA_F32, false);
        if (world_rank == 0) {
            assert_int_equal(pthread_create(&thread, NULL, cancel, comm), 0);
        }
        while (report.status == RA_OK) {
            rank_run(comm, &p, &l, &o, world_rank, &a, &report);
        }
        if (world_rank == 0) {
            pthread_join(thread, NULL);
        } else {
            assert_non_null(strstr(report.message, "rank 0"));
        }
        assert_int_equal(report.status, RA_E_COMM);
        ra_comm_close(comm);
        answer_free(&a, false);
        MPI_Barrier(MPI_COMM_WORLD);
    }
    problem_free(&p);
}

static void bad_arguments(void **state)
{
    (void)state;
    MPI_Comm none = MPI_COMM_NULL, world = MPI_COMM_WORLD;
    ra_comm *comm = NULL;
    assert_int_equal(ra_comm_open_mpi(NULL, &comm), RA_E_ARG);
    assert_int_equal(ra_comm_open_mpi(&none, &comm), RA_E_ARG);
    assert_int_equal(ra_comm_open_mpi(&world, NULL), RA_E_ARG);
    assert_null(comm);
}

/* Ranks are those of the communicator, in its order. */
static void sub_communicator(void **state)
{
    (void)state;
    MPI_Comm part;
    ra_comm *comm = NULL;
    int32_t all[PROBLEM_RANKS_MAX] = {0};
    support_limit(20, "ranks in reverse order");
    MPI_Comm_split(MPI_COMM_WORLD, world_rank % 2, -world_rank, &part);
    assert_int_equal(ra_comm_open_mpi(&part, &comm), RA_OK);
    MPI_Comm_free(&part);
    int32_t mine = world_rank;
    assert_int_equal(ra_comm_gather(comm, &mine, sizeof mine, all, TIMEOUT_MS), RA_OK);
    assert_int_equal(all[ra_comm_rank(comm)], world_rank);
    for (int i = 1; i < ra_comm_size(comm); i++) {
        assert_int_equal(all[i], all[i - 1] - 2);
    }
    ra_comm_close(comm);
}

/* ---- thread levels -------------------------------------------------------------------------- */

static int level_of(int argc, char **argv)
{
    const char *name = argc > 2 && strcmp(argv[1], "--level") == 0 ? argv[2] : "multiple";
    return strcmp(name, "funneled") == 0     ? MPI_THREAD_FUNNELED
           : strcmp(name, "serialized") == 0 ? MPI_THREAD_SERIALIZED
                                             : MPI_THREAD_MULTIPLE;
}

static void funneled(void **state)
{
    (void)state;
    MPI_Comm world = MPI_COMM_WORLD;
    ra_comm *comm = NULL;
    int level = 0;
    MPI_Query_thread(&level);
    if (level > MPI_THREAD_FUNNELED) {
        print_message("SKIPPED: this MPI grants more than MPI_THREAD_FUNNELED\n");
        return;
    }
    assert_int_equal(ra_comm_open_mpi(&world, &comm), RA_E_UNSUPPORTED);
    assert_non_null(strstr(ra_last_error(), "MPI_THREAD_FUNNELED"));
}

int main(int argc, char **argv)
{
    int level = level_of(argc, argv), granted = 0;
    MPI_Init_thread(&argc, &argv, level, &granted);
    MPI_Comm_rank(MPI_COMM_WORLD, &world_rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    support_start(1, argv);
    const struct CMUnitTest refused[] = {cmocka_unit_test(funneled)};
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exchanges),          cmocka_unit_test(gathers),
        cmocka_unit_test(past_two_gibibytes), cmocka_unit_test(same_bits_as_threads),
        cmocka_unit_test(nothing_leaks),      cmocka_unit_test(different_lengths),
        cmocka_unit_test(told_and_late),      cmocka_unit_test(abort_from_another_thread),
        cmocka_unit_test(sub_communicator),   cmocka_unit_test(bad_arguments),
    };
    int failures = level == MPI_THREAD_FUNNELED ? cmocka_run_group_tests(refused, NULL, NULL)
                                                : cmocka_run_group_tests(tests, NULL, NULL);
    if (ra_mpi_parked() > 0) {
        printf("rank %d: %lld requests parked\n", world_rank, (long long)ra_mpi_parked());
    }
    if (failures) {
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
    return 0;
}
