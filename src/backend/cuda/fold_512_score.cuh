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
    unit_reader<UNIT_SLOTS> reader; /* of the unit that the softmax is in */
    uint32_t tile = 0;              /* that the softmax is in, over all units */

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
        const uint32_t q = opaque(descriptor_low_k(sm.base + AT_Q + step * Q_SLAB_BYTES));
        const uint32_t k = opaque(descriptor_low_k(sm.base + AT_K + step % RING * SLOT_BYTES));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma_ss<E, 0, 0>(scores, descriptor(q + 2 * i), descriptor(k + 2 * i),
                              step > 0 || i > 0);
        }
        wgmma_commit_group();
    }

    /* Masks half of the tile; the maxima of what this thread holds of it. */
    template <bool PLAIN>
    __device__ __forceinline__ float2 own_max(float (&scores)[N], const tile_info *info, int half)
    {
        const int begin = half * (N / 2), end = begin + N / 2;
        if (!PLAIN && info->partial) {
            const int2 *reach = sm.reach(reader.n) + row;
            softmax_mask(scores, tile_columns(*info, reach[0]), tile_columns(*info, reach[8]), lane,
                         begin, end);
        }
        return softmax_own_max(scores, begin, end);
    }

    /* Takes the maxima of a tile's halves in. */
    __device__ __forceinline__ void raise(float2 x, float2 y)
    {
        const float2 own = make_float2(fmaxf(x.x, y.x), fmaxf(x.y, y.y));
        factor = make_float2(1.0f, 1.0f);
        if (softmax_raises(rows, own, args.scale_log2, factor)) {
            shift_rows();
        }
    }
    __device__ __forceinline__ void shift_rows()
    {
        shift0 = softmax_shift(rows.max0);
        shift1 = softmax_shift(rows.max1);
    }

    /* Part `part` of `parts` of probability stage `half` of the tile, as an operand in shared
     * memory. The factors of the tile travel with its first stage. TURN: the tile is an odd one. */
    template <int TURN>
    __device__ __forceinline__ void emit(float (&scores)[N], int half, int part, int parts)
    {
        const int stage = 2 * TURN + half;
        if (part == 0) {
            mbarrier_wait(sm.bar(P_EMPTY) + 8 * stage, (tile / 2 & 1) ^ 1);
            if (half == 0) {
                send_factors(AT_SCALE + TURN * ROWS * 4, factor.x, factor.y);
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
            hand_over(P_FULL + stage);
        }
    }

    /* What the output multiplies this thread's two rows by. */
    __device__ __forceinline__ void send_factors(int at, float f0, float f1)
    {
        if (lane % 4 == 0) {
            float *to = (float *)(sm.bytes + at) + row;
            to[0] = f0;
            to[8] = f1;
        }
    }

    __device__ __forceinline__ void hand_over(int bar)
    {
        __syncwarp();
        if (lane == 0) {
            mbarrier_arrive(sm.bar(bar));
        }
    }

    /* ---- units */

    __device__ __forceinline__ float *lse_at(const fold_unit *unit, int at) const
    {
        return view_at<float>(args.lse, unit->item.row, unit->head + cluster_rank<CTAS>(),
                              (int64_t)unit->item.index + at);
    }

    /* What unit number n starts from, on its way to shared memory: the reaches of the warp's rows
     * and the lse that they resume from. */
    __device__ __forceinline__ void fetch(uint32_t n) const
    {
        const fold_unit *unit = reader.units + n % UNIT_SLOTS;
        const int at = thread / 32 * 16 + lane, count = unit->item.count;
        __syncwarp();
        if (lane < 16) {
            cp_async_ca<8>(smem_address(sm.reach(n) + at),
                           args.reach + unit->item.reach + min(at, count - 1));
            if (!(unit->item.flags & RA_WORK_FRESH) && at < count) {
                cp_async_ca<4>(sm.base + AT_LSE + at * 4, lse_at(unit, at));
            } else {
                *(float *)(sm.bytes + AT_LSE + at * 4) = -INFINITY;
            }
        }
    }

    /* The softmax starts from nothing, or from a state of maximum lse, sum 1 and numerator acc. */
    __device__ __forceinline__ void begin()
    {
        cp_async_wait_all();
        __syncwarp();
        const float *lse = (const float *)(sm.bytes + AT_LSE) + row;
        const float lse0 = lse[0], lse1 = lse[8], share = lane % 4 == 0 ? 1.0f : 0.0f;
        rows.max0 = lse0 * RA_LOG2E;
        rows.max1 = lse1 * RA_LOG2E;
        rows.sum0 = lse0 == -INFINITY ? 0.0f : share;
        rows.sum1 = lse1 == -INFINITY ? 0.0f : share;
        shift_rows();
    }

    /* The unit's sums are complete: their inverses, for the output. */
    __device__ __forceinline__ void end_sums()
    {
        rows.sum0 = quad_sum(rows.sum0);
        rows.sum1 = quad_sum(rows.sum1);
        mbarrier_wait(sm.bar(END_EMPTY), (reader.n & 1) ^ 1);
        send_factors(AT_INVERSE, softmax_inverse(rows.sum0), softmax_inverse(rows.sum1));
        hand_over(END_FULL);
    }

    /* lse to memory. Goes to the next unit. */
    __device__ __forceinline__ void end_unit()
    {
        const fold_unit *unit = reader.unit();
        if (lane % 4 == 0) {
            const int rest = unit->item.count - row;
            float *lse = lse_at(unit, row);
            if (rest > 0) {
                lse[0] = softmax_lse(rows.max0, rows.sum0);
            }
            if (rest > 8) {
                lse[8 * args.lse.seq] = softmax_lse(rows.max1, rows.sum1);
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

    /* The softmax of a tile between the slots of the next one's scores. PLAIN: every query sees all
     * of it, and it ends no unit. */
    template <bool PLAIN, int TURN>
    __device__ __forceinline__ void fold(float (&scores)[N], float (&next)[N],
                                         const tile_info *info)
    {
        const bool last = !PLAIN && info->last;
        const uint32_t unit = reader.n + 1;
        issue(next, 0, last, unit);
        if (last) {
            fetch(unit);
        }
        wgmma_wait_group<1>();
        wgmma_fence_operand(scores);
        release(K_STEPS - 1, last);
        const bool next_last = sm.tile(tile + 1)->last;
        const auto advance = [&](int step) {
            issue(next, step, last, unit);
            wgmma_wait_group<1>();
            release(step - 1, next_last);
        };
        const float2 own = own_max<PLAIN>(scores, info, 0);
        advance(1);
        raise(own, own_max<PLAIN>(scores, info, 1));
        advance(2);
        emit<TURN>(scores, 0, 0, 2);
        advance(3);
        emit<TURN>(scores, 0, 1, 2);
        advance(4);
        emit<TURN>(scores, 1, 0, 2);
        advance(5);
        emit<TURN>(scores, 1, 1, 2);
        if (last) {
            end_sums();
        }
        advance(6);
        if (last) {
            end_unit();
        }
        advance(7);
        if (last) {
            begin();
        }
    }

    /* The same where no tile follows. */
    template <int TURN>
    __device__ __forceinline__ void fold_last(float (&scores)[N], const tile_info *info)
    {
        wgmma_wait_group<0>();
        wgmma_fence_operand(scores);
        release(K_STEPS - 1, true);
        const float2 own = own_max<false>(scores, info, 0);
        raise(own, own_max<false>(scores, info, 1));
        emit<TURN>(scores, 0, 0, 1);
        emit<TURN>(scores, 1, 0, 1);
        end_sums();
        end_unit();
    }

    /* False: that was the last tile of all. */
    template <int TURN> __device__ __forceinline__ bool turn(float (&scores)[N], float (&next)[N])
    {
        const tile_info *info = sm.tile(tile);
        const bool partial = info->partial, last = info->last;
        if (!partial && !last) {
            fold<true, TURN>(scores, next, info);
        } else if (last && !more()) {
            fold_last<TURN>(scores, info);
            return false;
        } else {
            fold<false, TURN>(scores, next, info);
        }
        tile++;
        return true;
    }

    __device__ __forceinline__ void run()
    {
        if (!reader.wait(sm.units())) {
            return;
        }
        fetch(0);
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
        begin();
        while (turn<0>(even, odd) && turn<1>(odd, even)) {
        }
    }
};

} // namespace fold512

#endif
