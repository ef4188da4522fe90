/*
 * First kernel of the tuned backward at head_dim 256, where a warpgroup can hold its rows of q and
 * dout in registers: only keys and values pass through shared memory, which is what binds the
 * kernel for all head dims (score.cu). A CTA keeps 128 queries of one head and walks a run of
 * blocks, 64 keys at a time; the two CTAs of a cluster have the two units of a strip, so that keys
 * and values are copied once for both.
 *
 * Each warpgroup has two accumulators, so that the arithmetic on one runs under the products of the
 * other:
 *   s of the next keys under ds | rest of s | dp under p | ...
 * A run ends with an s that nobody reads, of whatever comes next, so that no step is a special one.
 */
#include "backend/cuda/score.cuh"

using namespace grad;

namespace
{

/* Places of 64 rows x 256 channels, instead of stages. What is known of the keys of a place and of
 * the rows of the run, and the barriers of places: where the other kernel knows its rows. */
constexpr int PLACES = 6, PLACE_BYTES = 32768, SLAB_BYTES = PLACE_BYTES / 4;
constexpr int AT_KEYS = AT_LSE, AT_PLACE = AT_KEYS + PLACES * 16,
              AT_ROWS_BAR = AT_PLACE + 2 * PLACES * 8, AT_ROWS = AT_ROWS_BAR + 2 * ROW_WARPS * 8;
static_assert(PLACES * PLACE_BYTES <= AT_STAGING && AT_KEYS % 16 == 0 && AT_ROWS % 16 == 0 &&
                  AT_ROWS + RA_BLOCK_ROWS * 16 <= AT_BARRIER,
              "shared memory");

/* Of 16 products of depth 16; the last ones of s wait for the next step, as the compiler takes a
 * sum for complete only if it was added to in the same one. */
constexpr int DEPTH = 16, EARLY = 12;

/* The next run is taken when so many blocks are left to copy: in time to be described and to
 * begin behind the last of them. */
constexpr int TAKE_BLOCKS = 3;

using run_place = place_in_ring<PLACES>;

/* What one CTA computes. */
struct run_unit {
    int live;                       /* 1 */
    int row, index, count;          /* queries; count may be 0 */
    int reach, head, kv_head, slot; /* slot: of the first block */
    int block, blocks;              /* block: from the slab's first */
    int dead;                       /* 16-bit words of the masks before the unit's */
    int unused[5];
};

/* The keys of a place. */
struct __align__(16) place_keys
{
    int pos, count; /* of the first; how many there are */
    int slot;       /* of the block */
    int which;      /* half of the block; and 2 in the last step of a run */
};
RA_PTX place_keys *keys_of(shared sm, int place)
{
    return (place_keys *)(sm.bytes + AT_KEYS) + place;
}
/* What is known of a row: lse in base 2, the keys that it sees. */
struct __align__(16) unit_row
{
    float lse, delta;
    int begin, end;
};
RA_PTX unit_row *row_of(shared sm, int row)
{
    return (unit_row *)(sm.bytes + AT_ROWS) + row;
}

RA_PTX uint32_t place_at(shared sm, int i)
{
    return sm.base + i * PLACE_BYTES;
}
RA_PTX uint32_t full_at(shared sm, int i)
{
    return sm.base + AT_PLACE + 8 * i;
}
RA_PTX uint32_t empty_at(shared sm, int i)
{
    return sm.base + AT_PLACE + 8 * (PLACES + i);
}
/* The same of a warpgroup's rows. */
RA_PTX uint32_t rows_full_at(shared sm, int warpgroup)
{
    return sm.base + AT_ROWS_BAR + 8 * warpgroup;
}
RA_PTX uint32_t rows_empty_at(shared sm, int warpgroup)
{
    return sm.base + AT_ROWS_BAR + 8 * (ROW_WARPS + warpgroup);
}
/* A warpgroup is done with a place: a thread each tells the loaders of both CTAs. */
RA_PTX void release_place(shared sm, int i, int thread)
{
    if ((thread & 31) == 0 && thread < 32 * CTAS) {
        mbarrier_arrive_cluster(mapa(empty_at(sm, i), thread >> 5));
    }
}

/* ---- hand-out and copies */

RA_PTX void describe_unit(const ra_grad_slab &slab, uint32_t unit, int cta, int4 (&word)[4])
{
    const int pair = unit % slab.pairs, rest = unit / slab.pairs, kv = rest % slab.kv_count;
    const ra_slab_run run = slab.run[rest / slab.kv_count];
    const ra_slab_strip strip = slab.strip[run.strip];
    const int own = (kv * slab.pairs + pair) * 2 + cta; /* unit of the slab */
    const int kv_head = slab.kv_first + kv, skip = cta * slab.unit_row;
    const int head = kv_head * slab.group + pair * (1 + slab.unit_head) + cta * slab.unit_head;
    word[0] =
        make_int4(1, strip.row, strip.index + skip, max(min(strip.count - skip, RA_BLOCK_ROWS), 0));
    word[1] = make_int4(strip.reach + skip, head, kv_head, own * slab.block_count + run.first);
    word[2] = make_int4(run.first, run.count,
                        (own * slab.strip_count + run.strip - slab.strip_first) * 8, 0);
}

/* 128 rows of q or dout: a place for each warpgroup. */
RA_PTX void copy_queries(shared sm, run_place &at, const run_unit *u, const CUtensorMap *map)
{
#pragma unroll 1
    for (int half = 0; half < 2; half++) {
        const uint32_t to = place_at(sm, at.stage), full = full_at(sm, at.stage);
        const int index = u->index + half * RA_STEP;
        mbarrier_wait(empty_at(sm, at.stage), at.parity ^ 1);
        mbarrier_arrive_expect_tx(full, PLACE_BYTES);
        cp_async_bulk_tensor_5d(to, map, full, 0, index, 0, u->head, u->row);
        cp_async_bulk_tensor_5d(to + 2 * SLAB_BYTES, map, full, 0, index, 2, u->head, u->row);
        at.next();
    }
}

/* 64 keys or values, half of the channels by each CTA. */
RA_PTX void copy_keys(shared sm, run_place &at, const CUtensorMap *map, place_keys keys, int row,
                      int index, int kv_head)
{
    const int mine = 2 * cluster_ctarank();
    const uint32_t to = place_at(sm, at.stage) + mine * SLAB_BYTES, full = full_at(sm, at.stage);
    mbarrier_wait(empty_at(sm, at.stage), at.parity ^ 1);
    *keys_of(sm, at.stage) = keys;
    mbarrier_arrive_expect_tx(full, PLACE_BYTES);
    cp_async_bulk_tensor_5d_multicast(to, map, full, 0, index, mine, kv_head, row, 3);
    at.next();
}

/* One thread. Rows of q, keys, rows of dout, values, then keys and values in turn; behind the last
 * unit one more place, without anything in it. */
RA_PTX void copy_units(const ra_score_args &args, shared sm)
{
    unit_reader<run_unit> reader;
    run_place at;
#pragma unroll 1
    for (; reader.wait(sm); reader.release(sm, true)) {
        const run_unit *u = reader.unit(sm);
        bool first = true;
        copy_queries(sm, at, u, &args.q);
#pragma unroll 1
        for (int i = 0; i < u->blocks; i++) {
            const ra_slab_tile tile = args.slab.tile[args.slab.block[u->block + i].tile];
            if (i == max(u->blocks - TAKE_BLOCKS, 0)) {
                reader.ends(sm);
            }
#pragma unroll 1
            for (int done = 0; done < tile.count; done += RA_STEP) {
                const bool last = i + 1 == u->blocks && tile.count - done <= RA_STEP;
                const place_keys keys = {tile.pos + done, min(tile.count - done, RA_STEP),
                                         u->slot + i, done / RA_STEP + 2 * last};
                const int index = tile.index + done;
                copy_keys(sm, at, &args.k[tile.source], keys, tile.row, index, u->kv_head);
                if (first) {
                    copy_queries(sm, at, u, &args.dout);
                    first = false;
                }
                copy_keys(sm, at, &args.v[tile.source], keys, tile.row, index, u->kv_head);
            }
        }
    }
    if (reader.n > 0) {
        mbarrier_wait(empty_at(sm, at.stage), at.parity ^ 1);
        mbarrier_arrive(full_at(sm, at.stage));
    }
}

/* ---- rows */

constexpr int LANE_ROWS = RA_BLOCK_ROWS / (32 * ROW_WARPS);

RA_PTX float value_of(const ra_grad_view &view, const run_unit *u, int row)
{
    return __ldg((const float *)view.data + u->row * view.row + u->head * view.head +
                 (u->index + row) * view.seq);
}

/* The rows of a warpgroup. Tells gemm which have no keys at all or are none. */
RA_PTX void fetch_unit_rows(const ra_score_args &args, shared sm, const run_unit *u, int warpgroup,
                            uint32_t parity, int lane)
{
    float x[LANE_ROWS], y[LANE_ROWS];
    int2 sees[LANE_ROWS];
    const int first = warpgroup * 32 * LANE_ROWS + lane;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        const int row = first + 32 * i;
        const bool live = row < u->count;
        x[i] = live ? value_of(args.lse, u, row) : -INFINITY;
        y[i] = live ? value_of(args.delta, u, row) : 0.0f;
        sees[i] = live ? __ldg((const int2 *)(args.reach + u->reach + row)) : make_int2(0, 0);
    }
    mbarrier_wait(rows_empty_at(sm, warpgroup), parity ^ 1);
    griddepcontrol_wait(); /* gemm has read the workspace and the last masks */
#pragma unroll
    for (int i = 0; i < LANE_ROWS; i++) {
        const bool dead = x[i] == -INFINITY;
        const uint32_t all = __ballot_sync(~0u, dead);
        if (lane == 0) {
            ((uint32_t *)(args.slab.dead + u->dead))[warpgroup * LANE_ROWS + i] = all;
        }
        *row_of(sm, first + 32 * i) = {x[i] * LOG2E, y[i], dead ? 0 : sees[i].x,
                                       dead ? 0 : sees[i].y};
    }
    __syncwarp();
    if (lane == 0) {
        mbarrier_arrive(rows_full_at(sm, warpgroup));
    }
}

