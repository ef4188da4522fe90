/*
 * The output of the forward for head dims up to 512: two warpgroups fold probability stages and
 * value slots into the accumulators of 256 columns each, and store them. Must not know scores.
 */
#ifndef RA_BACKEND_CUDA_FOLD_512_OUTPUT_CUH
#define RA_BACKEND_CUDA_FOLD_512_OUTPUT_CUH

#include "backend/cuda/fold_512.cuh"

namespace fold512
{

/* Both warpgroups run the same code, so that instruction caches hold it once. */
template <typename E, int CTAS> struct output_role {
    const fold_args &args;
    shared sm;
    int half; /* columns from 256 * half on */
    int thread, lane, row;
    uint32_t values;   /* descriptor of this half of the first slot of values */
    uint32_t tile = 0; /* over all units */

    __device__ __forceinline__ output_role(const fold_args &args_, shared sm_, int half_)
        : args(args_), sm(sm_), half(half_), thread(threadIdx.x % WARPGROUP), lane(thread % 32),
          row(thread / 32 * 16 + lane / 4),
          values(descriptor_low_mn(sm_.base + AT_V + half_ * HALF_SLOT, HALF_SLOT / 4))
    {
    }

    __device__ __forceinline__ void release_values(int step)
    {
        release_slot<CTAS>(sm.bar(V_EMPTY) + 8 * (step % RING), thread);
    }
    __device__ __forceinline__ void release(int bar, uint32_t n)
    {
        __syncwarp();
        if (lane == 0) {
            mbarrier_arrive(sm.bar(bar) + 8 * n);
        }
    }
    /* Where half `part` of the tile's probabilities is. */
    __device__ __forceinline__ uint32_t stage(int part) const { return tile % 2 * 2 + part; }
    __device__ __forceinline__ void wait_stage(int part)
    {
        mbarrier_wait(sm.bar(P_FULL) + 8 * stage(part), tile / 2 & 1);
    }
    __device__ __forceinline__ float2 factors() const
    {
        const float *from = (const float *)(sm.bytes + AT_SCALE) + tile % 2 * ROWS + row;
        return make_float2(from[0], from[8]);
    }

    /* Values behind the run's end belong to somebody else, and 0 * NaN is NaN: this half of the
     * slots that go with stage `part` gets zeros from their key `count` on. Whole 128-byte rows, so
     * that the swizzle does not matter. */
    __device__ __forceinline__ void clear_tail(int part, int count)
    {
        const uint32_t own = opaque((uint32_t)thread); /* not kept over the loop for this */
        uint32_t to = sm.base + AT_V + half * HALF_SLOT + own * 16;
#pragma unroll 1
        for (int slot = 0; slot < RING; slot++) {
            mbarrier_wait(sm.bar(V_FULL) + 8 * slot, part);
            if (slot * SLOT_KEYS + (int)(own / 8) >= count) {
#pragma unroll
                for (int slab = 0; slab < 4; slab++) {
                    st_shared_v4(to + slab * (HALF_SLOT / 4), make_uint4(0, 0, 0, 0));
                }
            }
            to += SLOT_BYTES;
        }
        fence_proxy_async();
        bar_sync(1 + half, WARPGROUP);
    }

    static __device__ __forceinline__ void multiply(float (&x)[64], float2 f)
    {
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            x[i] *= f.x;
            x[i + 1] *= f.x;
            x[i + 2] *= f.y;
            x[i + 3] *= f.y;
        }
    }

    /* Passes over the second half of a tile that has no keys there. */
    __device__ __forceinline__ void pass()
    {
        wait_stage(1);
#pragma unroll
        for (int slot = 0; slot < RING; slot++) {
            mbarrier_wait(sm.bar(V_FULL) + 8 * slot, 1);
            release_values(slot);
        }
    }

    /* What the group before those of stage `part` has used up: the last slot and its stage. The
     * stages of a unit's last tile are kept, for the store. */
    __device__ __forceinline__ void give_back(int part, bool last)
    {
        release_values(RING - 1);
        if (part == 0) {
            release(P_EMPTY, stage(0) ^ 3);
        } else if (!last) {
            release(P_EMPTY, stage(0));
        }
    }

