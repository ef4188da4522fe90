/* Walks the blocks of every message. */
#include "comm/nccl/rounds.h"

#include "base/alloc.h"

enum { STAGING_ALIGN = 256 };

ra_status ra_nccl_rounds_start(ra_nccl_rounds *rounds, const ra_xfer *xfers, int count)
{
    RA_TRY(RA_RESERVE(&rounds->message, &rounds->message_capacity, count));
    for (int i = 0; i < count; i++) {
        rounds->message[i] =
            (ra_nccl_message){&xfers[i], {.block = xfers[i].blocks}, xfers[i].bytes};
    }
    rounds->message_count = count;
    return RA_OK;
}

static ra_nccl_piece cut(ra_nccl_message *m, size_t most)
{
    size_t bytes = m->left < most ? (size_t)m->left : most;
    ra_nccl_piece piece = {m->xfer->peer, m->xfer->send, m->at, bytes, NULL, 0};
    ra_stretch first = ra_cursor_take(&m->at, bytes);
    if (first.rows == 1 && first.width == bytes) {
        piece.direct = first.data;
    }
    for (size_t passed = ra_stretch_bytes(&first); passed < bytes;) {
        ra_stretch next = ra_cursor_take(&m->at, bytes - passed);
        passed += ra_stretch_bytes(&next);
    }
    m->left -= bytes;
    return piece;
}

ra_status ra_nccl_rounds_next(ra_nccl_rounds *rounds)
{
    const int pieces_max = (int)(rounds->round_bytes / rounds->piece_bytes);
    rounds->piece_count = 0;
    rounds->staging_bytes = 0;
    RA_TRY(RA_RESERVE(&rounds->piece, &rounds->piece_capacity,
                      (int64_t)rounds->message_count * pieces_max));
    for (int i = 0; i < rounds->message_count; i++) {
        ra_nccl_message *m = &rounds->message[i];
        for (int n = 0; n < pieces_max && m->left > 0; n++) {
            ra_nccl_piece piece = cut(m, rounds->piece_bytes);
            if (!piece.direct) {
                piece.staging = rounds->staging_bytes;
                rounds->staging_bytes += (size_t)ra_round_up((int64_t)piece.bytes, STAGING_ALIGN);
            }
            rounds->piece[rounds->piece_count++] = piece;
        }
    }
    return RA_OK;
}

void ra_nccl_rounds_free(ra_nccl_rounds *rounds)
{
    ra_free(rounds->message);
    ra_free(rounds->piece);
}
