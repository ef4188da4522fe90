/*
 * `ringattn plan`: the plans of all ranks, without tensors and without scratch: who owns what, what
 * travels from whom to whom, what it costs. Must not know how plans are made.
 */
#include <stdio.h>

#include "base/alloc.h"
#include "cli/commands.h"
#include "cli/report.h"
#include "cli/setup.h"
#include "cli/world.h"

typedef struct rank_plan {
    ra_plan_info info;
    ra_device_forecast forecast;
    int64_t transfer_count;
    ra_transfer *transfer; /* those this rank sends or receives */
} rank_plan;

typedef struct survey {
    const ra_args *args;
    ra_case c;
    ra_deals deals;
    rank_plan *rank; /* [args->ranks] */
} survey;

static ra_status survey_rank(ra_comm *comm, void *user)
{
    survey *s = user;
    int rank = ra_comm_rank(comm);
    rank_plan *to = &s->rank[rank];
    ra_ctx_options options = {
        .size = sizeof options,
        .timeout_ms = s->args->timeout_ms,
        .plan_only = true,
    };
    ra_args args = *s->args;
    args.device = RA_DEVICE_CPU; /* also to plan for a GPU */
    ra_setup setup;
    RA_TRY(ra_setup_open(&s->c, &args, &s->deals.deal[rank], &options, comm, &setup));
    to->info = setup.info;
    int64_t count = ra_plan_transfers(setup.plan, NULL, 0);
    ra_status status = RA_NEW(&to->transfer, count);
    status = status ? status : ra_device_predict(s->args->device, setup.plan, &to->forecast);
    if (!status) {
        to->transfer_count = ra_plan_transfers(setup.plan, to->transfer, count);
    }
    ra_setup_close(&setup);
    return status;
}

static void print_owned(const survey *s)
{
    enum { SHOWN = 4 };
    printf("owned positions\n");
    for (int rank = 0; rank < s->args->ranks; rank++) {
        const ra_deal *deal = &s->deals.deal[rank];
        printf("  rank %-4d %9lld in", rank, (long long)deal->length);
        for (int i = 0; i < deal->run_count && i < SHOWN; i++) {
            printf(" [%lld, %lld)", (long long)deal->runs[i].start,
                   (long long)(deal->runs[i].start + deal->runs[i].count));
        }
        if (deal->run_count > SHOWN) {
            printf(" and %d more runs", deal->run_count - SHOWN);
        }
        printf("%s\n", deal->run_count == 0 ? " no run" : "");
    }
}

static void print_costs(const survey *s)
{
    char pairs[RA_NUMBER_BYTES], forward[RA_NUMBER_BYTES], backward[RA_NUMBER_BYTES];
    printf("computations and traffic\n  %-4s %4s %9s %9s %17s %10s %10s %11s %11s %10s\n", "rank",
           "hops", "full", "partial", "pairs", "GFLOP fwd", "GFLOP bwd", "sent fwd", "sent bwd",
           "rows in");
    for (int rank = 0; rank < s->args->ranks; rank++) {
        const ra_plan_info *info = &s->rank[rank].info;
        printf("  %-4d %4d %9lld %9lld %17s %10.4g %10.4g %11s %11s %10lld\n", rank, info->hops,
               (long long)info->tiles_full, (long long)info->tiles_partial,
               ra_number_group((uint64_t)info->pairs, pairs), info->flops_forward * 1e-9,
               info->flops_backward * 1e-9, ra_bytes_scale(info->forward_bytes_sent, forward),
               ra_bytes_scale(info->backward_bytes_sent, backward), (long long)info->rows_received);
    }
}

/* Rows from each sender to one receiver; neighbouring senders of equal rows share an entry. */
static void print_senders(const int64_t *rows, int ranks)
{
    int shown = 0;
    for (int from = 0; from < ranks;) {
        int last = from;
        while (last + 1 < ranks && rows[last + 1] == rows[from]) {
            last++;
        }
        if (rows[from] > 0) {
            printf("%s %d", shown++ ? "," : "", from);
            if (last > from) {
                printf("-%d", last);
            }
            printf(" (%lld%s)", (long long)rows[from], last > from ? " each" : "");
        }
        from = last + 1;
    }
    printf("%s\n", shown ? "" : " nobody");
}

static ra_status print_transfers(const survey *s)
{
    int64_t *rows = NULL;
    int ranks = s->args->ranks;
    RA_TRY(RA_NEW(&rows, ranks));
    printf("key rows received in a forward, by sender\n");
    for (int rank = 0; rank < ranks; rank++) {
        const rank_plan *plan = &s->rank[rank];
        for (int from = 0; from < ranks; from++) {
            rows[from] = 0;
        }
        for (int64_t i = 0; i < plan->transfer_count; i++) {
            if (plan->transfer[i].to == rank) {
                rows[plan->transfer[i].from] += plan->transfer[i].count;
            }
        }
        printf("  rank %-4d from", rank);
        print_senders(rows, ranks);
    }
    ra_free(rows);
    return RA_OK;
}

