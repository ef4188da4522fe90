/* Two queues in front of a backend. */
#include "support_queued.h"

#include <stdlib.h>
#include <time.h>

#include "base/alloc.h"
#include "plan/passes.h"

/* What a call was given. */
struct queued_call {
    ra_status (*run)(const ra_backend *inner, const queued_call *call);
    ra_fold_job fold;
    ra_grad_job grad;
    ra_cover part; /* of one that is computed in two parts: its own */
    ra_tensor to, from, other;
    float value;
    queued_call *next;
};

static ra_status run_fold(const ra_backend *inner, const queued_call *call)
{
    return inner->ops->fold(inner->self, &call->fold);
}

static ra_status run_grad(const ra_backend *inner, const queued_call *call)
{
    return inner->ops->grad(inner->self, &call->grad);
}

static ra_status run_part(const ra_backend *inner, const queued_call *call)
{
    ra_grad_job job = call->grad;
    ra_cover part = call->part;
    job.cover = &part;
    ra_status status = inner->ops->grad(inner->self, &job);
    ra_cover_free(&part);
    return status;
}

static ra_status run_fill(const ra_backend *inner, const queued_call *call)
{
    return inner->ops->fill(inner->self, &call->to, call->value);
}

static ra_status run_add(const ra_backend *inner, const queued_call *call)
{
    return inner->ops->add(inner->self, &call->to, &call->from);
}

static ra_status run_cast(const ra_backend *inner, const queued_call *call)
{
    return inner->ops->cast(inner->self, &call->to, &call->from);
}

static ra_status run_row_dot(const ra_backend *inner, const queued_call *call)
{
    return inner->ops->row_dot(inner->self, &call->from, &call->other, &call->to);
}

/* ---- queues */

static void begin_late(call_queue *c)
{
    if (c->delay_us > 0 && rng_chance(&c->r, 33)) {
        struct timespec t = {0, rng_int(&c->r, 0, c->delay_us) * 1000};
        nanosleep(&t, NULL);
    }
}

static void *work(void *arg)
{
    call_queue *c = arg;
    pthread_mutex_lock(&c->lock);
    while (!c->stop || c->first) {
        queued_call *call = c->first;
        if (!call) {
            pthread_cond_wait(&c->changed, &c->lock);
            continue;
        }
        c->first = call->next;
        c->end = c->first ? c->end : &c->first;
        pthread_mutex_unlock(&c->lock);
        begin_late(c);
        ra_status status = call->run(c->inner, call);
        free(call);
        pthread_mutex_lock(&c->lock);
        c->status = c->status ? c->status : status;
        c->done++;
        pthread_cond_broadcast(&c->changed);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

static void queue_open(call_queue *c, const ra_backend *inner, int delay_us, uint64_t seed)
{
    *c = (call_queue){.inner = inner, .delay_us = delay_us, .r = rng_of(seed)};
    c->end = &c->first;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->changed, NULL);
    if (pthread_create(&c->thread, NULL, work, c) != 0) {
        abort();
    }
}

/* Until the first `count` calls are done. */
static ra_status queue_wait(call_queue *c, int64_t count)
{
    pthread_mutex_lock(&c->lock);
    while (c->done < count) {
        pthread_cond_wait(&c->changed, &c->lock);
    }
    ra_status status = c->status;
    pthread_mutex_unlock(&c->lock);
    return status;
}

static ra_status queue_post(call_queue *c, queued_call call)
{
    queued_call *own = malloc(sizeof *own);
    if (!own) {
        abort();
    }
    *own = call;
    pthread_mutex_lock(&c->lock);
    *c->end = own;
    c->end = &own->next;
    int64_t posted = ++c->posted;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    return c->at_once ? queue_wait(c, posted) : RA_OK;
}

static int64_t queue_posted(call_queue *c)
{
    pthread_mutex_lock(&c->lock);
    int64_t posted = c->posted;
    pthread_mutex_unlock(&c->lock);
    return posted;
}

static void queue_close(call_queue *c)
{
    pthread_mutex_lock(&c->lock);
    c->stop = true;
    pthread_cond_broadcast(&c->changed);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->changed);
}

/* ---- the backend's table */

static void use_stream(void *self, ra_stream stream)
{
    const queued_backend *q = self;
    q->inner->ops->use_stream(q->inner->self, stream);
}

