/*
 * `ringattn run`: a case through the ring, the results into a safetensors file that either appears
 * whole or not at all. Must not compare anything.
 */
#include <stdio.h>

#include "base/alloc.h"
#include "cli/commands.h"
#include "cli/report.h"
#include "cli/ring_run.h"

static ra_st_dtype file_dtype(ra_dtype dtype)
{
    switch (dtype) {
    case RA_F32: return RA_ST_F32;
    case RA_BF16: return RA_ST_BF16;
    case RA_F16: return RA_ST_F16;
    case RA_F64: return RA_ST_F64;
    }
    return RA_ST_DTYPE_COUNT;
}

/* lse is [rows, heads, seq] in files and has a channel axis of 1 in the library. */
static ra_st_tensor describe(ra_result result, const ra_tensor *t)
{
    ra_st_tensor tensor = {
        .name = ra_result_name(result),
        .dtype = file_dtype(t->dtype),
        .dims = result == RA_RESULT_LSE ? RA_NDIM - 1 : RA_NDIM,
        .data = t->data,
        .bytes = (size_t)ra_tensor_count(t) * ra_dtype_bytes(t->dtype),
    };
    for (int i = 0; i < tensor.dims; i++) {
        tensor.shape[i] = t->size[i];
    }
    return tensor;
}

static ra_status write_results(const ra_case *c, const ra_args *args, ra_ring_result *ring)
{
    ra_st_tensor tensor[RA_RESULT_COUNT];
    int count = 0;
    for (int i = 0; i < RA_RESULT_COUNT; i++) {
        ra_tensor *result = &ring->result[i];
        if (!result->data) {
            continue;
        }
        if (args->out_dtype && i != RA_RESULT_LSE && args->out_dtype != result->dtype) {
            void *converted = NULL;
            RA_TRY(ra_tensor_convert(result, args->out_dtype, &converted));
            ra_free(ring->owned[i]);
            ring->owned[i] = converted;
        }
        tensor[count++] = describe((ra_result)i, result);
    }
    return ra_safetensors_write(args->out, tensor, count, c->file.meta, c->file.meta_count);
}

static void print_summary(const ra_case *c, const ra_args *args, const ra_ring_result *ring)
{
    char bytes[RA_NUMBER_BYTES], scratch[2][RA_NUMBER_BYTES];
    uint64_t sent = 0;
    for (int i = 0; i < ring->ranks; i++) {
        sent += ring->rank[i].forward_bytes + ring->rank[i].backward_bytes;
    }
    printf("%s: %s of %s on %d ranks, path %s, %s bytes sent, %.3f s -> %s\n", c->path,
           ring->backward ? "forward and backward" : "forward", c->name, ring->ranks,
           ring->rank[0].info.path, ra_number_group(sent, bytes), ring->seconds, args->out);
    ra_trace_print(ring);
    for (int i = 0; args->verbose && i < ring->ranks; i++) {
        printf("  rank %d: scratch %s forward, %s backward\n", i,
               ra_bytes_scale(ring->rank[i].info.scratch_forward_bytes, scratch[0]),
               ra_bytes_scale(ring->rank[i].info.scratch_backward_bytes, scratch[1]));
    }
}

static ra_status print_json(const ra_case *c, const ra_args *args, const ra_ring_result *ring)
{
    uint64_t forward = 0, backward = 0;
    for (int i = 0; i < ring->ranks; i++) {
        forward += ring->rank[i].forward_bytes;
        backward += ring->rank[i].backward_bytes;
    }
    return ra_json_print(json_pack("{s:o, s:o, s:o, s:i, s:s, s:b, s:I, s:I, s:o}", "file",
                                   ra_json_text(c->path), "name", ra_json_text(c->name), "out",
                                   ra_json_text(args->out), "ranks", ring->ranks, "path",
                                   ring->rank[0].info.path, "backward", (int)ring->backward,
                                   "forward_bytes", (json_int_t)forward, "backward_bytes",
                                   (json_int_t)backward, "seconds", ra_json_number(ring->seconds)));
}

/* What may fail in one process alone. */
static ra_status prepare(const ra_args *args, ra_trace **trace, ra_case *c)
{
    RA_TRY(ra_trace_open(args, trace));
    RA_TRY(ra_outputs_check(args));
    RA_TRY(ra_case_read(args->files[0], c));
    return args->dtype ? ra_case_convert(c, args->dtype) : RA_OK;
}

static ra_status run_case(const ra_args *args, ra_trace *trace, ra_case *c, ra_ring_result *ring)
{
    RA_TRY(ra_ring_run(c, args, trace, ring));
    if (args->rank > 0) { /* the first process has all results */
        return RA_OK;
    }
    RA_TRY(write_results(c, args, ring));
    if (trace) {
        RA_TRY(ra_trace_save(trace, args->trace));
    }
    if (args->json) {
        return print_json(c, args, ring);
    }
    print_summary(c, args, ring);
    return RA_OK;
}

int ra_command_run(const ra_args *args)
{
    ra_trace *trace = NULL;
    ra_case c = {0};
    ra_ring_result ring = {0};
    ra_status status = ra_processes_agree(args->transport, prepare(args, &trace, &c));
    if (!status) {
        status = run_case(args, trace, &c, &ring);
    }
    if (status) {
        ra_error_print();
    }
    ra_ring_result_free(&ring);
    ra_case_free(&c);
    ra_trace_free(trace);
    return ra_exit_of(status);
}
