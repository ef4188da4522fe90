/* Copies, posts and tests the pieces of one message. */
#include "comm/mpi/flow.h"

#include <string.h>

ra_status ra_mpi_check(int code, const char *what, int peer)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int length = 0;
    if (code == MPI_SUCCESS) {
        return RA_OK;
    }
    MPI_Error_string(code, text, &length);
    return RA_FAIL(RA_E_COMM, "rank %d: %s: %.300s", peer, what, text);
}

bool ra_mpi_done(MPI_Request *request)
{
    int done = 1;
    return MPI_Test(request, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || done;
}

/* Sizes are rounded up so that slots soon stop growing. */
static ra_status reserve(ra_mpi_memory *memory, size_t bytes, ra_mpi_place place)
{
    size_t room = RA_MPI_FIRST_BYTES;
    while (room < bytes) {
        room *= 2;
    }
    return ra_mpi_memory_reserve(memory, room, place);
}

static ra_mpi_slot *slot_of(ra_mpi_flow *f, int64_t piece)
{
    return &f->slot[piece % RA_MPI_SLOTS];
}

static ra_mpi_memory *memory_of(ra_mpi_slot *slot)
{
    return slot->first ? &slot->head : &slot->body;
}

/* Bytes of a slot that are no payload. */
static size_t head_of(const ra_mpi_flow *f, const ra_mpi_slot *slot)
{
    return slot->first ? sizeof f->header : 0;
}

/* A send, or a receive with all the room that the slot has. */
static ra_status post_request(ra_mpi_flow *f, ra_mpi_slot *slot, MPI_Comm comm)
{
    char *data = memory_of(slot)->data;
    int peer = f->xfer->peer;
    int bytes = slot->first && !f->send ? RA_MPI_FIRST_BYTES : (int)slot->bytes;
    int code = f->send
                   ? MPI_Isend(data, bytes, MPI_BYTE, peer, RA_MPI_TAG_DATA, comm, &slot->request)
                   : MPI_Irecv(data, bytes, MPI_BYTE, peer, RA_MPI_TAG_DATA, comm, &slot->request);
    if (code != MPI_SUCCESS) {
        slot->request = MPI_REQUEST_NULL;
    }
    return ra_mpi_check(code, f->send ? "MPI_Isend" : "MPI_Irecv", peer);
}

static ra_status begin_copy(ra_mpi_flow *f, ra_mpi_slot *slot)
{
    size_t head = head_of(f, slot);
    slot->copying = true;
    return ra_mpi_memory_copy(memory_of(slot), head, &f->at, slot->bytes - head, f->send);
}

/* Begins the next piece in a slot that is free. */
static ra_status begin_piece(ra_mpi_flow *f, MPI_Comm comm)
{
    ra_mpi_slot *slot = slot_of(f, f->pieces_posted);
    uint64_t left = f->total - f->posted;
    slot->first = f->pieces_posted == 0;
    size_t most = slot->first ? RA_MPI_FIRST_BYTES : RA_MPI_PIECE_BYTES;
    slot->bytes = left < most ? (size_t)left : most;
    /* Copies to and from the head are those of a device too, so it is never memory of one. */
    ra_mpi_place head_place = f->place == RA_MPI_HOST ? RA_MPI_HOST : RA_MPI_PINNED;
    RA_TRY(slot->first ? reserve(&slot->head, most, head_place)
                       : reserve(&slot->body, slot->bytes, f->place));
    f->posted += slot->bytes;
    f->pieces_posted++;
    if (!f->send) {
        return post_request(f, slot, comm);
    }
    memcpy(memory_of(slot)->data, &f->header, head_of(f, slot));
    return begin_copy(f, slot);
}

/* As many pieces as there are slots; a receiver reads the header before it asks for more. */
static ra_status begin_pieces(ra_mpi_flow *f, MPI_Comm comm)
{
    while (f->posted < f->total && f->pieces_posted - f->pieces_done < RA_MPI_SLOTS &&
           (f->send || f->pieces_posted == 0 || f->pieces_moved > 0)) {
        RA_TRY(begin_piece(f, comm));
    }
    return RA_OK;
}

/* Is the piece that came the one that was expected? */
static ra_status check_received(const ra_mpi_flow *f, ra_mpi_slot *slot, size_t received)
{
    const ra_xfer *xfer = f->xfer;
    size_t head = head_of(f, slot);
    ra_mpi_header sent = f->header;
    if (received >= head) {
        memcpy(&sent, memory_of(slot)->data, head);
    }
    if (sent.call != f->header.call) {
        return RA_FAIL(RA_E_COMM, "rank %d is in call %llu of this communicator, expected %llu",
                       xfer->peer, (unsigned long long)sent.call,
                       (unsigned long long)f->header.call);
    }
    if (sent.bytes != xfer->bytes || received != slot->bytes) {
        return RA_FAIL(RA_E_COMM, "rank %d sends %llu bytes, expected %llu", xfer->peer,
                       (unsigned long long)sent.bytes, (unsigned long long)xfer->bytes);
    }
    return RA_OK;
}

static ra_status test_request(ra_mpi_flow *f, ra_mpi_slot *slot, bool *done)
{
    MPI_Status status;
    int is_done = 0, received = 0, peer = f->xfer->peer;
    RA_TRY(ra_mpi_check(MPI_Test(&slot->request, &is_done, &status), "MPI_Test", peer));
    *done = is_done;
    if (!is_done || f->send) {
        return RA_OK;
    }
    RA_TRY(ra_mpi_check(MPI_Get_count(&status, MPI_BYTE, &received), "MPI_Get_count", peer));
    RA_TRY(check_received(f, slot, (size_t)received));
    return begin_copy(f, slot);
}

/* The copy of a sender's next piece, behind which it is sent, or the message of a receiver's. */
static ra_status move_next(ra_mpi_flow *f, MPI_Comm comm, bool *moved)
{
    ra_mpi_slot *slot = slot_of(f, f->pieces_moved);
    bool done;
    if (f->send) {
        RA_TRY(ra_mpi_memory_done(memory_of(slot), &done));
        slot->copying = !done;
        RA_TRY(done ? post_request(f, slot, comm) : RA_OK);
    } else {
        RA_TRY(test_request(f, slot, &done));
    }
    f->pieces_moved += done;
    *moved = done;
    return RA_OK;
}

/* What comes after: the sender's message, the receiver's copy. */
static ra_status end_next(ra_mpi_flow *f, bool *ended)
{
    ra_mpi_slot *slot = slot_of(f, f->pieces_done);
    if (f->send) {
        RA_TRY(test_request(f, slot, ended));
    } else {
        RA_TRY(ra_mpi_memory_done(memory_of(slot), ended));
        slot->copying = !*ended;
    }
    f->pieces_done += *ended;
    f->done += *ended ? slot->bytes : 0;
    return RA_OK;
}

void ra_mpi_flow_init(ra_mpi_flow *flow)
{
    *flow = (ra_mpi_flow){0};
    for (int i = 0; i < RA_MPI_SLOTS; i++) {
        flow->slot[i].request = MPI_REQUEST_NULL;
    }
}

ra_status ra_mpi_flow_start(ra_mpi_flow *flow, MPI_Comm comm, uint64_t call, const ra_xfer *xfer,
                            bool direct)
{
    bool moved;
    flow->xfer = xfer;
    flow->send = xfer->send;
    flow->place = ra_mpi_place_of(xfer, direct);
    flow->header = (ra_mpi_header){call, xfer->bytes};
    flow->at = (ra_cursor){.block = xfer->blocks};
    flow->total = sizeof flow->header + xfer->bytes;
    flow->posted = flow->done = 0;
    flow->pieces_posted = flow->pieces_moved = flow->pieces_done = 0;
    RA_TRY(begin_pieces(flow, comm));
    return xfer->send ? ra_mpi_flow_step(flow, comm, &moved) : RA_OK;
}

ra_status ra_mpi_flow_step(ra_mpi_flow *flow, MPI_Comm comm, bool *moved)
{
    for (bool going = true; going;) {
        bool one = false, other = false;
        if (flow->pieces_moved < flow->pieces_posted) {
            RA_TRY(move_next(flow, comm, &one));
        }
        if (flow->pieces_done < flow->pieces_moved) {
            RA_TRY(end_next(flow, &other));
        }
        going = one || other;
        *moved = *moved || going;
        RA_TRY(begin_pieces(flow, comm));
    }
    return RA_OK;
}

void ra_mpi_flow_cancel(ra_mpi_flow *flow)
{
    for (int i = 0; i < RA_MPI_SLOTS; i++) {
        ra_mpi_slot *slot = &flow->slot[i];
        if (!flow->send && slot->request != MPI_REQUEST_NULL) {
            MPI_Cancel(&slot->request);
        }
        if (slot->copying) {
            ra_mpi_memory_settle(memory_of(slot));
            slot->copying = false;
        }
    }
}

int ra_mpi_flow_pending(ra_mpi_flow *flow)
{
    int pending = 0;
    for (int i = 0; i < RA_MPI_SLOTS; i++) {
        pending += !ra_mpi_done(&flow->slot[i].request);
    }
    return pending;
}

void ra_mpi_flow_free(ra_mpi_flow *flow)
{
    for (int i = 0; i < RA_MPI_SLOTS; i++) {
        ra_mpi_memory_free(&flow->slot[i].head);
        ra_mpi_memory_free(&flow->slot[i].body);
    }
}
