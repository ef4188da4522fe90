/*
 * ringattn.h - exact context-parallel (ring) attention, forward and backward.
 *
 * One long sequence is sharded over ranks. Every rank keeps its own query, key and value rows; the
 * key/value rows that another rank's queries can see travel to it, hop by hop, while the previous
 * hop is computed, and each hop is folded into a running (out, lse) by online softmax. In the
 * backward, dK/dV partial sums travel back.
 *
 * Read this file from top to bottom: it follows the data.
 *
 *   backend  where math runs                                    ra_backend_open_cpu
 *   comm     who I exchange with                                ra_comm_open_threads, ..._custom
 *   ctx      backend + comm + the model's layer kinds           ra_ctx_create       (collective)
 *   step     one batch's documents, padding, images; its plans  ra_step_create      (collective)
 *   plan     one layer kind in one step, owned by the step      ra_step_plan
 *   calls    the operation                                      ra_attn_forward     (collective)
 *                                                               ra_attn_backward    (collective)
 *
 * Ownership: callers own tensors and metadata; backend and comm outlive the ctx, the ctx outlives
 * its steps, a step owns its plans. One ctx is used by one thread at a time. Metadata is copied by
 * ra_step_create. Nothing is saved between forward and backward but what the caller holds (out,
 * lse, kept_k, kept_v, the step), so recomputation of activations needs no special case. Every
 * close and free accepts NULL.
 *
 * Errors: a function that can fail returns ra_status, 0 or negative; ra_last_error() then holds a
 * sentence with the argument, its value and what was expected. Outputs are written only on success.
 * Collective calls give the same error on every rank while a ctx or a step is created; a rank that
 * fails in forward or backward returns its own error and the others RA_E_COMM naming it, in that
 * call or the next, after which the ctx accepts only ra_ctx_free. No call blocks for longer than
 * ra_ctx_options.timeout_ms without progress.
 *
 * Structs that callers fill start with `size`, to be set to sizeof of the struct; other members
 * left zero mean their default. Sequence positions are GLOBAL: position in the whole row, before
 * sharding.
 */
#ifndef RINGATTN_H
#define RINGATTN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RA_VERSION_MAJOR 0
#define RA_VERSION_MINOR 1
#define RA_VERSION_PATCH 0

#if defined(_WIN32)
#define RA_API
#else
#define RA_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- status ---------------------------------------------------------------------------- */

#define RA_STATUS_LIST(X)                                                                          \
    X(RA_OK, 0, "success")                                                                         \
    X(RA_E_ARG, -1, "argument missing or out of range")                                            \
    X(RA_E_SHAPE, -2, "tensor shapes, strides or dtypes disagree")                                 \
    X(RA_E_UNSUPPORTED, -3, "valid request this backend cannot run")                               \
    X(RA_E_UNAVAILABLE, -4, "built without this backend or transport")                             \
    X(RA_E_NOMEM, -5, "host or device memory exhausted")                                           \
    X(RA_E_MISMATCH, -6, "ranks disagree about layers or step")                                    \
    X(RA_E_DEVICE, -7, "device runtime failed")                                                    \
    X(RA_E_COMM, -8, "transport failed, timed out or was aborted")                                 \
    X(RA_E_IO, -9, "file unreadable or malformed")

typedef enum ra_status {
#define RA_STATUS_ENUM(name, code, text) name = code,
    RA_STATUS_LIST(RA_STATUS_ENUM)
#undef RA_STATUS_ENUM
} ra_status;

RA_API const char *ra_version(void);                 /* "major.minor.patch" */
RA_API const char *ra_status_name(ra_status status); /* "RA_E_SHAPE" */
RA_API const char *
ra_status_text(ra_status status);       /* "tensor shapes, strides or dtypes disagree" */
RA_API const char *ra_last_error(void); /* this thread's last message; never NULL */

/* ---- tensors --------------------------------------------------------------------------- */

