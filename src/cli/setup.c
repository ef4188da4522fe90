/* Opens what a rank needs, in the order of the public header, and closes it in reverse. */
#include "cli/setup.h"

#include <string.h>

#include "base/alloc.h"
#include "base/mathx.h"

static ra_status take_metadata(const void *whole, const ra_case *c, const ra_deal *deal,
                               size_t width, void *out)
{
    void *slice = NULL;
    if (whole) {
        /* One element more: an empty slice must not become NULL, which means "no such metadata". */
        RA_TRY(ra_alloc((size_t)(c->rows * deal->length + 1), width, &slice));
        ra_status status =
            ra_runs_take(deal->runs, deal->run_count, whole, c->rows, c->seq, width, slice);
        if (status) {
            ra_free(slice);
            return status;
        }
    }
    memcpy(out, &slice, sizeof slice);
    return RA_OK;
}

static ra_status create_step(const ra_case *c, const ra_deal *deal, ra_setup *out)
{
    int32_t *doc_id = NULL, *token_type = NULL;
    uint8_t *is_pad = NULL;
    ra_status status;
    if ((status = take_metadata(c->doc_id, c, deal, sizeof *doc_id, &doc_id)) ||
        (status = take_metadata(c->token_type, c, deal, sizeof *token_type, &token_type)) ||
        (status = take_metadata(c->is_pad, c, deal, sizeof *is_pad, &is_pad))) {
        goto done;
    }
    ra_step_desc desc = {
        .size = sizeof desc,
        .rows = c->rows,
        .seq_local = deal->length,
        .run_count = deal->run_count,
        .runs = deal->runs,
        .doc_id = doc_id,
        .is_pad = is_pad,
        .token_type = token_type,
    };
    status = ra_step_create(out->ctx, &desc, &out->step);
done:
    ra_free(doc_id);
    ra_free(token_type);
    ra_free(is_pad);
    return status;
}

static ra_status open_all(const ra_case *c, const ra_args *args, const ra_deal *deal,
                          const ra_ctx_options *options, ra_comm *comm, ra_setup *out)
{
    int shared = (int)ra_max_i64(1, ra_cpu_count() / args->ranks);
    int threads = options->plan_only ? 1 : args->threads ? args->threads : shared;
    RA_TRY(ra_device_backend(args->device, ra_comm_rank(comm), threads, args->cpu_level,
                             &out->backend));
    RA_TRY(ra_ctx_create(out->backend, comm, &c->layer, 1, options, &out->ctx));
    RA_TRY(create_step(c, deal, out));
    out->plan = ra_step_plan(out->step, 0);
    out->info.size = sizeof out->info;
    return ra_plan_inspect(out->plan, &out->info);
}

ra_status ra_setup_open(const ra_case *c, const ra_args *args, const ra_deal *deal,
                        const ra_ctx_options *options, ra_comm *comm, ra_setup *out)
{
    *out = (ra_setup){0};
    ra_status status = open_all(c, args, deal, options, comm, out);
    if (status) {
        ra_setup_close(out);
    }
    return status;
}

void ra_setup_close(ra_setup *setup)
{
    ra_step_free(setup->step);
    ra_ctx_free(setup->ctx);
    ra_backend_close(setup->backend);
    *setup = (ra_setup){0};
}
