/* Whole rows to the runs of every rank: what each position costs, who gets which, and runs made of
 * that. Every rank that asks with the same batch gets the same runs: nothing here is random or
 * depends on the machine. */
#include "plan/balance.h"

#include <math.h>

#include "base/alloc.h"
#include "base/limits.h"
#include "plan/cost.h"
#include "plan/desc.h"
#include "rule/layer.h"

static const double GOOD_ENOUGH = 1.03; /* what a layout of few runs may lack */

static ra_status check_layers(const ra_layer *layers, int layer_count,
                              const ra_balance_options *options)
{
    if (!layers || layer_count < 1 || layer_count > RA_LAYERS_MAX) {
        return RA_FAIL(RA_E_ARG, "layers: %d, expected 1 to %d", layers ? layer_count : 0,
                       RA_LAYERS_MAX);
    }
    for (int i = 0; i < layer_count; i++) {
        ra_status status = ra_layer_check(&layers[i]);
        if (status) {
            return RA_FAIL(status, "layer %d: %.400s", i, ra_last_error());
        }
        double weight = options->weight ? options->weight[i] : 1;
        if (!(weight >= 0) || !isfinite(weight)) {
            return RA_FAIL(RA_E_ARG, "options.weight[%d]: %g, expected a finite number from 0 on",
                           i, weight);
        }
    }
    return RA_OK;
}

static ra_status check_options(const ra_balance_options *options, int ranks)
{
    if (options->size != sizeof *options) {
        return RA_FAIL(RA_E_ARG, "options.size: %zu, expected %zu", options->size, sizeof *options);
    }
    if (options->align < 0 || options->align > RA_SEQ_MAX) {
        return RA_FAIL(RA_E_ARG, "options.align: %lld, expected 0 (none) to %lld",
                       (long long)options->align, (long long)RA_SEQ_MAX);
    }
    if (ranks < 1 || ranks > RA_RANKS_MAX) {
        return RA_FAIL(RA_E_ARG, "ranks: %d, expected 1 to %d", ranks, RA_RANKS_MAX);
    }
    return RA_OK;
}

static double weight_of(const ra_layer *layer, int i, const ra_balance_options *options)
{
    return options->weight ? options->weight[i] : (double)layer->q_heads * layer->head_dim;
}

/* The power of two just above the largest weight. Only ratios count, and weights divided by it have
 * sums of pairs that neither overflow nor lose digits. */
static int weight_exponent(const ra_layer *layers, int layer_count,
                           const ra_balance_options *options)
{
    double largest = 0;
    int exponent;
    for (int i = 0; i < layer_count; i++) {
        largest = fmax(largest, weight_of(&layers[i], i, options));
    }
    frexp(largest, &exponent);
    return exponent;
}

/* cost[i] = that of granule i, over all rows and layer kinds. */
static ra_status count_costs(const ra_step_desc *whole, const ra_layer *layers, int layer_count,
                             const ra_balance_options *options, double *cost)
{
    const int one = 1, exponent = weight_exponent(layers, layer_count, options);
    const ra_run row = {0, whole->seq_local};
    ra_shards shards = {0};
    ra_tokens tokens = {0};
    ra_pieces pieces = {0};
    ra_token_run *runs = NULL;
    int64_t run_count = 0;
    ra_status status;
    if ((status = ra_token_runs_encode(whole, &runs, &run_count)) ||
        (status = ra_shards_build(1, &one, &row, &shards)) ||
        (status = ra_tokens_build(&shards, whole->rows, &run_count, runs, &tokens)) ||
        (status = ra_pieces_build(&shards, &tokens, &pieces))) {
        goto done;
    }
    for (int i = 0; i < layer_count; i++) {
        const ra_cover rule = {.tokens = &tokens, .mask = ra_mask_of_layer(&layers[i])};
        double weight = ldexp(weight_of(&layers[i], i, options), -exponent);
        ra_cost_positions(&rule, &pieces, weight, options->align, cost);
    }
done:
    ra_free(runs);
    ra_pieces_free(&pieces);
    ra_tokens_free(&tokens);
    ra_shards_free(&shards);
    return status;
}

/* Costs become sums of those before. A batch of padding alone is dealt by numbers. */
static void add_up(ra_granules *g, double *cost)
{
    double total = 0;
    for (int64_t i = 0; i < g->count; i++) {
        total += cost[i];
    }
    bool idle = total == 0;
    total = 0;
    for (int64_t i = 0; i <= g->count; i++) {
        double own = i == g->count ? 0 : idle ? 1 : cost[i];
        g->largest = own > g->largest ? own : g->largest;
        cost[i] = total;
        total += own;
    }
    g->before = cost;
}

/* Cost of the busiest rank / mean. `load` is [ranks] of memory for it. */
static double measure(const ra_granules *g, const int *owner, double *load)
{
    double busiest = 0, total = g->before[g->count];
    for (int rank = 0; rank < g->ranks; rank++) {
        load[rank] = 0;
    }
    for (int64_t i = 0; i < g->count; i++) {
        load[owner[i]] += g->before[i + 1] - g->before[i];
    }
    for (int rank = 0; rank < g->ranks; rank++) {
        busiest = load[rank] > busiest ? load[rank] : busiest;
    }
    return total > 0 ? busiest * g->ranks / total : 1;
}

