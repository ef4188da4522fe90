/*
 * First kernel of the tuned backward: probabilities and their gradients of a slab's blocks, into
 * the workspace. s = q k, p = exp(scale s - lse); dp = dout v, ds = p (dp - delta). A CTA computes
 * one block of 128 keys for two units of 128 queries (two heads, or two halves of a strip); a
 * cluster two blocks, whose queries are copied once for both if they are of one strip.
 *
 * Each warpgroup keeps 64 queries of both units as two accumulators, `left` one chunk of 64
 * channels ahead of `right`, so that the arithmetic on each half runs under products of the other:
 *   phase (s or dp):  R0 | LR1 .. | L last | R last under left's | L0 of the next under right's
 * p stays in registers until ds needs it. What is known of each row is fetched by two more warps, a
 * unit ahead: a product must not wait for memory that only the arithmetic behind it reads.
 */
#include "backend/cuda/score.cuh"

using namespace grad;

namespace
{

/* What one CTA computes. */
struct score_unit {
    int live;                       /* 1, or 3 if both CTAs have the same strip */
    int row, index, count;          /* the strip */
    int reach, head, kv_head, slot; /* head and slot of the first unit */
    int source, k_row, k_index, k_count;
    int k_pos;
    int dead;                 /* 16-bit words of the masks before the first unit's */
    int slot_step, dead_step; /* to the second unit */
};

/* ---- hand-out and copies */

RA_PTX void describe_unit(const ra_grad_slab &slab, uint32_t unit, int cta, int4 (&word)[4])
{
    const int pair = unit % slab.pairs, two = unit / slab.pairs;
    const int couples = (slab.block_count + 1) / 2;
    const int kv = two / couples, couple = two % couples;
    /* An odd block at the end is computed by both CTAs: the same bits. */
    const int last = slab.block_count - 1;
    const int at = min(2 * couple + cta, last), other = min(2 * couple + (cta ^ 1), last);
    const ra_slab_block block = slab.block[at];
    const bool shared_strip = slab.block[other].strip == block.strip;
    const ra_slab_strip strip = slab.strip[block.strip];
    const ra_slab_tile tile = slab.tile[block.tile];
    const int first = (kv * slab.pairs + pair) * 2; /* unit of the slab */
    const int head = (slab.kv_first + kv) * slab.group + pair * (1 + slab.unit_head);
    word[0] = make_int4(shared_strip ? 3 : 1, strip.row, strip.index, strip.count);
    word[1] = make_int4(strip.reach, head, slab.kv_first + kv, first * slab.block_count + at);
    word[2] = make_int4(tile.source, tile.row, tile.index, tile.count);
    word[3] = make_int4(tile.pos, (first * slab.strip_count + block.strip - slab.strip_first) * 8,
                        slab.block_count, slab.strip_count * 8);
}

/* One chunk of 64 channels: the queries of both units, the keys. */
RA_PTX void copy_chunk(const ra_score_args &args, shared sm, int stage, const score_unit *u,
                       int chunk, bool product)
{
    const CUtensorMap *a = product ? &args.dout : &args.q;
    const CUtensorMap *b = product ? &args.v[u->source] : &args.k[u->source];
    const uint32_t to = sm.stage(stage), full = sm.bar(FULL + stage);
    const int head_step = args.slab.unit_head, row_step = args.slab.unit_row;
    mbarrier_arrive_expect_tx(full, STAGE_BYTES);
    if (u->live == 3) {
        const int mine = cluster_ctarank();
        cp_async_bulk_tensor_5d_multicast(to + mine * OPERAND_BYTES, a, full, 0,
                                          u->index + mine * row_step, chunk,
                                          u->head + mine * head_step, u->row, 3);
    } else {
        cp_async_bulk_tensor_5d(to, a, full, 0, u->index, chunk, u->head, u->row);
        cp_async_bulk_tensor_5d(to + OPERAND_BYTES, a, full, 0, u->index + row_step, chunk,
                                u->head + head_step, u->row);
    }
    cp_async_bulk_tensor_5d(to + 2 * OPERAND_BYTES, b, full, 0, u->k_index, chunk, u->kv_head,
                            u->k_row);
}

/* One thread. Behind the last unit one more chunk arrives, so that no phase is a special one. */
RA_PTX void copy_units(const ra_score_args &args, shared sm, int chunks)
{
    unit_reader<score_unit> reader;
    ring_place at;
#pragma unroll 1
    for (; reader.wait(sm); reader.release(sm, true)) {
#pragma unroll 1
        for (int i = 0; i < 2 * chunks; i++) {
            mbarrier_wait(sm.bar(EMPTY + at.stage), at.parity ^ 1);
            copy_chunk(args, sm, at.stage, reader.unit(sm), i < chunks ? i : i - chunks,
                       i >= chunks);
            at.next();
        }
    }
    if (reader.n > 0) {
        mbarrier_wait(sm.bar(EMPTY + at.stage), at.parity ^ 1);
        mbarrier_arrive(sm.bar(FULL + at.stage));
    }
}

/* ---- what is known of each row, through shared memory */

constexpr int LANE_ROWS = RA_BLOCK_ROWS / 32;

/* Which keys of the block a row sees. */
RA_PTX uint32_t span_in_block(const ra_work_reach *reach, const score_unit *u, int row, float lse)
{
    if (row >= u->count || lse == -INFINITY) {
        return 0;
    }
    const int2 sees = __ldg((const int2 *)(reach + u->reach + row));
    return span_of(sees.x - u->k_pos, sees.y - u->k_pos, u->k_count);
}
constexpr uint32_t WHOLE_SPANS = 0x80008000u; /* of two rows */
static_assert(RA_BLOCK_KEYS == 0x80, "the span of a row that sees the whole block");

/* Rows past the strip's end read its last one. */
RA_PTX void load_rows(float (&x)[LANE_ROWS], const ra_grad_view &view, const score_unit *u,
                      int head, int row)
{
    const float *first = (const float *)view.data + (u->row * view.row + head * view.head);
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        x[i] = __ldg(first + (u->index + min(row + 32 * i, u->count - 1)) * view.seq);
    }
}

