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
    uint32_t operands;     /* descriptor of the first byte of shared memory */
    int thread, lane, row; /* row: the first of this thread's two */
    softmax_rows rows;
    float2 factor;
    float shift0, shift1;
    unit_reader<UNIT_SLOTS> reader; /* of the unit that the softmax is in */
    uint32_t turns = 0;             /* of the ring of stages: pairs of tiles, over all units */

    __device__ __forceinline__ score_role(const fold_args &args_, shared sm_)
        : args(args_), sm(sm_), operands(descriptor_low_k(sm_.base)),
          thread(threadIdx.x % WARPGROUP), lane(thread % 32), row(thread / 32 * 16 + lane / 4),
          reader(sm_.reader())
    {
    }

    /* `row` where it is rarely used: found anew, as to keep it costs a register of the loop. */
    __device__ __forceinline__ int rare_row() const
    {
        const uint32_t own = opaque((uint32_t)thread);
        return own / 32 * 16 + own % 32 / 4;
    }

    /* The operands of a step are used up: the slot of keys, and behind the last tile of a unit the
     * slab of queries, with the last one what the unit started from. */
    __device__ __forceinline__ void release(int step, bool last)
    {
        release_slot<CTAS>(sm.bar(K_EMPTY) + 8 * (step % RING), thread);
        if (step == K_STEPS - 1) {
            if (last) {
                hand_over(Q_EMPTY + step);
            }
        } else if (last && thread == 0) {
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
        const uint32_t base = opaque(operands);
        const uint32_t q = base + (AT_Q + step * Q_SLAB_BYTES >> 4);
        const uint32_t k = base + (AT_K + step % RING * SLOT_BYTES >> 4);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            wgmma_ss<E, 0, 0>(scores, descriptor(q + 2 * i), descriptor(k + 2 * i),
                              step > 0 || i > 0);
        }
        wgmma_commit_group();
    }

    /* Masks half of the tile, if a row of the warp does not see all of it; the maxima of what this
     * thread holds of it. */
    template <bool PLAIN>
    __device__ __forceinline__ float2 own_max(float (&scores)[N], const tile_info *info, int half)
    {
        const int begin = half * (N / 2), end = begin + N / 2;
        if (!PLAIN && info->partial) {
            const int2 *reach = sm.reach(reader.n) + rare_row();
            const int2 a = tile_columns(*info, reach[0]), b = tile_columns(*info, reach[8]);
            if (__any_sync(~0u, max(a.x, b.x) > begin * 2 || min(a.y, b.y) < end * 2)) {
                softmax_mask(scores, a, b, lane, begin, end);
            }
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
            mbarrier_wait(sm.bar(P_EMPTY) + 8 * stage, (turns & 1) ^ 1);
            if (half == 0) {
                send_factors(AT_SCALE + TURN * ROWS * 4, factor.x, factor.y);
            }
        }
        const int first = part * 4 / parts, end = (part + 1) * 4 / parts; /* 16 keys each */
        softmax_exp(rows, scores, half * 32 + first * 8, half * 32 + end * 8, args.scale_log2,
                    shift0, shift1);
        const int target = thread / 32 * 16 + lane % 16;
        const uint32_t to = sm.base + AT_P + target * 128 + (lane / 16 ^ (target & 7)) * 16;
#pragma unroll
        for (int k = first; k < end; k++) {
            const float *p = scores + half * 32 + k * 8;
            stmatrix_x4((opaque(to) ^ (k * 32)) + stage * P_BYTES, cvt_rn_x2<E>(p[0], p[1]),
                        cvt_rn_x2<E>(p[2], p[3]), cvt_rn_x2<E>(p[4], p[5]),
                        cvt_rn_x2<E>(p[6], p[7]));
        }
        if (part == parts - 1) {
            fence_proxy_async();
            hand_over(P_FULL + stage);
        }
    }

    /* The same for a half without keys, of which the output only wants to hear. */
    template <int TURN> __device__ __forceinline__ void pass()
    {
        const int stage = 2 * TURN + 1;
        mbarrier_wait(sm.bar(P_EMPTY) + 8 * stage, (turns & 1) ^ 1);
        hand_over(P_FULL + stage);
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

    /* The softmax starts from nothing, or from a state of maximum lse, sum 1 and numerator acc. */
    __device__ __forceinline__ void begin()
    {
        const float lse0 = *sm.lse(row), lse1 = *sm.lse(row + 8),
                    share = lane % 4 == 0 ? 1.0f : 0.0f;
        rows.max0 = lse0 * RA_LOG2E;
        rows.max1 = lse1 * RA_LOG2E;
        rows.sum0 = lse0 == -INFINITY ? 0.0f : share;
        rows.sum1 = lse1 == -INFINITY ? 0.0f : share;
        shift_rows();
    }

    /* The unit's sums are complete; the output and whoever stores lse do the rest. Goes to the next
     * unit. */
    __device__ __forceinline__ void end()
    {
        rows.sum0 = quad_sum(rows.sum0);
        rows.sum1 = quad_sum(rows.sum1);
        mbarrier_wait(sm.bar(END_EMPTY), (reader.n & 1) ^ 1);
        if (lane % 4 == 0) {
            const int at = rare_row();
            *sm.end(at) = make_float2(rows.sum0, rows.max0);
            *sm.end(at + 8) = make_float2(rows.sum1, rows.max1);
        }
        hand_over(END_FULL);
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
        wgmma_wait_group<1>();
        wgmma_fence_operand(scores);
        release(K_STEPS - 1, last);
        const bool next_last = sm.tile(turns * 2 + TURN + 1)->last;
        const auto advance = [&](int step) {
            issue(next, step, last, unit);
            wgmma_wait_group<1>();
            release(step - 1, next_last);
        };
        const bool half = last && info->count <= TILE / 2; /* keys in the first one only */
        const float2 own = own_max<PLAIN>(scores, info, 0);
        advance(1);
        raise(own, half ? own : own_max<PLAIN>(scores, info, 1));
        advance(2);
        emit<TURN>(scores, 0, 0, 2);
        advance(3);
        emit<TURN>(scores, 0, 1, 2);
        advance(4);
        if (!half) {
            emit<TURN>(scores, 1, 0, 2);
        }
        advance(5);
        if (!half) {
            emit<TURN>(scores, 1, 1, 2);
        } else {
            pass<TURN>();
        }
        advance(6);
        if (last) {
            end();
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
        end();
    }

    /* False: that was the last tile of all. */
    template <int TURN> __device__ __forceinline__ bool turn(float (&scores)[N], float (&next)[N])
    {
        const tile_info *info = sm.tile(turns * 2 + TURN);
        const bool partial = info->partial, last = info->last;
        if (!partial && !last) {
            fold<true, TURN>(scores, next, info);
        } else if (last && !more()) {
            fold_last<TURN>(scores, info);
            return false;
        } else {
            fold<false, TURN>(scores, next, info);
        }
        turns += TURN;
        return true;
    }

    __device__ __forceinline__ void run()
    {
        if (!reader.wait(sm.units())) {
            return;
        }
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
