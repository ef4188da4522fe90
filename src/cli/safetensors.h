/*
 * Safetensors files: bytes become a checked list of named tensors, and a list of tensors becomes a
 * file. Nothing of a file is believed: every length, offset and name is checked before use. Must
 * not know what the tensors mean, and never prints.
 */
#ifndef RA_CLI_SAFETENSORS_H
#define RA_CLI_SAFETENSORS_H

#include "base/status.h"

enum {
    RA_ST_DIMS_MAX = 8,
    RA_ST_HEADER_BYTES_MAX = 100 * 1000 * 1000, /* the format's own limit */
};

#define RA_ST_DTYPE_LIST(X)                                                                        \
    X(BOOL, 1)                                                                                     \
    X(U8, 1)                                                                                       \
    X(I8, 1)                                                                                       \
    X(F8_E4M3, 1)                                                                                  \
    X(F8_E5M2, 1)                                                                                  \
    X(I16, 2)                                                                                      \
    X(U16, 2)                                                                                      \
    X(F16, 2)                                                                                      \
    X(BF16, 2)                                                                                     \
    X(I32, 4)                                                                                      \
    X(U32, 4)                                                                                      \
    X(F32, 4)                                                                                      \
    X(I64, 8)                                                                                      \
    X(U64, 8)                                                                                      \
    X(F64, 8)

typedef enum ra_st_dtype {
#define RA_ST_DTYPE_ENUM(name, bytes) RA_ST_##name,
    RA_ST_DTYPE_LIST(RA_ST_DTYPE_ENUM)
#undef RA_ST_DTYPE_ENUM
        RA_ST_DTYPE_COUNT
} ra_st_dtype;

typedef struct ra_st_tensor {
    const char *name;
    ra_st_dtype dtype;
    int dims;
    int64_t shape[RA_ST_DIMS_MAX];
    const void *data; /* aligned to its element */
    size_t bytes;
} ra_st_tensor;

typedef struct ra_st_meta {
    const char *key, *value;
} ra_st_meta;

typedef struct ra_safetensors {
    int64_t tensor_count, meta_count;
    ra_st_tensor *tensor; /* in the order of their data */
    ra_st_meta *meta;
    void *header; /* the parsed header, which owns the strings */
    void *data;   /* what ra_safetensors_read read; NULL after ra_safetensors_parse */
    void **copy;  /* [tensor_count] aligned copies of misaligned tensors; NULL entries elsewhere */
} ra_safetensors;

const char *ra_st_dtype_name(ra_st_dtype dtype);
size_t ra_st_dtype_bytes(ra_st_dtype dtype);

/* Parses a whole file in memory; tensors point into `data`, which outlives *out. */
ra_status ra_safetensors_parse(const void *data, size_t bytes, ra_safetensors *out);
/* Reads a regular file. It is read, not mapped: the tensors are copied to the ranks in any case,
 * and a map of a file that someone truncates raises SIGBUS, which cannot become a status. */
ra_status ra_safetensors_read(const char *path, ra_safetensors *out);
void ra_safetensors_free(ra_safetensors *file);

const ra_st_tensor *ra_safetensors_find(const ra_safetensors *file, const char *name);
const char *ra_safetensors_meta(const ra_safetensors *file, const char *key); /* NULL = absent */

/* Writes the tensors, sorted by name, to a temporary file beside `path`, and renames it: `path` is
 * either the whole new file or what it was. */
ra_status ra_safetensors_write(const char *path, const ra_st_tensor *tensor, int64_t tensor_count,
                               const ra_st_meta *meta, int64_t meta_count);

#endif
