/* Checks of an ra_step_desc: numbers in range, runs that add up. Must not know ranks or layers. */
#include "plan/desc.h"

#include "base/limits.h"

static ra_status runs_check(const ra_step_desc *desc)
{
    int64_t total = 0;
    for (int i = 0; i < desc->run_count; i++) {
        const ra_run *run = &desc->runs[i];
        /* The start is bounded first, so that the end cannot overflow. */
        if (run->start < 0 || run->start > RA_SEQ_MAX) {
            return RA_FAIL(RA_E_ARG, "desc.runs[%d].start: %lld, expected 0 to %lld", i,
                           (long long)run->start, (long long)RA_SEQ_MAX);
        }
        if (run->count < 0 || run->count > RA_SEQ_MAX - run->start) {
            return RA_FAIL(RA_E_ARG, "desc.runs[%d].count: %lld, expected 0 to %lld", i,
                           (long long)run->count, (long long)(RA_SEQ_MAX - run->start));
        }
        total += run->count;
    }
    if (desc->runs && total != desc->seq_local) {
        return RA_FAIL(RA_E_ARG, "desc.seq_local: %lld, expected %lld, the sum over desc.runs",
                       (long long)desc->seq_local, (long long)total);
    }
    return RA_OK;
}

ra_status ra_step_desc_check(const ra_step_desc *desc)
{
    if (!desc) {
        return RA_FAIL(RA_E_ARG, "desc: NULL, expected a step description");
    }
    if (desc->size != sizeof *desc) {
        return RA_FAIL(RA_E_ARG, "desc.size: %zu, expected %zu", desc->size, sizeof *desc);
    }
    if (desc->rows < 1 || desc->rows > RA_ROWS_MAX) {
        return RA_FAIL(RA_E_ARG, "desc.rows: %lld, expected 1 to %lld", (long long)desc->rows,
                       (long long)RA_ROWS_MAX);
    }
    if (desc->seq_local < 0 || desc->seq_local > RA_SEQ_MAX) {
        return RA_FAIL(RA_E_ARG, "desc.seq_local: %lld, expected 0 to %lld",
                       (long long)desc->seq_local, (long long)RA_SEQ_MAX);
    }
    if (desc->run_count < 0 || desc->run_count > RA_RUNS_MAX) {
        return RA_FAIL(RA_E_ARG, "desc.run_count: %d, expected 0 to %d", desc->run_count,
                       RA_RUNS_MAX);
    }
    if (desc->run_count > 0 && !desc->runs) {
        return RA_FAIL(RA_E_ARG, "desc.runs: NULL, expected %d runs", desc->run_count);
    }
    return runs_check(desc);
}