/* A warp for each warpgroup, a unit ahead. */
RA_PTX void fetch_rows(const ra_score_args &args, shared sm, int warpgroup, int lane)
{
    unit_reader<run_unit> reader;
    uint32_t parity = 0; /* of the units before */
#pragma unroll 1
    for (; reader.wait(sm); reader.release(sm, lane == 0)) {
        fetch_unit_rows(args, sm, reader.unit(sm), warpgroup, parity, lane);
        parity ^= 1;
    }
}

/* The first operand of the products with 64 rows: what this warp multiplies of them. */
RA_PTX void load_fragments(uint32_t (&a)[4 * DEPTH], shared sm, run_place &at, int thread,
                           int warpgroup)
{
    const int lane = thread & 31, warp = thread / 32;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        mbarrier_wait(full_at(sm, at.stage), at.parity);
        if (half == warpgroup) {
            const uint32_t row = place_at(sm, at.stage) + (warp * 16 + (lane & 15)) * 128;
#pragma unroll
            for (int k = 0; k < DEPTH; k++) {
                const uint32_t chunk = (uint32_t)((k & 3) * 2 + (lane >> 4)) ^ (lane & 7);
                ldmatrix_x4(row + k / 4 * SLAB_BYTES + (chunk << 4), a[4 * k], a[4 * k + 1],
                            a[4 * k + 2], a[4 * k + 3]);
            }
        }
        if (warpgroup == 0) {
            bar_sync<1, WARPGROUP>();
        } else {
            bar_sync<2, WARPGROUP>();
        }
        release_place(sm, at.stage, thread);
        at.next();
    }
}

