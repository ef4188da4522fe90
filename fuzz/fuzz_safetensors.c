/*
 * Any bytes as a safetensors file: the parser accepts or refuses them, and of what it accepts every
 * byte of every tensor can be read. Must not know what the tensors mean.
 */
#include <stdlib.h>
#include <string.h>

#include "cli/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Reads every byte, so that a sanitizer sees one outside; traps where a promise is broken. */
static unsigned touch(const ra_safetensors *file, size_t file_bytes)
{
    unsigned sum = 0;
    size_t total = 0;
    for (int64_t i = 0; i < file->tensor_count; i++) {
        const ra_st_tensor *tensor = &file->tensor[i];
        size_t elements = 1;
        for (int d = 0; d < tensor->dims; d++) {
            elements *= (size_t)tensor->shape[d];
        }
        bool aligned = (uintptr_t)tensor->data % ra_st_dtype_bytes(tensor->dtype) == 0;
        if (elements * ra_st_dtype_bytes(tensor->dtype) != tensor->bytes || !aligned ||
            ra_safetensors_find(file, tensor->name) != tensor) {
            abort();
        }
        for (size_t b = 0; b < tensor->bytes; b++) {
            sum += ((const unsigned char *)tensor->data)[b];
        }
        total += tensor->bytes;
    }
    for (int64_t i = 0; i < file->meta_count; i++) {
        sum += (unsigned)strlen(ra_safetensors_meta(file, file->meta[i].key));
    }
    if (total > file_bytes) {
        abort();
    }
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ra_safetensors file;
    static volatile unsigned sink;
    if (ra_safetensors_parse(data, size, &file) == RA_OK) {
        sink = sink + touch(&file, size);
        ra_safetensors_free(&file);
    } else if (*ra_last_error() == 0) {
        abort(); /* a refusal without a reason */
    }
    return 0;
}
