/*
 * The scores and the softmax of the forward for head dims up to 512: one warpgroup turns query and
 * key slots into probability stages and the factors that belong to them. Must not know values.
 */
#ifndef RA_BACKEND_CUDA_FOLD_512_SCORE_CUH
#define RA_BACKEND_CUDA_FOLD_512_SCORE_CUH

#include "backend/cuda/fold_512.cuh"

namespace fold512
{

/* Two score accumulators take turns: the next tile's scores stream into one while this tile's
 * softmax works in the other. The next tile may be the first of the next unit. */
template <typename E, int CTAS> struct score_role {
    static constexpr int N = TILE / 2; /* accumulator registers of a score tile */
    const fold_args &args;
    shared sm;
    int thread, lane, row; /* row: the first of this thread's two */
    softmax_rows rows;
    float2 factor;
    float shift0, shift1;
    uint32_t stage = 0, stage_parity = 1;
    unit_reader<UNIT_SLOTS> reader; /* of the unit that the softmax is in */
    uint32_t tile = 0;              /* tiles the softmax has begun, over all units */

    __device__ __forceinline__ score_role(const fold_args &args_, shared sm_)
        : args(args_), sm(sm_), thread(threadIdx.x % WARPGROUP), lane(thread % 32),
          row(thread / 32 * 16 + lane / 4), reader(sm_.reader())
    {
    }

    /* The operands of a step are used up: the slot of keys, and behind the last tile of a unit the
     * slab of queries. */
    __device__ __forceinline__ void release(int step, bool last)
    {
        release_slot<CTAS>(sm.bar(K_EMPTY) + 8 * (step % RING), thread);
        if (last && thread == 0) {
            mbarrier_arrive(sm.bar(Q_EMPTY) + 8 * step);
        }
    }

    /* scores += Q[:, slab] K[:, slab]^T as one group; behind it at most one group is in flight.
     * first: of unit number `unit`. */
    __device__ __forceinline__ void issue(float (&scores)[N], int step, bool first, uint32_t unit)
    {
        if (first) {
            mbarrier_wait(sm.bar(Q_FULL) + 8 * step, unit & 1);
        }
        mbarrier_wait(sm.bar(K_FULL) + 8 * (step % RING), step / RING & 1);
        wgmma_fence();
        const uint64_t q =
            opaque(descriptor(descriptor_low_k(sm.base + AT_Q + step * Q_SLAB_BYTES)));
        const uint64_t k =
            opaque(descriptor(descriptor_low_k(sm.base + AT_K + step % RING * SLOT_BYTES)));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma_ss<E, 0, 0>(scores, q + 2 * i, k + 2 * i, step > 0 || i > 0);
        }
        wgmma_commit_group();
    }

    /* Masks the tile and takes its maxima in. */
    __device__ __forceinline__ void raise(float (&scores)[N], const tile_info *info)
    {
        if (info->partial) {
            const int2 *reach = (const int2 *)(sm.bytes + AT_REACH) + row;
            softmax_mask(scores, tile_columns(*info, reach[0]), tile_columns(*info, reach[8]),
                         lane);
        }
        factor = softmax_raise(rows, scores, args.scale_log2);
        shift0 = softmax_shift(rows.max0);
        shift1 = softmax_shift(rows.max1);
    }

    /* Part `part` of `parts` of probability stage `half` of the tile, as an operand in shared
     * memory. The factors of the tile travel with its first stage. */
    __device__ __forceinline__ void emit(float (&scores)[N], const tile_info *info, int half,
                                         int part, int parts)
    {
        if (part == 0) {
            mbarrier_wait(sm.bar(P_EMPTY) + 8 * stage, stage_parity);
            if (half == 0) {
                send_factors(factor.x, factor.y);
                if (thread == 0) {
                    *((stage_info *)(sm.bytes + AT_STAGE) + stage) =
                        stage_info{info->count, info->last};
                }
            }
        }
        const int first = part * 4 / parts, end = (part + 1) * 4 / parts; /* 16 keys each */
        softmax_exp(rows, scores, half * 32 + first * 8, half * 32 + end * 8, args.scale_log2,
                    shift0, shift1);
        const int target = thread / 32 * 16 + lane % 16;
        const uint32_t to = sm.base + AT_P + stage * P_BYTES + target * 128;
#pragma unroll
        for (int k = first; k < end; k++) {
            const float *p = scores + half * 32 + k * 8;
            stmatrix_x4(to + ((k * 2 + lane / 16) ^ (target & 7)) * 16, cvt_rn_x2<E>(p[0], p[1]),
                        cvt_rn_x2<E>(p[2], p[3]), cvt_rn_x2<E>(p[4], p[5]),
                        cvt_rn_x2<E>(p[6], p[7]));
        }
        if (part == parts - 1) {
            fence_proxy_async();
            hand_over();
        }
    }

    __device__ __forceinline__ void send_factors(float f0, float f1)
    {
        if (lane % 4 == 0) {
            float *to = (float *)(sm.bytes + AT_SCALE) + stage * ROWS + row;
            to[0] = f0;
            to[8] = f1;
        }
    }

    __device__ __forceinline__ void hand_over()
    {
        __syncwarp();
        if (lane == 0) {
            mbarrier_arrive(sm.bar(P_FULL) + 8 * stage);
        }
        stage = (stage + 1) % P_STAGES;
        stage_parity ^= stage == 0;
    }

