/*
 * A consumer of the forward for head dims up to 256: one warpgroup that folds 64 queries of each
 * unit. The tiles it sees, over all units, form one stream: scores of the next tile are issued
 * before the values of this one. Where the next tile may be far, at the end of a unit, values come
 * first, and the unit is stored under the first scores of the next one. Tiles that none of its
 * queries see are released unread. Most tiles neither begin a unit nor end anything: they have a
 * loop of their own, so that what they execute lies together in the instruction cache.
 */
#ifndef RA_BACKEND_CUDA_FOLD_256_CONSUMER_CUH
#define RA_BACKEND_CUDA_FOLD_256_CONSUMER_CUH

#include "backend/cuda/fold_256.cuh"

namespace fold256
{

/* One tile of the stream. */
struct step {
    uint32_t tile; /* index of its view */
    uint32_t bits; /* TILE_* */
    uint32_t unit; /* its number */
    int passed;    /* tiles between the step before and this one, whose values are not released */
    bool first;    /* of the unit, for this consumer */
    __device__ __forceinline__ bool is(uint32_t bit) const { return bits & bit; }
    __device__ __forceinline__ bool is_plain() const { return !first && !is(TILE_ENDS); }
};

template <typename E, int CTAS, int TILE> struct consumer {
    using at = layout<TILE>;
    static constexpr int N = TILE / 2; /* accumulator registers of a score tile */

    const fold_args &args;
    shared<TILE> sm;
    int self, thread, lane, row; /* row: the first of this thread's two */
    ring_place<at::K_SLOTS> keys;
    ring_place<at::V_SLOTS> values;
    uint32_t entered = 0; /* units; the tiles of the last of them are being walked */
    bool over = true;     /* the last tile looked at was the unit's last */
    bool waiting = false; /* for a tile of it that this consumer sees */
    uint32_t q_slot = 0;  /* of its queries and reaches */
    softmax_rows rows;
    bool raised = false; /* maxima, by the tile whose values come next; then factor is valid */
    float2 factor;

    __device__ __forceinline__ consumer(const fold_args &args_, shared<TILE> sm_, int self_)
        : args(args_), sm(sm_), self(self_), thread(threadIdx.x % WARPGROUP), lane(thread % 32),
          row(thread / 32 * 16 + lane / 4)
    {
    }

    /* ---- slots and units. Warps arrive one by one: no warp may lag a whole turn behind. */

    __device__ __forceinline__ void release_keys()
    {
        __syncwarp();
        release_slot<CTAS>(sm.bar(at::K_EMPTY) + 8 * keys.slot, lane);
        keys.next();
    }
    __device__ __forceinline__ void release_values()
    {
        __syncwarp();
        release_slot<CTAS>(sm.bar(at::V_EMPTY) + 8 * values.slot, lane);
        values.next();
    }
    __device__ __forceinline__ void pass_values(int count)
    {
#pragma unroll 1
        for (; count > 0; count--) {
            mbarrier_wait(sm.bar(at::V_FULL) + 8 * values.slot, values.parity);
            release_values();
        }
    }
    __device__ __forceinline__ const fold_unit *unit_at(uint32_t unit) const
    {
        return (const fold_unit *)(sm.bytes + at::AT_UNIT) + unit % UNIT_SLOTS;
    }
    __device__ __forceinline__ void release_unit(uint32_t unit)
    {
        __syncwarp();
        if (lane == 0) {
            mbarrier_arrive_cluster(mapa(sm.bar(at::UNIT_EMPTY) + 8 * (unit % UNIT_SLOTS), 0));
        }
    }
    /* This consumer's rows of a unit; none or fewer in its last ones. */
    __device__ __forceinline__ int rows_of(uint32_t unit) const
    {
        return min(ROWS, unit_at(unit)->item.count - self * ROWS);
    }
    __device__ __forceinline__ int head_of(uint32_t unit) const
    {
        return unit_at(unit)->head + cluster_rank<CTAS>();
    }

    /* Goes to the next unit. False behind the last. */
    __device__ __forceinline__ bool enter()
    {
        mbarrier_wait(sm.bar(at::UNIT_FULL) + 8 * (entered % UNIT_SLOTS), entered / UNIT_SLOTS & 1);
        if (unit_at(entered)->item.count == 0) {
            return false;
        }
        if (entered > 0) {
            __syncwarp();
            if (lane == 0) {
                mbarrier_arrive(sm.bar(at::Q_EMPTY) + 8 * q_slot);
            }
        }
        const uint32_t turn = entered * CONSUMERS + self;
        q_slot = turn % at::Q_SLOTS;
        mbarrier_wait(sm.bar(at::Q_FULL) + 8 * q_slot, turn / at::Q_SLOTS & 1);
        waiting = true;
        entered++;
        return true;
    }

    /* Waits for the next tile of keys, and reads how this consumer sees it. */
    __device__ __forceinline__ void look(step &s)
    {
        mbarrier_wait(sm.bar(at::K_FULL) + 8 * keys.slot, keys.parity);
        s.tile = sm.tile_index(keys);
        s.bits = sm.tile(s.tile)->bits[self];
        s.unit = entered - 1;
        over = s.is(TILE_LAST);
    }

    /* To the tile behind one that ends nothing: this consumer sees it, too. */
    __device__ __forceinline__ void follow(step &s)
    {
        look(s);
        s.passed = 0;
        s.first = false;
    }

    /* Walks to the next tile that this consumer sees. False behind the last unit; s.passed is valid
     * then, too. */
    __device__ __forceinline__ bool advance(step &s)
    {
#pragma unroll 1
        for (s.passed = 0;; s.passed++) {
            if (over && !enter()) {
                return false;
            }
            look(s);
            /* A query without keys takes part in one tile, too: it has an output as well. */
            if (s.is(TILE_SEEN) || (over && waiting)) {
                s.first = waiting;
                waiting = false;
                return true;
            }
            release_keys();
        }
    }

    /* ---- products. Low words of descriptors come from lane 0, which tells the compiler that they
     * are uniform: a descriptor then costs two instructions and not ten. */

    __device__ __forceinline__ uint32_t uniform(uint32_t low)
    {
        return __shfl_sync(~0u, low, 0);
    }

    __device__ __forceinline__ void issue_scores(float (&scores)[N], uint32_t q, uint32_t k)
    {
        wgmma_fence();
#pragma unroll
        for (int slab = 0; slab < SLABS; slab++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                wgmma_ss<E, 0, 0>(scores, descriptor(q + slab * (ROWS * 128 >> 4) + 2 * i),
                                  descriptor(k + slab * (TILE * 128 >> 4) + 2 * i),
                                  slab > 0 || i > 0);
            }
        }
        wgmma_commit_group();
    }
    __device__ __forceinline__ uint32_t q_operand()
    {
        return uniform(descriptor_low_k(sm.base + at::AT_Q + q_slot * at::Q_BYTES));
    }
    __device__ __forceinline__ uint32_t k_operand()
    {
        return uniform(descriptor_low_k(sm.base + at::AT_K + keys.slot * at::SLOT_BYTES));
    }

