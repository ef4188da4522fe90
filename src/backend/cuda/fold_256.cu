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
        if (lane < CONSUMERS) { /* slots become free late: then at least from L2 */
            cp_async_bulk_prefetch_tensor_5d(&args.q, 0, unit->item.index + lane * ROWS, 0,
                                             unit->head + cluster_rank<CTAS>(), unit->item.row);
        }
#pragma unroll 1
        for (int first = 0; first < CONSUMERS * ROWS; first += ROWS) {
            const uint32_t full = sm.bar(at::Q_FULL) + 8 * place.slot;
            mbarrier_wait(sm.bar(at::Q_EMPTY) + 8 * place.slot, place.parity ^ 1);
            if (lane == 0) {
                mbarrier_arrive_expect_tx(full, at::Q_BYTES);
                cp_async_bulk_tensor_5d(sm.base + at::AT_Q + place.slot * at::Q_BYTES, &args.q,
                                        full, 0, unit->item.index + first, 0,
                                        unit->head + cluster_rank<CTAS>(), unit->item.row);
            }
            __syncwarp();
            const int2 *reach = (const int2 *)args.reach + unit->item.reach;
#pragma unroll 1
            for (int r = lane; r < ROWS; r += 32) {
                sm.reach(place.slot)[r] = reach[min(first + r, unit->item.count - 1)];
            }
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive(full);
            }
            place.next();
        }
        __syncwarp();
    }
}

/* How a consumer sees the tiles of its units, one after the other. Rows without a query count as
 * the last query. */
struct tile_sight {
    int2 first, last; /* reaches of its first and last query */
    int passed = 0;   /* tiles in a row that they did not see */

    __device__ __forceinline__ void begin(const fold_args &args, const ra_work_item &item, int self)
    {
        const int2 *reach = (const int2 *)args.reach + item.reach;
        first = reach[min(self * ROWS, item.count - 1)];
        last = reach[min(self * ROWS + ROWS, item.count) - 1];
    }
    template <int TILE>
    __device__ __forceinline__ uint32_t next(const ra_work_run &run, bool is_last)
    {
        const bool meets = run.pos < last.y && run.pos + min(run.count, TILE) > first.x;
        const bool seen = meets || passed == PASSED_MAX;
        uint32_t bits = seen ? TILE_SEEN : 0;
        bits |= run.pos < last.x || run.pos + TILE > first.y || run.count < TILE ? TILE_PARTIAL : 0;
        bits |= !meets || run.count <= TILE || run.pos + TILE >= last.y ? TILE_ENDS : 0;
        bits |= is_last ? TILE_LAST : 0;
        passed = seen ? 0 : passed + 1;
        return bits;
    }
};

/* One warp: a slot of keys for each tile. Each of the first lanes describes it for a consumer. */
template <int CTAS, int TILE>
__device__ __forceinline__ void copy_keys(const fold_args &args, shared<TILE> sm)
{
    using at = layout<TILE>;
    const int lane = threadIdx.x % 32;
    unit_reader<UNIT_SLOTS> reader = sm.reader();
    ring_place<at::K_SLOTS> place;
    tile_sight sight;
    for (; reader.wait(sm.units()); reader.release(sm.units(), lane == 0)) {
        const fold_unit *unit = reader.unit();
        sight.begin(args, unit->item, lane % CONSUMERS);
        walk_tiles<TILE>(args, unit, [&](const ra_work_run &run, bool last) {
            tile_view *tile = sm.tile(sm.tile_index(place));
            const uint32_t bits = sight.template next<TILE>(run, last);
            if (lane == 0) {
                tile->pos = run.pos;
                tile->count = run.count;
            }
            if (lane < CONSUMERS) {
                tile->bits[lane] = bits;
            }
            mbarrier_wait(sm.bar(at::K_EMPTY) + 8 * place.slot, place.parity ^ 1);
            __syncwarp();
            if (lane == 0) {
                const uint32_t full = sm.bar(at::K_FULL) + 8 * place.slot;
                const int part = cluster_rank<CTAS>();
                mbarrier_arrive_expect_tx(full, at::SLOT_BYTES);
                copy_part<CTAS>(sm.base + at::AT_K + place.slot * at::SLOT_BYTES +
                                    part * (at::SLOT_BYTES / CTAS),
                                &args.k[run.source], full, run.index, part * (SLABS / CTAS),
                                unit->kv_head, run.row);
            }
            place.next();
        });
        __syncwarp();
    }
}