/* ---- products of one step and the arithmetic on them */

/* Products [FIRST, END) of the 16. */
template <typename E, int FIRST, int END>
RA_PTX void multiply(float (&acc)[32], const uint32_t (&a)[4 * DEPTH], shared sm, int place)
{
    const uint64_t b = descriptor(descriptor_low_k(place_at(sm, place)));
#pragma unroll
    for (int k = FIRST; k < END; k++) {
        wgmma_rs<E, 0>(acc, a[4 * k], a[4 * k + 1], a[4 * k + 2], a[4 * k + 3],
                       b + k / 4 * (SLAB_BYTES / 16) + 2 * (k & 3), k > 0);
    }
}

/* 64 keys of a block, for two rows of a thread. */
struct step_keys {
    uint32_t spans;
    int to; /* four times the slot of the block, and which */
};
constexpr uint32_t WHOLE_SPANS = 0x40004000u;
static_assert(RA_STEP == 0x40, "the span of a row that sees all keys of a step");

RA_PTX step_keys keys_at(shared sm, int place, int warp, int lane)
{
    const place_keys keys = *keys_of(sm, place);
    uint32_t spans = 0;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const unit_row row = *row_of(sm, warp * 16 + lane / 4 + 8 * i);
        spans |= span_of(row.begin - keys.pos, row.end - keys.pos, keys.count) << (16 * i);
    }
    return {spans, 4 * keys.slot + keys.which};
}

