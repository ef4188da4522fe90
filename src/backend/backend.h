/*
 * Where math runs: memory of the device and the few computations the ring needs. This table and
 * ra_comm_callbacks are the two waists of the library; nothing else is pluggable. The contract of
 * the kernels is written here, once.
 *
 * Scores are scale * q.k, in f32 or better; softmax, lse, delta and all sums in f32. Only pairs
 * that the cover's mask allows contribute, and only rows of its pieces are read: a NaN in padding
 * or in another document cannot reach a result. Kernels are deterministic: same inputs, same level,
 * same bits, whatever the team. Jobs are checked by the callers; kernels assert. `add`
 * runs beside a fold or grad, on the thread that brings gradients home, and must share no state
 * with them.
 */
#ifndef RA_BACKEND_BACKEND_H
#define RA_BACKEND_BACKEND_H

#include "plan/cover.h"
#include "tensor/tensor.h"

/* Forward over one cover. For every query piece: start from (acc, lse), or from nothing if the
 * piece is fresh; fold the partners in; store out in its dtype and the final lse if the piece is
 * final, else acc and lse. The state between computations is normalised: acc is the
 * softmax-weighted mean so far, lse its log-sum-exp; resuming is a running softmax with maximum
 * lse, sum 1 and numerator acc. A row without any key so far is acc 0, lse -inf. Where there is a
 * lse_rest, lse + lse_rest is the log-sum-exp between computations: scores of 100 leave an error of
 * 4e-6 in an f32 lse, which every hop would make again. */
typedef struct ra_fold_job {
    const ra_cover *cover;
    const void *prepared; /* what prepare made of the cover */
    float scale;
    ra_tensor q; /* [B, Hq, S, D] dtype */
    ra_tensor
        k[RA_SOURCE_COUNT]; /* [*, Hkv, *, D] dtype; data NULL if no key piece uses the source */
    ra_tensor v[RA_SOURCE_COUNT]; /* like k */
    ra_tensor acc; /* [B, Hq, S, D] f32, in/out; data NULL if every piece is fresh and final */
    ra_tensor lse; /* [B, Hq, S, 1] f32, in/out */
    ra_tensor
        lse_rest;  /* like lse, in/out where acc is; data NULL = none, as for inputs in halves */
    ra_tensor out; /* [B, Hq, S, D] dtype of q */
} ra_fold_job;

/* Gradients in the dtype of q: [B, Hq, S, D], and of this rank's own keys [B, Hkv, S, D]. */
typedef struct ra_grad_results {
    ra_tensor dq, dk, dv;
} ra_grad_results;

/* Moments of the computation that a transport waits for: one for each task that can be posted. */
typedef enum ra_mark {
    RA_MARK_COLLECT, /* and the next: by parity of the hop */
    RA_MARK_ROUTE = RA_MARK_COLLECT + 2,
    RA_MARK_TRACE = RA_MARK_ROUTE + 2, /* the end of a computation that is timed */
    RA_MARK_COUNT,
} ra_mark;

/* Backward over one cover, with p = exp(scale s - lse), ds = p (dout.v - delta) scale. lse and
 * delta are those of the whole row, over all hops. For every piece, of queries and of keys: start
 * from the f32 sums, or from nothing if it is fresh; add what the partners give; store the result,
 * rounded once, if it is final, else the sums. Sums hold anything in fresh rows, and afterwards in
 * final ones. Every row has a partner (ra_cover_trim), so all are written; rows of no piece are not
 * touched. Sources without key pieces have data NULL everywhere. */
typedef struct ra_grad_job {
    const ra_cover *cover;
    const void *prepared;
    float scale;
    ra_tensor q, dout;            /* [B, Hq, S, D] dtype */
    ra_tensor k[RA_SOURCE_COUNT]; /* [*, Hkv, *, D] dtype */
    ra_tensor v[RA_SOURCE_COUNT];
    ra_tensor lse, delta;          /* [B, Hq, S, 1] f32 */
    ra_tensor dq;                  /* [B, Hq, S, D] f32 sums, in/out */
    ra_tensor dk[RA_SOURCE_COUNT]; /* like k, f32 sums, in/out */
    ra_tensor dv[RA_SOURCE_COUNT];
    ra_grad_results to;
    int chunk_mark; /* where marks_chunk: recorded once the chunk's sums are stored; 0 = none */
} ra_grad_job;

/* fold, grad, fill, cast, row_dot and add_behind may return before they are done; they run in the
 * order of their calls, on the stream given last. */
typedef struct ra_backend_ops {
    const char *name;
    void (*use_stream)(void *self, ra_stream stream);
    /* Turns a cover of one layer kind into the backend's own work lists, once a step. */
    ra_status (*prepare)(void *self, const ra_cover *cover, const ra_layer *layer, void **prepared);
    void (*discard)(void *self, void *prepared);
    /* May kernels touch this tensor's memory? */
    ra_status (*check)(void *self, const ra_tensor *t, const char *name);
    ra_status (*mark)(void *self, int mark);      /* now, behind everything called so far */
    ra_status (*wait_mark)(void *self, int mark); /* any thread; returns when that is done */
    ra_status (*alloc)(void *self, size_t bytes, void **out); /* device memory, zeroed */
    void (*free)(void *self, void *memory);
    ra_status (*fold)(void *self, const ra_fold_job *job);
    ra_status (*grad)(void *self, const ra_grad_job *job);
    ra_status (*fill)(void *self, const ra_tensor *t, float value); /* any dtype */
    /* f32, same sizes; may return before it is done, which wait_add waits for. */
    ra_status (*add)(void *self, const ra_tensor *to, const ra_tensor *from);
    ra_status (*wait_add)(void *self);
    /* The same among fold, grad and the others, in the order of their calls. */
    ra_status (*add_behind)(void *self, const ra_tensor *to, const ra_tensor *from);
    ra_status (*cast)(void *self, const ra_tensor *to,
                      const ra_tensor *from); /* f32 to any dtype */
    ra_status (*row_dot)(void *self, const ra_tensor *a, const ra_tensor *b,
                         const ra_tensor *dot); /* f32 sum over D */
    const char *(*level)(void *self);
    void (*close)(void *self);
    /* For transports that queue exchanges on the device: the device's event of a mark, NULL if it
     * has none, and: what is called from now on starts behind an event of the device. */
    void *(*mark_event)(void *self, int mark);
    ra_status (*follow)(void *self, void *event);
    /* grad can tell when the chunk's sums are stored, well before its end. Then a hop that has all
     * of a rank's queries is as good as two, and the backward's plan has one where it can. Equal
     * for all backends of one name. */
    bool marks_chunk;
    /* Room in which gradients that come home land, at most; 0 = 16 MiB. Equal for all backends of
     * one name, as ranks must agree on it. */
    int64_t landing_bytes;
} ra_backend_ops;

struct ra_backend {
    const ra_backend_ops *ops;
    void *self;
};

/* check where kernels may touch any memory. */
ra_status ra_backend_check_nothing(void *self, const ra_tensor *t, const char *name);

/* mark_event, follow and wait_add where every call is done when it returns. */
void *ra_backend_no_event(void *self, int mark);
ra_status ra_backend_follow_nothing(void *self, void *event);
ra_status ra_backend_wait_nothing(void *self);

/* Asked about every tensor of a caller before anything of a call starts; a refusal names it. */
ra_status ra_backend_check(const ra_backend *backend, const ra_tensor *t, const char *name);

/* Wraps a table; takes over `self`, also when it fails. */
ra_status ra_backend_wrap(const ra_backend_ops *ops, void *self, ra_backend **out);

#endif
