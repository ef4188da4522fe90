/*
 * Second kernel of the tuned backward: adds the products of a slab's blocks to the gradients.
 * dq += scale ds k, dk += scale ds^T q, dv += p^T dout. A CTA computes 128 rows x 256 channels in
 * steps of depth 64 over keys (dq) or queries (dk, dv); a cluster two such tiles, whose second
 * operand, keys or queries, is copied once for both if they walk the same. Queries without keys and
 * rows behind a run's end are cleared in shared memory before they are multiplied: the workspace
 * holds zeros for them, and zero times NaN is NaN.
 *
 * The first computation that adds to a tile stores its sum instead, and the last one stores the
 * tile of the result, rounded: sums of one slab never go through memory.
 *
 * Each tile has one writer in a launch and launches are ordered, so that adding in memory gives the
 * same bits every time.
 */
#include "backend/cuda/grad.cuh"

using namespace grad;

namespace
{

enum { DQ = 1, DK, DV };

/* What one CTA computes. */
struct gemm_unit {
    int kind;                      /* DQ, DK, DV */
    int steps;                     /* the same for both CTAs */
    int shared;                    /* both CTAs need the same keys or queries */
    int slab64;                    /* first channel / 64 */
    int source, row, index, count; /* rows of the result; count 0: none */
    int head;                      /* of the result */
    int b_head;       /* of the second operand: KV head, or the group's first query head */
    int first, terms; /* blocks, or refs */
    int slot;         /* DQ: of the slab's first block; DK, DV: of the first unit's */
    int dead;         /* DK, DV: mask of the first unit's first strip */
    int cta;          /* in the cluster */
    int when;         /* RA_SLAB_* */
};

/* ---- hand-out */

RA_PTX void describe_unit(const ra_grad_slab &slab, uint32_t unit, int cta, int4 (&word)[4])
{
    const int parts = (slab.chan + RA_PRODUCT_CHAN - 1) / RA_PRODUCT_CHAN;
    const int kv = unit % slab.kv_count;
    const ra_slab_unit which = slab.unit[unit / slab.kv_count];
    const ra_slab_output output = slab.output[which.output];
    const int n = which.part % parts * (RA_PRODUCT_CHAN / RA_SLAB), pair = which.part / parts;
    const int units = kv * slab.pairs * 2; /* of the KV heads before */
    const int kv_head = slab.kv_first + kv, group_head = kv_head * slab.group;
    const int part = cta ? output.part[1] : output.part[0];
    const int first = cta ? output.first[1] : output.first[0];
    const int count = cta ? output.count[1] : output.count[0];
    const int when = cta ? output.when[1] : output.when[0];
    if (output.keys) {
        const ra_slab_tile tile = slab.tile[max(part, 0)];
        word[0] = make_int4(DK + pair, output.steps, output.shared, n);
        word[1] = make_int4(tile.source, tile.row, tile.index, part < 0 ? 0 : tile.count);
        word[2] = make_int4(kv_head, group_head, first, count);
        word[3] = make_int4(units * slab.block_count, units * slab.strip_count, cta, when);
    } else {
        const ra_slab_strip strip = slab.strip[part];
        const int rows = min(strip.count - cta * slab.unit_row, RA_BLOCK_ROWS);
        const int head = group_head + pair * (1 + slab.unit_head) + cta * slab.unit_head;
        word[0] = make_int4(DQ, output.steps, 1, n);
        word[1] = make_int4(0, strip.row, strip.index + cta * slab.unit_row, max(rows, 0));
        word[2] = make_int4(head, kv_head, first, count);
        word[3] = make_int4((units + 2 * pair + cta) * slab.block_count, 0, cta, when);
    }
}

/* ---- copies */

/* The second operand of a step: 64 rows x 256 channels, and which of the rows are dead. */
RA_PTX void copy_second(shared sm, int stage, const gemm_unit *u, const CUtensorMap *map, int row,
                        int index, int head, uint64_t dead)
{
    const uint32_t to = sm.stage(stage) + OPERAND_BYTES, full = sm.bar(FULL + stage);
    *(volatile uint64_t *)(sm.bytes + AT_DEAD + 8 * stage) = dead;
    mbarrier_arrive_expect_tx(full, STAGE_BYTES);
    if (u->shared) {
        cp_async_bulk_tensor_5d_multicast(to + u->cta * OPERAND_BYTES, map, full, 0, index,
                                          u->slab64 + 2 * u->cta, head, row, 3);
    } else {
        cp_async_bulk_tensor_5d(to, map, full, 0, index, u->slab64, head, row);
        cp_async_bulk_tensor_5d(to + OPERAND_BYTES, map, full, 0, index, u->slab64 + 2, head, row);
    }
}

/* dq: the blocks of a strip, 64 keys a step. */
RA_PTX void copy_keys(const ra_gemm_args &args, shared sm, const gemm_unit *u, ring_place &at)
{
#pragma unroll 1
    for (int i = 0; i < u->terms; i++) {
        const int block = u->first + i;
        const ra_slab_tile tile = args.slab.tile[args.slab.block[block].tile];
#pragma unroll 1
        for (int done = 0; done < tile.count; done += RA_STEP) {
            const int left = tile.count - done;
            mbarrier_wait(sm.bar(EMPTY + at.stage), at.parity ^ 1);
            copy_second(sm, at.stage, u, &args.k[tile.source], tile.row, tile.index + done,
                        u->b_head, left < RA_STEP ? ~0ull << left : 0);
            cp_async_bulk_tensor_5d(sm.stage(at.stage), &args.ds_rows, sm.bar(FULL + at.stage), 0,
                                    0, done / RA_STEP, u->slot + block, 0);
            at.next();
        }
    }
}

/* What the steps of one strip need besides the data: at most two of them. */
struct query_term {
    int row, index, head, steps, slot;
    ulonglong2 dead; /* a mask for each step */
};

RA_PTX query_term fetch_term(const ra_grad_slab &slab, const gemm_unit *u, int unit, int i)
{
    const int odd = unit & 1;
    const int4 *words = (const int4 *)(slab.ref + u->first + i);
    const int4 strip = __ldg(words);
    const int2 blocks = __ldg((const int2 *)(words + 1));
    const int block = u->cta ? blocks.y : blocks.x;
    query_term term;
    term.row = strip.x;
    term.index = strip.y + odd * slab.unit_row;
    term.head = u->b_head + (unit >> 1) * (1 + slab.unit_head) + odd * slab.unit_head;
    term.steps = odd ? strip.w >> 8 : strip.w & 0xff;
    term.slot = block < 0 ? -1 : u->slot + unit * slab.block_count + block;
    term.dead = __ldcg((const ulonglong2 *)slab.dead + u->dead + unit * slab.strip_count + strip.z);
    return term;
}

/* dk and dv: for each unit of the group the strips that see the tile, 64 queries a step. A block
 * that is not there is copied from before the workspace: zeros. What a strip needs is looked up
 * under the steps of the one before, so that no step waits for it. */
RA_PTX void copy_queries(const ra_gemm_args &args, shared sm, const gemm_unit *u, ring_place &at)
{
    const ra_grad_slab &slab = args.slab;
    const CUtensorMap *first = u->kind == DK ? &args.ds_keys : &args.p_keys;
    const CUtensorMap *second = u->kind == DK ? &args.q : &args.dout;
    const int units = 2 * slab.pairs;
    query_term next = fetch_term(slab, u, 0, 0);
#pragma unroll 1
    for (int unit = 0, i = 0; unit < units;) {
        const query_term term = next;
        if (++i == u->terms) {
            i = 0;
            unit++;
        }
        next = fetch_term(slab, u, min(unit, units - 1), i);
#pragma unroll 1
        for (int step = 0; step < term.steps; step++) {
            mbarrier_wait(sm.bar(EMPTY + at.stage), at.parity ^ 1);
            copy_second(sm, at.stage, u, second, term.row, term.index + step * RA_STEP, term.head,
                        step ? term.dead.y : term.dead.x);
            cp_async_bulk_tensor_5d(sm.stage(at.stage), first, sm.bar(FULL + at.stage), 0,
                                    step * RA_STEP, 0, term.slot, 0);
            at.next();
        }
    }
}

/* One thread. */
RA_PTX void copy_units(const ra_gemm_args &args, shared sm)
{
    unit_reader<gemm_unit> reader;
    ring_place at;
#pragma unroll 1
    for (; reader.wait(sm); reader.release(sm, true)) {
        const gemm_unit *u = reader.unit(sm);
        griddepcontrol_wait(); /* the scores are there */
        if (u->kind == DQ) {
            copy_keys(args, sm, u, at);
        } else {
            copy_queries(args, sm, u, at);
        }
    }
}

/* ---- products */

/* Both warpgroups: clears the rows of the mask in the second operand. A row is 128 bytes in each of
 * four parts, wherever the swizzle puts its words. */
RA_PTX void clear_rows(shared sm, int stage, uint64_t dead, int thread, int warpgroup)
{
    const int lane = thread & 31;
    const uint32_t at =
        sm.stage(stage) + OPERAND_BYTES + lane / 8 * (OPERAND_BYTES / 2) + lane % 8 * 16;
#pragma unroll 1
    for (int row = warpgroup * 4 + thread / 32; row < RA_STEP; row += CONSUMER_WARPS) {
        if (dead >> row & 1) {
            st_shared_v4(at + row * 128, make_uint4(0, 0, 0, 0));
        }
    }
    fence_proxy_async();
    bar_sync<1, 2 * WARPGROUP>();
}

/* ROWS: the first operand is stored by rows of the result (dq), else by columns. */
template <typename E, bool ROWS>
RA_PTX void multiply(float (&acc)[128], shared sm, int steps, ring_place &at, int thread,
                     int warpgroup)
{
    int before = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
        mbarrier_wait(sm.bar(FULL + at.stage), at.parity);
        const uint64_t dead = *(const volatile uint64_t *)(sm.bytes + AT_DEAD + 8 * at.stage);
        if (dead) {
            clear_rows(sm, at.stage, dead, thread, warpgroup);
        }
        const uint32_t first = sm.stage(at.stage) + warpgroup * (OPERAND_BYTES / 2);
        const uint32_t second = sm.stage(at.stage) + OPERAND_BYTES;
        const uint64_t a = descriptor(ROWS ? descriptor_low_k(first)
                                           : descriptor_low_mn(first, OPERAND_BYTES / 2));
        const uint64_t b = descriptor(descriptor_low_mn(second, OPERAND_BYTES / 2));
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            wgmma_ss<E, ROWS ? 0 : 1, 1>(acc, a + (ROWS ? 2 : 128) * k, b + 128 * k, step | k);
        }
        wgmma_commit_group();
        wgmma_wait_group<1>();
        if (step > 0) {
            release_stage(sm, before, thread);
        }
        before = at.stage;
        at.next();
    }
    wgmma_wait_group<0>();
    release_stage(sm, before, thread);
}