typedef enum ra_dtype {
    RA_F32 = 1,
    RA_BF16,
    RA_F16,
    RA_F64, /* results of the oracle only */
} ra_dtype;

enum { RA_ROW, RA_HEAD, RA_SEQ, RA_CHAN, RA_NDIM };

/* A view of [rows, heads, seq, channels] elements; it never owns data. Strides count elements;
 * channels are contiguous (stride 1), every other stride is free. Data is aligned to its element.
 */
typedef struct ra_tensor {
    void *data;
    ra_dtype dtype;
    int64_t size[RA_NDIM];
    int64_t stride[RA_NDIM];
} ra_tensor;

/* A contiguous [rows, heads, seq, chan] tensor. lse is [rows, heads, seq, 1] of RA_F32. */
RA_API ra_tensor ra_tensor_bhsd(void *data, ra_dtype dtype, int64_t rows, int64_t heads,
                                int64_t seq, int64_t chan);
RA_API size_t ra_dtype_bytes(ra_dtype dtype);     /* 0 for an unknown dtype */
RA_API const char *ra_dtype_name(ra_dtype dtype); /* "bf16" */

/* ---- layers and the mask --------------------------------------------------------------- */

typedef enum ra_vision {
    RA_VISION_OFF,
    RA_VISION_OVER_WINDOW,   /* same image block: at any distance (NeMo AutoModel) */
    RA_VISION_WITHIN_WINDOW, /* same image block: also ahead, in the window (transformers >= 5) */
} ra_vision;

/* An attention layer kind. Gemma 4 has two: global (head_dim 512, window 0) and sliding (head_dim
 * 256). */
typedef struct ra_layer {
    size_t size;
    int q_heads, kv_heads;  /* query head h reads KV head h / (q_heads / kv_heads) */
    int head_dim;           /* a multiple of 8, at most 512 */
    ra_dtype dtype;         /* of q, k, v, out and gradients: RA_F32, RA_BF16 or RA_F16 */
    float scale;            /* softmax scale, never guessed; Gemma 4 uses 1.0 */
    bool causal;            /* key position <= query position */
    int64_t window;         /* query - key < window, itself counted; 0 = none: a global layer */
    int64_t window_right;   /* key - query < window_right; 0 = none */
    ra_vision vision;       /* ignored by global layers (window 0), as in Gemma 4 */
    float dropout, softcap; /* not offered: anything but 0 is refused */
} ra_layer;

/* One token as the mask sees it. */
typedef struct ra_token {
    int64_t pos;   /* global position */
    int32_t doc;   /* document id; <= 0 is padding */
    int32_t group; /* vision block number over the full row; -1 = text */
} ra_token;

/* May this query token attend this key token of the same batch row? The truth that every path
 * agrees with. */
RA_API bool ra_mask_allows(const ra_layer *layer, ra_token query, ra_token key);

/* Vision block numbers of whole rows: token_type and group are [rows, seq]; types 1 (image) and 2
 * (video) are vision, neighbours belong to one block, text gets -1. Numbers start at 0 in each row.
 */
RA_API ra_status ra_vision_groups(const int32_t *token_type, int64_t rows, int64_t seq,
                                  int32_t *group);

/* ---- shards: which positions a rank owns ----------------------------------------------- */

/* Consecutive global positions [start, start + count). */
typedef struct ra_run {
    int64_t start, count;
} ra_run;

/* Contiguous shards: the first seq mod size ranks hold one token more. Returns the run count: 1, or
 * 0 if empty. */
RA_API int ra_runs_contiguous(int rank, int size, int64_t seq, ra_run out[1]);
/* Zigzag shards, balanced for causal masks: seq is cut into 2*size pieces, rank r owns pieces r and
 * 2*size-1-r. Returns the run count, 0 to 2. */
RA_API int ra_runs_zigzag(int rank, int size, int64_t seq, ra_run out[2]);

