/* The event ring and its writer. Any thread may record; writing happens when nobody does. */
#include "base/trace.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/alloc.h"
#include "base/clock.h"

typedef struct event {
    const char *name;
    int64_t begin_ns, end_ns;
    int rank, hop;
    ra_lane lane;
} event;

struct ra_trace {
    size_t event_max;
    atomic_size_t recorded; /* ever; the newest event_max of them are kept */
    event *ring;
};

ra_status ra_trace_create(size_t event_max, ra_trace **out)
{
    if (!out || event_max == 0) {
        return RA_FAIL(RA_E_ARG, "event_max: %zu, expected 1 or more and out not NULL", event_max);
    }
    ra_trace *trace = NULL;
    RA_TRY(RA_NEW(&trace, 1));
    trace->event_max = event_max;
    ra_status status = RA_NEW(&trace->ring, event_max);
    if (status) {
        ra_free(trace);
        return status;
    }
    *out = trace;
    return RA_OK;
}

void ra_trace_free(ra_trace *trace)
{
    if (trace) {
        ra_free(trace->ring);
        ra_free(trace);
    }
}

int64_t ra_trace_begin(const ra_trace *trace)
{
    return trace ? ra_clock_ns() : 0;
}

void ra_trace_end(ra_trace *trace, int64_t begin_ns, const char *name, ra_lane lane, int rank,
                  int hop)
{
    if (trace) {
        size_t at = atomic_fetch_add(&trace->recorded, 1) % trace->event_max;
        trace->ring[at] = (event){name, begin_ns, ra_clock_ns(), rank, hop, lane};
    }
}

static size_t event_count(const ra_trace *trace)
{
    size_t recorded = atomic_load(&trace->recorded);
    return recorded < trace->event_max ? recorded : trace->event_max;
}

/* The i-th of those that are left, oldest first. */
static const event *event_at(const ra_trace *trace, size_t i, size_t count)
{
    return &trace->ring[(atomic_load(&trace->recorded) - count + i) % trace->event_max];
}

typedef struct span {
    int64_t begin, end;
} span;

static int compare_span(const void *a, const void *b)
{
    const span *left = a, *right = b;
    return (left->begin > right->begin) - (left->begin < right->begin);
}

/* The time in which any of the spans was open. Sorts them. */
static int64_t time_covered(span *spans, size_t count)
{
    int64_t covered = 0, end = INT64_MIN;
    if (count > 0) {
        qsort(spans, count, sizeof *spans, compare_span);
    }
    for (size_t i = 0; i < count; i++) {
        int64_t begin = spans[i].begin > end ? spans[i].begin : end;
        covered += spans[i].end > begin ? spans[i].end - begin : 0;
        end = spans[i].end > end ? spans[i].end : end;
    }
    return covered;
}

ra_status ra_trace_summarize(const ra_trace *trace, int rank, ra_trace_summary *out)
{
    if (!trace || !out) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", trace ? "out" : "trace");
    }
    if (out->size != sizeof *out) {
        return RA_FAIL(RA_E_ARG, "out.size: %zu, expected %zu", out->size, sizeof *out);
    }
    size_t count = event_count(trace), call_count = 0;
    int64_t own[RA_LANE_COUNT] = {0};
    span *calls = NULL;
    RA_TRY(RA_NEW(&calls, count));
    for (size_t i = 0; i < count; i++) {
        const event *e = event_at(trace, i, count);
        if (e->lane == RA_LANE_CALL) {
            calls[call_count++] = (span){e->begin_ns, e->end_ns};
        }
        own[e->lane] += e->rank == rank ? e->end_ns - e->begin_ns : 0;
    }
    int64_t wall = time_covered(calls, call_count);
    ra_free(calls);
    *out = (ra_trace_summary){
        .size = sizeof *out,
        .wall = (double)wall * 1e-9,
        .compute = (double)own[RA_LANE_COMPUTE] * 1e-9,
        .exchange = (double)own[RA_LANE_COMM] * 1e-9,
        .exposed = (double)own[RA_LANE_WAIT] * 1e-9,
        .lost = (int64_t)(atomic_load(&trace->recorded) - count),
        .idle = (double)(wall - own[RA_LANE_COMPUTE] - own[RA_LANE_WAIT]) * 1e-9,
    };
    return RA_OK;
}

ra_status ra_trace_write(const ra_trace *trace, const char *json_path)
{
    static const char *const lane_name[RA_LANE_COUNT] = {"call", "compute", "comm", "wait"};
    if (!trace || !json_path) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", trace ? "json_path" : "trace");
    }
    FILE *file = fopen(json_path, "w");
    if (!file) {
        return RA_FAIL(RA_E_IO, "%s: cannot be opened for writing", json_path);
    }
    size_t count = event_count(trace);
    fprintf(file, "{\"traceEvents\": [");
    for (size_t i = 0; i < count; i++) {
        const event *e = event_at(trace, i, count);
        fprintf(
            file,
            "%s\n{\"name\": \"%s\", \"cat\": \"%s\", \"ph\": \"X\", \"pid\": %d, \"tid\": \"%s\", "
            "\"ts\": %.3f, \"dur\": %.3f, \"args\": {\"hop\": %d}}",
            i ? "," : "", e->name, lane_name[e->lane], e->rank, lane_name[e->lane],
            (double)e->begin_ns / 1e3, (double)(e->end_ns - e->begin_ns) / 1e3, e->hop);
    }
    fprintf(file, "\n], \"displayTimeUnit\": \"ms\"}\n");
    bool failed = ferror(file) != 0;
    failed = fclose(file) != 0 || failed;
    if (failed) {
        return RA_FAIL(RA_E_IO, "%s: writing failed", json_path);
    }
    return RA_OK;
}