/* One unit of the pair: lse in base 2 and spans, then delta. Tells gemm which rows have no keys at
 * all or are none. */
RA_PTX void fetch_unit_rows(const ra_score_args &args, shared sm, const score_unit *u, int side,
                            uint32_t parity, int lane)
{
    const int row = side * args.slab.unit_row + lane, head = u->head + side * args.slab.unit_head;
    const int to = side * RA_BLOCK_ROWS + lane;
    float x[LANE_ROWS];
    uint32_t span[LANE_ROWS];
    load_rows(x, args.lse, u, head, row);
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        span[i] = span_in_block(args.reach, u, row + 32 * i, x[i]);
    }
    mbarrier_wait(sm.bar(LSE_EMPTY), parity ^ 1);
    griddepcontrol_wait(); /* gemm has read the workspace and the last masks */
    uint32_t *dead = (uint32_t *)(args.slab.dead + u->dead + side * u->dead_step);
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        const uint32_t all = __ballot_sync(~0u, row + 32 * i >= u->count || x[i] == -INFINITY);
        if (lane == 0) {
            dead[i] = all;
        }
        ((volatile float *)(sm.bytes + AT_LSE))[to + 32 * i] = x[i] * LOG2E;
        ((volatile uint16_t *)(sm.bytes + AT_SPAN))[to + 32 * i] = (uint16_t)span[i];
    }
    __syncwarp();
    if (lane == 0) {
        mbarrier_arrive(sm.bar(LSE_FULL));
    }
    load_rows(x, args.delta, u, head, row);
    mbarrier_wait(sm.bar(DELTA_EMPTY), parity ^ 1);
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        ((volatile float *)(sm.bytes + AT_DELTA))[to + 32 * i] = x[i];
    }
    __syncwarp();
    if (lane == 0) {
        mbarrier_arrive(sm.bar(DELTA_FULL));
    }
}

/* Two warps, one for each unit of the pair. */
RA_PTX void fetch_rows(const ra_score_args &args, shared sm, int side, int lane)
{
    unit_reader<score_unit> reader;
    uint32_t parity = 0; /* of the units before */
#pragma unroll 1
    for (; reader.wait(sm); reader.release(sm, lane == 0)) {
        fetch_unit_rows(args, sm, reader.unit(sm), side, parity, lane);
        parity ^= 1;
    }
}

