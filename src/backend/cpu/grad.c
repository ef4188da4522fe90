/* Backward: both passes in turn. Must not know instruction sets. */
#include "backend/cpu/grad.h"

#include <math.h>
#include <string.h>

#include "base/mathx.h"

void ra_grad_load(const ra_grad_run *run, const ra_tensor *t, const ra_piece *piece, int64_t head,
                  int64_t pos, int64_t count, int64_t row_end, float *tile)
{
    ra_rows rows = ra_tile_rows(t, piece, head, pos, count);
    run->cpu->level->load(&rows, row_end, tile, run->tile_row);
    for (int64_t i = 0; i < count; i++) {
        if (*ra_tile_value(&run->job->lse, piece, head, pos + i) == -INFINITY) {
            memset(tile + i * run->tile_row, 0, (size_t)run->chan * sizeof *tile);
        }
    }
}

ra_status ra_cpu_grad(ra_cpu *cpu, const ra_grad_job *job)
{
    ra_grad_run run = {
        .cpu = cpu,
        .job = job,
        .q_heads = job->q.size[RA_HEAD],
        .chan = job->q.size[RA_CHAN],
    };
    for (int i = 0; i < RA_SOURCE_COUNT; i++) {
        if (job->k[i].data) {
            run.kv_heads = job->k[i].size[RA_HEAD];
        }
    }
    if (run.kv_heads == 0) {
        return RA_OK; /* no keys: nothing to add */
    }
    run.chan_padded = ra_round_up(run.chan, cpu->level->nr);
    run.tile_row = run.chan_padded + RA_TILE_GAP;
    RA_TRY(ra_grad_queries(&run));
    return ra_grad_keys(&run);
}