    enum progress { MORE, LAST, LAST_HALF };

    /* Folds one tile in. A group stays in flight behind it; what it uses is given back behind the
     * next one. pending: there is one from the tile before; the first tile of a FRESH unit ignores
     * what the accumulators held. LAST_HALF: the unit's last tile has no keys in its second half,
     * which is still to be passed over. */
    template <bool FRESH>
    __device__ __forceinline__ progress fold(float (&left)[64], float (&right)[64], bool pending)
    {
        int keys = 0;
        bool last = false;
#pragma unroll
        for (int part = 0; part < 2; part++) {
            if (part == 1 && last && keys <= TILE / 2) {
                return LAST_HALF;
            }
            wait_stage(part);
            if (part == 0) {
                const tile_info *info = sm.tile(tile);
                keys = info->count;
                last = info->last;
                const float2 f = factors();
                if (__builtin_expect(__any_sync(~0u, f.x != 1.0f || f.y != 1.0f), 0)) {
                    wgmma_wait_group<0>();
                    wgmma_fence_operand(left);
                    wgmma_fence_operand(right);
                    multiply(left, f);
                    multiply(right, f);
                }
            }
            bool behind = part || pending;
            if (__builtin_expect(keys < (part + 1) * (TILE / 2), 0)) {
                if (behind) { /* or its slot would not be filled again */
                    wgmma_wait_group<0>();
                    give_back(part, last);
                    behind = false;
                }
                clear_tail(part, keys - part * (TILE / 2));
            }
            const uint32_t p = descriptor_low_k(sm.base + AT_P + stage(part) * P_BYTES);
#pragma unroll
            for (int slot = 0; slot < RING; slot++) {
                const uint32_t a = opaque(p + (slot * SLOT_KEYS * 2 >> 4));
                const uint32_t b = opaque(values) + (slot * SLOT_BYTES >> 4);
                const int keep = !FRESH || part || slot || pending;
                mbarrier_wait(sm.bar(V_FULL) + 8 * slot, part);
                wgmma_fence();
                wgmma_ss<E, 0, 1>(left, descriptor(a), descriptor(b), keep);
                wgmma_ss<E, 0, 1>(right, descriptor(a), descriptor(b + (HALF_SLOT / 2 >> 4)), keep);
                wgmma_commit_group();
                wgmma_wait_group<1>();
                if (slot > 0) {
                    release_values(slot - 1);
                } else if (behind) {
                    give_back(part, last);
                }
            }
        }
        return last ? LAST : MORE;
    }

    /* ---- the store, through shared memory, so that warps write whole lines. Behind a unit's last
     * product the stages of its last tile are free: 16 rows of 128 bytes for each warp, their
     * 16-byte chunks swizzled like an operand's. */