RA_PTX row_values rows_at(shared sm, int from, int row)
{
    const volatile float *x = (const volatile float *)(sm.bytes + from) + row;
    return {x[0], x[8]};
}
RA_PTX uint32_t spans_at(shared sm, int row)
{
    const volatile uint16_t *span = (const volatile uint16_t *)(sm.bytes + AT_SPAN) + row;
    return span[0] | (uint32_t)span[8] << 16;
}

/* ---- arithmetic on half a phase */

/* Where a warp's 16 x 128 values go. */
struct half_place {
    const CUtensorMap *map;
    uint32_t staging;
    int row, slot; /* of the block in the workspace */
};

/* p or ds, rounded, to the workspace. */
template <typename E, bool MASKED, bool DS>
RA_PTX void finish_half(float (&acc)[64], uint32_t (&p)[32], half_place to, float scale,
                        row_values x, uint32_t spans, int lane)
{
    if (lane == 0) {
        cp_async_bulk_wait_group_read<0>(); /* the last store has left the staging memory */
    }
    __syncwarp();
    round_rows<E, MASKED, DS>(acc, p, to.staging, scale, x, spans, lane);
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
        cp_async_bulk_tensor_5d_store(to.map, to.staging, 0, to.row, 0, to.slot, 0);
        cp_async_bulk_commit_group();
    }
}

/* Everything that happens to one half (side 0 left, 1 right) of a phase when its products are
 * there. */
template <typename E, bool DS>
RA_PTX void take_half(const ra_score_args &args, shared sm, const score_unit *u, float (&acc)[64],
                      uint32_t (&p)[32], uint32_t spans, row_values x, int side, int thread,
                      int warpgroup)
{
    const int lane = thread & 31, warp = warpgroup * 4 + thread / 32;
    const half_place to = {DS ? &args.ds : &args.p, sm.base + AT_STAGING + warp * WARP_STAGING,
                           warp * 16, u->slot + side * u->slot_step};
    const float scale = args.slab.scale * LOG2E;
    if (__any_sync(~0u, spans != WHOLE_SPANS)) {
        finish_half<E, true, DS>(acc, p, to, scale, x, spans, lane);
    } else {
        finish_half<E, false, DS>(acc, p, to, scale, x, spans, lane);
    }
}

/* ---- products */

/* One chunk of one half; first: the accumulator starts anew. */
template <typename E>
RA_PTX void multiply(float (&acc)[64], shared sm, int stage, int side, int warpgroup, bool first)
{
    const uint32_t at = sm.stage(stage);
    const uint64_t a =
        descriptor(descriptor_low_k(at + side * OPERAND_BYTES + warpgroup * (OPERAND_BYTES / 2)));
    const uint64_t b = descriptor(descriptor_low_k(at + 2 * OPERAND_BYTES));
#pragma unroll
    for (int k = 0; k < 4; k++) {
        wgmma_ss<E, 0, 0>(acc, a + 2 * k, b + 2 * k, !first || k > 0);
    }
}

/* First chunk of a phase, left half: one group stays in flight. The result is its stage. */
template <typename E>
RA_PTX int open_phase(float (&left)[64], shared sm, ring_place &at, int warpgroup)
{
    const int stage = at.stage;
    mbarrier_wait(sm.bar(FULL + stage), at.parity);
    wgmma_fence();
    multiply<E>(left, sm, stage, 0, warpgroup, true);
    wgmma_commit_group();
    at.next();
    return stage;
}

struct half_state {
    float acc[64];
    uint32_t p[32];
    uint32_t spans;
};

