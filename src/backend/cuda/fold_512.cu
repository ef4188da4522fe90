/*
 * The forward for head dims up to 512 on Hopper. A CTA folds 64 queries of one head; its four
 * warpgroups have one job each: copies | scores and softmax | output columns 0-255 | 256-511.
 * Keys and values stream through rings of 16 KiB slots (keys: 128 keys x 64 channels, values: 16
 * keys x 512 channels). Scores of the next tile run in a second accumulator while the softmax of
 * this one is cut into pieces between their slots, so that the tensor core always has work.
 * In a cluster of two, each CTA copies half of every slot for both.
 */
#include "backend/cuda/fold_512_output.cuh"
#include "backend/cuda/fold_512_score.cuh"
#include "backend/cuda/fold_host.cuh"

using namespace fold512;

namespace
{

/* ---- copies */

/* The rows that the output starts from: near when it gets there. */
template <int CTAS>
__device__ __forceinline__ void prefetch_state(const fold_args &args, const fold_unit *unit)
{
    const float *row = view_at<float>(args.acc, unit->item.row, unit->head + cluster_rank<CTAS>(),
                                      unit->item.index);
#pragma unroll 1
    for (int i = 0; i < unit->item.count; i++) {
        cp_async_bulk_prefetch(row, args.channels * sizeof *row);
        row += args.acc.seq;
    }
}

template <int CTAS>
__device__ __forceinline__ float *lse_at(const fold_args &args, const fold_unit *unit, int at)
{
    return view_at<float>(args.lse, unit->item.row, unit->head + cluster_rank<CTAS>(),
                          (int64_t)unit->item.index + at);
}

/* What the softmax of a unit starts from: the reaches of its rows and the lse that they resume
 * from. */
template <int CTAS>
__device__ __forceinline__ void copy_start(const fold_args &args, shared sm,
                                           unit_reader<UNIT_SLOTS> of)
{
    const fold_unit *unit = of.unit();
    const int count = unit->item.count;
#pragma unroll 1
    for (int at = threadIdx.x % 32; at < ROWS; at += 32) {
        cp_async_ca<8>(smem_address(sm.reach(of.n) + at),
                       args.reach + unit->item.reach + min(at, count - 1));
        if (!(unit->item.flags & RA_WORK_FRESH) && at < count) {
            cp_async_ca<4>(smem_address(sm.lse(at)), lse_at<CTAS>(args, unit, at));
        } else {
            *sm.lse(at) = -INFINITY;
        }
    }
    cp_async_wait_all();
}

/* lse of a unit, when its sums are complete. Goes to the next unit. */
template <int CTAS>
__device__ __forceinline__ void store_lse(const fold_args &args, shared sm,
                                          unit_reader<UNIT_SLOTS> &of)
{
    const fold_unit *unit = of.unit();
    const int lane = threadIdx.x % 32;
    mbarrier_wait(sm.bar(END_FULL), of.n & 1);
#pragma unroll 1
    for (int at = lane; at < unit->item.count; at += 32) {
        const float2 end = *sm.end(at);
        *lse_at<CTAS>(args, unit, at) = softmax_lse(end.y, end.x);
    }
    __syncwarp();
    if (lane == 0) {
        mbarrier_arrive(sm.bar(END_EMPTY));
    }
    of.release(sm.units(), lane == 0);
}

/* One warp: the queries of each unit, slab by slab, so that the first are there when the last tile
 * of the unit before still uses the others; what its softmax starts from; and lse of the one
 * before, which would hold up the softmax. */
template <int CTAS> __device__ __forceinline__ void copy_queries(const fold_args &args, shared sm)
{
    const bool speaks = threadIdx.x % 32 == 0;
    unit_reader<UNIT_SLOTS> reader = sm.reader(), before = reader;
    for (; reader.wait(sm.units()); reader.n++) {
        const fold_unit *unit = reader.unit();
        const int head = unit->head + cluster_rank<CTAS>(), row = unit->item.row;
        if (speaks) {
#pragma unroll 1
            for (int slab = 0; slab < SLABS; slab++) {
                cp_async_bulk_prefetch_tensor_5d(&args.q, 0, unit->item.index, slab, head, row);
            }
        }
#pragma unroll 1
        for (int slab = 0; slab < SLABS; slab++) {
            const uint32_t full = sm.bar(Q_FULL) + 8 * slab;
            mbarrier_wait(sm.bar(Q_EMPTY) + 8 * slab, (reader.n & 1) ^ 1);
            if (speaks) {
                mbarrier_arrive_expect_tx(full, Q_SLAB_BYTES);
                cp_async_bulk_tensor_5d(sm.base + AT_Q + slab * Q_SLAB_BYTES, &args.q, full, 0,
                                        unit->item.index, slab, head, row);
                if (slab == 0 && !(unit->item.flags & RA_WORK_FRESH)) {
                    prefetch_state<CTAS>(args, unit);
                }
            }
        }
        copy_start<CTAS>(args, sm, reader);
        __syncwarp();
        if (speaks) {
            mbarrier_arrive(sm.bar(Q_FULL) + 8 * (SLABS - 1));
        }
        if (before.n < reader.n) {
            store_lse<CTAS>(args, sm, before);
        }
    }
    if (before.n < reader.n) {
        store_lse<CTAS>(args, sm, before);
    }
}

/* One thread: the keys, slot by slot, and what the softmax needs of each tile. */
template <int CTAS> __device__ __forceinline__ void copy_keys(const fold_args &args, shared sm)
{
    const int part = cluster_rank<CTAS>();
    unit_reader<UNIT_SLOTS> reader = sm.reader();
    uint32_t tile = 0;
    for (; reader.wait(sm.units()); reader.release(sm.units(), true)) {
        const fold_unit *unit = reader.unit();
        walk_tiles<TILE>(args, unit, [&](const ra_work_run &run, bool last) {
            *sm.tile(tile++) = describe_tile<TILE>(run, last);
#pragma unroll 1
            for (int step = 0; step < K_STEPS; step++) {
                const int slot = step % RING;
                const uint32_t full = sm.bar(K_FULL) + 8 * slot;
                mbarrier_wait(sm.bar(K_EMPTY) + 8 * slot, (step / RING & 1) ^ 1);
                mbarrier_arrive_expect_tx(full, SLOT_BYTES);
                copy_part<CTAS>(sm.base + AT_K + slot * SLOT_BYTES + part * (SLOT_BYTES / CTAS),
                                &args.k[run.source], full, run.index + part * (TILE / CTAS), step,
                                unit->kv_head, run.row);
            }
        });
    }
}

/* One thread: the values, slot by slot. */
template <int CTAS> __device__ __forceinline__ void copy_values(const fold_args &args, shared sm)
{
    const int part = cluster_rank<CTAS>();
    const uint32_t to = sm.base + AT_V + part * (SLOT_BYTES / CTAS);
    unit_reader<UNIT_SLOTS> reader = sm.reader();
    for (; reader.wait(sm.units()); reader.release(sm.units(), true)) {
        const fold_unit *unit = reader.unit();
        walk_tiles<TILE>(args, unit, [&](const ra_work_run &run, bool) {
#pragma unroll 1
            for (int step = 0; step < V_STEPS; step++) {
                const int slot = step % RING;
                const uint32_t full = sm.bar(V_FULL) + 8 * slot;
                mbarrier_wait(sm.bar(V_EMPTY) + 8 * slot, (step / RING & 1) ^ 1);
                mbarrier_arrive_expect_tx(full, SLOT_BYTES);
                copy_part<CTAS>(to + slot * SLOT_BYTES, &args.v[run.source], full,
                                run.index + step * SLOT_KEYS, part * (SLABS / CTAS), unit->kv_head,
                                run.row);
            }
        });
    }
}

/* ---- the kernel */

template <typename E, int CTAS>
__global__ void __launch_bounds__(THREADS, 1) fold_512(const __grid_constant__ fold_args args)
{
    extern __shared__ __align__(1024) char bytes[];
    const shared sm = {bytes, smem_address(bytes)};
    const int thread = threadIdx.x, warpgroup = thread / WARPGROUP;
    if (thread == 0) {
        for (int i = 0; i < SLABS; i++) {
            const bool start = i == SLABS - 1; /* with what the softmax starts from */
            mbarrier_init(sm.bar(Q_FULL + i), start ? 2 : 1);
            mbarrier_init(sm.bar(Q_EMPTY + i), start ? 4 : 1);
        }
        for (int i = 0; i < RING; i++) {
            mbarrier_init(sm.bar(K_FULL + i), 1);
            mbarrier_init(sm.bar(K_EMPTY + i), CTAS);
            mbarrier_init(sm.bar(V_FULL + i), 1);
            mbarrier_init(sm.bar(V_EMPTY + i), 2 * CTAS);
        }
        for (int i = 0; i < P_STAGES; i++) {
            mbarrier_init(sm.bar(P_FULL + i), 4);
            mbarrier_init(sm.bar(P_EMPTY + i), 8);
        }
        mbarrier_init(sm.bar(END_FULL), 4);
        mbarrier_init(sm.bar(END_EMPTY), 9);
        for (int i = 0; i < UNIT_SLOTS; i++) {
            mbarrier_init(sm.bar(UNIT_FULL + i), 1);
            mbarrier_init(sm.bar(UNIT_EMPTY + i), UNIT_READERS * CTAS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    if constexpr (CTAS > 1) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    if (warpgroup == 0) {
        setmaxnreg_dec<LOAD_REGISTERS>();
        if (thread == 0) {
            copy_keys<CTAS>(args, sm);
        } else if (thread == 32) {
            copy_values<CTAS>(args, sm);
        } else if (thread / 32 == 2) {
            copy_queries<CTAS>(args, sm);
        } else if (thread == 96 && cluster_rank<CTAS>() == 0) {
            hand_out_units<CTAS>(args, sm.units());
        }
    } else if (warpgroup == 1) {
        setmaxnreg_inc<SCORE_REGISTERS>();
        score_role<E, CTAS>(args, sm).run();
    } else {
        setmaxnreg_inc<OUTPUT_REGISTERS>();
        output_role<E, CTAS>(args, sm, __shfl_sync(~0u, warpgroup - 2, 0)).run();
    }
    if constexpr (CTAS > 1) { /* nobody leaves while another CTA may still write to it */
        __syncwarp();
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
}

/* ---- the host side */

template <typename E, int CTAS>
ra_status launch_as(const ra_fold_job *job, const ra_cuda_work *work, const ra_cuda_launch *at)
{
    const fold_boxes box = {.q_seq = ROWS,
                            .q_slabs = 1,
                            .k_seq = TILE / CTAS,
                            .k_slabs = 1,
                            .v_seq = SLOT_KEYS,
                            .v_slabs = SLABS / CTAS};
    fold_args args;
    RA_TRY(fold_arguments(job, work, at, CTAS, box, &args));
    return fold_run(fold_512<E, CTAS>, &args, at, CTAS, THREADS, SHARED_BYTES);
}

bool supports(const ra_fold_job *job, const ra_cuda_work *work, const ra_cuda_launch *at)
{
    const int64_t channels = job->q.size[RA_CHAN];
    return channels > 256 && channels <= 512 && fold_supports(job, work, at, ROWS);
}

ra_status launch(const ra_fold_job *job, const ra_cuda_work *work, const ra_cuda_launch *at)
{
    const bool pairs = fold_heads_per_kv(work) % 2 == 0;
    if (job->q.dtype == RA_BF16) {
        return pairs ? launch_as<__nv_bfloat16, 2>(job, work, at)
                     : launch_as<__nv_bfloat16, 1>(job, work, at);
    }
    return pairs ? launch_as<__half, 2>(job, work, at) : launch_as<__half, 1>(job, work, at);
}

} /* namespace */

const ra_cuda_fold_kernel ra_cuda_fold_512 = {"fold_512", supports, launch};
