/*
 * `ringattn check`: each case through the ring, each result against its reference, each rank's
 * bytes against its plan. Must not know how either is computed.
 */
#include <string.h>

#include "base/alloc.h"
#include "cli/commands.h"
#include "cli/reference.h"
#include "cli/report.h"
#include "cli/ring_run.h"
#include "oracle/tolerance.h"

typedef struct verdict {
    ra_comparison comparison[RA_RESULT_COUNT];
    int result_count; /* compared */
    int first_wrong;  /* rank that sent other bytes than its plan says, or -1 */
    bool pass;
} verdict;

static ra_status judge(const ra_ring_result *ring, const ra_reference *reference, ra_dtype dtype,
                       verdict *out)
{
    *out = (verdict){.first_wrong = -1, .pass = true};
    out->result_count = ring->backward ? RA_RESULT_COUNT : RA_RESULT_DQ;
    for (int i = 0; i < out->result_count; i++) {
        RA_TRY(ra_compare(&ring->result[i], &reference->plain[i], &reference->truth[i],
                          i == RA_RESULT_LSE ? RA_F32 : dtype, &out->comparison[i]));
        out->pass = out->pass && out->comparison[i].pass;
    }
    for (int rank = ring->ranks - 1; rank >= 0; rank--) {
        const ra_ring_rank *r = &ring->rank[rank];
        if (r->forward_bytes != r->info.forward_bytes_sent ||
            (ring->backward && r->backward_bytes != r->info.backward_bytes_sent)) {
            out->first_wrong = rank;
            out->pass = false;
        }
    }
    return RA_OK;
}

static void print_errors(const verdict *v)
{
    printf("  %-10s %11s %11s %11s %11s\n", "tensor", "max error", "allowed", "rms error",
           "allowed");
    for (int i = 0; i < v->result_count; i++) {
        const ra_comparison *c = &v->comparison[i];
        printf("  %-10s %11.3e %11.3e %11.3e %11.3e  %s\n", ra_result_name((ra_result)i),
               c->max_error, c->max_allowed, c->rms_error, c->rms_allowed,
               c->pass ? "ok" : "FAILED");
        if (!c->pass) {
            printf("    %lld Inf or NaN misplaced; worst at row %lld, head %lld, position %lld, "
                   "channel %lld: %.9g, expected %.9g\n",
                   (long long)c->misplaced, (long long)c->worst[RA_ROW],
                   (long long)c->worst[RA_HEAD], (long long)c->worst[RA_SEQ],
                   (long long)c->worst[RA_CHAN], c->worst_got, c->worst_expected);
        }
    }
}

static void print_ranks(const ra_ring_result *ring, bool verbose)
{
    char forward[RA_NUMBER_BYTES], backward[RA_NUMBER_BYTES], scratch[2][RA_NUMBER_BYTES];
    printf("  %-4s %9s %4s %15s %15s %10s %10s %9s %9s\n", "rank", "rows", "hops", "bytes forward",
           "bytes backward", "MFLOP fwd", "MFLOP bwd", "ms fwd", "ms bwd");
    for (int i = 0; i < ring->ranks; i++) {
        const ra_ring_rank *r = &ring->rank[i];
        printf("  %-4d %9lld %4d %15s %15s %10.1f %10.1f %9.2f %9.2f\n", i,
               (long long)r->info.seq_local, r->info.hops,
               ra_number_group(r->forward_bytes, forward),
               ra_number_group(r->backward_bytes, backward), r->info.flops_forward * 1e-6,
               ring->backward ? r->info.flops_backward * 1e-6 : 0.0, r->forward_seconds * 1e3,
               r->backward_seconds * 1e3);
        if (verbose) {
            printf("       scratch %s forward, %s backward\n",
                   ra_bytes_scale(r->info.scratch_forward_bytes, scratch[0]),
                   ra_bytes_scale(r->info.scratch_backward_bytes, scratch[1]));
        }
    }
}

static void print_text(const ra_case *c, const ra_args *args, const ra_ring_result *ring,
                       const verdict *v)
{
    char layout[128];
    const ra_ring_rank *wrong = v->first_wrong >= 0 ? &ring->rank[v->first_wrong] : NULL;
    ra_layout_print(&args->layout, layout, sizeof layout);
    printf("%s: %d ranks, %s, path %s, %s\n", c->name, ring->ranks, layout, ring->rank[0].info.path,
           ra_dtype_name(c->layer.dtype));
    print_errors(v);
    print_ranks(ring, args->verbose);
    ra_trace_print(ring);
    if (wrong) {
        printf("  rank %d sent %llu bytes forward and %llu backward, its plan says %llu and %llu: "
               "FAILED\n",
               v->first_wrong, (unsigned long long)wrong->forward_bytes,
               (unsigned long long)wrong->backward_bytes,
               (unsigned long long)wrong->info.forward_bytes_sent,
               (unsigned long long)wrong->info.backward_bytes_sent);
    }
    printf("  %s\n", v->pass ? "pass" : "FAILED");
}

static json_t *errors_json(const verdict *v)
{
    json_t *errors = json_object();
    for (int i = 0; i < v->result_count; i++) {
        const ra_comparison *c = &v->comparison[i];
        json_object_set_new(
            errors, ra_result_name((ra_result)i),
            json_pack("{s:o, s:o, s:o, s:o, s:b}", "max_abs", ra_json_number(c->max_error), "rms",
                      ra_json_number(c->rms_error), "tolerance", ra_json_number(c->max_allowed),
                      "rms_tolerance", ra_json_number(c->rms_allowed), "pass", (int)c->pass));
    }
    return errors;
}