/* What the ranks need at most, which is what a caller has to provide everywhere. */
static void print_memory(const survey *s)
{
    uint64_t most[4] = {0};
    char text[4][RA_NUMBER_BYTES];
    for (int rank = 0; rank < s->args->ranks; rank++) {
        const ra_plan_info *info = &s->rank[rank].info;
        const uint64_t bytes[4] = {info->scratch_forward_bytes, info->scratch_backward_bytes,
                                   info->plan_bytes, info->metadata_bytes};
        for (int i = 0; i < 4; i++) {
            most[i] = bytes[i] > most[i] ? bytes[i] : most[i];
        }
    }
    printf("memory of the largest rank: scratch %s forward, %s backward; plan %s; metadata %s\n",
           ra_bytes_scale(most[0], text[0]), ra_bytes_scale(most[1], text[1]),
           ra_bytes_scale(most[2], text[2]), ra_bytes_scale(most[3], text[3]));
}

static void print_pass(const char *name, const char *kernel, double seconds)
{
    printf("%s %s", name, kernel);
    if (seconds > 0) {
        printf(" %.4g ms", seconds * 1e3);
    } else {
        printf(" (not predicted)");
    }
}

static void print_forecast(const survey *s)
{
    const ra_device_forecast *first = &s->rank[0].forecast;
    double forward = 0, backward = 0;
    char workspace[RA_NUMBER_BYTES];
    if (!first->forward) {
        return;
    }
    for (int rank = 0; rank < s->args->ranks; rank++) {
        const ra_device_forecast *f = &s->rank[rank].forecast;
        forward = f->forward_seconds > forward ? f->forward_seconds : forward;
        backward = f->backward_seconds > backward ? f->backward_seconds : backward;
    }
    printf("predicted on an H200, busiest rank: ");
    print_pass("forward", first->forward, forward);
    print_pass(", backward", first->backward, backward);
    printf("; workspace %s\n", ra_bytes_scale(first->workspace_bytes, workspace));
}

static void print_order(const ra_plan_info *info)
{
    if (info->hops > 1) {
        printf("backward: %s", info->local_halved ? "half of hop 0, hop" : "hop");
        printf(info->hops > 2 ? "s 1 to %d" : " %d", info->hops - 1);
        printf(", %shop 0\n", info->local_halved ? "the rest of " : "");
    }
}

static ra_status print_text(const survey *s)
{
    static const char *const vision[] = {"no vision", "vision over_window", "vision within_window"};
    const ra_layer *layer = &s->c.layer;
    const ra_plan_info *info = &s->rank[0].info;
    char layout[128], seq[RA_NUMBER_BYTES], pairs[RA_NUMBER_BYTES];
    uint64_t forward = 0, backward = 0;
    for (int rank = 0; rank < s->args->ranks; rank++) {
        forward += s->rank[rank].info.forward_bytes_sent;
        backward += s->rank[rank].info.backward_bytes_sent;
    }
    ra_layout_print(&s->args->layout, layout, sizeof layout);
    printf("%s: %lld x %s positions on %d ranks, %s\n", s->c.name, (long long)s->c.rows,
           ra_number_group((uint64_t)s->c.seq, seq), s->args->ranks, layout);
    printf("layer: %d/%d heads of %d channels, %s, %s, window %lld, %s\n", layer->q_heads,
           layer->kv_heads, layer->head_dim, ra_dtype_name(layer->dtype),
           layer->causal ? "causal" : "not causal", (long long)layer->window,
           vision[layer->vision]);
    printf("path %s: %s\n", info->path, info->reason);
    print_order(info);
    print_owned(s);
    print_costs(s);
    RA_TRY(print_transfers(s));
    print_memory(s);
    print_forecast(s);
    printf("in all: %s pairs a head, imbalance %.3f, ",
           ra_number_group((uint64_t)info->pairs_total, pairs), info->imbalance);
    printf("%s sent forward, ", ra_bytes_scale(forward, layout));
    printf("%s backward\n", ra_bytes_scale(backward, layout));
    return RA_OK;
}

static json_t *runs_json(const ra_deal *deal)
{
    json_t *runs = json_array();
    for (int i = 0; i < deal->run_count; i++) {
        json_array_append_new(runs, json_pack("[I, I]", (json_int_t)deal->runs[i].start,
                                              (json_int_t)deal->runs[i].count));
    }
    return runs;
}