/* The global position of each token of a rank, in the order of its runs: the position ids that
 * rotary embeddings need. Returns how many there are; out may be NULL. */
RA_API int64_t ra_runs_positions(const ra_run *runs, int64_t run_count, int64_t *out);
/* take: slice = the runs' positions of whole; put: back. Host memory. whole is [outer, seq],
 * slice [outer, positions of the runs], of `width` bytes a position: for [B, H, S, D] outer is B *
 * H and width the bytes of D, for [B, S, H, D] it is B and those of H * D. The runs of all ranks,
 * one after another, permute a batch and back. RA_E_ARG if a run leaves the row. */
RA_API ra_status ra_runs_take(const ra_run *runs, int64_t run_count, const void *whole,
                              int64_t outer, int64_t seq, size_t width, void *slice);
RA_API ra_status ra_runs_put(const ra_run *runs, int64_t run_count, const void *slice,
                             int64_t outer, int64_t seq, size_t width, void *whole);

/* ---- backend: where math runs ---------------------------------------------------------- */

typedef struct ra_backend ra_backend;
/* A cudaStream_t; ignored by the CPU backend. */
typedef struct ra_stream {
    void *handle;
} ra_stream;

/* threads: size of this backend's persistent team, the caller included; 0 = one per online CPU.
 * level: the instruction set of the kernels, one of ra_cpu_level_name, or NULL for the best this
 * machine runs. RA_E_ARG for a level that does not exist, RA_E_UNSUPPORTED for one that the machine
 * lacks. Ranks may share a backend: it lets one computation at a time through. */
RA_API ra_status ra_backend_open_cpu(int threads, const char *level, ra_backend **out);
/* The levels that are built in, on most machines slowest first; NULL past the end. */
RA_API const char *ra_cpu_level_name(int index);
/* Does this machine have the instructions? */
RA_API bool ra_cpu_level_runs(int index);
RA_API const char *ra_backend_name(const ra_backend *backend);  /* "cpu" */
RA_API const char *ra_backend_level(const ra_backend *backend); /* "avx512" */
RA_API void ra_backend_close(ra_backend *backend);

/* ---- comm: my place among the ranks ---------------------------------------------------- */

typedef struct ra_comm ra_comm;

/* `count` pieces of `width` bytes, `stride` bytes apart: a strided slice of a tensor. */
typedef struct ra_block {
    void *data;
    size_t width, stride;
    int64_t count;
} ra_block;

/* One message: the bytes of its blocks in order. Sender and receiver agree on the total, not on the
 * blocks. */
typedef struct ra_xfer {
    int peer;
    bool send; /* false: receive */
    const ra_block *blocks;
    int64_t block_count;
    uint64_t bytes; /* sum over blocks of width * count */
} ra_xfer;

/* A transport that the caller supplies, so that an engine a program already runs carries the ring.
 * All entries are required. Calls come from one thread at a time (not always the same one), in the
 * same order on every rank; only abort may come from another thread, at any time, also twice. An
 * entry that fails returns a negative status. */
typedef struct ra_comm_callbacks {
    size_t size;
    void *user;
    /* Post every transfer, then wait for all. At most one send to and one receive from each peer in
     * a call. Ranks call it the same number of times, also with xfer_count 0. RA_E_COMM if not done
     * within timeout_ms. */
    ra_status (*exchange)(void *user, const ra_xfer *xfers, int xfer_count, int timeout_ms);
    /* all[r * bytes ...] = what rank r passed as mine; bytes is equal on every rank. */
    ra_status (*gather)(void *user, const void *mine, size_t bytes, void *all, int timeout_ms);
    ra_status (*barrier)(void *user, int timeout_ms);
    /* Make every rank's pending and later calls fail soon; `why` is for their messages. */
    void (*abort)(void *user, const char *why);
    void (*close)(void *user);
} ra_comm_callbacks;