static ra_status prepare(void *self, const ra_cover *cover, const ra_layer *layer, void **prepared)
{
    const queued_backend *q = self;
    return q->inner->ops->prepare(q->inner->self, cover, layer, prepared);
}

static void discard(void *self, void *prepared)
{
    queued_backend *q = self;
    queued_wait(q);
    q->inner->ops->discard(q->inner->self, prepared);
}

static ra_status check(void *self, const ra_tensor *t, const char *name)
{
    const queued_backend *q = self;
    return ra_backend_check(q->inner, t, name);
}

static void set_mark(queued_backend *q, int at)
{
    pthread_mutex_lock(&q->calls.lock);
    q->mark[at] = q->calls.posted;
    pthread_mutex_unlock(&q->calls.lock);
}

static ra_status mark(void *self, int at)
{
    queued_backend *q = self;
    q->marked_again +=
        at != RA_MARK_TRACE && q->chunks > 0 && queue_posted(&q->calls) == q->behind_chunk;
    set_mark(q, at);
    return RA_OK;
}

static ra_status wait_mark(void *self, int at)
{
    queued_backend *q = self;
    pthread_mutex_lock(&q->calls.lock);
    int64_t count = q->mark[at];
    pthread_mutex_unlock(&q->calls.lock);
    return queue_wait(&q->calls, count);
}

static ra_status alloc(void *self, size_t bytes, void **out)
{
    const queued_backend *q = self;
    return q->inner->ops->alloc(q->inner->self, bytes, out);
}

static void free_memory(void *self, void *memory)
{
    queued_backend *q = self;
    queued_wait(q);
    q->inner->ops->free(q->inner->self, memory);
}

static ra_status fold(void *self, const ra_fold_job *job)
{
    queued_backend *q = self;
    return queue_post(&q->calls, (queued_call){.run = run_fold, .fold = *job});
}

/* The first query of a piece behind all that see a row of the chunk. */
static int64_t end_of_seeing(const ra_cover *cover, const ra_piece *q)
{
    int64_t end = q->pos;
    for (int64_t i = q->first; i < q->last; i++) {
        const ra_piece *k = &cover->k[i];
        if (k->source == RA_SOURCE_CHUNK) {
            ra_range seeing = ra_cover_seen_by(cover, k, k->pos, k->pos + k->count, q);
            end = seeing.begin < seeing.end && seeing.end > end ? seeing.end : end;
        }
    }
    return end;
}

static void part_open(const ra_cover *whole, bool second, ra_cover *part)
{
    *part = (ra_cover){.tokens = whole->tokens, .mask = whole->mask};
    if (RA_NEW(&part->q, whole->q_count) || RA_NEW(&part->k, whole->k_count)) {
        abort();
    }
    for (int64_t i = 0; i < whole->k_count; i++) {
        part->k[part->k_count++] = whole->k[i];
    }
    for (int64_t i = 0; i < whole->q_count; i++) {
        ra_piece q = whole->q[i];
        int64_t cut = end_of_seeing(whole, &q) - q.pos;
        q.pos += second ? cut : 0;
        q.index += second ? cut : 0;
        q.count = second ? q.count - cut : cut;
        if (q.count > 0) {
            part->q[part->q_count++] = q;
        }
    }
    for (int64_t i = 0; i < part->q_count; i++) {
        part->q[i].fresh = part->q[i].final = false;
    }
    for (int64_t i = 0; i < part->k_count; i++) {
        part->k[i].fresh = part->k[i].final = false;
    }
    ra_cover_link(part);
}

/* A computation that has all of its rows' queries, as two: of those that see the chunk, and of the
 * others. */
static void split(const ra_cover *whole, ra_cover part[2])
{
    ra_cover *const parts[] = {&part[0], &part[1]};
    const ra_piece_set nothing = {0};
    ra_piece_set later = {0};
    ra_status status = RA_OK;
    for (int64_t i = 0; i < whole->k_count; i++) {
        const ra_piece *k = &whole->k[i];
        if (k->source == RA_SOURCE_OWN && !k->final) {
            status = status ? status : ra_piece_set_add(&later, k, 1);
        }
    }
    part_open(whole, false, &part[0]);
    part_open(whole, true, &part[1]);
    if (status || ra_passes_mark(parts, 2, &nothing, &later)) {
        abort();
    }
    ra_piece_set_free(&later);
}