/* acc becomes p or ds, in the workspace. */
template <typename E, bool DS>
RA_PTX void finish(const ra_score_args &args, shared sm, float (&acc)[32], uint32_t (&p)[16],
                   const step_keys &step, int warp, int lane)
{
    const uint32_t staging = sm.base + AT_STAGING + (2 * warp + DS) * (WARP_STAGING / 2);
    const volatile unit_row *row = row_of(sm, warp * 16 + lane / 4);
    const row_values x =
        DS ? row_values{row[0].delta, row[8].delta} : row_values{row[0].lse, row[8].lse};
    const float scale = args.slab.scale * LOG2E;
    if (lane == 0) {
        cp_async_bulk_wait_group_read<1>(); /* the last store has left this half */
    }
    __syncwarp();
    if (__any_sync(~0u, step.spans != WHOLE_SPANS)) {
        round_rows<E, true, DS>(acc, p, staging, scale, x, step.spans, lane);
    } else {
        round_rows<E, false, DS>(acc, p, staging, scale, x, step.spans, lane);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
        cp_async_bulk_tensor_5d_store(DS ? &args.ds : &args.p, staging, 0, warp * 16, step.to & 1,
                                      step.to >> 2, 0);
        cp_async_bulk_commit_group();
    }
}

template <typename E>
RA_PTX void multiply_unit(const ra_score_args &args, shared sm, run_place &at, uint32_t parity,
                          int thread, int warpgroup)
{
    const int lane = thread & 31, warp = warpgroup * 4 + thread / 32;
    uint32_t q[4 * DEPTH], dout[4 * DEPTH], p[16];
    float s[32] = {}, dp[32] = {};
    load_fragments(q, sm, at, thread, warpgroup);
    int keys = at.stage;
    mbarrier_wait(full_at(sm, keys), at.parity);
    wgmma_fence();
    multiply<E, 0, EARLY>(s, q, sm, keys);
    wgmma_commit_group();
    at.next();
    load_fragments(dout, sm, at, thread, warpgroup);
    mbarrier_wait(rows_full_at(sm, warpgroup), parity);
    bool last;
#pragma unroll 1
    do {
        const int values = at.stage;
        mbarrier_wait(full_at(sm, values), at.parity);
        const step_keys mine = keys_at(sm, values, warp, lane);
        last = mine.to & 2;
        at.next();
        wgmma_fence();
        multiply<E, EARLY, DEPTH>(s, q, sm, keys);
        wgmma_commit_group();
        wgmma_wait_group<1>();
        wgmma_fence();
        multiply<E, 0, DEPTH>(dp, dout, sm, values);
        wgmma_commit_group();
        wgmma_wait_group<1>(); /* s is complete */
        wgmma_fence_operand(s);
        release_place(sm, keys, thread);
        finish<E, false>(args, sm, s, p, mine, warp, lane);
        keys = at.stage;
        mbarrier_wait(full_at(sm, keys), at.parity);
        wgmma_fence();
        multiply<E, 0, EARLY>(s, q, sm, keys);
        wgmma_commit_group();
        if (!last) {
            at.next();
        }
        wgmma_wait_group<1>(); /* dp is complete */
        wgmma_fence_operand(dp);
        release_place(sm, values, thread);
        finish<E, true>(args, sm, dp, p, mine, warp, lane);
    } while (!last);
    wgmma_wait_group<0>();
    __syncwarp();
    if (lane == 0) {
        mbarrier_arrive(rows_empty_at(sm, warpgroup));
    }
}