/* size ranks in one process, each driven by its own thread; fills out_by_rank[0 .. size-1]. */
RA_API ra_status ra_comm_open_threads(int size, ra_comm **out_by_rank);
RA_API ra_status ra_comm_open_custom(int rank, int size, const ra_comm_callbacks *callbacks,
                                     ra_comm **out);
RA_API int ra_comm_rank(const ra_comm *comm);
RA_API int ra_comm_size(const ra_comm *comm);
RA_API uint64_t ra_comm_bytes_sent(const ra_comm *comm);   /* by exchanges, so far */
RA_API void ra_comm_abort(ra_comm *comm, const char *why); /* any thread; peers return RA_E_COMM */
RA_API void ra_comm_close(ra_comm *comm);
/* For transports that move flat buffers of xfer->bytes. */
RA_API void ra_xfer_pack(const ra_xfer *xfer, void *flat);
RA_API void ra_xfer_unpack(const ra_xfer *xfer, const void *flat);

/* ---- trace: what happened when --------------------------------------------------------- */

typedef struct ra_trace ra_trace;

/* Keeps the newest event_max events: computations and exchanges of every call of a ctx that has
 * it among its options. Several ranks of one process may share one. */
RA_API ra_status ra_trace_create(size_t event_max, ra_trace **out);
/* Chrome trace format: open it in a trace viewer. A row a rank and kind. RA_E_IO if it cannot. */
RA_API ra_status ra_trace_write(const ra_trace *trace, const char *json_path);
/* Where the time of the calls went, in seconds, as one rank saw it. A ctx with a trace waits for
 * its device behind every computation. */
typedef struct ra_trace_summary {
    size_t size;
    double wall;                   /* any rank of the trace was inside a call: the sum of ... */
    double compute, exposed, idle; /* computations; waits for an exchange; the rest */
    double exchange;               /* exchanges, hidden or exposed */
    int64_t lost;                  /* events that the trace had no room for: the sums lack them */
} ra_trace_summary;
/* The caller sets out->size; while no call runs. */
RA_API ra_status ra_trace_summarize(const ra_trace *trace, int rank, ra_trace_summary *out);
RA_API void ra_trace_free(ra_trace *trace);

/* ---- ctx, step, plan ------------------------------------------------------------------- */

typedef struct ra_ctx ra_ctx;
typedef struct ra_step ra_step;
typedef struct ra_plan ra_plan;

typedef struct ra_ctx_options {
    size_t size;
    size_t scratch_bytes_max; /* a step that needs more is refused on every rank; 0 = no limit */
    int timeout_ms;    /* of one exchange or gather, so longer than the longest computation of
                          one hop on any rank; 0 = 30,000 */
    bool forward_only; /* no backward: less scratch */
    bool no_overlap;   /* exchange between computations, on the calling thread */
    bool keep_kv;      /* forward stores received rows; backward exchanges gradients only */
    bool plan_only;    /* no scratch at all: steps can be inspected, not run */
    ra_trace *trace;   /* NULL = none */
} ra_ctx_options;

/* Collective. options may be NULL. Ranks pass the same layers and options; only timeout_ms,
 * scratch_bytes_max, no_overlap and trace may differ. RA_E_MISMATCH, on every rank, names what
 * differs; any rank's own error becomes every rank's. */
RA_API ra_status ra_ctx_create(ra_backend *backend, ra_comm *comm, const ra_layer *layers,
                               int layer_count, const ra_ctx_options *options, ra_ctx **out);
/* RA_OK, or the failure after which only ra_ctx_free is accepted. */
RA_API ra_status ra_ctx_status(const ra_ctx *ctx);
RA_API void ra_ctx_free(ra_ctx *ctx);

/* This rank's slice of the batch, host memory, arrays [rows, seq_local] in the order of its tokens
 * in q, k and v. */