    /* What `out` holds is not the unit's. */
    __device__ __forceinline__ bool is_fresh(const step &s) const
    {
        return s.first && (unit_at(s.unit)->item.flags & RA_WORK_FRESH);
    }

    __device__ __forceinline__ void issue_output(float (&out)[128], const uint32_t (&p)[TILE / 4],
                                                 bool fresh)
    {
        mbarrier_wait(sm.bar(at::V_FULL) + 8 * values.slot, values.parity);
        const uint32_t v = uniform(
            descriptor_low_mn(sm.base + at::AT_V + values.slot * at::SLOT_BYTES, TILE * 128));
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < TILE / 16; c++) {
            wgmma_rs<E, 1>(out, p[4 * c], p[4 * c + 1], p[4 * c + 2], p[4 * c + 3],
                           descriptor(v + c * (16 * 128 >> 4)), c > 0 || !fresh);
        }
        wgmma_commit_group();
    }

    /* ---- softmax and state */

    __device__ __forceinline__ float *lse_at(uint32_t unit)
    {
        const fold_unit *u = unit_at(unit);
        return view_at<float>(args.lse, u->item.row, head_of(unit),
                              (int64_t)u->item.index + self * ROWS + row);
    }
    /* From nothing, or from a state of maximum lse, sum 1 and numerator acc. */
    __device__ __forceinline__ void begin(uint32_t unit)
    {
        rows = softmax_rows{-INFINITY, -INFINITY, 0.0f, 0.0f};
        if (!(unit_at(unit)->item.flags & RA_WORK_FRESH)) {
            const float *lse = lse_at(unit);
            const int count = rows_of(unit);
            rows.max0 = row < count ? __ldcg(lse) * RA_LOG2E : -INFINITY;
            rows.max1 = row + 8 < count ? __ldcg(lse + 8 * args.lse.seq) * RA_LOG2E : -INFINITY;
            const float share = lane % 4 == 0 ? 1.0f : 0.0f;
            rows.sum0 = rows.max0 == -INFINITY ? 0.0f : share;
            rows.sum1 = rows.max1 == -INFINITY ? 0.0f : share;
        }
    }

    __device__ __forceinline__ void softmax(float (&scores)[N], const step &s)
    {
        if (s.is(TILE_PARTIAL)) {
            const int2 *reach = sm.reach(q_slot) + row;
            const tile_view *view = sm.tile(s.tile);
            const tile_info tile = {view->pos, view->count, 1, 0};
            softmax_mask(scores, tile_columns(tile, reach[0]), tile_columns(tile, reach[8]), lane);
        }
        raised = softmax_raises(rows, scores, args.scale_log2, factor);
        softmax_exp(rows, scores, 0, N, args.scale_log2, softmax_shift(rows.max0),
                    softmax_shift(rows.max1));
        /* The exponentials stay here, beside the products in flight. */
        wgmma_fence_operand(scores);
        opaque(rows.sum0);
        opaque(rows.sum1);
    }

    static __device__ __forceinline__ void pack(uint32_t (&p)[TILE / 4], const float (&scores)[N])
    {
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) {
            p[i] = cvt_rn_x2<E>(scores[2 * i], scores[2 * i + 1]);
        }
    }

    template <typename T>
    __device__ __forceinline__ row_pair<T> rows_in(const fold_view &view, uint32_t unit)
    {
        row_pair<T> r = view_rows<T>(view, unit_at(unit), head_of(unit), self * ROWS + row, 0);
        return r;
    }

    /* A unit is complete: its lse and `out` to memory. */
    __device__ __forceinline__ void finish(const float (&out)[128], uint32_t unit)
    {
        const float sum0 = quad_sum(rows.sum0), sum1 = quad_sum(rows.sum1);
        if (lane % 4 == 0) {
            const int count = rows_of(unit);
            float *lse = lse_at(unit);
            if (row < count) {
                lse[0] = softmax_lse(rows.max0, sum0);
            }
            if (row + 8 < count) {
                lse[8 * args.lse.seq] = softmax_lse(rows.max1, sum1);
            }
        }
        __syncwarp();
        const float2 scale = make_float2(softmax_inverse(sum0), softmax_inverse(sum1));
        if (unit_at(unit)->item.flags & RA_WORK_FINAL) {
            store_rows_as<E>(out, rows_in<E>(args.out, unit), scale, args.channels, lane);
        } else {
            store_rows(out, rows_in<float>(args.acc, unit), scale, args.channels, lane);
        }
        release_unit(unit);
    }

    __device__ __forceinline__ void rescale(float (&out)[128])
    {
        if (raised) {
#pragma unroll
            for (int i = 0; i < 128; i += 4) {
                out[i] *= factor.x;
                out[i + 1] *= factor.x;
                out[i + 2] *= factor.y;
                out[i + 3] *= factor.y;
            }
        }
    }

    /* Adds the values of a step. PLAIN: it is known to be plain. */
    template <bool PLAIN>
    __device__ __forceinline__ void add_values(float (&out)[128], const uint32_t (&p)[TILE / 4],
                                               const step &s)
    {
        const bool fresh = !PLAIN && is_fresh(s);
        if (!PLAIN && s.first && !fresh) {
            load_rows(out, rows_in<float>(args.acc, s.unit), args.channels, lane);
        }
        if (!fresh) {
            rescale(out);
        }
        issue_output(out, p, fresh);
    }

    /* Values of the step before, if held, and those passed over before this step. */
    __device__ __forceinline__ void release_older(bool &held, step &s)
    {
        if (held) {
            release_values();
        }
        pass_values(s.passed);
        held = false;
        s.passed = 0;
    }

    /* From a tile that ends nothing to the next one, whose scores are complete behind it. */
    template <bool PLAIN>
    __device__ __forceinline__ void go_on(float (&out)[128], float (&scores)[N],
                                          uint32_t (&p)[TILE / 4], bool &held, step &now,
                                          step &next)
    {
        follow(next);
        const uint32_t q = q_operand(), k = k_operand();
        wgmma_wait_group<0>();
        wgmma_fence_operand(out);
        release_older(held, now);
        pack(p, scores);
        issue_scores(scores, q, k);
        add_values<PLAIN>(out, p, now);
        held = true;
        wgmma_wait_group<1>();
    }

    __device__ __forceinline__ void run()
    {
        float out[128], scores[N];
        uint32_t p[TILE / 4];
        step now, next;
#pragma unroll
        for (int i = 0; i < 128; i++) {
            out[i] = 0.0f;
        }
        if (!advance(now)) {
            return;
        }
        issue_scores(scores, q_operand(), k_operand());
        wgmma_wait_group<0>();
        wgmma_fence_operand(scores);
        release_keys();
        begin(now.unit);
        softmax(scores, now);
        bool held = false; /* values of the step before are not released */
        for (;;) {
            if (now.is(TILE_ENDS)) {
                wgmma_wait_group<0>();
                wgmma_fence_operand(out);
                release_older(held, now);
                pack(p, scores);
                add_values<false>(out, p, now);
                wgmma_wait_group<0>();
                wgmma_fence_operand(out);
                release_values();
                if (!advance(next)) {
                    break;
                }
                issue_scores(scores, q_operand(), k_operand());
                if (next.first) {
                    finish(out, now.unit);
                }
                wgmma_wait_group<0>();
            } else {
                go_on<false>(out, scores, p, held, now, next);
            }
            wgmma_fence_operand(scores);
            release_keys();
            if (next.first) {
                begin(next.unit);
            }
            softmax(scores, next);
            now = next;
#pragma unroll 1
            while (now.is_plain()) {
                go_on<true>(out, scores, p, held, now, next);
                wgmma_fence_operand(scores);
                release_keys();
                softmax(scores, next);
                now = next;
            }
        }
        pass_values(next.passed);
        finish(out, now.unit);
    }
};

} // namespace fold256

#endif
