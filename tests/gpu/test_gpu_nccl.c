/* The NCCL transport between processes, one GPU each: messages of every cut, gathers, aborts, and
 * whole rings against the oracle. NCCL refuses two ranks on one GPU, so a machine with one GPU runs
 * a rank that talks to itself, and says what it leaves out. */
#include "nccl_world.h"
#include "support_random.h"

#include <cuda_runtime_api.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "comm/comm.h"
#include "tensor/tensor.h"

enum { TIMEOUT_MS = 20000, BLOCKS_MAX = 12, GAP_MAX = 40, POISON = 0xee };

/* ---- messages */

/* A message in device memory with gaps, and its image in host memory. */
typedef struct parcel {
    char *host, *device;
    size_t bytes; /* of the memory */
    ra_block there[BLOCKS_MAX], here[BLOCKS_MAX];
    ra_xfer xfer, image;
} parcel;

/* shape: the bytes of each block, drawn alike on both sides; own: how its rows lie. */
static void parcel_create(parcel *p, rng shape, rng *own, int peer, bool send, int64_t longest)
{
    static const int64_t rows_of[] = {1, 2, 3, 4, 6, 8, 12, 24};
    size_t offset[BLOCKS_MAX];
    uint64_t total = 0;
    int64_t count = rng_int(&shape, 1, BLOCKS_MAX);
    *p = (parcel){0};
    for (int64_t i = 0; i < count; i++) {
        int64_t unit = rng_int(&shape, i == 0, rng_chance(&shape, 50) ? longest : 1000);
        int64_t rows = rows_of[rng_int(own, 0, 7)];
        size_t width = (size_t)(24 * unit / rows);
        size_t stride = width + (rng_chance(own, 50) ? 0 : (size_t)rng_int(own, 1, GAP_MAX));
        p->there[i] = p->here[i] = (ra_block){NULL, width, stride, rows};
        offset[i] = p->bytes + (size_t)rng_int(own, 0, GAP_MAX);
        p->bytes = offset[i] + stride * (size_t)rows;
        total += 24 * (uint64_t)unit;
    }
    p->host = malloc(p->bytes + 1);
    if (!p->host || cudaMalloc((void **)&p->device, p->bytes + 1) != cudaSuccess) {
        abort();
    }
    for (int64_t i = 0; i < count; i++) {
        p->there[i].data = p->device + offset[i];
        p->here[i].data = p->host + offset[i];
    }
    memset(p->host, POISON, p->bytes);
    p->xfer = (ra_xfer){peer, send, p->there, count, total};
    p->image = (ra_xfer){peer, send, p->here, count, total};
}

static void parcel_free(parcel *p)
{
    free(p->host);
    cudaFree(p->device);
}

static bool parcel_put(const parcel *p)
{
    return ra_cuda_copy(p->device, p->host, p->bytes, (ra_stream){0}) == RA_OK;
}

static char *content(int turn, int from, uint64_t total)
{
    char *flat = malloc(total + 1);
    for (uint64_t i = 0; flat && i < total; i++) {
        flat[i] = (char)((i + 1 + (uint64_t)(turn * 16 + from) * 977) * 0x9e3779b97f4a7c15u >> 40);
    }
    return flat;
}

/* Did exactly the sender's bytes arrive, and nothing outside the blocks change? */
static bool parcel_holds(parcel *p, const char *flat)
{
    char *got = malloc(p->xfer.bytes + 1), *poison = malloc(p->xfer.bytes + 1);
    bool same =
        got && poison && ra_cuda_copy(p->host, p->device, p->bytes, (ra_stream){0}) == RA_OK;
    if (same) {
        ra_xfer_pack(&p->image, got);
        same = memcmp(got, flat, p->xfer.bytes) == 0;
        memset(poison, POISON, p->xfer.bytes);
        ra_xfer_unpack(&p->image, poison);
        for (size_t i = 0; i < p->bytes; i++) {
            same = same && (unsigned char)p->host[i] == POISON;
        }
    }
    free(got);
    free(poison);
    return same;
}

/* To the next rank and from the one before, or, alone, to itself. longest: of a block, in 24 bytes.
 * Returns the bytes sent. */
static uint64_t exchange_one(ra_comm *comm, int rank, int turn, rng *own, int64_t longest,
                             rank_report *report)
{
    int size = ra_comm_size(comm), next = (rank + 1) % size, before = (rank + size - 1) % size;
    rng shape = rng_of(support_seed() + 1000 + (uint64_t)turn);
    parcel out, in;
    parcel_create(&out, shape, own, next, true, longest);
    parcel_create(&in, shape, own, before, false, longest);
    uint64_t total = out.xfer.bytes;
    char *mine = content(turn, rank, total), *theirs = content(turn, before, total);
    ra_xfer_unpack(&out.image, mine);
    const ra_xfer xfers[] = {out.xfer, in.xfer};
    if (nccl_expect(report, parcel_put(&out) && parcel_put(&in), "copies to the device") &&
        report_keep(report, ra_comm_exchange(comm, xfers, 2, TIMEOUT_MS), "exchange")) {
        nccl_expect(report, parcel_holds(&in, theirs), "bytes of a message");
    }
    free(mine);
    free(theirs);
    parcel_free(&out);
    parcel_free(&in);
    return total;
}

