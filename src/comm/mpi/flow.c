/* Packs, posts, tests and unpacks the pieces of one message. */
#include "comm/mpi/flow.h"

#include <string.h>

#include "base/alloc.h"

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

/* Copies the next bytes of the message to or from flat memory. */
static void copy_payload(ra_mpi_flow *f, char *flat, size_t bytes)
{
    while (bytes > 0) {
        const ra_block *b = f->block;
        /* Rows without gaps between them are one. */
        size_t width = b->stride == b->width ? b->width * (size_t)b->count : b->width;
        int64_t rows = b->stride == b->width ? 1 : b->count;
        size_t count = width - f->used < bytes ? width - f->used : bytes;
        char *at = (char *)b->data + (size_t)f->row * b->stride + f->used;
        if (count > 0) {
            memcpy(f->xfer->send ? flat : at, f->xfer->send ? at : flat, count);
        }
        flat += count;
        bytes -= count;
        f->used += count;
        if (f->used == width) {
            f->used = 0;
            f->row++;
        }
        if (f->row >= rows) {
            f->row = 0;
            f->block++;
        }
    }
}

/* Room for a piece; sizes are rounded up so that slots soon stop growing. */
static ra_status slot_reserve(ra_mpi_slot *slot, size_t bytes)
{
    size_t room = RA_MPI_FIRST_BYTES;
    if (ra_alloc_bytes(slot->memory) >= bytes) {
        return RA_OK;
    }
    while (room < bytes) {
        room *= 2;
    }
    ra_free(slot->memory);
    slot->memory = NULL;
    return ra_alloc(room, 1, &slot->memory);
}

static ra_status post(ra_mpi_flow *f, MPI_Comm comm)
{
    ra_mpi_slot *slot = &f->slot[f->pieces_posted % RA_MPI_SLOTS];
    bool first = f->pieces_posted == 0;
    uint64_t left = f->total - f->posted;
    size_t most = first ? RA_MPI_FIRST_BYTES : RA_MPI_PIECE_BYTES;
    size_t bytes = left < most ? (size_t)left : most;
    int peer = f->xfer->peer, code;
    RA_TRY(slot_reserve(slot, first ? most : bytes));
    if (f->send) {
        size_t head = first ? sizeof f->header : 0;
        memcpy(slot->memory, &f->header, head);
        copy_payload(f, slot->memory + head, bytes - head);
        code = MPI_Isend(slot->memory, (int)bytes, MPI_BYTE, peer, RA_MPI_TAG_DATA, comm,
                         &slot->request);
    } else {
        code = MPI_Irecv(slot->memory, (int)(first ? most : bytes), MPI_BYTE, peer, RA_MPI_TAG_DATA,
                         comm, &slot->request);
    }
    if (code != MPI_SUCCESS) {
        slot->request = MPI_REQUEST_NULL;
    }
    RA_TRY(ra_mpi_check(code, f->send ? "MPI_Isend" : "MPI_Irecv", peer));
    slot->bytes = bytes;
    f->posted += bytes;
    f->pieces_posted++;
    return RA_OK;
}

/* As many pieces as there are slots; a receiver reads the header before it asks for more. */
static ra_status post_all(ra_mpi_flow *f, MPI_Comm comm)
{
    while (f->posted < f->total && f->pieces_posted - f->pieces_done < RA_MPI_SLOTS &&
           (f->send || f->pieces_posted == 0 || f->done > 0)) {
        RA_TRY(post(f, comm));
    }
    return RA_OK;
}

static ra_status take(ra_mpi_flow *f, const ra_mpi_slot *slot, size_t received)
{
    const ra_xfer *xfer = f->xfer;
    size_t head = f->pieces_done == 0 ? sizeof f->header : 0;
    ra_mpi_header sent = f->header;
    if (received >= head) {
        memcpy(&sent, slot->memory, head);
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
    copy_payload(f, slot->memory + head, slot->bytes - head);
    return RA_OK;
}

void ra_mpi_flow_init(ra_mpi_flow *flow)
{
    *flow = (ra_mpi_flow){0};
    for (int i = 0; i < RA_MPI_SLOTS; i++) {
        flow->slot[i].request = MPI_REQUEST_NULL;
    }
}

ra_status ra_mpi_flow_start(ra_mpi_flow *flow, MPI_Comm comm, uint64_t call, const ra_xfer *xfer)
{
    flow->xfer = xfer;
    flow->send = xfer->send;
    flow->header = (ra_mpi_header){call, xfer->bytes};
    flow->block = xfer->blocks;
    flow->row = 0;
    flow->used = 0;
    flow->total = sizeof flow->header + xfer->bytes;
    flow->posted = flow->done = 0;
    flow->pieces_posted = flow->pieces_done = 0;
    return post_all(flow, comm);
}

ra_status ra_mpi_flow_step(ra_mpi_flow *flow, MPI_Comm comm, bool *moved)
{
    while (flow->done < flow->posted) {
        ra_mpi_slot *slot = &flow->slot[flow->pieces_done % RA_MPI_SLOTS];
        MPI_Status status;
        int done = 0, received = 0;
        RA_TRY(
            ra_mpi_check(MPI_Test(&slot->request, &done, &status), "MPI_Test", flow->xfer->peer));
        if (!done) {
            return RA_OK;
        }
        *moved = true;
        if (!flow->xfer->send) {
            RA_TRY(ra_mpi_check(MPI_Get_count(&status, MPI_BYTE, &received), "MPI_Get_count",
                                flow->xfer->peer));
            RA_TRY(take(flow, slot, (size_t)received));
        }
        flow->done += slot->bytes;
        flow->pieces_done++;
        RA_TRY(post_all(flow, comm));
    }
    return RA_OK;
}

void ra_mpi_flow_cancel(ra_mpi_flow *flow)
{
    for (int i = 0; i < RA_MPI_SLOTS; i++) {
        MPI_Request *request = &flow->slot[i].request;
        if (!flow->send && *request != MPI_REQUEST_NULL) {
            MPI_Cancel(request);
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
        ra_free(flow->slot[i].memory);
    }
}