/* ---- a warp's 16 rows x 256 channels, to the sums or to the result */

/* Where they go. */
struct warp_place {
    const ra_grad_view *view; /* of the sums */
    const CUtensorMap *map;   /* of the sums, or of the result where that is written */
    float scale;
    int row, lane;
    int end; /* of the channels, from the first */
};

/* The first channel that this thread has of one of the warp's rows. */
template <typename T>
RA_PTX T *address_of(const ra_grad_view *view, const gemm_unit *u, int row, int lane)
{
    return (T *)view->data +
           (u->row * view->row + u->head * view->head + (int64_t)(u->index + row) * view->seq +
            u->slab64 * RA_SLAB + (lane & 3) * 2);
}

/* All 16 rows, 32 channels at a time; fresh: there is nothing to add to. */
RA_PTX void add_boxes(const float (&acc)[128], uint32_t staging, const gemm_unit *u,
                      const warp_place &to, bool fresh)
{
    const uint32_t own = to.lane / 4 * 128 + (to.lane & 1) * 8;
    const int chan = u->slab64 * RA_SLAB;
#pragma unroll
    for (int box = 0; box < 8; box++) {
        if (box * 32 >= to.end) {
            break;
        }
        const uint32_t from = staging + (box & 1) * (WARP_STAGING / 2);
        if (to.lane == 0) {
            cp_async_bulk_wait_group_read<1>();
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t word = (uint32_t)((j * 2 + (to.lane >> 1 & 1)) ^ (to.lane / 4)) << 4;
            const int i = box * 16 + j * 4;
            st_shared_v2(from + own + word, acc[i] * to.scale, acc[i + 1] * to.scale);
            st_shared_v2(from + own + 1024 + word, acc[i + 2] * to.scale, acc[i + 3] * to.scale);
        }
        fence_proxy_async();
        __syncwarp();
        if (to.lane == 0) {
            if (fresh) {
                cp_async_bulk_tensor_4d_store(to.map, from, chan + box * 32, u->index + to.row,
                                              u->head, u->row);
            } else {
                cp_reduce_async_bulk_tensor_4d_add(to.map, from, chan + box * 32, u->index + to.row,
                                                   u->head, u->row);
            }
            cp_async_bulk_commit_group();
        }
    }
}