typedef struct ra_step_desc {
    size_t size;
    int64_t rows;      /* batch rows, equal on every rank */
    int64_t seq_local; /* may be 0 */
    int run_count;
    const ra_run *runs;        /* this rank's positions; NULL = contiguous shards in rank order */
    const int32_t *doc_id;     /* <= 0 is padding; one id is one document wherever it stands in its
                                  row; NULL, on all ranks that have tokens = one per row */
    const uint8_t *is_pad;     /* nonzero = padding, in addition to doc_id; NULL = none */
    const int32_t *token_type; /* 1 image, 2 video; NULL = text only */
} ra_step_desc;

/* Collective. Gathers every rank's description and plans every layer kind; allocates all that the
 * calls need. RA_E_MISMATCH, on every rank, for runs that overlap or leave a gap. */
RA_API ra_status ra_step_create(ra_ctx *ctx, const ra_step_desc *desc, ra_step **out);
RA_API void ra_step_free(ra_step *step);
/* Borrowed from the step; NULL if there is no such layer. */
RA_API const ra_plan *ra_step_plan(const ra_step *step, int layer);

typedef struct ra_plan_info {
    size_t size;
    const char *path;   /* "global", "sliding" or "general" */
    const char *reason; /* why this path */
    int hops;           /* computations of a forward, the local one included */
    int n_prior;        /* largest distance to a rank behind whose rows are needed */
    int64_t seq_local, seq_total;
    int64_t tiles_full, tiles_partial;    /* of 64 queries by 64 keys, a head */
    int64_t pairs, pairs_total;           /* allowed (query, key) pairs a head: own, all ranks' */
    double imbalance;                     /* pairs of the busiest rank / mean; 1 = balanced */
    double flops_forward, flops_backward; /* own: 4 and 10 * head_dim * q_heads * pairs */
    uint64_t forward_bytes_sent, forward_bytes_received; /* by this rank's exchanges */
    uint64_t backward_bytes_sent, backward_bytes_received;
    int64_t rows_received;          /* key rows that reach this rank in one forward */
    int64_t kept_seq;               /* of kept_k and kept_v; 0 without keep_kv */
    uint64_t scratch_forward_bytes; /* of the ctx, shared by all layers and steps */
    uint64_t scratch_backward_bytes;
    uint64_t plan_bytes;     /* this plan; the step's gathered metadata apart */
    uint64_t metadata_bytes; /* the step: documents, blocks, shards of all ranks */
    bool local_halved; /* half of hop 0 opens a backward, the rest ends it; else hop 1 and it do */
} ra_plan_info;

/* Counts exactly, linear in documents, runs and image blocks. The caller sets out->size. */
RA_API ra_status ra_plan_inspect(const ra_plan *plan, ra_plan_info *out);

/* Key rows [start, start + count) of batch row `row` go from one rank to another before a hop. */
typedef struct ra_transfer {
    int hop, from, to;
    int64_t row, start, count;
} ra_transfer;

/* Fills at most `capacity` transfers that this rank sends or receives; returns how many exist. */
RA_API int64_t ra_plan_transfers(const ra_plan *plan, ra_transfer *out, int64_t capacity);

/* Which path a layer takes in a step like desc, and why; `contiguous`: are the shards? Never
 * depends on a rank's slice. */
RA_API const char *ra_path_for(const ra_layer *layer, bool has_documents, bool has_vision,
                               bool contiguous, const char **reason);

/* ---- balanced shards ------------------------------------------------------------------- */

typedef struct ra_balance_options {
    size_t size;
    int64_t align;        /* runs begin at multiples of it and end there or with the row; 0 = 1 */
    bool equal_tokens;    /* each rank owns the same number of aligned pieces, or one more */
    const double *weight; /* [layer_count] cost of a pair; NULL = q_heads * head_dim */
} ra_balance_options;

typedef struct ra_balance {
    int ranks;
    int64_t *run_first; /* [ranks + 1] rank r owns run[run_first[r]] to run[run_first[r + 1] - 1] */
    ra_run *run;        /* ascending in each rank */
    double imbalance;   /* cost of the busiest rank / mean; 1 = balanced */
} ra_balance;