/* Seconds, a rank each. */
static json_t *trace_json(const ra_ring_result *ring)
{
    json_t *ranks = json_array();
    for (int i = 0; i < ring->ranks; i++) {
        const ra_trace_summary *t = &ring->rank[i].trace;
        json_array_append_new(
            ranks,
            json_pack("{s:o, s:o, s:o, s:o, s:o, s:I}", "wall", ra_json_number(t->wall), "compute",
                      ra_json_number(t->compute), "exposed", ra_json_number(t->exposed), "idle",
                      ra_json_number(t->idle), "exchange", ra_json_number(t->exchange),
                      "events_lost", (json_int_t)t->lost));
    }
    return ranks;
}

static json_t *case_json(const ra_case *c, const ra_args *args, const ra_ring_result *ring,
                         const verdict *v)
{
    char layout[128];
    json_t *forward = json_array(), *backward = json_array(), *hops = json_array();
    json_t *scratch = json_array(), *flops = json_array();
    ra_layout_print(&args->layout, layout, sizeof layout);
    for (int i = 0; i < ring->ranks; i++) {
        const ra_ring_rank *r = &ring->rank[i];
        json_array_append_new(forward, json_integer((json_int_t)r->forward_bytes));
        json_array_append_new(backward, json_integer((json_int_t)r->backward_bytes));
        json_array_append_new(hops, json_integer(r->info.hops));
        uint64_t bytes = r->info.scratch_forward_bytes > r->info.scratch_backward_bytes
                             ? r->info.scratch_forward_bytes
                             : r->info.scratch_backward_bytes;
        json_array_append_new(scratch, json_integer((json_int_t)bytes));
        json_array_append_new(flops, ra_json_number(r->info.flops_forward +
                                                    (ring->backward ? r->info.flops_backward : 0)));
    }
    json_t *object = json_pack(
        "{s:o, s:o, s:i, s:o, s:s, s:s, s:b, s:o, s:{s:o, s:o}, s:b, s:o, s:o, s:o, "
        "s:o}",
        "file", ra_json_text(c->path), "name", ra_json_text(c->name), "ranks", ring->ranks,
        "layout", ra_json_text(layout), "path", ring->rank[0].info.path, "dtype",
        ra_dtype_name(c->layer.dtype), "pass", (int)v->pass, "errors", errors_json(v), "bytes_sent",
        "forward", forward, "backward", backward, "bytes_as_planned", v->first_wrong < 0, "hops",
        hops, "flops", flops, "scratch_bytes", scratch, "seconds", ra_json_number(ring->seconds));
    if (args->trace) {
        json_object_set_new(object, "trace", trace_json(ring));
    }
    return object;
}

static ra_status check_case(const ra_args *args, ra_trace *trace, ra_case *c, json_t *list,
                            bool *pass)
{
    ra_ring_result ring = {0};
    ra_reference reference = {0};
    verdict v;
    ra_status status;
    if ((status = ra_ring_run(c, args, trace, &ring))) {
        goto done;
    }
    if (args->rank > 0) { /* the first process judges all results */
        *pass = true;
        goto done;
    }
    ra_plain_sum sum = ra_device_sum(args->device, &c->layer);
    if ((status = ra_reference_build(c, sum, ring.backward, &reference)) ||
        (status = judge(&ring, &reference, c->layer.dtype, &v))) {
        goto done;
    }
    *pass = v.pass;
    if (!args->json) {
        print_text(c, args, &ring, &v);
    } else if (json_array_append_new(list, case_json(c, args, &ring, &v)) != 0) {
        status = RA_FAIL(RA_E_NOMEM, "%s: JSON output: allocation failed", c->path);
    }
done:
    ra_ring_result_free(&ring);
    ra_reference_free(&reference);
    return status;
}

/* A file that cannot be checked is reported and does not keep the others from being checked. */
static int check_file(const char *path, const ra_args *args, ra_trace *trace, json_t *list)
{
    ra_case c = {0};
    bool pass = false;
    ra_status status = ra_case_read(path, &c);
    status = status || !args->dtype ? status : ra_case_convert(&c, args->dtype);
    status = ra_processes_agree(args->transport, status);
    if (!status) {
        status = check_case(args, trace, &c, list, &pass);
    }
    if (status) {
        ra_error_print();
        if (args->json) {
            json_array_append_new(list,
                                  json_pack("{s:o, s:b, s:o}", "file", ra_json_text(path), "pass",
                                            0, "error", ra_json_text(ra_last_error())));
        }
    }
    ra_case_free(&c);
    return status ? ra_exit_of(status) : pass ? RA_EXIT_OK : RA_EXIT_DIFFERS;
}

int ra_command_check(const ra_args *args)
{
    ra_trace *trace = NULL;
    json_t *list = json_array();
    int worst = RA_EXIT_OK;
    ra_status status = ra_trace_open(args, &trace);
    status = ra_processes_agree(args->transport, status ? status : ra_outputs_check(args));
    for (int i = 0; i < args->file_count && !status; i++) {
        int exit_status = check_file(args->files[i], args, trace, list);
        worst = exit_status > worst ? exit_status : worst;
    }
    if (!status && trace && args->rank == 0) {
        status = ra_trace_save(trace, args->trace);
    }
    if (!status && args->json && args->rank == 0) {
        status = ra_json_print(json_incref(list));
    }
    if (status) {
        ra_error_print();
        worst = ra_exit_of(status) > worst ? ra_exit_of(status) : worst;
    }
    json_decref(list);
    ra_trace_free(trace);
    return worst;
}