template <typename E>
RA_PTX void multiply_units(const ra_score_args &args, shared sm, int thread, int warpgroup)
{
    const int lane = thread & 31;
    unit_reader<run_unit> reader;
    run_place at;
#pragma unroll 1
    while (reader.wait(sm)) {
        const uint32_t parity = reader.n & 1; /* of the units before */
        __syncwarp();
        reader.release(sm, lane == 0);
        multiply_unit<E>(args, sm, at, parity, thread, warpgroup);
    }
    if (lane == 0) {
        cp_async_bulk_wait_group<0>();
    }
}

template <typename E>
__global__ void __launch_bounds__(THREADS, 1) score_256(const __grid_constant__ ra_score_args args)
{
    extern __shared__ __align__(1024) char bytes[];
    const int thread = threadIdx.x % WARPGROUP, warpgroup = threadIdx.x / WARPGROUP;
    if (threadIdx.x == 0) { /* the thread that also opens the rest */
        const shared early = {bytes, smem_address(bytes)};
        for (int i = 0; i < PLACES; i++) {
            mbarrier_init(full_at(early, i), 1);
            mbarrier_init(empty_at(early, i), 2 * CTAS);
        }
        for (int i = 0; i < ROW_WARPS; i++) {
            mbarrier_init(rows_full_at(early, i), 1);
            mbarrier_init(rows_empty_at(early, i), CONSUMER_WARPS / ROW_WARPS);
        }
    }
    const shared sm = open_shared(bytes, 1 + ROW_WARPS + CONSUMER_WARPS);
    if (warpgroup == 0) {
        setmaxnreg_dec<LOAD_REGISTERS>();
        if (thread == 0) {
            copy_units(args, sm);
        } else if (thread == 32 && cluster_ctarank() == 0) {
            const ra_grad_slab &slab = args.slab;
            const uint32_t units = (uint32_t)slab.run_count * slab.pairs * slab.kv_count;
            hand_out<true>(sm, slab, units, [&](uint32_t unit, int cta, int4(&word)[4]) {
                describe_unit(args.slab, unit, cta, word);
            });
        } else if (thread >= WARPGROUP - 32 * ROW_WARPS) {
            fetch_rows(args, sm, thread / 32 - ROW_WARPS, thread & 31);
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        multiply_units<E>(args, sm, thread, warpgroup - 1);
    }
    close_shared();
}

} /* namespace */

ra_status ra_grad_score_256(const ra_score_args *args, ra_dtype dtype, int clusters,
                            cudaStream_t stream)
{
    return launch(dtype == RA_BF16 ? score_256<__nv_bfloat16> : score_256<__half>, args, clusters,
                  stream);
}
