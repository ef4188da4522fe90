/*
 * Tiles, shared memory and barriers of the forward for head dims up to 256: what its roles agree
 * on. Must not know what a role does.
 */
#ifndef RA_BACKEND_CUDA_FOLD_256_CUH
#define RA_BACKEND_CUDA_FOLD_256_CUH

#include "backend/cuda/fold_common.cuh"
#include "backend/cuda/wgmma.cuh"

namespace fold256
{

constexpr int ROWS = 64, CONSUMERS = 2; /* queries of a consumer; a unit has both's */
constexpr int CHANNELS = 256, SLABS = CHANNELS / RA_SLAB;
constexpr int SHARED_MAX = 232448; /* of an SM */

/* A consumer stores a unit when it has entered the next one; a third slot lets copies go ahead. */
constexpr int UNIT_SLOTS = 3;
constexpr int UNIT_READERS = 3 + 4 * CONSUMERS; /* copying warps, warps of the consumers */

/* They must sum to 504, what 384 threads are launched with; a warpgroup that is refused its
 * registers waits for ever. */
constexpr int LOAD_REGISTERS = 24, FOLD_REGISTERS = 240;
constexpr int WARPGROUP = 128, THREADS = WARPGROUP * (1 + CONSUMERS);

/* Tiles in a row that a consumer passes over at most; the next one counts as seen. Both consumers
 * share two slots of keys and two of values: one that waited for keys further ahead, while it holds
 * the values that belong to its scores, would block the other. */
constexpr int PASSED_MAX = 2;

/* What consumers must know of a tile; bits: TILE_*, one word for each of them. */
struct tile_view {
    int pos;   /* of the first key */
    int count; /* keys of the run from there on; more than a tile holds, or less */
    uint32_t bits[CONSUMERS];
};
enum : uint32_t {
    TILE_SEEN = 1,    /* by some of its queries; else the consumer passes over it */
    TILE_PARTIAL = 2, /* some of its queries do not see all of it */
    TILE_ENDS =
        4, /* what it sees, for now: the next tile may be passed over, or be another unit's */
    TILE_LAST = 8, /* of the unit */
};

/* TILE: keys of a tile, of which shared memory holds two. Query slots are taken in turn by both
 * consumers; a third lets the next unit's queries arrive before this one's are released. */
template <int TILE> struct layout {
    static constexpr int Q_SLOTS = TILE <= 64 ? 3 : 2, K_SLOTS = 2, V_SLOTS = 2;
    static constexpr int Q_BYTES = ROWS * CHANNELS * 2, SLOT_BYTES = TILE * CHANNELS * 2;
    static constexpr int AT_Q = 0, AT_K = AT_Q + Q_SLOTS * Q_BYTES,
                         AT_V = AT_K + K_SLOTS * SLOT_BYTES, AT_REACH = AT_V + V_SLOTS * SLOT_BYTES,
                         AT_UNIT = AT_REACH + Q_SLOTS * ROWS * 8,
                         AT_TILE = AT_UNIT + UNIT_SLOTS * UNIT_BYTES,
                         AT_BARRIER = AT_TILE + 2 * K_SLOTS * 16;
    enum {
        Q_FULL,
        Q_EMPTY = Q_FULL + Q_SLOTS,
        K_FULL = Q_EMPTY + Q_SLOTS,
        K_EMPTY = K_FULL + K_SLOTS,
        V_FULL = K_EMPTY + K_SLOTS,
        V_EMPTY = V_FULL + V_SLOTS,
        V_COPIED = V_EMPTY + V_SLOTS,
        UNIT_FULL = V_COPIED + V_SLOTS,
        UNIT_EMPTY = UNIT_FULL + UNIT_SLOTS,
        BARRIERS = UNIT_EMPTY + UNIT_SLOTS,
    };
    static constexpr int SHARED_BYTES = AT_BARRIER + 8 * BARRIERS;
    static_assert(SHARED_BYTES <= SHARED_MAX, "shared memory");
};

template <int TILE> struct shared {
    using at = layout<TILE>;
    char *bytes;
    uint32_t base;

    __device__ __forceinline__ uint32_t bar(int i) const { return base + at::AT_BARRIER + 8 * i; }
    __device__ __forceinline__ unit_ring<UNIT_SLOTS> units() const
    {
        return unit_ring<UNIT_SLOTS>{base + at::AT_UNIT, bar(at::UNIT_FULL), bar(at::UNIT_EMPTY)};
    }
    __device__ __forceinline__ unit_reader<UNIT_SLOTS> reader() const
    {
        return unit_reader<UNIT_SLOTS>{(const fold_unit *)(bytes + at::AT_UNIT)};
    }
    __device__ __forceinline__ int2 *reach(uint32_t q_slot) const
    {
        return (int2 *)(bytes + at::AT_REACH) + q_slot * ROWS;
    }
    /* Twice as many as slots: a tile is described before its slot is free. */
    __device__ __forceinline__ tile_view *tile(uint32_t index) const
    {
        return (tile_view *)(bytes + at::AT_TILE) + index;
    }
    static __device__ __forceinline__ uint32_t tile_index(ring_place<at::K_SLOTS> place)
    {
        return place.parity * at::K_SLOTS + place.slot;
    }
};

} // namespace fold256

#endif
