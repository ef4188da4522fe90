/*
 * One attention problem as a whole sequence: a case file becomes checked tensors, metadata and a
 * layer kind. Must not know ranks or layouts.
 */
#ifndef RA_CLI_CASE_H
#define RA_CLI_CASE_H

#include "cli/args.h"
#include "cli/safetensors.h"
#include "tensor/tensor.h"

enum { RA_CASE_NAME_BYTES = 128 };

/* The results of forward and backward, in the order in which they are printed. */
typedef enum ra_result {
    RA_RESULT_OUT,
    RA_RESULT_LSE,
    RA_RESULT_DQ,
    RA_RESULT_DK,
    RA_RESULT_DV,
    RA_RESULT_COUNT,
} ra_result;

typedef struct ra_case {
    const char *path;
    char name[RA_CASE_NAME_BYTES]; /* printable */
    ra_safetensors file;           /* owns what the tensors below point to, unless converted */
    ra_layer layer;
    int64_t rows, seq;
    ra_tensor q, k, v, dout; /* dout.data NULL: forward only */
    void *converted[4];      /* the inputs after ra_case_convert, else NULL */
    int32_t *doc_id;         /* [rows, seq] or NULL, as the two below */
    int32_t *token_type;
    uint8_t *is_pad;
    ra_tensor expected[RA_RESULT_COUNT]; /* data NULL where the file has none */
} ra_case;

/* The names in a file: "out", "lse", "grad_query", "grad_key", "grad_value". */
const char *ra_result_name(ra_result result);
/* A contiguous whole-sequence view of this result's shape. */
ra_tensor ra_case_result(const ra_case *c, ra_result result, void *data, ra_dtype dtype);

/* A failure names the path. */
ra_status ra_case_read(const char *path, ra_case *out);
/* The case of `plan --seq`: metadata and a layer, no tensors. */
ra_status ra_case_imagine(const ra_args *args, ra_case *out);
/* The metadata of the whole batch; borrowed from c. */
ra_step_desc ra_case_desc(const ra_case *c);
/* Rounds the inputs to dtype and drops the expected results, which are those of other inputs. */
ra_status ra_case_convert(ra_case *c, ra_dtype dtype);
/* Makes *t a contiguous copy of itself in dtype, at *owned. */
ra_status ra_tensor_convert(ra_tensor *t, ra_dtype dtype, void **owned);
void ra_case_free(ra_case *c);

#endif