/* Where some of the 16 rows are not the result's: those are not touched. */
RA_PTX void add_rows(const float (&acc)[128], const gemm_unit *u, const warp_place &to, bool fresh)
{
    const int mine = to.row + to.lane / 4;
    float *first = address_of<float>(to.view, u, mine, to.lane);
    float *second = first + 8 * to.view->seq;
    const int end_a = mine < u->count ? to.end : 0, end_b = mine + 8 < u->count ? to.end : 0;
#pragma unroll
    for (int i = 0; i < 128; i++) {
        float *at = (i & 2 ? second : first) + i / 4 * 8 + (i & 1);
        if (i / 4 * 8 < (i & 2 ? end_b : end_a)) {
            if (fresh) {
                *at = acc[i] * to.scale;
            } else {
                atomicAdd(at, acc[i] * to.scale);
            }
        }
    }
}

/* What earlier slabs summed up, and four values more. */
RA_PTX void take_sums(float (&x)[4], const float *first, const float *second)
{
    const float2 a = __ldcg((const float2 *)first), b = __ldcg((const float2 *)second);
    x[0] += a.x;
    x[1] += a.y;
    x[2] += b.x;
    x[3] += b.y;
}

/* The result, rounded, 64 channels at a time; sums: earlier slabs have added something. */
template <typename E>
RA_PTX void store_boxes(const float (&acc)[128], uint32_t staging, const gemm_unit *u,
                        const warp_place &to, bool sums)
{
    const float *first = address_of<float>(to.view, u, to.row + to.lane / 4, to.lane);
    const float *second = first + 8 * to.view->seq;
#pragma unroll
    for (int box = 0; box < 4; box++) {
        if (box * RA_SLAB >= to.end) {
            break;
        }
        uint32_t out[16];
#pragma unroll
        for (int j = 0; j < 8; j++) { /* of 8 channels */
            const int i = box * 32 + j * 4;
            float x[4] = {acc[i] * to.scale, acc[i + 1] * to.scale, acc[i + 2] * to.scale,
                          acc[i + 3] * to.scale};
            if (sums) {
                take_sums(x, first + i * 2, second + i * 2);
            }
            out[2 * j] = cvt_rn_x2<E>(x[0], x[1]);
            out[2 * j + 1] = cvt_rn_x2<E>(x[2], x[3]);
        }
        const uint32_t from = staging + (box & 1) * (WARP_STAGING / 2);
        if (to.lane == 0) {
            cp_async_bulk_wait_group_read<1>();
        }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 4; j++) { /* 16 channels */
            const uint32_t chunk = (uint32_t)(j * 2 + (to.lane >> 4)) ^ (to.lane & 7);
            stmatrix_x4(from + (to.lane & 15) * 128 + (chunk << 4), out[4 * j], out[4 * j + 1],
                        out[4 * j + 2], out[4 * j + 3]);
        }
        fence_proxy_async();
        __syncwarp();
        if (to.lane == 0) {
            cp_async_bulk_tensor_5d_store(to.map, from, 0, u->index + to.row, u->slab64 + box,
                                          u->head, u->row);
            cp_async_bulk_commit_group();
        }
    }
}

