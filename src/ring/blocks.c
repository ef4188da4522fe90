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

static void append(ra_block_list *list, ra_block block)
{
    RA_CHECK(list->count < list->capacity);
    list->block[list->count++] = block;
}

void ra_blocks_add(ra_block_list *list, const ra_tensor *t, int64_t tensor_row, int64_t index,
                   int64_t count)
{
    int64_t element = (int64_t)ra_dtype_bytes(t->dtype), heads = t->size[RA_HEAD];
    int64_t width = t->size[RA_CHAN] * element, stride = t->stride[RA_SEQ] * element;
    int64_t apart = t->stride[RA_HEAD] * element;
    bool gapless = count == 1 || stride == width; /* rows of a head: as one */
    if (gapless && (heads == 1 || apart >= width * count)) {
        void *data = ra_tensor_at(t, tensor_row, 0, index);
        append(list, (ra_block){data, (size_t)(width * count),
                                (size_t)(heads == 1 ? width * count : apart), heads});
        return;
    }
    for (int64_t head = 0; head < heads; head++) {
        void *data = ra_tensor_at(t, tensor_row, head, index);
        append(list, gapless ? (ra_block){data, (size_t)(width * count), (size_t)(width * count), 1}
                             : (ra_block){data, (size_t)width, (size_t)stride, count});
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