static json_t *rank_json(const survey *s, int rank)
{
    const ra_plan_info *info = &s->rank[rank].info;
    json_t *object = json_pack(
        "{s:i, s:o, s:I, s:i, s:b, s:i, s:I, s:I, s:I, s:o, s:o, s:I, s:I}", "rank", rank, "runs",
        runs_json(&s->deals.deal[rank]), "seq_local", (json_int_t)info->seq_local, "hops",
        info->hops, "local_halved", info->local_halved, "n_prior", info->n_prior, "tiles_full",
        (json_int_t)info->tiles_full, "tiles_partial", (json_int_t)info->tiles_partial, "pairs",
        (json_int_t)info->pairs, "flops_forward", ra_json_number(info->flops_forward),
        "flops_backward", ra_json_number(info->flops_backward), "rows_received",
        (json_int_t)info->rows_received, "kept_seq", (json_int_t)info->kept_seq);
    const ra_device_forecast *forecast = &s->rank[rank].forecast;
    if (forecast->forward) {
        json_object_set_new(object, "forecast",
                            json_pack("{s:s, s:s, s:o, s:o, s:I}", "forward_kernel",
                                      forecast->forward, "backward_kernel", forecast->backward,
                                      "forward_seconds", ra_json_number(forecast->forward_seconds),
                                      "backward_seconds",
                                      ra_json_number(forecast->backward_seconds), "workspace_bytes",
                                      (json_int_t)forecast->workspace_bytes));
    }
    const struct {
        const char *name;
        uint64_t bytes;
    } bytes[] = {
        {"forward_bytes_sent", info->forward_bytes_sent},
        {"backward_bytes_sent", info->backward_bytes_sent},
        {"forward_bytes_received", info->forward_bytes_received},
        {"backward_bytes_received", info->backward_bytes_received},
        {"scratch_forward_bytes", info->scratch_forward_bytes},
        {"scratch_backward_bytes", info->scratch_backward_bytes},
        {"plan_bytes", info->plan_bytes},
        {"metadata_bytes", info->metadata_bytes},
    };
    for (size_t i = 0; i < sizeof bytes / sizeof bytes[0]; i++) {
        json_object_set_new(object, bytes[i].name, json_integer((json_int_t)bytes[i].bytes));
    }
    return object;
}

static json_t *survey_json(const survey *s)
{
    char layout[128];
    const ra_plan_info *info = &s->rank[0].info;
    json_t *ranks = json_array(), *transfers = json_array();
    ra_layout_print(&s->args->layout, layout, sizeof layout);
    for (int rank = 0; rank < s->args->ranks; rank++) {
        const rank_plan *plan = &s->rank[rank];
        json_array_append_new(ranks, rank_json(s, rank));
        for (int64_t i = 0; i < plan->transfer_count; i++) {
            const ra_transfer *t = &plan->transfer[i];
            if (t->to == rank) {
                json_array_append_new(
                    transfers, json_pack("{s:i, s:i, s:i, s:I, s:I, s:I}", "hop", t->hop, "from",
                                         t->from, "to", t->to, "row", (json_int_t)t->row, "start",
                                         (json_int_t)t->start, "count", (json_int_t)t->count));
            }
        }
    }
    return json_pack("{s:o, s:i, s:o, s:s, s:s, s:I, s:I, s:I, s:o, s:o, s:o}", "name",
                     ra_json_text(s->c.name), "ranks", s->args->ranks, "layout",
                     ra_json_text(layout), "path", info->path, "reason", info->reason, "rows",
                     (json_int_t)s->c.rows, "seq", (json_int_t)s->c.seq, "pairs",
                     (json_int_t)info->pairs_total, "imbalance", ra_json_number(info->imbalance),
                     "rank", ranks, "transfers", transfers);
}

static ra_status run_survey(survey *s)
{
    const ra_args *args = s->args;
    RA_TRY(args->file_count ? ra_case_read(args->files[0], &s->c) : ra_case_imagine(args, &s->c));
    if (args->dtype) {
        s->c.layer.dtype = args->dtype;
    }
    const ra_step_desc whole = ra_case_desc(&s->c);
    RA_TRY(ra_deals_build(&args->layout, args->ranks, &whole, &s->c.layer, &s->deals));
    RA_TRY(RA_NEW(&s->rank, args->ranks));
    RA_TRY(ra_world_run(RA_DEVICE_CPU, args->ranks, survey_rank, s));
    return args->json ? ra_json_print(survey_json(s)) : print_text(s);
}

int ra_command_plan(const ra_args *args)
{
    survey s = {.args = args};
    ra_status status = run_survey(&s);
    if (status) {
        ra_error_print();
    }
    for (int rank = 0; s.rank && rank < args->ranks; rank++) {
        ra_free(s.rank[rank].transfer);
    }
    ra_free(s.rank);
    ra_deals_free(&s.deals);
    ra_case_free(&s.c);
    return ra_exit_of(status);
}
