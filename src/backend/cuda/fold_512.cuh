/*
 * Tiles, shared memory and barriers of the forward for head dims up to 512: what its four roles
 * agree on. Must not know what a role does.
 */
#ifndef RA_BACKEND_CUDA_FOLD_512_CUH
#define RA_BACKEND_CUDA_FOLD_512_CUH

#include "backend/cuda/fold_common.cuh"
#include "backend/cuda/wgmma.cuh"

namespace fold512
{

constexpr int ROWS = 64, TILE = 128; /* queries of a unit, keys of a tile */
constexpr int SLABS = 8;             /* of 64 channels */
constexpr int RING = 4, SLOT_BYTES = 16384, HALF_SLOT = SLOT_BYTES / 2;
constexpr int SLOT_KEYS = 16; /* of values */
/* Slots of a tile. They turn each ring an even number of times, so that a step's slot and parity
 * are constants. */
constexpr int K_STEPS = SLABS, V_STEPS = TILE / SLOT_KEYS;
static_assert(K_STEPS % (2 * RING) == 0 && V_STEPS % (2 * RING) == 0, "constant parities");
constexpr int P_STAGES = 4, P_BYTES = 8192; /* 64 queries x 64 keys; two a tile */
constexpr int Q_BYTES = ROWS * 512 * 2, Q_SLAB_BYTES = Q_BYTES / SLABS;
/* Scores run up to two tiles ahead of the output and start the next unit before the softmax of this
 * one is over; units may be as short as a tile. */
constexpr int UNIT_SLOTS = 4;
/* Descriptions of tiles. The copy of the keys writes one before its slots are free; then the scores
 * are in the tile before, the softmax in the one before that, and docs/kernels.md shows that all
 * warps are behind the one before those. */
constexpr int TILE_SLOTS = 4;

/* Shared memory, from a base aligned to 1024. */
constexpr int AT_Q = 0, AT_K = AT_Q + Q_BYTES, AT_V = AT_K + RING * SLOT_BYTES,
              AT_P = AT_V + RING * SLOT_BYTES, AT_SCALE = AT_P + P_STAGES * P_BYTES,
              AT_END = AT_SCALE + P_STAGES / 2 * ROWS * 4, AT_REACH = AT_END + ROWS * 8,
              AT_LSE = AT_REACH + 2 * ROWS * 8, AT_UNIT = AT_LSE + ROWS * 4,
              AT_TILE = AT_UNIT + UNIT_SLOTS * UNIT_BYTES,
              AT_BARRIER = AT_TILE + TILE_SLOTS * TILE_INFO_BYTES;
/* Barriers. */
enum {
    Q_FULL, /* one a slab: the next unit's follow those of this one as these are used up; with the
               last one what the softmax starts from */
    Q_EMPTY = Q_FULL + SLABS,
    K_FULL = Q_EMPTY + SLABS,
    K_EMPTY = K_FULL + RING,
    V_FULL = K_EMPTY + RING,
    V_EMPTY = V_FULL + RING,
    P_FULL = V_EMPTY + RING,
    P_EMPTY = P_FULL + P_STAGES,
    END_FULL = P_EMPTY + P_STAGES, /* the sums and maxima of a unit */
    END_EMPTY,
    UNIT_FULL,
    UNIT_EMPTY = UNIT_FULL + UNIT_SLOTS,
    BARRIERS = UNIT_EMPTY + UNIT_SLOTS,
};
constexpr int SHARED_BYTES = AT_BARRIER + 8 * BARRIERS;
static_assert(SHARED_BYTES <= 232448, "shared memory of an SM");

/* They must sum to 512, what 512 threads are launched with; a warpgroup that is refused its
 * registers waits for ever. */
constexpr int LOAD_REGISTERS = 24, SCORE_REGISTERS = 168, OUTPUT_REGISTERS = 160;
constexpr int THREADS = 512, WARPGROUP = 128;
constexpr int UNIT_READERS = 3 + 4 + 8; /* the copying threads, the warps of the others */

struct shared {
    char *bytes;
    uint32_t base;
    __device__ __forceinline__ uint32_t bar(int i) const { return base + AT_BARRIER + 8 * i; }
    __device__ __forceinline__ unit_ring<UNIT_SLOTS> units() const
    {
        return unit_ring<UNIT_SLOTS>{base + AT_UNIT, bar(UNIT_FULL), bar(UNIT_EMPTY)};
    }
    __device__ __forceinline__ unit_reader<UNIT_SLOTS> reader() const
    {
        return unit_reader<UNIT_SLOTS>{(const fold_unit *)(bytes + AT_UNIT)};
    }
    __device__ __forceinline__ int2 *reach(uint32_t unit) const
    {
        return (int2 *)(bytes + AT_REACH) + unit % 2 * ROWS;
    }
    __device__ __forceinline__ float *lse(int row) const { return (float *)(bytes + AT_LSE) + row; }
    /* A row's sum and maximum at the end of a unit. */
    __device__ __forceinline__ float2 *end(int row) const
    {
        return (float2 *)(bytes + AT_END) + row;
    }
    __device__ __forceinline__ tile_info *tile(uint32_t n) const
    {
        return (tile_info *)(bytes + AT_TILE) + n % TILE_SLOTS;
    }
};

} // namespace fold512

#endif