/* One warp: keys [count, TILE) of a slot of values become zero. */
template <int TILE> __device__ __forceinline__ void clear_values(uint32_t slot, int count)
{
    const int lane = threadIdx.x % 32;
    const uint32_t to = slot + lane / 8 * (TILE * 128) + lane % 8 * 16;
#pragma unroll 1
    for (int key = count; key < TILE; key++) {
        st_shared_v4(to + key * 128, make_uint4(0, 0, 0, 0));
    }
    fence_proxy_async();
    __syncwarp();
}

/* One warp: a slot of values for each tile. Values behind a run's end belong to somebody else, and
 * 0 * NaN is NaN: where there are any, the warp waits for the copy itself and clears them before it
 * hands the slot over. */
template <int CTAS, int TILE>
__device__ __forceinline__ void copy_values(const fold_args &args, shared<TILE> sm)
{
    using at = layout<TILE>;
    const int lane = threadIdx.x % 32, part = cluster_rank<CTAS>();
    unit_reader<UNIT_SLOTS> reader = sm.reader();
    ring_place<at::V_SLOTS> place;
    uint32_t parities = 0; /* of V_COPIED, a bit for each slot */
    for (; reader.wait(sm.units()); reader.release(sm.units(), lane == 0)) {
        const fold_unit *unit = reader.unit();
        walk_tiles<TILE>(args, unit, [&](const ra_work_run &run, bool) {
            const uint32_t slot = sm.base + at::AT_V + place.slot * at::SLOT_BYTES;
            const uint32_t full = sm.bar(at::V_FULL) + 8 * place.slot;
            const uint32_t copied = run.count < TILE ? sm.bar(at::V_COPIED) + 8 * place.slot : full;
            mbarrier_wait(sm.bar(at::V_EMPTY) + 8 * place.slot, place.parity ^ 1);
            if (lane == 0) {
                mbarrier_arrive_expect_tx(copied, at::SLOT_BYTES);
                copy_part<CTAS>(slot + part * (at::SLOT_BYTES / CTAS), &args.v[run.source], copied,
                                run.index, part * (SLABS / CTAS), unit->kv_head, run.row);
            }
            __syncwarp();
            if (copied != full) {
                mbarrier_wait(copied, parities >> place.slot & 1);
                parities ^= 1u << place.slot;
                clear_values<TILE>(slot, run.count);
                if (lane == 0) {
                    mbarrier_arrive(full);
                }
            }
            place.next();
        });
        __syncwarp();
    }
}

template <int CTAS, int TILE> __device__ __forceinline__ void init_barriers(shared<TILE> sm)
{
    using at = layout<TILE>;
    for (int i = 0; i < at::Q_SLOTS; i++) {
        mbarrier_init(sm.bar(at::Q_FULL + i), 2);
        mbarrier_init(sm.bar(at::Q_EMPTY + i), 4);
    }
    for (int i = 0; i < at::K_SLOTS; i++) {
        mbarrier_init(sm.bar(at::K_FULL + i), 1);
        mbarrier_init(sm.bar(at::K_EMPTY + i), 4 * CONSUMERS * CTAS);
        mbarrier_init(sm.bar(at::V_FULL + i), 1);
        mbarrier_init(sm.bar(at::V_COPIED + i), 1);
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
        } else if (thread < 64) {
            copy_keys<CTAS>(args, sm);
        } else if (thread < 96) {
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