/* Shards of equal cost. whole: rows and seq_local of the whole batch; runs ignored. layers: the
 * kinds that will share the shards; a position costs the weighted pairs of its queries. imbalance
 * is at most 1.03 if no `align` positions cost more than 1 % of a rank's mean; then a rank owns one
 * run, or, with equal_tokens, all together at most 2 * ranks - 1. Else it is as near as exchanging
 * such pieces comes, in more runs. Linear in the tokens; the same on every rank. Free with
 * ra_balance_free, after success only. */
RA_API ra_status ra_runs_balanced(const ra_step_desc *whole, const ra_layer *layers,
                                  int layer_count, int ranks, const ra_balance_options *options,
                                  ra_balance *out);
RA_API void ra_balance_free(ra_balance *balance);

/* ---- the operation --------------------------------------------------------------------- */

/* S is this rank's seq_local, B the step's rows. No result shares its data with another tensor. */
typedef struct ra_forward_io {
    size_t size;
    ra_tensor q;              /* in   [B, q_heads, S, head_dim] */
    ra_tensor k, v;           /* in   [B, kv_heads, S, head_dim] */
    ra_tensor out;            /* out  like q */
    ra_tensor lse;            /* out  [B, q_heads, S, 1] f32, natural log; -inf: no key allowed */
    ra_tensor kept_k, kept_v; /* out  with keep_kv: [1, kv_heads, kept_seq, head_dim] */
} ra_forward_io;

typedef struct ra_backward_io {
    size_t size;
    ra_tensor q, k, v;        /* in   as in forward */
    ra_tensor out, lse;       /* in   the forward's results */
    ra_tensor kept_k, kept_v; /* in   with keep_kv */
    ra_tensor dout;           /* in   like q; rows that attend nothing are ignored */
    ra_tensor dq;             /* out  like q */
    ra_tensor dk, dv;         /* out  like k */
} ra_backward_io;

/* Collective: out = softmax(scale * q k^T, over the keys the mask allows) v, and lse. Every rank
 * calls with its plan of the same layer and step. Work on a device is enqueued on stream. Bad
 * arguments are found before anything is sent or written. A call that fails later leaves its
 * results NaN. RA_E_COMM names the rank and the hop that failed. */
RA_API ra_status ra_attn_forward(ra_ctx *ctx, const ra_plan *plan, const ra_forward_io *io,
                                 ra_stream stream);
/* Collective: gradients of a loss by q, k and v from dout, its gradient by out. Sums over ranks are
 * f32, in a fixed order: same inputs, same bits. dk and dv arrive complete at the rows' owner. */
RA_API ra_status ra_attn_backward(ra_ctx *ctx, const ra_plan *plan, const ra_backward_io *io,
                                  ra_stream stream);

/* ---- the oracle: whole sequence, one rank, fp64, the mask rule per element, no tiles --- */

/* whole: rows and seq_local of the whole batch; runs ignored. Results may also be RA_F64. Slow on
 * purpose. */
RA_API ra_status ra_oracle_forward(const ra_step_desc *whole, const ra_layer *layer,
                                   const ra_forward_io *io);
/* Recomputes out and lse itself; io->out and io->lse are ignored. */
RA_API ra_status ra_oracle_backward(const ra_step_desc *whole, const ra_layer *layer,
                                    const ra_backward_io *io);

/* ---- building blocks, for callers with their own kernels or transport ------------------ */

/* Per-document segments of one (query shard, key chunk) pair: for each document on both sides, in
 * order of its first query token, the flat indices (row * seq + pos, ascending) of its query and of
 * its key tokens. */
