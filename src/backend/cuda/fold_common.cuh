/*
 * What the tuned forward kernels share: arguments, the hand-out of work, the tile walk and the
 * stores. A unit is one item for the query heads that a cluster's CTAs take, one each, all of one
 * KV head, so that the CTAs walk the same keys and every copied key serves all of them. Must not
 * know tile sizes or the roles of warps.
 */
#ifndef RA_BACKEND_CUDA_FOLD_COMMON_CUH
#define RA_BACKEND_CUDA_FOLD_COMMON_CUH

#include "backend/cuda/dispatch.h"
#include "backend/cuda/softmax.cuh"
#include "backend/cuda/tensor_map.h"

/* A tensor on the device: strides count elements. */
struct fold_view {
    void *data;
    int64_t row, head, seq;
};

struct fold_args {
    CUtensorMap q, k[RA_SOURCE_COUNT], v[RA_SOURCE_COUNT];
    fold_view acc, lse, out;
    const ra_work_item *item;
    const ra_work_run *run;
    const ra_work_reach *reach;
    uint32_t *counter; /* units handed out so far */
    int item_count, unit_count;
    int clusters; /* of the grid */
    int heads_per_kv;
    int channels;
    float scale_log2;
    int tail_head, tail_heads; /* the last KV heads, which hand out their items together */
};

template <typename E> RA_PTX E *view_at(const fold_view &view, int row, int head, int64_t seq)
{
    return (E *)view.data + (row * view.row + head * view.head + seq * view.seq);
}

/* ---- units */

/* In shared memory, SLOTS of them: readers of one do not hold up the next. count 0: no more. */
struct fold_unit {
    ra_work_item item;
    ra_work_run run; /* the item's first, so that copies need not wait for it; 0 keys if none */
    int head;        /* of the cluster's first CTA */
    int kv_head;
    int unused[2];
};
constexpr int UNIT_BYTES = 80;
static_assert(sizeof(fold_unit) == UNIT_BYTES && sizeof(ra_work_item) == 32 &&
                  sizeof(ra_work_run) == 32,
              "copied in 16-byte words");

/* Shared-window addresses. full, empty: SLOTS barriers each; full counts 1 arrival and the bytes,
 * empty one arrival of each reader of each CTA, at the cluster's first CTA. */
template <int SLOTS> struct unit_ring {
    uint32_t units, full, empty;
};

/* One 16-byte word of a unit to every CTA of the cluster. */
template <int CTAS, int SLOTS>
RA_PTX void send_unit_word(unit_ring<SLOTS> ring, uint32_t slot, int index, int4 word)
{
    const uint32_t to = ring.units + UNIT_BYTES * slot + 16 * index;
    if constexpr (CTAS == 1) { /* asynchronous stores want a cluster */
        st_shared_v4(to, make_uint4(word.x, word.y, word.z, word.w));
    } else {
#pragma unroll 1
        for (int cta = 0; cta < CTAS; cta++) {
            st_async_v4(mapa(to, cta), word, mapa(ring.full + 8 * slot, cta));
        }
    }
}

/* The item of the n-th unit, and which of the query heads it is for, counted in clusters. One KV
 * head follows the other, so that its keys stay in L2, with the longest items first. Only the last
 * heads take turns, longest first over all of them, or the grid would wait at its end for the first
 * items of the last head. */
template <int CTAS> RA_PTX uint2 find_unit(const fold_args &args, uint32_t n)
{
    const uint32_t heads = args.heads_per_kv / CTAS;
    uint32_t first = args.tail_head * heads, turn = args.tail_heads * heads;
    if (n < first * args.item_count) {
        first = n / (heads * args.item_count) * heads;
        turn = heads;
    }
    const uint32_t rest = n - first * args.item_count;
    return make_uint2(rest / turn, first + rest % turn);
}

/* One thread of the cluster's first CTA: takes units in order, for all CTAs. Taking them one by one
 * balances the load whatever else runs on the device. */
template <int CTAS, int SLOTS>
RA_PTX void hand_out_units(const fold_args &args, unit_ring<SLOTS> ring)
{
    bool more = true;
#pragma unroll 1
    for (uint32_t n = 0; more; n++) {
        const uint32_t slot = n % SLOTS;
        mbarrier_wait(ring.empty + 8 * slot, (n / SLOTS & 1) ^ 1);
        const uint32_t unit = atomicAdd(args.counter, 1);
        more = unit < (uint32_t)args.unit_count;
        if constexpr (CTAS > 1) {
#pragma unroll
            for (int cta = 0; cta < CTAS; cta++) {
                mbarrier_arrive_expect_tx_cluster(mapa(ring.full + 8 * slot, cta), UNIT_BYTES);
            }
        }
        const uint2 found = find_unit<CTAS>(args, more ? unit : 0);
        const int head = found.y * CTAS;
        send_unit_word<CTAS>(ring, slot, 4, make_int4(head, head / args.heads_per_kv, 0, 0));
        const int4 *from = (const int4 *)(args.item + found.x);
        int4 word = from[0];
        word.z = more ? word.z : 0; /* count */
        send_unit_word<CTAS>(ring, slot, 0, word);
        word = from[1];
        send_unit_word<CTAS>(ring, slot, 1, word);
        const bool any = word.y > 0; /* run_count */
        from = (const int4 *)(args.run + word.x);
        send_unit_word<CTAS>(ring, slot, 2, any ? from[0] : int4{});
        send_unit_word<CTAS>(ring, slot, 3, any ? from[1] : int4{});
        if constexpr (CTAS == 1) {
            mbarrier_arrive(ring.full + 8 * slot);
        }
    }
}

