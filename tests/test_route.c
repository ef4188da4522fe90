/* Gradients that come home in pieces: whatever a landing holds, the bits are those of one piece,
 * and pieces take no more memory, but for a row. */
#include "support_random.h"
#include "support_world.h"

enum { RANKS = 4, SEQ = 90, KV_HEADS = 2, HEAD_DIM = 16 };

typedef struct job {
    problem p;
    layout l;
    int64_t landing_bytes;
    answer a;
    rank_report report[RANKS];
} job;

static void run_rank(int rank, ra_comm *comm, void *arg)
{
    job *j = arg;
    ra_backend *real = NULL;
    ra_ctx *ctx = NULL;
    ra_ctx_options options = {.size = sizeof options};
    world_options o = {.ctx = options};
    if (report_keep(&j->report[rank], ra_backend_open_cpu(1, NULL, &real), "backend")) {
        ra_backend_ops ops;
        ra_backend backend = landing_backend(real, j->landing_bytes, &ops);
        if (report_keep(&j->report[rank],
                        ra_ctx_create(&backend, comm, &j->p.layer, 1, &options, &ctx), "ctx")) {
            rank_step(ctx, comm, 0, &j->p, &j->l, &o, rank, &j->a, &j->report[rank]);
        }
        ra_ctx_free(ctx);
    }
    ra_backend_close(real);
}

static void run(job *j, int64_t landing_bytes)
{
    j->landing_bytes = landing_bytes;
    answer_create(&j->a, &j->p, j->p.layer.dtype, RA_F32, false);
    assert_true(world_each(RANKS, run_rank, j));
    for (int rank = 0; rank < RANKS; rank++) {
        if (j->report[rank].status) {
            fail_msg("%s: rank %d: %s: %s", support_case(), rank, j->report[rank].call,
                     j->report[rank].message);
        }
    }
}

static void pieces_keep_bits(void **state)
{
    (void)state;
    const int64_t row = 2 * KV_HEADS * HEAD_DIM * (int64_t)sizeof(float);
    rng r = rng_of(support_seed());
    for (int kind = 0; kind < LAYOUT_KINDS; kind++) {
        job one = {.l = layout_kind(kind, RANKS, SEQ, &r)};
        reference ref;
        problem_create(&one.p, layer_of(4, KV_HEADS, HEAD_DIM, RA_F32), 1, SEQ);
        random_metadata(&r, &one.p);
        problem_fill_unit(&one.p, &r);
        support_limit(60, "pieces, %s", one.l.name);
        reference_create(&ref, &one.p);
        run(&one, 0);
        reference_check_tiny(&ref, &one.p, &one.a);
        for (int64_t rows = 1; rows <= 9; rows += 2) { /* of both halves together */
            job cut = {.p = one.p, .l = one.l};
            run(&cut, rows * row);
            assert_true(answer_same_bits(&cut.a, &one.a));
            for (int rank = 0; rank < RANKS; rank++) {
                assert_true(cut.report[rank].info.scratch_backward_bytes <=
                            one.report[rank].info.scratch_backward_bytes + (uint64_t)row);
            }
            answer_free(&cut.a, false);
        }
        answer_free(&one.a, false);
        reference_free(&ref);
        problem_free(&one.p);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(pieces_keep_bits)};
    support_start(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
