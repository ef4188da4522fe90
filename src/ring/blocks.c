/* Walks and blocks. */
#include "ring/blocks.h"

ra_slice_walk ra_slice_walk_start(const ra_message *message, int64_t begin, int64_t end)
{
    return (ra_slice_walk){message, 0, 0, begin, ra_min_i64(end, message->row_count)};
}

bool ra_slice_walk_next(ra_slice_walk *walk, ra_slice *slice)
{
    while (walk->range < walk->message->range_count && walk->passed < walk->end) {
        const ra_key_rows *range = &walk->message->range[walk->range++];
        int64_t first = ra_max_i64(walk->begin, walk->passed);
        int64_t last = ra_min_i64(walk->end, walk->passed + range->count);
        int64_t skipped = first - walk->passed;
        walk->passed += range->count;
        if (first < last) {
            *slice = (ra_slice){range->row, range->index + skipped, first, last - first};
            return true;
        }
    }
    return false;
}

void ra_blocks_add(ra_block_list *list, const ra_tensor *t, int64_t tensor_row, int64_t index,
                   int64_t count)
{
    size_t element = ra_dtype_bytes(t->dtype);
    size_t width = (size_t)t->size[RA_CHAN] * element;
    size_t stride = (size_t)t->stride[RA_SEQ] * element;
    for (int64_t head = 0; head < t->size[RA_HEAD]; head++) {
        RA_CHECK(list->count < list->capacity);
        ra_block *block = &list->block[list->count++];
        block->data = ra_tensor_at(t, tensor_row, head, index);
        if (stride == width) { /* rows lie side by side: one long copy */
            *block = (ra_block){block->data, width * (size_t)count, width * (size_t)count, 1};
        } else {
            *block = (ra_block){block->data, width, stride, count};
        }
    }
}

ra_xfer ra_blocks_xfer(const ra_block_list *list, int64_t first, int peer, bool send)
{
    ra_xfer xfer = {
        .peer = peer,
        .send = send,
        .blocks = list->block + first,
        .block_count = list->count - first,
    };
    for (int64_t i = 0; i < xfer.block_count; i++) {
        xfer.bytes += xfer.blocks[i].width * (uint64_t)xfer.blocks[i].count;
    }
    return xfer;
}