static void exchanges(int rank, ra_comm *comm, void *arg, rank_report *report)
{
    (void)arg;
    rng own = rng_of(support_seed() + 1 + (uint64_t)rank);
    uint64_t sent = 0;
    for (int turn = 0; turn < 24 && !report->status; turn++) {
        /* Several pieces, and once more than a round. */
        bool past_a_round = turn == 4 && ra_comm_size(comm) > 1;
        int64_t longest = past_a_round ? 6 << 20 : turn % 4 == 0 ? 100000 : 3000;
        sent += exchange_one(comm, rank, turn, &own, longest, report);
    }
    nccl_expect(report, report->status || ra_comm_bytes_sent(comm) == sent, "count of bytes");
    ra_comm_close(comm);
}

static void gathers(int rank, ra_comm *comm, void *arg, rank_report *report)
{
    (void)arg;
    const size_t sizes[] = {1, 24, 1000, 0, (3 << 20) + 1};
    int size = ra_comm_size(comm);
    for (int i = 0; i < 5 && !report->status; i++) {
        unsigned char *mine = malloc(sizes[i] + 1), *all = malloc(sizes[i] * (size_t)size + 1);
        memset(mine, 16 * i + rank, sizes[i] + 1);
        report_keep(report, ra_comm_gather(comm, mine, sizes[i], all, TIMEOUT_MS), "gather");
        bool same = true;
        for (size_t at = 0; !report->status && at < sizes[i] * (size_t)size; at++) {
            same = same && all[at] == 16 * i + (int)(at / sizes[i]);
        }
        nccl_expect(report, same, "gathered bytes");
        free(mine);
        free(all);
    }
    ra_comm_close(comm);
}

/* After an abort every call fails at once, and the process can open another communicator. */
static void aborts(int rank, ra_comm *comm, void *arg, rank_report *report)
{
    (void)arg;
    ra_nccl_id id;
    ra_comm *again = NULL;
    char mine = 0, all[NCCL_RANKS_MAX];
    ra_comm_abort(comm, "the test wants it");
    double start = support_now();
    nccl_expect(report, ra_comm_gather(comm, &mine, 1, all, TIMEOUT_MS) == RA_E_COMM, "status");
    nccl_expect(report, ra_comm_exchange(comm, NULL, 0, TIMEOUT_MS) == RA_E_COMM, "status, again");
    nccl_expect(report, support_now() - start < 1, "time of a call after an abort");
    ra_comm_close(comm);
    if (report_keep(report, ra_nccl_id_create(&id), "second id") &&
        report_keep(report, ra_comm_open_nccl(&id, 0, 1, rank, &again), "second open") &&
        report_keep(report, ra_comm_gather(again, &mine, 1, all, TIMEOUT_MS), "second gather")) {
        rng r = rng_of(support_seed());
        exchange_one(again, 0, 0, &r, 10000, report);
    }
    ra_comm_close(again);
}

/* Opens and closes; what stays of the device's memory is what NCCL keeps for good. */
static void opens(int rank, ra_comm *comm, void *arg, rank_report *report)
{
    (void)arg;
    size_t free_before = 0, free_after = 0, total = 0;
    ra_comm_close(comm);
    for (int turn = 0; turn < 6 && !report->status; turn++) {
        ra_nccl_id id;
        ra_comm *one = NULL;
        rng r = rng_of(support_seed());
        if (report_keep(report, ra_nccl_id_create(&id), "id") &&
            report_keep(report, ra_comm_open_nccl(&id, 0, 1, rank, &one), "open")) {
            exchange_one(one, 0, 0, &r, 100000, report);
        }
        ra_comm_close(one);
        cudaDeviceSynchronize();
        cudaMemGetInfo(turn == 1 ? &free_before : &free_after, &total);
    }
    nccl_expect(report, free_after + (4 << 20) >= free_before, "memory of closed communicators");
}

