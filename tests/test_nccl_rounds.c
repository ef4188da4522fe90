/* How the NCCL transport cuts messages: plain host code, so it is tested where there is no GPU. The
 * two ends of a message, whose rows lie differently, must cut at the same bytes, and their pieces
 * must carry every byte once, in order. */
#include <stdlib.h>
#include <string.h>

#include "comm/nccl/rounds.h"
#include "support.h"

enum { BLOCKS_MAX = 40, GAP_MAX = 48, SMALL = 1 << 16, PIECE = 1 << 20, ROUND = 8 << 20 };

/* A message in memory with gaps. */
typedef struct parcel {
    char *memory;
    ra_block block[BLOCKS_MAX];
    ra_xfer xfer;
} parcel;

/* shape: the bytes of each block, drawn alike on both sides; own: how its rows lie. */
static void parcel_create(parcel *p, rng shape, rng *own, bool send)
{
    static const int64_t rows_of[] = {1, 2, 3, 4, 6, 8, 12, 24};
    size_t room = 0, offset[BLOCKS_MAX];
    int64_t count = rng_int(&shape, 0, BLOCKS_MAX),
            longest = rng_chance(&shape, 20) ? 1 << 18 : 4000;
    *p = (parcel){.xfer = {.peer = 3, .send = send, .blocks = p->block, .block_count = count}};
    for (int64_t i = 0; i < count; i++) {
        int64_t unit = rng_int(&shape, 0, rng_chance(&shape, 30) ? longest : 1000);
        int64_t rows = rows_of[rng_int(own, 0, 7)];
        size_t width = (size_t)(24 * unit / rows);
        size_t stride = width + (rng_chance(own, 50) ? 0 : (size_t)rng_int(own, 1, GAP_MAX));
        p->block[i] = (ra_block){NULL, width, stride, rows};
        offset[i] = room + (size_t)rng_int(own, 0, GAP_MAX);
        room = offset[i] + stride * (size_t)rows;
        p->xfer.bytes += 24 * (uint64_t)unit;
    }
    p->memory = malloc(room + 1);
    assert_non_null(p->memory);
    memset(p->memory, 0xee, room + 1);
    for (int64_t i = 0; i < count; i++) {
        p->block[i].data = p->memory + offset[i];
    }
}

/* One piece of the sender's to the same piece of the receiver's, by the cursor alone. */
static void carry(const ra_nccl_piece *from, const ra_nccl_piece *to)
{
    char *flat = malloc(from->bytes);
    ra_cursor at = from->at;
    assert_non_null(flat);
    for (size_t passed = 0; passed < from->bytes;) {
        ra_stretch s = ra_cursor_take(&at, from->bytes - passed);
        assert_true(s.width > 0 && s.rows > 0);
        for (int64_t i = 0; i < s.rows; i++, passed += s.width) {
            memcpy(flat + passed, s.data + (size_t)i * s.stride, s.width);
        }
        assert_true(passed <= from->bytes);
    }
    if (from->direct) {
        assert_memory_equal(flat, from->direct, from->bytes);
    }
    at = to->at;
    for (size_t passed = 0; passed < to->bytes;) {
        ra_stretch s = ra_cursor_take(&at, to->bytes - passed);
        for (int64_t i = 0; i < s.rows; i++, passed += s.width) {
            memcpy(s.data + (size_t)i * s.stride, flat + passed, s.width);
        }
    }
    if (to->direct) {
        assert_memory_equal(flat, to->direct, to->bytes);
    }
    free(flat);
}

/* Staged pieces lie beside each other, and within the room that the round asks for. */
static void check_staging(const ra_nccl_rounds *rounds)
{
    size_t end = 0;
    for (int i = 0; i < rounds->piece_count; i++) {
        const ra_nccl_piece *piece = &rounds->piece[i];
        assert_in_range(piece->bytes, 1, rounds->piece_bytes);
        if (!piece->direct) {
            assert_true(piece->staging >= end);
            end = piece->staging + piece->bytes;
        }
    }
    assert_true(end <= rounds->staging_bytes);
    assert_true(rounds->staging_bytes <= ROUND + PIECE + 256 * (size_t)rounds->piece_count);
}