template <typename E>
RA_PTX void store_rows(const float (&acc)[128], const gemm_unit *u, const warp_place &to,
                       const ra_grad_view *result, bool sums)
{
    const int mine = to.row + to.lane / 4;
#pragma unroll
    for (int half = 0; half < 2; half++) { /* rows eight apart */
        const int row = mine + 8 * half;
        const float *sum = address_of<float>(to.view, u, row, to.lane);
        E *at = address_of<E>(result, u, row, to.lane);
        const int end = row < u->count ? to.end : 0;
#pragma unroll
        for (int i = 2 * half; i < 128; i += 4) {
            const int c = i / 4 * 8;
            if (c < end) {
                const float2 more =
                    sums ? __ldcg((const float2 *)(sum + c)) : make_float2(0.0f, 0.0f);
                *(uint32_t *)(at + c) =
                    cvt_rn_x2<E>(acc[i] * to.scale + more.x, acc[i + 1] * to.scale + more.y);
            }
        }
    }
}

template <typename E>
RA_PTX void add_result(const ra_gemm_args &args, shared sm, const gemm_unit *u,
                       const float (&acc)[128], int thread, int warpgroup)
{
    const int warp = warpgroup * 4 + thread / 32, when = u->when;
    const uint32_t staging = sm.base + AT_STAGING + warp * WARP_STAGING;
    warp_place to;
    to.lane = thread & 31;
    to.row = warp * 16;
    to.end = args.slab.chan - u->slab64 * RA_SLAB;
    to.scale = u->kind == DV ? 1.0f : args.slab.scale;
    to.view = u->kind == DQ ? &args.dq : u->kind == DK ? &args.dk[u->source] : &args.dv[u->source];
    if (to.row >= u->count) {
        return;
    }
    const bool boxes = to.row + 16 <= u->count, fresh = when & RA_SLAB_FRESH;
    if (when & RA_SLAB_FINAL) {
        if (boxes) {
            to.map = u->kind == DQ   ? &args.final_dq
                     : u->kind == DK ? &args.final_dk
                                     : &args.final_dv;
            store_boxes<E>(acc, staging, u, to, !fresh);
        } else {
            const ra_grad_view *result = u->kind == DQ   ? &args.result_dq
                                         : u->kind == DK ? &args.result_dk
                                                         : &args.result_dv;
            store_rows<E>(acc, u, to, result, !fresh);
        }
    } else if (boxes) {
        to.map = u->kind == DQ   ? &args.add_dq
                 : u->kind == DK ? &args.add_dk[u->source]
                                 : &args.add_dv[u->source];
        add_boxes(acc, staging, u, to, fresh);
    } else {
        add_rows(acc, u, to, fresh);
    }
}

