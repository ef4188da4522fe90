/*
 * One rank made ready: its slice of the metadata, a backend, a ctx with one layer kind, a step and
 * its plan. Must not know tensors.
 */
#ifndef RA_CLI_SETUP_H
#define RA_CLI_SETUP_H

#include "cli/case.h"

typedef struct ra_setup {
    ra_backend *backend;
    ra_ctx *ctx;
    ra_step *step;
    const ra_plan *plan; /* the step's */
    ra_plan_info info;
} ra_setup;

/* Collective. */
ra_status ra_setup_open(const ra_case *c, const ra_args *args, const ra_deal *deal,
                        const ra_ctx_options *options, ra_comm *comm, ra_setup *out);
void ra_setup_close(ra_setup *setup);

#endif