/* All rounds of a message from one end to the other. */
static void carry_all(ra_nccl_rounds *out, ra_nccl_rounds *in, const parcel *from, const parcel *to)
{
    assert_int_equal(ra_nccl_rounds_start(out, &from->xfer, 1), RA_OK);
    assert_int_equal(ra_nccl_rounds_start(in, &to->xfer, 1), RA_OK);
    do {
        assert_int_equal(ra_nccl_rounds_next(out), RA_OK);
        assert_int_equal(ra_nccl_rounds_next(in), RA_OK);
        assert_int_equal(out->piece_count, in->piece_count);
        check_staging(out);
        check_staging(in);
        for (int i = 0; i < out->piece_count; i++) {
            assert_int_equal(out->piece[i].bytes, in->piece[i].bytes);
            assert_true(out->piece[i].send && !in->piece[i].send);
            carry(&out->piece[i], &in->piece[i]);
        }
    } while (out->piece_count > 0);
}

static void test_both_ends_cut_alike(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    ra_nccl_rounds out = {.small_bytes = SMALL, .piece_bytes = PIECE, .round_bytes = ROUND},
                   in = out;
    for (int64_t step = 0; step < support_steps(60); step++) {
        parcel from, to;
        rng shape = rng_of(support_seed() + 1000 + (uint64_t)step);
        parcel_create(&from, shape, &r, true);
        parcel_create(&to, shape, &r, false);
        uint64_t total = from.xfer.bytes;
        support_limit(60, "step %lld: %llu bytes", (long long)step, (unsigned long long)total);
        char *flat = malloc(total + 1), *got = malloc(total + 1);
        assert_true(flat && got);
        for (uint64_t i = 0; i < total; i++) { /* without a short period */
            flat[i] = (char)((i + 1) * 0x9e3779b97f4a7c15u >> 40);
        }
        ra_xfer_unpack(&from.xfer, flat);
        carry_all(&out, &in, &from, &to);
        ra_xfer_pack(&to.xfer, got);
        assert_memory_equal(got, flat, total);
        free(flat);
        free(got);
        free(from.memory);
        free(to.memory);
    }
    ra_nccl_rounds_free(&out);
    ra_nccl_rounds_free(&in);
}

/* What lies without a gap is sent where it is: the rows and the heads of a tensor, each half of a
 * message for itself; a small message is one piece. */
static void test_contiguous_is_direct(void **state)
{
    (void)state;
    const size_t head = 5 << 18; /* two are two and a half pieces */
    ra_nccl_rounds rounds = {.small_bytes = SMALL, .piece_bytes = PIECE, .round_bytes = ROUND};
    char *memory = malloc(5 * head);
    assert_non_null(memory);
    ra_block blocks[] = {
        {memory, head, head, 2},                         /* keys: heads side by side */
        {memory + 2 * head + 8, head - 8, head + 16, 1}, /* values: in two blocks */
        {memory + 4 * head - 8, head + 8, head + 8, 1},
    };
    ra_xfer xfer = {1, true, blocks, 3, 4 * head};
    const size_t bytes[] = {PIECE, PIECE, 2 * head - 2 * PIECE, PIECE, PIECE, 2 * head - 2 * PIECE};
    const bool direct[] = {true, true, true, true, false, true};
    assert_int_equal(ra_nccl_rounds_start(&rounds, &xfer, 1), RA_OK);
    assert_int_equal(ra_nccl_rounds_next(&rounds), RA_OK);
    assert_int_equal(rounds.piece_count, 6);
    for (int i = 0; i < 6; i++) {
        assert_int_equal(rounds.piece[i].bytes, bytes[i]);
        assert_int_equal(rounds.piece[i].direct != NULL, direct[i]);
    }
    assert_ptr_equal(rounds.piece[1].direct, memory + PIECE);
    assert_ptr_equal(rounds.piece[3].direct, memory + 2 * head + 8);
    assert_int_equal(ra_nccl_rounds_next(&rounds), RA_OK);
    assert_int_equal(rounds.piece_count, 0);

    ra_block small[] = {{memory, SMALL / 4, SMALL / 2, 2}, {memory + SMALL, SMALL / 2, 0, 1}};
    xfer = (ra_xfer){1, true, small, 2, SMALL};
    assert_int_equal(ra_nccl_rounds_start(&rounds, &xfer, 1), RA_OK);
    assert_int_equal(ra_nccl_rounds_next(&rounds), RA_OK);
    assert_int_equal(rounds.piece_count, 1);
    assert_null(rounds.piece[0].direct);
    ra_nccl_rounds_free(&rounds);
    free(memory);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_both_ends_cut_alike),
        cmocka_unit_test(test_contiguous_is_direct),
    };
    support_start(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