    /* 128 bytes of each of a warp's rows, scaled and rounded: elements of x from `first` on. */
    template <typename T>
    static __device__ __forceinline__ void stage_rows(const float (&x)[64], int first, uint32_t at,
                                                      float2 scale)
    {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const uint32_t to = opaque(at) ^ (k * 32);
            if constexpr (sizeof(T) == 2) {
                const float *p = x + first + k * 8;
                stmatrix_x4(to, cvt_rn_x2<T>(p[0] * scale.x, p[1] * scale.x),
                            cvt_rn_x2<T>(p[2] * scale.y, p[3] * scale.y),
                            cvt_rn_x2<T>(p[4] * scale.x, p[5] * scale.x),
                            cvt_rn_x2<T>(p[6] * scale.y, p[7] * scale.y));
            } else {
                const float *p = x + first + k * 4;
                st_shared_v2(to, p[0] * scale.x, p[1] * scale.x);
                st_shared_v2(to + 8 * 128, p[2] * scale.y, p[3] * scale.y);
            }
        }
    }

    /* What is staged to memory, four rows at a time; rows: those from this lane's first on. Goes on
     * to the next 128 bytes. */
    template <typename T>
    static __device__ __forceinline__ void send_rows(uint32_t from, T *&to, int64_t seq, int rows)
    {
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; i += 4) {
            const int4 v = ld_shared_v4((opaque(from) ^ (i & 4) * 16) + i * 128);
            if (i < rows) {
                __stcg((int4 *)to, v);
            }
            to += 4 * seq;
        }
        to += 128 / (int)sizeof(T) - 16 * seq;
        __syncwarp();
    }

    template <typename T>
    __device__ __forceinline__ void store_as(const fold_view &view, const fold_unit *unit, int head,
                                             const float (&left)[64], const float (&right)[64],
                                             float2 scale)
    {
        constexpr int WIDE = 128 / sizeof(T); /* columns of 128 bytes */
        const uint32_t own = opaque((uint32_t)thread), l = own % 32;
        const uint32_t rows = sm.base + AT_P + stage(half) * P_BYTES + own / 32 * (16 * 128);
        const uint32_t matrix = rows + l % 16 * 128 + (l / 16 ^ (l & 7)) * 16;
        const uint32_t pair = rows + l / 4 * 128 + (l % 4 / 2 ^ l / 4) * 16 + l % 2 * 8;
        const uint32_t line = rows + l / 8 * 128 + ((l ^ l / 8) & 7) * 16;
        const int first = own / 32 * 16 + l / 8, column = half * 256 + l % 8 * (WIDE / 8);
        const int count = unit->item.count - first;
        T *to = view_at<T>(view, unit->item.row, head, (int64_t)unit->item.index + first) + column;
#pragma unroll
        for (int i = 0; i < 256; i += WIDE) {
            stage_rows<T>(i < 128 ? left : right, i % 128 / 2, sizeof(T) == 2 ? matrix : pair,
                          scale);
            send_rows(line, to, view.seq, column + i < args.channels ? count : 0);
        }
    }

    __device__ __forceinline__ void store(const fold_unit *unit, int head, const float (&left)[64],
                                          const float (&right)[64], float2 inverse)
    {
        if (unit->item.flags & RA_WORK_FINAL) {
            store_as<E>(args.out, unit, head, left, right, inverse);
        } else {
            store_as<float>(args.acc, unit, head, left, right, inverse);
        }
    }

    /* One unit, from nothing or from the state that it resumes. Code of its own for each: where
     * accumulators come from must not depend on a branch, or matrix products are serialised. */
    template <bool FRESH>
    __device__ __forceinline__ void fold_unit_of(const fold_unit *unit, uint32_t number)
    {
        const int head = unit->head + cluster_rank<CTAS>();
        float left[64], right[64];
        if constexpr (!FRESH) {
            const int column = half * 256, limit = args.channels - column;
            const row_pair<float> rows = view_rows<float>(args.acc, unit, head, row, column);
            load_rows(left, rows, limit, lane);
            load_rows(right, rows.at(128), limit - 128, lane);
        }
        progress done;
        uint32_t pending = 0; /* opaque: the first tile gets no code of its own */
        while ((done = fold<FRESH>(left, right, opaque(pending))) == MORE) {
            tile++;
            pending = 1;
        }
        wgmma_wait_group<0>();
        wgmma_fence_operand(left);
        wgmma_fence_operand(right);
        release_values(V_STEPS - 1);
        if (done == LAST_HALF) {
            pass();
        }
        mbarrier_wait(sm.bar(END_FULL), number & 1);
        const float2 inverse =
            make_float2(softmax_inverse(sm.end(row)->x), softmax_inverse(sm.end(row + 8)->x));
        release(END_EMPTY, 0);
        bar_sync<3, 2 * WARPGROUP>(); /* products of both halves read P no more */
        store(unit, head, left, right, inverse);
        release(P_EMPTY, stage(0));
        release(P_EMPTY, stage(1));
        tile++;
    }

    __device__ __forceinline__ void run()
    {
        unit_reader<UNIT_SLOTS> reader = sm.reader();
        while (reader.wait(sm.units())) {
            const fold_unit *unit = reader.unit();
            if (unit->item.flags & RA_WORK_FRESH) {
                fold_unit_of<true>(unit, reader.n);
            } else {
                fold_unit_of<false>(unit, reader.n);
            }
            __syncwarp();
            reader.release(sm.units(), lane == 0);
        }
    }
};

} // namespace fold512

#endif