static void refusals(int rank, ra_comm *comm, void *arg, rank_report *report)
{
    (void)arg;
    ra_nccl_id id = {{0}};
    ra_comm *out = NULL;
    int devices = ra_cuda_device_count();
    nccl_expect(report, ra_comm_open_nccl(NULL, 0, 1, 0, &out) == RA_E_ARG, "no id");
    nccl_expect(report, ra_comm_open_nccl(&id, 0, 1, 0, NULL) == RA_E_ARG, "no out");
    nccl_expect(report, ra_comm_open_nccl(&id, 1, 1, 0, &out) == RA_E_ARG, "rank past the size");
    nccl_expect(report, ra_comm_open_nccl(&id, -1, 1, 0, &out) == RA_E_ARG, "rank below 0");
    nccl_expect(report, ra_comm_open_nccl(&id, 0, 0, 0, &out) == RA_E_ARG, "no ranks");
    nccl_expect(report, ra_comm_open_nccl(&id, 0, 1, devices, &out) == RA_E_ARG, "no such device");
    nccl_expect(report, ra_nccl_id_create(NULL) == RA_E_ARG, "id to nowhere");
    nccl_expect(report, strlen(ra_nccl_version()) >= 5, "version");
    nccl_expect(report, !out, "out of a refused call");
    (void)rank;
    ra_comm_close(comm);
}

static void test_transport(void **state)
{
    (void)state;
    int sizes[] = {1, nccl_devices() > 1 ? 2 : 0};
    for (int i = 0; i < 2 && sizes[i] > 0; i++) {
        support_limit(100, "messages on %d GPUs", sizes[i]);
        nccl_world_run(sizes[i], exchanges, NULL);
        support_limit(60, "gathers on %d GPUs", sizes[i]);
        nccl_world_run(sizes[i], gathers, NULL);
        support_limit(60, "aborts on %d GPUs", sizes[i]);
        nccl_world_run(sizes[i], aborts, NULL);
    }
    support_limit(60, "opening and closing");
    nccl_world_run(1, opens, NULL);
    support_limit(60, "refused arguments");
    nccl_world_run(1, refusals, NULL);
}

/* ---- whole rings */

typedef struct ring {
    problem p;
    layout l;
    world_options o;
    answer a;
} ring;

enum { RINGS = 16 };

static void run_rings(int rank, ra_comm *comm, void *arg, rank_report *report)
{
    const ring *rings = arg;
    for (int i = 0; i < RINGS && !report->status; i++) {
        answer a = rings[i].a;
        rank_run(comm, &rings[i].p, &rings[i].l, &rings[i].o, rank, &a, report);
    }
    ra_comm_close(comm);
}

static void ring_create(ring *g, int i, rng *r)
{
    static const ra_dtype dtypes[] = {RA_BF16, RA_F16, RA_F32};
    int dim = i % 2 ? 256 : 512;
    ra_layer layer = layer_of(4, i % 3 ? 1 : 2, i % 7 == 6 ? 80 : dim, dtypes[i % 3]);
    int64_t seq = rng_int(r, 1, 300);
    random_mask(r, seq, &layer);
    layer.scale = 1.0f / sqrtf((float)layer.head_dim);
    problem_create(&g->p, layer, rng_chance(r, 70) ? 1 : 2, seq);
    if (i % 2) {
        random_metadata(r, &g->p);
    }
    problem_fill_unit(&g->p, r);
    g->l = layout_kind(i % LAYOUT_KINDS, 2, seq, r);
    g->o = (world_options){.strides = (strides)(i / 2 % STRIDES_COUNT)};
    g->o.ctx.keep_kv = i % 4 == 1;
    g->o.ctx.no_overlap = i % 5 == 2;
    g->o.ctx.timeout_ms = TIMEOUT_MS;
    answer_create(&g->a, &g->p, layer.dtype, RA_F32, true);
}

static void test_rings(void **state)
{
    (void)state;
    if (nccl_devices() < 2) {
        print_message("skipped: whole rings over NCCL need 2 GPUs, here is %d\n", nccl_devices());
        return;
    }
    ring *rings = calloc(RINGS, sizeof *rings);
    rng r = rng_of(support_seed());
    support_limit(100, "random rings on 2 GPUs");
    for (int i = 0; i < RINGS; i++) {
        ring_create(&rings[i], i, &r);
    }
    nccl_world_run(2, run_rings, rings);
    for (int i = 0; i < RINGS; i++) {
        reference ref;
        support_limit(60, "random ring %d on 2 GPUs", i);
        reference_create(&ref, &rings[i].p);
        reference_check_tiny(&ref, &rings[i].p, &rings[i].a);
        reference_free(&ref);
        answer_free(&rings[i].a, true);
        problem_free(&rings[i].p);
    }
    free(rings);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_transport),
        cmocka_unit_test(test_rings),
    };
    support_start(argc, argv);
    if (nccl_devices() == 0 || nccl_unavailable()) {
        printf("skipped: everything: %s\n",
               nccl_devices() == 0 ? "no GPU on this machine" : nccl_unavailable());
        return 0;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
