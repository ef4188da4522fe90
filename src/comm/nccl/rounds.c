/* Walks the blocks of every message. */
#include "comm/nccl/rounds.h"

#include "base/alloc.h"

enum { STAGING_ALIGN = 256 };

ra_status ra_nccl_rounds_start(ra_nccl_rounds *rounds, const ra_xfer *xfers, int count)
{
    RA_TRY(RA_RESERVE(&rounds->message, &rounds->message_capacity, count));
    for (int i = 0; i < count; i++) {
        rounds->message[i] = (ra_nccl_message){.xfer = &xfers[i], .at = {.block = xfers[i].blocks}};
    }
    rounds->message_count = count;
    return RA_OK;
}

/* Bytes of the next piece; 0 when the message is done. */
static uint64_t measure(const ra_nccl_message *m, const ra_nccl_rounds *rounds)
{
    uint64_t whole = m->xfer->bytes, half = whole / 2;
    bool halved = whole > rounds->small_bytes && m->passed < half;
    uint64_t left = (halved ? half : whole) - m->passed;
    return left < rounds->piece_bytes ? left : rounds->piece_bytes;
}

static ra_nccl_piece cut(ra_nccl_message *m, uint64_t bytes)
{
    ra_nccl_piece piece = {m->xfer->peer, m->xfer->send, m->at, (size_t)bytes, NULL, 0};
    ra_stretch first = ra_cursor_take(&m->at, piece.bytes);
    if (first.rows == 1 && first.width == piece.bytes) {
        piece.direct = first.data;
    }
    for (size_t passed = ra_stretch_bytes(&first); passed < piece.bytes;) {
        ra_stretch next = ra_cursor_take(&m->at, piece.bytes - passed);
        passed += ra_stretch_bytes(&next);
    }
    m->passed += bytes;
    return piece;
}

static ra_status add_piece(ra_nccl_rounds *rounds, ra_nccl_piece piece)
{
    RA_TRY(RA_RESERVE(&rounds->piece, &rounds->piece_capacity, rounds->piece_count + 1));
    if (!piece.direct) {
        piece.staging = rounds->staging_bytes;
        rounds->staging_bytes += (size_t)ra_round_up((int64_t)piece.bytes, STAGING_ALIGN);
    }
    rounds->piece[rounds->piece_count++] = piece;
    return RA_OK;
}

ra_status ra_nccl_rounds_next(ra_nccl_rounds *rounds)
{
    rounds->piece_count = 0;
    rounds->staging_bytes = 0;
    for (int i = 0; i < rounds->message_count; i++) {
        ra_nccl_message *m = &rounds->message[i];
        uint64_t bytes;
        for (uint64_t taken = 0; taken < rounds->round_bytes; taken += bytes) {
            bytes = measure(m, rounds);
            if (bytes == 0) {
                break;
            }
            RA_TRY(add_piece(rounds, cut(m, bytes)));
        }
    }
    return RA_OK;
}

void ra_nccl_rounds_free(ra_nccl_rounds *rounds)
{
    ra_free(rounds->message);
    ra_free(rounds->piece);
}