/* A role's place in the sequence of units. */
template <int SLOTS> struct unit_reader {
    const fold_unit *units; /* the same memory as ring.units */
    uint32_t n = 0;

    /* Waits for unit n; false behind the last. Whole warps or single threads. */
    __device__ __forceinline__ bool wait(unit_ring<SLOTS> ring) const
    {
        mbarrier_wait(ring.full + 8 * (n % SLOTS), n / SLOTS & 1);
        return unit()->item.count != 0;
    }
    __device__ __forceinline__ const fold_unit *unit() const { return units + n % SLOTS; }
    /* The caller reads the unit no more. speaks: for itself and for the threads it is in step with
     */
    __device__ __forceinline__ void release(unit_ring<SLOTS> ring, bool speaks)
    {
        if (speaks) {
            mbarrier_arrive_cluster(mapa(ring.empty + 8 * (opaque(n) % SLOTS), 0));
        }
        n++;
    }
};

/* ---- the walk over an item's keys: run after run, `TILE` keys at a time from each run's first.
 * visit(run, last): `run` is what is left of a run, the tile its first keys; last: of the item. An
 * item without keys has one tile, of which it sees nothing. */
template <int TILE, typename F>
RA_PTX void walk_tiles(const fold_args &args, const fold_unit *unit, F visit)
{
    int at = 0;
    ra_work_run run = unit->run;
#pragma unroll 1
    for (;;) {
        const bool over = run.count <= TILE, last = over && at + 1 >= unit->item.run_count;
        visit(run, last);
        if (!over) {
            run.index += TILE;
            run.count -= TILE;
            run.pos += TILE;
            run.full_begin -= TILE;
            run.full_end -= TILE;
        } else if (!last) {
            at++;
            run = args.run[unit->item.run_first + at];
        } else {
            return;
        }
    }
}

/* What the softmax needs of a tile. */
struct tile_info {
    int pos;         /* of the first key */
    int count;       /* keys of the run from there on; more than a tile holds, or less */
    int16_t partial; /* some query does not see all of the tile */
    int16_t last;    /* of the item */
};
constexpr int TILE_INFO_BYTES = 12;
static_assert(sizeof(tile_info) == TILE_INFO_BYTES, "no holes");

template <int TILE> RA_PTX tile_info describe_tile(const ra_work_run &run, bool last)
{
    return tile_info{run.pos, run.count, (int16_t)(run.full_begin > 0 || run.full_end < TILE),
                     (int16_t)last};
}

/* Columns [x, y) of the tile that a row with this reach may see. */
RA_PTX int2 tile_columns(tile_info tile, int2 reach)
{
    return make_int2(reach.x - tile.pos, min(reach.y - tile.pos, tile.count));
}

/* This CTA's place in its cluster. */
template <int CTAS> RA_PTX int cluster_rank()
{
    return CTAS > 1 ? cluster_ctarank() : 0;
}

/* ---- rings of shared-memory slots */

/* Threads 0 to CTAS - 1 of those that agree arrive, one at each CTA: the slot is free for the
 * copies of every CTA of the cluster. */
template <int CTAS> RA_PTX void release_slot(uint32_t bar, int thread)
{
    if constexpr (CTAS == 1) {
        if (thread == 0) {
            mbarrier_arrive(bar);
        }
    } else if (thread < CTAS) {
        mbarrier_arrive_cluster(mapa(bar, thread));
    }
}

/* A place in a ring of N slots. Consumers wait for `parity`, producers for the other one. */
template <int N> struct ring_place {
    uint32_t slot = 0, parity = 0;
    __device__ __forceinline__ void next()
    {
        slot = slot + 1 == N ? 0 : slot + 1;
        parity ^= slot == 0;
    }
};

/* This CTA's part of a slot, for every CTA of the cluster. */
template <int CTAS>
RA_PTX void copy_part(uint32_t to, const CUtensorMap *map, uint32_t bar, int seq, int slab,
                      int head, int row)
{
    if constexpr (CTAS == 1) {
        cp_async_bulk_tensor_5d(to, map, bar, 0, seq, slab, head, row);
    } else {
        cp_async_bulk_tensor_5d_multicast(to, map, bar, 0, seq, slab, head, row, (1 << CTAS) - 1);
    }
}

