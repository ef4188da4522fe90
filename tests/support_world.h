/* Runs a problem sharded over ranks through the public API, one thread a rank, and puts the shards
 * of the results together again. Every output and kept buffer starts as NaN. Nothing here asserts
 * on a rank's thread: a failure is reported and the caller decides. */
#ifndef RA_TESTS_SUPPORT_WORLD_H
#define RA_TESTS_SUPPORT_WORLD_H

#include "backend/backend.h"
#include "base/alloc.h"
#include "base/limits.h"
#include "support_problem.h"

typedef enum strides {
    STRIDES_BHSD,   /* contiguous [rows, heads, seq, chan] */
    STRIDES_BSHD,   /* the same view of [rows, seq, heads, chan] memory */
    STRIDES_PADDED, /* gaps after channels, heads and rows; a write into one is a failure */
    STRIDES_COUNT
} strides;

typedef struct world_options {
    ra_ctx_options ctx; /* size is filled in */
    int threads;        /* of each rank's backend; 0 = 1 */
    const char *level;  /* of the CPU kernels; NULL = best */
    strides strides;
    bool joined;            /* the plan is that of a backend whose grad marks the chunk */
    ra_alloc_probe *probes; /* [ranks] NULL = none: counts each rank's allocations */
} world_options;

/* What one rank saw. */
typedef struct rank_report {
    ra_status status;
    const char *call; /* the call that failed: "ctx", "step", "forward", "backward", ... */
    char message[RA_MESSAGE_BYTES];
    ra_plan_info info;
    uint64_t forward_bytes, backward_bytes; /* sent, by ra_comm_bytes_sent */
} rank_report;

/* A rank's shard of a problem's tensors. */
typedef struct rank_tensor {
    ra_tensor view;
    unsigned char *memory;
    size_t bytes;
} rank_tensor;

enum {
    DATA_Q,
    DATA_K,
    DATA_V,
    DATA_DOUT,
    DATA_INPUTS,
    DATA_OUT = DATA_INPUTS,
    DATA_LSE,
    DATA_DQ,
    DATA_DK,
    DATA_DV,
    DATA_KEPT_K,
    DATA_KEPT_V,
    DATA_COUNT
};

typedef struct rank_data {
    rank_tensor tensor[DATA_COUNT];
    int64_t *pos; /* global position of each local token */
    int64_t length;
} rank_data;

void rank_data_create(rank_data *data, const problem *p, const layout *l, int rank, strides how,
                      int64_t kept_seq, bool keep_kv);
void rank_data_free(rank_data *data);
ra_forward_io rank_data_forward(const rank_data *data);
ra_backward_io rank_data_backward(const rank_data *data);
/* Copies the results to their places in the whole batch. False if memory outside a view changed. */
bool rank_data_collect(rank_data *data, bool backward, answer *a);
/* Of the bytes of all results; never 0. */
uint64_t rank_data_hash(const rank_data *data);
/* Is every element of the results DATA_* first to last NaN? After a failure nothing may look like
 * one.
 */
bool rank_data_no_result(const rank_data *data, int first, int last);

/* The rank's slice of the step's metadata; memory is freed with rank_desc_free. */
ra_step_desc rank_desc(const problem *p, const layout *l, int rank);
void rank_desc_free(ra_step_desc *desc);

/* One step on an existing ctx: create, forward, backward unless forward_only, free. layer: index of
 * p->layer among those of the ctx. */
void rank_step(ra_ctx *ctx, ra_comm *comm, int layer, const problem *p, const layout *l,
               const world_options *o, int rank, answer *a, rank_report *report);
/* Backend, ctx and one step. Closes neither comm nor answer. */
void rank_run(ra_comm *comm, const problem *p, const layout *l, const world_options *o, int rank,
              answer *a, rank_report *report);

/* The same backend with the plan that the options ask for. inner and *ops outlive it. */
ra_backend world_backend(const world_options *o, const ra_backend *inner, ra_backend_ops *ops);
/* The same with room of `bytes` for gradients that come home, 0 = its own. */
ra_backend landing_backend(const ra_backend *inner, int64_t bytes, ra_backend_ops *ops);

/* Calls fn(rank, comm, arg) on one thread a rank over a thread transport; false if it cannot open.
 */
typedef void (*world_fn)(int rank, ra_comm *comm, void *arg);
bool world_each(int ranks, world_fn fn, void *arg);

/* Runs p and reports; reports is [ranks]. */
void world_try(const problem *p, const layout *l, const world_options *o, answer *a,
               rank_report *reports);
/* Runs p, fails the test if a rank fails, and creates *a with the results. reports may be NULL. */
void world_run(const problem *p, const layout *l, const world_options *o, answer *a,
               rank_report *reports);

/* Keeps ra_last_error with the name of the failed call; the first failure stays. */
bool report_keep(rank_report *report, ra_status status, const char *call);

#endif