typedef struct ra_segments {
    int64_t count; /* documents on both sides; 0 = nothing shared, the arrays are empty */
    int64_t q_total, k_total;
    int64_t *q_index, *k_index; /* [q_total], [k_total] */
    int32_t *cu_q, *cu_k;       /* [count + 1] prefix sums: cu_seqlens */
    int32_t max_q, max_k;
    bool dense_local;  /* every query row is one document, padding only as a suffix */
    bool dense_cross;  /* dense_local, and every key row is that same document without padding */
    uint8_t *pad_rows; /* [rows, q_seq], 1 = padding query; NULL = none */
} ra_segments;

/* q_ids [rows, q_seq], k_ids [rows, k_seq]: document ids, <= 0 is padding. Free with
 * ra_segments_free, after success only. */
RA_API ra_status ra_segments_build(const int32_t *q_ids, int64_t q_seq, const int32_t *k_ids,
                                   int64_t k_seq, int64_t rows, ra_segments *out);
RA_API void ra_segments_free(ra_segments *segments);

/* dense is [rows, heads, seq, chan]; packed is THD: a [1, heads, total, chan] view (any strides);
 * index holds flat row * seq + pos, [total]. gather: packed = dense at index. scatter: dense =
 * packed at index, 0 elsewhere. add: dense += packed at index only; dtypes may differ, sums are
 * f32. */
RA_API ra_status ra_rows_gather(const ra_tensor *dense, const int64_t *index, int64_t total,
                                const ra_tensor *packed);
RA_API ra_status ra_rows_scatter(const ra_tensor *packed, const int64_t *index, int64_t total,
                                 const ra_tensor *dense);
RA_API ra_status ra_rows_add(const ra_tensor *packed, const int64_t *index, int64_t total,
                             const ra_tensor *dense);
/* The same for lse, f32: dense [rows, heads, seq], packed [heads, total]; scatter puts -inf
 * elsewhere. */
RA_API ra_status ra_lse_gather(const float *dense, int64_t rows, int64_t heads, int64_t seq,
                               const int64_t *index, int64_t total, float *packed);
RA_API ra_status ra_lse_scatter(const float *packed, const int64_t *index, int64_t total,
                                int64_t rows, int64_t heads, int64_t seq, float *dense);

/* (out, lse) += (part, part_lse) by online softmax, in f32: lse'' = logaddexp, out'' = weighted
 * mean; two empty parts stay empty (0, -inf). out, part: [B, H, S, D] f32; lse, part_lse: [B, H, S,
 * 1] f32. */
RA_API ra_status ra_merge(const ra_tensor *out, const ra_tensor *lse, const ra_tensor *part,
                          const ra_tensor *part_lse);
/* The same for packed parts ([1, H, total, D], [1, H, total, 1]) at the rows of index only. */
RA_API ra_status ra_merge_rows(const ra_tensor *out, const ra_tensor *lse, const ra_tensor *part,
                               const ra_tensor *part_lse, const int64_t *index, int64_t total);
/* Is the pass over live rows alone worth it? True up to a quarter of all rows. */
RA_API bool ra_merge_rows_pays(int64_t live, int64_t rows);

/* Variable-length attention on packed tokens, one rank. q: [1, q_heads, Tq, D], k, v: [1, kv_heads,
 * Tk, D] views (any strides, so [T, H, D] fits); cu_q, cu_k: [segments + 1], segment i's queries
 * attend segment i's keys; causal and window are aligned to the bottom right: the last query sees
 * the last key. window counts the query itself, 0 = none; vision does not apply. Queries that see
 * no key get out 0, lse -inf. */
typedef struct ra_varlen {
    size_t size;
    const int32_t *cu_q, *cu_k;
    int64_t segments;
} ra_varlen;
RA_API ra_status ra_varlen_forward(ra_backend *backend, const ra_layer *layer,
                                   const ra_varlen *lens, const ra_forward_io *io);
RA_API ra_status ra_varlen_backward(ra_backend *backend, const ra_layer *layer,
                                    const ra_varlen *lens, const ra_backward_io *io);

#ifdef __cplusplus
}
#endif
#endif
