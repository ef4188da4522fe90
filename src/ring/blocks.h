/* Message rows to the strided blocks of tensors: both ends list a message's bytes in one order,
 * range by range, head by head, row by row. Must not know what travels. */
#ifndef RA_RING_BLOCKS_H
#define RA_RING_BLOCKS_H

#include "plan/schedule.h"
#include "tensor/tensor.h"

/* Room for blocks, allocated by the owner for the largest exchange. */
typedef struct ra_block_list {
    ra_block *block;
    int64_t count, capacity;
} ra_block_list;

/* Part of one range of a message. */
typedef struct ra_slice {
    int64_t row;    /* of the batch */
    int64_t index;  /* as in ra_key_rows */
    int64_t offset; /* rows of the message before this part */
    int64_t count;
} ra_slice;

/* Cursor over the message rows [begin, end). */
typedef struct ra_slice_walk {
    const ra_message *message;
    int64_t range, passed; /* rows of the ranges before `range` */
    int64_t begin, end;
} ra_slice_walk;

ra_slice_walk ra_slice_walk_start(const ra_message *message, int64_t begin, int64_t end);
bool ra_slice_walk_next(ra_slice_walk *walk, ra_slice *slice);

/* Appends `count` sequence rows of all heads, head by head, in as few blocks as their strides
 * allow. */
void ra_blocks_add(ra_block_list *list, const ra_tensor *t, int64_t tensor_row, int64_t index,
                   int64_t count);

/* The transfer of the blocks from `first` on. */
ra_xfer ra_blocks_xfer(const ra_block_list *list, int64_t first, int peer, bool send);

#endif