template <typename E, bool DS>
RA_PTX void run_phase(const ra_score_args &args, shared sm, const score_unit *u, half_state &left,
                      half_state &right, ring_place &at, int &opened, uint32_t parity, int thread,
                      int warpgroup, int chunks)
{
    const int row = warpgroup * 64 + thread / 32 * 16 + (thread & 31) / 4;
    constexpr int from = DS ? AT_DELTA : AT_LSE, full = DS ? DELTA_FULL : LSE_FULL;
    int before = opened;
    wgmma_fence();
    multiply<E>(right.acc, sm, opened, 1, warpgroup, true);
    wgmma_commit_group();
#pragma unroll 1
    for (int k = 1; k < chunks - 1; k++) {
        mbarrier_wait(sm.bar(FULL + at.stage), at.parity);
        wgmma_fence();
        multiply<E>(left.acc, sm, at.stage, 0, warpgroup, false);
        multiply<E>(right.acc, sm, at.stage, 1, warpgroup, false);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        release_stage(sm, before, thread);
        before = at.stage;
        at.next();
    }
    mbarrier_wait(sm.bar(full), parity);
    row_values x = rows_at(sm, from, row);
    if constexpr (!DS) {
        left.spans = spans_at(sm, row);
    }
    const int last = at.stage;
    mbarrier_wait(sm.bar(FULL + last), at.parity);
    wgmma_fence();
    multiply<E>(left.acc, sm, last, 0, warpgroup, false);
    wgmma_commit_group();
    at.next();
    wgmma_wait_group<1>();
    release_stage(sm, before, thread);
    wgmma_fence();
    multiply<E>(right.acc, sm, last, 1, warpgroup, false);
    wgmma_commit_group();
    wgmma_wait_group<1>(); /* left is complete */
    take_half<E, DS>(args, sm, u, left.acc, left.p, left.spans, x, 0, thread, warpgroup);
    x = rows_at(sm, from, RA_BLOCK_ROWS + row);
    if constexpr (!DS) {
        right.spans = spans_at(sm, RA_BLOCK_ROWS + row);
    }
    __syncwarp();
    if ((thread & 31) == 0) {
        mbarrier_arrive(sm.bar(DS ? DELTA_EMPTY : LSE_EMPTY));
    }
    opened = open_phase<E>(left.acc, sm, at, warpgroup);
    wgmma_wait_group<1>(); /* right is complete */
    release_stage(sm, last, thread);
    take_half<E, DS>(args, sm, u, right.acc, right.p, right.spans, x, 1, thread, warpgroup);
}

template <typename E>
RA_PTX void multiply_units(const ra_score_args &args, shared sm, int thread, int warpgroup,
                           int chunks)
{
    half_state left, right;
    unit_reader<score_unit> reader;
    ring_place at;
    if (!reader.wait(sm)) {
        return;
    }
    uint32_t parity = 0; /* of the units before */
    int opened = open_phase<E>(left.acc, sm, at, warpgroup);
#pragma unroll 1
    do {
        const score_unit *u = reader.unit(sm);
        run_phase<E, false>(args, sm, u, left, right, at, opened, parity, thread, warpgroup,
                            chunks);
        run_phase<E, true>(args, sm, u, left, right, at, opened, parity, thread, warpgroup, chunks);
        reader.release(sm, (thread & 31) == 0);
        parity ^= 1;
    } while (reader.wait(sm));
    wgmma_wait_group<0>();
    release_stage(sm, opened, thread);
    if ((thread & 31) == 0) {
        cp_async_bulk_wait_group<0>();
    }
}

template <typename E>
__global__ void __launch_bounds__(THREADS, 1) score(const __grid_constant__ ra_score_args args)
{
    extern __shared__ __align__(1024) char bytes[];
    const int thread = threadIdx.x % WARPGROUP, warpgroup = threadIdx.x / WARPGROUP;
    const int chunks = args.slab.chan / RA_SLAB;
    const shared sm = open_shared(bytes, 1 + ROW_WARPS + CONSUMER_WARPS);
    if (warpgroup == 0) {
        setmaxnreg_dec<LOAD_REGISTERS>();
        if (thread == 0) {
            copy_units(args, sm, chunks);
        } else if (thread == 32 && cluster_ctarank() == 0) {
            const ra_grad_slab &slab = args.slab;
            const uint32_t units =
                (uint32_t)((slab.block_count + 1) / 2) * slab.pairs * slab.kv_count;
            hand_out<false>(sm, slab, units, [&](uint32_t unit, int cta, int4(&word)[4]) {
                describe_unit(args.slab, unit, cta, word);
            });
        } else if (thread >= WARPGROUP - 32 * ROW_WARPS) {
            fetch_rows(args, sm, thread / 32 - ROW_WARPS, thread & 31);
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        multiply_units<E>(args, sm, thread, warpgroup - 1, chunks);
    }
    close_shared();
}

} /* namespace */

ra_status ra_grad_score(const ra_score_args *args, ra_dtype dtype, int clusters,
                        cudaStream_t stream)
{
    return launch(dtype == RA_BF16 ? score<__nv_bfloat16> : score<__half>, args, clusters, stream);
}
