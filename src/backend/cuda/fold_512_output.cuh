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
        uint32_t to = sm.base + AT_V + half * HALF_SLOT + thread * 16;
#pragma unroll 1
        for (int slot = 0; slot < RING; slot++) {
            mbarrier_wait(sm.bar(V_FULL) + 8 * slot, part);
            if (slot * SLOT_KEYS + thread / 8 >= count) {
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
        release(P_EMPTY, stage(1));
#pragma unroll
        for (int slot = 0; slot < RING; slot++) {
            mbarrier_wait(sm.bar(V_FULL) + 8 * slot, 1);
            release_values(slot);
        }
    }

    /* What the group before those of stage `part` has used up: the last slot and its stage. */
    __device__ __forceinline__ void give_back(int part)
    {
        release_values(RING - 1);
        release(P_EMPTY, stage(part) ^ (part ? 1 : 3));
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
                    give_back(part);
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
                    give_back(part);
                }
            }
        }
        return last ? LAST : MORE;
    }

    __device__ __forceinline__ void store(const fold_unit *unit, int head, const float (&left)[64],
                                          const float (&right)[64], float2 inverse)
    {
        const int column = half * 256, limit = args.channels - column;
        if (unit->item.flags & RA_WORK_FINAL) {
            const row_pair<E> rows = view_rows<E>(args.out, unit, head, row, column);
            store_rows_as<E>(left, rows, inverse, limit, lane);
            store_rows_as<E>(right, rows.at(128), inverse, limit - 128, lane);
        } else {
            const row_pair<float> rows = view_rows<float>(args.acc, unit, head, row, column);
            store_rows(left, rows, inverse, limit, lane);
            store_rows(right, rows.at(128), inverse, limit - 128, lane);
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
        release(P_EMPTY, stage(done == LAST));
        if (done == LAST_HALF) {
            pass();
        }
        tile++;
        mbarrier_wait(sm.bar(END_FULL), number & 1);
        const float2 inverse =
            make_float2(softmax_inverse(sm.end(row)->x), softmax_inverse(sm.end(row + 8)->x));
        release(END_EMPTY, 0);
        store(unit, head, left, right, inverse);
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