/* Few runs if they balance; where granules are too large for that, a few runs more; where even they
 * are not enough, whatever balances better. */
static ra_status deal(const ra_granules *g, bool equal_tokens, int **owner, double *imbalance)
{
    double *load = NULL;
    int *other = NULL;
    ra_status status = RA_NEW(&load, g->ranks);
    status = status ? status : RA_NEW(&other, g->count + 1);
    if (status ||
        (status = equal_tokens ? ra_balance_peel(g, *owner) : ra_balance_cut(g, *owner))) {
        goto done;
    }
    *imbalance = measure(g, *owner, load);
    if (*imbalance > GOOD_ENOUGH) {
        if ((status = ra_balance_repair(g, equal_tokens, GOOD_ENOUGH, load, *owner))) {
            goto done;
        }
        *imbalance = measure(g, *owner, load);
    }
    if (*imbalance > GOOD_ENOUGH) {
        if ((status = ra_balance_greedy(g, equal_tokens, other))) {
            goto done;
        }
        double found = measure(g, other, load);
        if (found < *imbalance) {
            int *worse = *owner;
            *owner = other;
            other = worse;
            *imbalance = found;
        }
    }
done:
    ra_free(load);
    ra_free(other);
    return status;
}

/* Numbers the ranks by where their first run begins: documents stay on neighbours, and one run a
 * rank makes contiguous shards. */
static ra_status rename_ranks(int64_t count, int ranks, int *owner)
{
    int *name = NULL, named = 0;
    RA_TRY(RA_NEW(&name, ranks));
    for (int64_t i = 0; i < count; i++) {
        int *own = &name[owner[i]];
        *own = *own ? *own : ++named;
        owner[i] = *own - 1;
    }
    ra_free(name);
    return RA_OK;
}

static bool begins_run(const int *owner, int64_t i)
{
    return i == 0 || owner[i] != owner[i - 1];
}

/* Neighbouring granules of one owner are one run. */
static ra_status make_runs(const ra_granules *g, const int *owner, int64_t align, int64_t seq,
                           ra_balance *out)
{
    int64_t count = 0, *next = NULL;
    for (int64_t i = 0; i < g->count; i++) {
        count += begins_run(owner, i);
    }
    RA_TRY(RA_NEW(&out->run_first, g->ranks + 1));
    RA_TRY(RA_NEW(&out->run, count + 1)); /* one more: also a rank without runs has an address */
    RA_TRY(RA_NEW(&next, g->ranks));
    for (int64_t i = 0; i < g->count; i++) {
        out->run_first[owner[i] + 1] += begins_run(owner, i);
    }
    for (int rank = 0; rank < g->ranks; rank++) {
        out->run_first[rank + 1] += out->run_first[rank];
        next[rank] = out->run_first[rank];
    }
    for (int64_t i = 0; i < g->count; i++) {
        if (begins_run(owner, i)) {
            out->run[next[owner[i]]++].start = i * align;
        }
        ra_run *run = &out->run[next[owner[i]] - 1];
        run->count = ra_min_i64(seq, (i + 1) * align) - run->start;
    }
    ra_free(next);
    return RA_OK;
}

ra_status ra_runs_balanced(const ra_step_desc *whole, const ra_layer *layers, int layer_count,
                           int ranks, const ra_balance_options *options, ra_balance *out)
{
    if (!whole || !out) {
        return RA_FAIL(RA_E_ARG, "%s: NULL", whole ? "out" : "whole");
    }
    ra_step_desc desc = *whole;
    desc.runs = NULL;
    desc.run_count = 0;
    ra_balance_options opt = options ? *options : (ra_balance_options){.size = sizeof *options};
    RA_TRY(ra_step_desc_check(&desc));
    RA_TRY(check_options(&opt, ranks));
    RA_TRY(check_layers(layers, layer_count, &opt));
    opt.align = ra_max_i64(1, opt.align);
    ra_granules g = {.count = ra_ceil_div(desc.seq_local, opt.align), .ranks = ranks};
    ra_balance balance = {.ranks = ranks};
    double *cost = NULL;
    int *owner = NULL;
    ra_status status;
    if ((status = RA_NEW(&cost, g.count + 1)) || (status = RA_NEW(&owner, g.count + 1)) ||
        (status = count_costs(&desc, layers, layer_count, &opt, cost))) {
        goto done;
    }
    add_up(&g, cost);
    if ((status = deal(&g, opt.equal_tokens, &owner, &balance.imbalance)) ||
        (status = rename_ranks(g.count, ranks, owner)) ||
        (status = make_runs(&g, owner, opt.align, desc.seq_local, &balance))) {
        goto done;
    }
    *out = balance;
done:
    ra_free(cost);
    ra_free(owner);
    if (status) {
        ra_balance_free(&balance);
    }
    return status;
}

void ra_balance_free(ra_balance *balance)
{
    if (balance) {
        ra_free(balance->run_first);
        ra_free(balance->run);
        *balance = (ra_balance){0};
    }
}
