/* A plan to figures: what it covers, sends and needs. Everything is counted when asked for, not
 * while steps are created. */
#include "attn/step.h"

#include "base/alloc.h"
#include "plan/cost.h"

/* Allowed pairs of this rank, of all, and of the busiest. */
typedef struct pair_counts {
    int64_t own, total, busiest;
} pair_counts;

static ra_status count_pairs(const ra_plan *plan, pair_counts *out)
{
    const ra_step *step = plan->step;
    int size = step->shards.rank_count;
    const ra_cover rule = {.tokens = &step->tokens, .mask = ra_mask_of_layer(plan->layer)};
    int64_t *pairs = NULL;
    RA_TRY(RA_NEW(&pairs, size));
    ra_cost_pairs(&rule, &step->pieces, pairs);
    *out = (pair_counts){.own = pairs[ra_comm_rank(step->ctx->comm)]};
    for (int rank = 0; rank < size; rank++) {
        out->total += pairs[rank];
        out->busiest = ra_max_i64(out->busiest, pairs[rank]);
    }
    ra_free(pairs);
    return RA_OK;
}

static void count_bytes(const ra_plan *plan, ra_plan_info *info)
{
    const ra_schedule *schedule = &plan->schedule;
    const ra_ctx_options *options = &plan->step->ctx->options;
    uint64_t channels = 2 * (uint64_t)plan->layer->kv_heads * (uint64_t)plan->layer->head_dim;
    uint64_t sent = 0, received = (uint64_t)schedule->rows_received;
    for (int l = 0; l < schedule->leg_count; l++) {
        sent += (uint64_t)schedule->leg[l].send.row_count;
    }
    uint64_t row_bytes = channels * ra_dtype_bytes(plan->layer->dtype);
    uint64_t sum_bytes = channels * sizeof(float);
    uint64_t again = options->keep_kv ? 0 : row_bytes;
    info->forward_bytes_sent = sent * row_bytes;
    info->forward_bytes_received = received * row_bytes;
    if (!options->forward_only) {
        info->backward_bytes_sent = sent * again + received * sum_bytes;
        info->backward_bytes_received = received * again + sent * sum_bytes;
    }
    info->rows_received = schedule->rows_received;
    info->kept_seq = options->keep_kv ? schedule->rows_received : 0;
}

static uint64_t metadata_bytes(const ra_step *step)
{
    return ra_alloc_bytes(step) + ra_alloc_bytes(step->shards.length) +
           ra_alloc_bytes(step->shards.run) + ra_alloc_bytes(step->tokens.span) +
           ra_alloc_bytes(step->tokens.block) + ra_alloc_bytes(step->tokens.block_first) +
           ra_alloc_bytes(step->pieces.piece) + ra_alloc_bytes(step->pieces.owned_first) +
           ra_alloc_bytes(step->pieces.owned) + ra_alloc_bytes(step->idle);
}

ra_status ra_plan_inspect(const ra_plan *plan, ra_plan_info *out)
{
    if (!plan || !out) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", plan ? "out" : "plan");
    }
    if (out->size != sizeof *out) {
        return RA_FAIL(RA_E_ARG, "out.size: %zu, expected %zu", out->size, sizeof *out);
    }
    pair_counts pairs;
    RA_TRY(count_pairs(plan, &pairs));
    ra_plan_info info = {
        .size = sizeof info,
        .path = plan->choice.name,
        .reason = plan->choice.reason,
        .hops = plan->schedule.hop_count,
        .n_prior = plan->schedule.n_prior,
        .seq_local = plan->step->seq_local,
        .seq_total = plan->step->shards.seq,
        .pairs = pairs.own,
        .pairs_total = pairs.total,
        .imbalance = 1.0,
        .scratch_forward_bytes = plan->forward_bytes,
        .scratch_backward_bytes = plan->backward_bytes,
        .plan_bytes = ra_schedule_bytes(&plan->schedule),
        .metadata_bytes = metadata_bytes(plan->step),
        .local_halved = plan->schedule.pass_count > 1 && plan->schedule.pass[0].cover->q_count > 0,
    };
    if (pairs.total > 0) {
        info.imbalance =
            (double)pairs.busiest * plan->step->shards.rank_count / (double)pairs.total;
    }
    double flops = (double)pairs.own * plan->layer->q_heads * plan->layer->head_dim;
    info.flops_forward = 4 * flops;
    info.flops_backward = 10 * flops;
    for (int h = 0; h < plan->schedule.hop_count; h++) {
        ra_cost_tiles(&plan->schedule.hop[h].cover, &info.tiles_full, &info.tiles_partial);
    }
    count_bytes(plan, &info);
    *out = info;
    return RA_OK;
}

int64_t ra_plan_transfers(const ra_plan *plan, ra_transfer *out, int64_t capacity)
{
    int64_t count = 0;
    const ra_schedule *schedule = plan ? &plan->schedule : NULL;
    int me = plan ? ra_comm_rank(plan->step->ctx->comm) : 0;
    for (int h = 0; schedule && h < schedule->hop_count; h++) {
        const ra_hop *hop = &schedule->hop[h];
        for (int l = hop->leg_first; l < hop->leg_first + hop->leg_count; l++) {
            const ra_message *const both[2] = {&schedule->leg[l].send, &schedule->leg[l].recv};
            for (int way = 0; way < 2; way++) {
                for (int64_t i = 0; i < both[way]->range_count; i++, count++) {
                    const ra_key_rows *rows = &both[way]->range[i];
                    if (out && count < capacity) {
                        out[count] = (ra_transfer){h,
                                                   way == 0 ? me : both[way]->peer,
                                                   way == 0 ? both[way]->peer : me,
                                                   rows->row,
                                                   rows->pos,
                                                   rows->count};
                    }
                }
            }
        }
    }
    return count;
}