template <typename E>
RA_PTX void multiply_units(const ra_gemm_args &args, shared sm, int thread, int warpgroup)
{
    float acc[128];
    unit_reader<gemm_unit> reader;
    ring_place at;
#pragma unroll 1
    while (reader.wait(sm)) {
        const gemm_unit *u = reader.unit(sm);
        if (u->kind == DQ) {
            multiply<E, true>(acc, sm, u->steps, at, thread, warpgroup);
        } else {
            multiply<E, false>(acc, sm, u->steps, at, thread, warpgroup);
        }
        add_result<E>(args, sm, u, acc, thread, warpgroup);
        reader.release(sm, (thread & 31) == 0);
    }
    if ((thread & 31) == 0) {
        cp_async_bulk_wait_group<0>();
    }
}

template <typename E>
__global__ void __launch_bounds__(THREADS, 1) gemm(const __grid_constant__ ra_gemm_args args)
{
    extern __shared__ __align__(1024) char bytes[];
    const int thread = threadIdx.x % WARPGROUP, warpgroup = threadIdx.x / WARPGROUP;
    const shared sm = open_shared(bytes, 1 + CONSUMER_WARPS);
    if (warpgroup == 0) {
        setmaxnreg_dec<LOAD_REGISTERS>();
        if (thread == 0) {
            copy_units(args, sm);
        } else if (thread == 32 && cluster_ctarank() == 0) {
            const uint32_t units = (uint32_t)args.slab.unit_count * args.slab.kv_count;
            hand_out<false>(sm, args.slab, units, [&](uint32_t unit, int cta, int4(&word)[4]) {
                describe_unit(args.slab, unit, cta, word);
            });
        }
    } else {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        multiply_units<E>(args, sm, thread, warpgroup - 1);
    }
    close_shared();
}

} /* namespace */

ra_status ra_grad_gemm(const ra_gemm_args *args, ra_dtype dtype, int clusters, cudaStream_t stream)
{
    return launch(dtype == RA_BF16 ? gemm<__nv_bfloat16> : gemm<__half>, args, clusters, stream);
}
