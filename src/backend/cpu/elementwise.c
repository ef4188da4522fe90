/* Fill, add, cast and row dot over strided tensors, by rows of channels shared out to the team.
 * Must not know what the numbers mean. */
#include <string.h>

#include "backend/cpu/cpu.h"
#include "base/mathx.h"

/* Rows of an item. */
enum { ROWS = 64 };

typedef struct elementwise elementwise;
struct elementwise {
    void (*row)(const elementwise *job, int64_t row, int64_t head, int64_t seq);
    const ra_level *level;
    const ra_tensor *to, *a, *b;
    float value;
};

static void run_item(void *arg, int64_t item, int worker)
{
    (void)worker;
    const elementwise *job = arg;
    const int64_t *size = job->to->size;
    int64_t end = ra_min_i64((item + 1) * ROWS, size[RA_ROW] * size[RA_HEAD] * size[RA_SEQ]);
    for (int64_t i = item * ROWS; i < end; i++) {
        job->row(job, i / size[RA_SEQ] / size[RA_HEAD], i / size[RA_SEQ] % size[RA_HEAD],
                 i % size[RA_SEQ]);
    }
}

static int64_t count_items(const elementwise *job)
{
    const int64_t *size = job->to->size;
    return ra_ceil_div(size[RA_ROW] * size[RA_HEAD] * size[RA_SEQ], ROWS);
}

static void run_rows(ra_cpu *cpu, elementwise *job)
{
    ra_team_run(cpu->team, count_items(job), run_item, job);
}

static void fill_row(const elementwise *job, int64_t row, int64_t head, int64_t seq)
{
    char *to = ra_tensor_at(job->to, row, head, seq);
    size_t size = ra_dtype_bytes(job->to->dtype), bytes = (size_t)job->to->size[RA_CHAN] * size;
    if (job->value == 0) {
        memset(to, 0, bytes);
        return;
    }
    for (size_t at = 0; at < bytes; at += size) {
        job->level->store(&job->value, 1, 1.0f, job->to->dtype, to + at);
    }
}

static void add_row(const elementwise *job, int64_t row, int64_t head, int64_t seq)
{
    float *to = ra_tensor_at(job->to, row, head, seq);
    const float *from = ra_tensor_at(job->a, row, head, seq);
    for (int64_t i = 0; i < job->to->size[RA_CHAN]; i++) {
        to[i] += from[i];
    }
}

static void cast_row(const elementwise *job, int64_t row, int64_t head, int64_t seq)
{
    job->level->store(ra_tensor_at(job->a, row, head, seq), job->to->size[RA_CHAN], 1.0f,
                      job->to->dtype, ra_tensor_at(job->to, row, head, seq));
}

static void row_dot_row(const elementwise *job, int64_t row, int64_t head, int64_t seq)
{
    const ra_tensor *a = job->a, *b = job->b;
    *(float *)ra_tensor_at(job->to, row, head, seq) =
        job->level->dot(ra_tensor_at(a, row, head, seq), a->dtype, ra_tensor_at(b, row, head, seq),
                        b->dtype, a->size[RA_CHAN]);
}

void ra_cpu_fill(ra_cpu *cpu, const ra_tensor *t, float value)
{
    elementwise job = {.row = fill_row, .level = cpu->level, .to = t, .value = value};
    run_rows(cpu, &job);
}

/* On the calling thread alone: a fold or grad may have the team at the same time. */
void ra_cpu_add(const ra_tensor *to, const ra_tensor *from)
{
    elementwise job = {.row = add_row, .to = to, .a = from};
    for (int64_t item = 0; item < count_items(&job); item++) {
        run_item(&job, item, 0);
    }
}

void ra_cpu_cast(ra_cpu *cpu, const ra_tensor *to, const ra_tensor *from)
{
    elementwise job = {.row = cast_row, .level = cpu->level, .to = to, .a = from};
    run_rows(cpu, &job);
}

void ra_cpu_row_dot(ra_cpu *cpu, const ra_tensor *a, const ra_tensor *b, const ra_tensor *dot)
{
    elementwise job = {.row = row_dot_row, .level = cpu->level, .to = dot, .a = a, .b = b};
    run_rows(cpu, &job);
}
