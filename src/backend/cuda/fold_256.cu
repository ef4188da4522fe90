/*
 * The forward for head dims up to 256 on Hopper. A CTA folds 128 queries of one head: a warpgroup
 * that copies, and two consumers of 64 queries each, which compute scores, softmax and output with
 * everything but the operands in registers. In a cluster of two, each CTA copies half of every slot
 * of keys and values for both.
 */
#include "backend/cuda/fold_256_consumer.cuh"
#include "backend/cuda/fold_host.cuh"

using namespace fold256;

namespace
{

/* One warp: the queries of each unit, a slot for each consumer, and the reaches that belong to
 * them. Rows without a query get what lies there, which nobody looks at, and the last query's
 * reach. */
template <int CTAS, int TILE>
__device__ __forceinline__ void copy_queries(const fold_args &args, shared<TILE> sm)
{
    using at = layout<TILE>;
    const int lane = threadIdx.x % 32;
    unit_reader<UNIT_SLOTS> reader = sm.reader();
    ring_place<at::Q_SLOTS> place;
    for (; reader.wait(sm.units()); reader.release(sm.units(), lane == 0)) {
        const fold_unit *unit = reader.unit();
#pragma unroll 1
        for (int first = 0; first < CONSUMERS * ROWS; first += ROWS) {
            mbarrier_wait(sm.bar(at::Q_EMPTY) + 8 * place.slot, place.parity ^ 1);
            const int2 *reach = (const int2 *)args.reach + unit->item.reach;
#pragma unroll 1
            for (int r = lane; r < ROWS; r += 32) {
                sm.reach(place.slot)[r] = reach[min(first + r, unit->item.count - 1)];
            }
            __syncwarp();
            if (lane == 0) {
                const uint32_t full = sm.bar(at::Q_FULL) + 8 * place.slot;
                mbarrier_arrive_expect_tx(full, at::Q_BYTES);
                cp_async_bulk_tensor_5d(sm.base + at::AT_Q + place.slot * at::Q_BYTES, &args.q,
                                        full, 0, unit->item.index + first, 0,
                                        unit->head + cluster_rank<CTAS>(), unit->item.row);
            }
            place.next();
        }
        __syncwarp();
    }
}

/* One thread: a slot of keys for each tile, and what consumers must know of it. */
template <int CTAS, int TILE>
__device__ __forceinline__ void copy_keys(const fold_args &args, shared<TILE> sm)
{
    using at = layout<TILE>;
    unit_reader<UNIT_SLOTS> reader = sm.reader();
    ring_place<at::K_SLOTS> place;
    for (; reader.wait(sm.units()); reader.release(sm.units(), true)) {
        const fold_unit *unit = reader.unit();
        walk_tiles<TILE>(args, unit, [&](const ra_work_run &run, bool last) {
            *sm.tile(place) = describe_tile<TILE>(run, last);
            mbarrier_wait(sm.bar(at::K_EMPTY) + 8 * place.slot, place.parity ^ 1);
            const uint32_t full = sm.bar(at::K_FULL) + 8 * place.slot;
            const int part = cluster_rank<CTAS>();
            mbarrier_arrive_expect_tx(full, at::SLOT_BYTES);
            copy_part<CTAS>(sm.base + at::AT_K + place.slot * at::SLOT_BYTES +
                                part * (at::SLOT_BYTES / CTAS),
                            &args.k[run.source], full, run.index, part * (SLABS / CTAS),
                            unit->kv_head, run.row);
            place.next();
        });
    }
}

/* One thread: a slot of values for each tile. */
template <int CTAS, int TILE>
__device__ __forceinline__ void copy_values(const fold_args &args, shared<TILE> sm)
{
    using at = layout<TILE>;
    unit_reader<UNIT_SLOTS> reader = sm.reader();
    ring_place<at::V_SLOTS> place;
    for (; reader.wait(sm.units()); reader.release(sm.units(), true)) {
        const fold_unit *unit = reader.unit();
        walk_tiles<TILE>(args, unit, [&](const ra_work_run &run, bool) {
            mbarrier_wait(sm.bar(at::V_EMPTY) + 8 * place.slot, place.parity ^ 1);
            const uint32_t full = sm.bar(at::V_FULL) + 8 * place.slot;
            const int part = cluster_rank<CTAS>();
            mbarrier_arrive_expect_tx(full, at::SLOT_BYTES);
            copy_part<CTAS>(sm.base + at::AT_V + place.slot * at::SLOT_BYTES +
                                part * (at::SLOT_BYTES / CTAS),
                            &args.v[run.source], full, run.index, part * (SLABS / CTAS),
                            unit->kv_head, run.row);
            place.next();
        });
    }
}

template <int CTAS, int TILE> __device__ __forceinline__ void init_barriers(shared<TILE> sm)
{
    using at = layout<TILE>;
    for (int i = 0; i < at::Q_SLOTS; i++) {
        mbarrier_init(sm.bar(at::Q_FULL + i), 1);
        mbarrier_init(sm.bar(at::Q_EMPTY + i), 4);
    }
    for (int i = 0; i < at::K_SLOTS; i++) {
        mbarrier_init(sm.bar(at::K_FULL + i), 1);
        mbarrier_init(sm.bar(at::K_EMPTY + i), 4 * CONSUMERS * CTAS);
        mbarrier_init(sm.bar(at::V_FULL + i), 1);
        mbarrier_init(sm.bar(at::V_EMPTY + i), 4 * CONSUMERS * CTAS);
    }
    for (int i = 0; i < UNIT_SLOTS; i++) {
        mbarrier_init(sm.bar(at::UNIT_FULL + i), 1);
        mbarrier_init(sm.bar(at::UNIT_EMPTY + i), UNIT_READERS * CTAS);
    }
    fence_mbarrier_init();
}

template <typename E, int CTAS, int TILE>
__global__ void __launch_bounds__(THREADS, 1) fold_256(const __grid_constant__ fold_args args)
{
    extern __shared__ __align__(1024) char bytes[];
    const shared<TILE> sm = {bytes, smem_address(bytes)};
    const int thread = threadIdx.x, warpgroup = thread / WARPGROUP;
    if (thread == 0) {
        init_barriers<CTAS>(sm);
    }
    __syncthreads();
    if constexpr (CTAS > 1) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    if (warpgroup == 0) {
        setmaxnreg_dec<LOAD_REGISTERS>();
        if (thread < 32) {
            copy_queries<CTAS>(args, sm);
        } else if (thread == 32) {
            copy_keys<CTAS>(args, sm);
        } else if (thread == 64) {
            copy_values<CTAS>(args, sm);
        } else if (thread == 96 && cluster_rank<CTAS>() == 0) {
            hand_out_units<CTAS>(args, sm.units());
        }
    } else {
        setmaxnreg_inc<FOLD_REGISTERS>();
        consumer<E, CTAS, TILE>(args, sm, warpgroup - 1).run();
    }
    if constexpr (CTAS > 1) { /* nobody leaves while another CTA may still write to it */
        __syncwarp();
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
}

/* ---- the host side */

template <typename E, int CTAS, int TILE>
ra_status launch_tile(const ra_fold_job *job, const ra_cuda_work *work, const ra_cuda_launch *at)
{
    const fold_boxes box = {.q_seq = ROWS,
                            .q_slabs = SLABS,
                            .k_seq = TILE,
                            .k_slabs = SLABS / CTAS,
                            .v_seq = TILE,
                            .v_slabs = SLABS / CTAS};
    fold_args args;
    RA_TRY(fold_arguments(job, work, at, CTAS, box, &args));
    return fold_run(fold_256<E, CTAS, TILE>, &args, at, CTAS, THREADS, layout<TILE>::SHARED_BYTES);
}

/* Long rows of keys gain from longer tiles; in a window, tiles as long as a consumer's queries
 * leave the least outside of it. */
template <typename E, int CTAS>
ra_status launch_as(const ra_fold_job *job, const ra_cuda_work *work, const ra_cuda_launch *at)
{
    return job->cover->mask.window > 0 ? launch_tile<E, CTAS, 64>(job, work, at)
                                       : launch_tile<E, CTAS, 80>(job, work, at);
}

bool supports(const ra_fold_job *job, const ra_cuda_work *work, const ra_cuda_launch *at)
{
    return job->q.size[RA_CHAN] <= CHANNELS && fold_supports(job, work, at, ROWS * CONSUMERS);
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

const ra_cuda_fold_kernel ra_cuda_fold_256 = {"fold_256", supports, launch};
