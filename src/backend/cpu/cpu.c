/* The ops table for host memory: opens and closes the team and its scratch, and lets one operation
 * at a time through. Must not know how anything is computed. */
#include "backend/cpu/cpu.h"

#include <unistd.h>

#include "base/alloc.h"
#include "base/limits.h"
#include "base/mathx.h"

ra_status ra_cpu_scratch_reserve(ra_cpu *cpu, int64_t part)
{
    int64_t size = ra_team_size(cpu->team);
    part = ra_round_up(part, RA_ALIGN_BYTES);
    if (part * size > cpu->scratch_bytes) {
        ra_free(cpu->scratch);
        cpu->scratch = NULL;
        cpu->scratch_bytes = 0;
        RA_TRY(RA_NEW(&cpu->scratch, part * size));
        cpu->scratch_bytes = part * size;
    }
    cpu->scratch_part = part;
    return RA_OK;
}

static ra_status alloc_memory(void *self, size_t bytes, void **out)
{
    (void)self;
    return ra_alloc(bytes, 1, out);
}

static void free_memory(void *self, void *memory)
{
    (void)self;
    ra_free(memory);
}

/* Host memory needs no streams, lists or marks: every call is done when it returns. */
static void use_stream(void *self, ra_stream stream)
{
    (void)self;
    (void)stream;
}

static ra_status prepare(void *self, const ra_cover *cover, const ra_layer *layer, void **prepared)
{
    (void)self;
    (void)cover;
    (void)layer;
    *prepared = NULL;
    return RA_OK;
}

static void discard(void *self, void *prepared)
{
    (void)self;
    (void)prepared;
}

static ra_status mark(void *self, int at)
{
    (void)self;
    (void)at;
    return RA_OK;
}

static ra_status fold(void *self, const ra_fold_job *job)
{
    ra_cpu *cpu = self;
    pthread_mutex_lock(&cpu->busy);
    ra_status status = ra_cpu_fold(cpu, job);
    pthread_mutex_unlock(&cpu->busy);
    return status;
}

static ra_status grad(void *self, const ra_grad_job *job)
{
    ra_cpu *cpu = self;
    pthread_mutex_lock(&cpu->busy);
    ra_status status = ra_cpu_grad(cpu, job);
    pthread_mutex_unlock(&cpu->busy);
    return status;
}

static ra_status fill(void *self, const ra_tensor *t, float value)
{
    ra_cpu *cpu = self;
    pthread_mutex_lock(&cpu->busy);
    ra_cpu_fill(cpu, t, value);
    pthread_mutex_unlock(&cpu->busy);
    return RA_OK;
}

static ra_status add(void *self, const ra_tensor *to, const ra_tensor *from)
{
    (void)self;
    ra_cpu_add(to, from);
    return RA_OK;
}

static ra_status cast(void *self, const ra_tensor *to, const ra_tensor *from)
{
    ra_cpu *cpu = self;
    pthread_mutex_lock(&cpu->busy);
    ra_cpu_cast(cpu, to, from);
    pthread_mutex_unlock(&cpu->busy);
    return RA_OK;
}

static ra_status row_dot(void *self, const ra_tensor *a, const ra_tensor *b, const ra_tensor *dot)
{
    ra_cpu *cpu = self;
    pthread_mutex_lock(&cpu->busy);
    ra_cpu_row_dot(cpu, a, b, dot);
    pthread_mutex_unlock(&cpu->busy);
    return RA_OK;
}

static const char *level(void *self)
{
    const ra_cpu *cpu = self;
    return cpu->level->name;
}

static void close_cpu(void *self)
{
    ra_cpu *cpu = self;
    ra_team_close(cpu->team);
    pthread_mutex_destroy(&cpu->busy);
    ra_free(cpu->progress);
    ra_free(cpu->tiles[0].first);
    ra_free(cpu->tiles[1].first);
    ra_free(cpu->scratch);
    ra_free(cpu);
}

static const ra_backend_ops ops = {
    .name = "cpu",
    .use_stream = use_stream,
    .prepare = prepare,
    .discard = discard,
    .check = ra_backend_check_nothing,
    .mark = mark,
    .wait_mark = mark,
    .alloc = alloc_memory,
    .free = free_memory,
    .fold = fold,
    .grad = grad,
    .fill = fill,
    .add = add,
    .wait_add = ra_backend_wait_nothing,
    .add_behind = add,
    .cast = cast,
    .row_dot = row_dot,
    .level = level,
    .close = close_cpu,
    .mark_event = ra_backend_no_event,
    .follow = ra_backend_follow_nothing,
};

ra_status ra_backend_open_cpu(int threads, const char *level_name, ra_backend **out)
{
    if (!out) {
        return RA_FAIL(RA_E_ARG, "out: NULL, expected where to put the backend");
    }
    if (threads < 0 || threads > RA_THREADS_MAX) {
        return RA_FAIL(RA_E_ARG, "threads: %d, expected 0 to %d", threads, RA_THREADS_MAX);
    }
    const ra_level *found = NULL;
    RA_TRY(ra_level_find(level_name, &found));
    if (threads == 0) {
        threads = (int)ra_clamp_i64(sysconf(_SC_NPROCESSORS_ONLN), 1, RA_THREADS_MAX);
    }
    ra_cpu *cpu = NULL;
    RA_TRY(RA_NEW(&cpu, 1));
    cpu->level = found;
    ra_status status = ra_team_open(threads, &cpu->team);
    if (status) {
        ra_free(cpu);
        return status;
    }
    pthread_mutex_init(&cpu->busy, NULL);
    return ra_backend_wrap(&ops, cpu, out);
}