/* ---- accumulators from and to global memory. A thread holds elements of two rows like those of a
 * score tile (softmax.cuh), of N / 2 columns each. `limit`: columns of the tensor from the first
 * on; whole slabs. */

/* What a thread's two rows are in a tensor: base of the first column; valid: may be touched. */
template <typename E> struct row_pair {
    E *first, *second;
    bool valid0, valid1;
    __device__ __forceinline__ row_pair at(int column) const
    {
        return row_pair{first + column, second + column, valid0, valid1};
    }
};

template <typename E>
RA_PTX row_pair<E> view_rows(const fold_view &view, const fold_unit *unit, int head, int row,
                             int column)
{
    row_pair<E> rows;
    rows.first = view_at<E>(view, unit->item.row, head, (int64_t)unit->item.index + row) + column;
    rows.second = rows.first + 8 * view.seq;
    rows.valid0 = row < unit->item.count;
    rows.valid1 = row + 8 < unit->item.count;
    return rows;
}

/* Where a lane's 16 bytes of two neighbouring groups of 8 columns lie: lanes 2i and 2i + 1 trade
 * the halves of what they hold of both. */
RA_PTX int traded_column(int lane)
{
    return (lane >> 1 & 1) * 4 + (lane & 1) * 8;
}

/* Rows that are not valid, and columns past the limit, read as zero. */
template <int N> RA_PTX void load_rows(float (&x)[N], row_pair<float> rows, int limit, int lane)
{
    const bool odd = lane & 1;
    const int own = traded_column(lane);
#pragma unroll
    for (int i = 0; i < N; i += 8) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if ((r ? rows.valid1 : rows.valid0) && i * 2 < limit) {
                v = __ldcg((const float4 *)((r ? rows.second : rows.first) + own + i * 2));
            }
            const float other0 = __shfl_xor_sync(~0u, odd ? v.x : v.z, 1);
            const float other1 = __shfl_xor_sync(~0u, odd ? v.y : v.w, 1);
            x[i + 2 * r] = odd ? other0 : v.x;
            x[i + 2 * r + 1] = odd ? other1 : v.y;
            x[i + 4 + 2 * r] = odd ? v.z : other0;
            x[i + 5 + 2 * r] = odd ? v.w : other1;
        }
    }
}

/* x * scale. */
template <int N>
RA_PTX void store_rows(const float (&x)[N], row_pair<float> rows, float2 scale, int limit, int lane)
{
    const bool odd = lane & 1;
    const int own = traded_column(lane);
#pragma unroll
    for (int i = 0; i < N; i += 8) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float f = r ? scale.y : scale.x;
            const float a0 = x[i + 2 * r] * f, a1 = x[i + 2 * r + 1] * f;
            const float b0 = x[i + 4 + 2 * r] * f, b1 = x[i + 5 + 2 * r] * f;
            const float other0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1);
            const float other1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
            if ((r ? rows.valid1 : rows.valid0) && i * 2 < limit) {
                __stcg((float4 *)((r ? rows.second : rows.first) + own + i * 2),
                       odd ? make_float4(other0, other1, b0, b1)
                           : make_float4(a0, a1, other0, other1));
            }
        }
    }
}

/* Over a quad: afterwards lane q holds word q of lanes 0 to 3. */
RA_PTX void quad_transpose(uint32_t (&v)[4], int lane)
{
    uint32_t a = lane & 1 ? v[0] : v[1], b = lane & 1 ? v[2] : v[3];
    a = __shfl_xor_sync(~0u, a, 1);
    b = __shfl_xor_sync(~0u, b, 1);
    (lane & 1 ? v[0] : v[1]) = a;
    (lane & 1 ? v[2] : v[3]) = b;
    a = lane & 2 ? v[0] : v[2];
    b = lane & 2 ? v[1] : v[3];
    a = __shfl_xor_sync(~0u, a, 2);
    b = __shfl_xor_sync(~0u, b, 2);
    (lane & 2 ? v[0] : v[2]) = a;
    (lane & 2 ? v[1] : v[3]) = b;
}

/* x * scale rounded to E; the quad trades words so that every lane writes 16 bytes. */
template <typename E, int N>
RA_PTX void store_rows_as(const float (&x)[N], row_pair<E> rows, float2 scale, int limit, int lane)
{
    const int own = (lane & 3) * 8;
#pragma unroll
    for (int i = 0; i < N; i += 16) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float f = r ? scale.y : scale.x;
            uint32_t v[4];
#pragma unroll
            for (int u = 0; u < 4; u++) {
                v[u] = cvt_rn_x2<E>(x[i + 4 * u + 2 * r] * f, x[i + 4 * u + 2 * r + 1] * f);
            }
            quad_transpose(v, lane);
            if ((r ? rows.valid1 : rows.valid0) && i * 2 < limit) {
                *(uint4 *)((r ? rows.second : rows.first) + own + i * 2) =
                    make_uint4(v[0], v[1], v[2], v[3]);
            }
        }
    }
}

#endif