    /* ---- units */

    /* What a unit starts from, on its way from memory. */
    struct state {
        int2 reach; /* of row lane % 16 of the warp */
        float lse0, lse1;
    };

    __device__ __forceinline__ float *lse_at(const fold_unit *unit) const
    {
        return view_at<float>(args.lse, unit->item.row, unit->head + cluster_rank<CTAS>(),
                              (int64_t)unit->item.index + row);
    }

    __device__ __forceinline__ state fetch() const
    {
        const fold_unit *unit = reader.unit();
        const int count = unit->item.count, rest = count - row;
        const int2 *reach = (const int2 *)args.reach + unit->item.reach;
        state from = {__ldg(reach + min(thread / 32 * 16 + lane % 16, count - 1)), -INFINITY,
                      -INFINITY};
        if (!(unit->item.flags & RA_WORK_FRESH)) {
            const float *lse = lse_at(unit);
            from.lse0 = rest > 0 ? __ldcg(lse) : -INFINITY;
            from.lse1 = rest > 8 ? __ldcg(lse + 8 * args.lse.seq) : -INFINITY;
        }
        return from;
    }

    /* Reaches to shared memory. The softmax starts from nothing, or from a state of maximum lse,
     * sum 1 and numerator acc. */
    __device__ __forceinline__ void begin(const state &from)
    {
        __syncwarp();
        if (lane < 16) {
            ((int2 *)(sm.bytes + AT_REACH))[thread / 32 * 16 + lane] = from.reach;
        }
        __syncwarp();
        const float share = lane % 4 == 0 ? 1.0f : 0.0f;
        rows.max0 = from.lse0 * RA_LOG2E;
        rows.max1 = from.lse1 * RA_LOG2E;
        rows.sum0 = from.lse0 == -INFINITY ? 0.0f : share;
        rows.sum1 = from.lse1 == -INFINITY ? 0.0f : share;
    }

    /* lse to memory; the inverse sums travel as one more stage. Goes to the next unit. */
    __device__ __forceinline__ void end()
    {
        const fold_unit *unit = reader.unit();
        const float sum0 = quad_sum(rows.sum0), sum1 = quad_sum(rows.sum1);
        mbarrier_wait(sm.bar(P_EMPTY) + 8 * stage, stage_parity);
        send_factors(softmax_inverse(sum0), softmax_inverse(sum1));
        hand_over();
        if (lane % 4 == 0) {
            const int rest = unit->item.count - row;
            float *lse = lse_at(unit);
            if (rest > 0) {
                lse[0] = softmax_lse(rows.max0, sum0);
            }
            if (rest > 8) {
                lse[8 * args.lse.seq] = softmax_lse(rows.max1, sum1);
            }
        }
        __syncwarp();
        reader.release(sm.units(), lane == 0);
    }

    /* Is there a unit behind the one that the softmax is in? */
    __device__ __forceinline__ bool more() const
    {
        unit_reader<UNIT_SLOTS> next = reader;
        next.n++;
        return next.wait(sm.units());
    }

    /* ---- tiles */

    /* The softmax of a tile between the slots of the next one's scores. */
    __device__ __forceinline__ void fold(float (&scores)[N], float (&next)[N],
                                         const tile_info *info, bool last)
    {
        const uint32_t unit = reader.n + 1;
        issue(next, 0, last, unit);
        wgmma_wait_group<1>();
        wgmma_fence_operand(scores);
        release(K_STEPS - 1, last);
        const bool next_last = sm.tile(tile)->last;
        const auto advance = [&](int step) {
            issue(next, step, last, unit);
            wgmma_wait_group<1>();
            release(step - 1, next_last);
        };
        raise(scores, info);
        advance(1);
        emit(scores, info, 0, 0, 2);
        advance(2);
        emit(scores, info, 0, 1, 2);
        advance(3);
        emit(scores, info, 1, 0, 2);
        advance(4);
        emit(scores, info, 1, 1, 2);
        state from;
        if (last) {
            end();
            from = fetch();
        }
        advance(5);
        advance(6);
        advance(7);
        if (last) {
            begin(from);
        }
    }

    /* The same where no tile follows. */
    __device__ __forceinline__ void fold_last(float (&scores)[N], const tile_info *info)
    {
        wgmma_wait_group<0>();
        wgmma_fence_operand(scores);
        release(K_STEPS - 1, true);
        raise(scores, info);
        emit(scores, info, 0, 0, 1);
        emit(scores, info, 1, 0, 1);
        end();
    }

    /* False: that was the last tile of all. */
    __device__ __forceinline__ bool turn(float (&scores)[N], float (&next)[N])
    {
        const tile_info *info = sm.tile(tile++);
        const bool last = info->last;
        if (last && !more()) {
            fold_last(scores, info);
            return false;
        }
        fold(scores, next, info, last);
        return true;
    }

    __device__ __forceinline__ void run()
    {
        if (!reader.wait(sm.units())) {
            return;
        }
        const state from = fetch();
        float even[N], odd[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            even[i] = odd[i] = 0.0f;
        }
#pragma unroll
        for (int step = 0; step < K_STEPS; step++) {
            issue(even, step, true, 0);
            wgmma_wait_group<1>();
            if (step > 0) {
                release(step - 1, sm.tile(0)->last);
            }
        }
        begin(from);
        while (turn(even, odd) && turn(odd, even)) {
        }
    }
};

} // namespace fold512

#endif