/* The chunk's mark is as early as can be: between the two parts, the second of which leaves the
 * chunk alone. */
static ra_status grad(void *self, const ra_grad_job *job)
{
    queued_backend *q = self;
    if (!job->chunk_mark) {
        return queue_post(&q->calls, (queued_call){.run = run_grad, .grad = *job});
    }
    queued_call calls[] = {{.run = run_part, .grad = *job}, {.run = run_part, .grad = *job}};
    ra_cover part[2];
    split(job->cover, part);
    ra_tensor *const chunk[] = {
        &calls[1].grad.k[RA_SOURCE_CHUNK], &calls[1].grad.v[RA_SOURCE_CHUNK],
        &calls[1].grad.dk[RA_SOURCE_CHUNK], &calls[1].grad.dv[RA_SOURCE_CHUNK]};
    for (int i = 0; i < 4; i++) {
        chunk[i]->data = NULL;
    }
    for (int i = 0; i < 2; i++) {
        calls[i].part = part[i];
        if (part[i].q_count > 0) {
            RA_TRY(queue_post(&q->calls, calls[i]));
        } else {
            ra_cover_free(&part[i]);
        }
        if (i == 0) {
            set_mark(q, job->chunk_mark);
        }
    }
    q->chunks++;
    q->behind_chunk = queue_posted(&q->calls);
    return RA_OK;
}

static ra_status fill(void *self, const ra_tensor *t, float value)
{
    queued_backend *q = self;
    return queue_post(&q->calls, (queued_call){.run = run_fill, .to = *t, .value = value});
}

static ra_status add(void *self, const ra_tensor *to, const ra_tensor *from)
{
    queued_backend *q = self;
    return queue_post(&q->additions, (queued_call){.run = run_add, .to = *to, .from = *from});
}

static ra_status wait_add(void *self)
{
    queued_backend *q = self;
    return queue_wait(&q->additions, queue_posted(&q->additions));
}

static ra_status add_behind(void *self, const ra_tensor *to, const ra_tensor *from)
{
    queued_backend *q = self;
    return queue_post(&q->calls, (queued_call){.run = run_add, .to = *to, .from = *from});
}

static ra_status cast(void *self, const ra_tensor *to, const ra_tensor *from)
{
    queued_backend *q = self;
    return queue_post(&q->calls, (queued_call){.run = run_cast, .to = *to, .from = *from});
}

static ra_status row_dot(void *self, const ra_tensor *a, const ra_tensor *b, const ra_tensor *dot)
{
    queued_backend *q = self;
    return queue_post(&q->calls,
                      (queued_call){.run = run_row_dot, .from = *a, .other = *b, .to = *dot});
}

static const char *level(void *self)
{
    const queued_backend *q = self;
    return q->inner->ops->level(q->inner->self);
}

static void close_nothing(void *self)
{
    (void)self;
}

static const ra_backend_ops table = {
    .name = "queued",
    .use_stream = use_stream,
    .prepare = prepare,
    .discard = discard,
    .check = check,
    .mark = mark,
    .wait_mark = wait_mark,
    .alloc = alloc,
    .free = free_memory,
    .fold = fold,
    .grad = grad,
    .fill = fill,
    .add = add,
    .wait_add = wait_add,
    .add_behind = add_behind,
    .cast = cast,
    .row_dot = row_dot,
    .level = level,
    .close = close_nothing,
    .mark_event = ra_backend_no_event,
    .follow = ra_backend_follow_nothing,
    .marks_chunk = true,
};

void queued_open(queued_backend *q, const ra_backend *inner, int delay_us, uint64_t seed)
{
    *q = (queued_backend){.ops = table, .inner = inner};
    q->backend = (ra_backend){&q->ops, q};
    queue_open(&q->calls, inner, delay_us, seed);
    queue_open(&q->additions, inner, delay_us, seed + 1);
}

ra_status queued_wait(queued_backend *q)
{
    ra_status status = queue_wait(&q->calls, queue_posted(&q->calls));
    ra_status added = queue_wait(&q->additions, queue_posted(&q->additions));
    return status ? status : added;
}

void queued_close(queued_backend *q)
{
    queue_close(&q->calls);
    queue_close(&q->additions);
}
