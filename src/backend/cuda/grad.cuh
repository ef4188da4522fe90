/*
 * What the two kernels of the tuned backward share: the layout of shared memory, the ring of
 * stages, and the hand-out of units. A CTA is one loading warpgroup and two that multiply; two CTAs
 * are a cluster, and what both need is copied by halves for both. Must not know what is multiplied.
 */
#ifndef RA_BACKEND_CUDA_GRAD_CUH
#define RA_BACKEND_CUDA_GRAD_CUH

#include "backend/cuda/check.h"
#include "backend/cuda/grad.h"
#include "backend/cuda/ptx.cuh"
#include "backend/cuda/tensor_map.h"
#include "backend/cuda/wgmma.cuh"

namespace grad
{

constexpr int CTAS = 2, THREADS = 384, WARPGROUP = 128, CONSUMER_WARPS = 8, ROW_WARPS = 2;
/* They sum to what the CTA is launched with, three times 168. */
constexpr int LOAD_REGISTERS = 40, CONSUMER_REGISTERS = 232;

/* A stage: three operands of 128 rows x 64 columns, or one and another of 64 rows x 256. */
constexpr int STAGES = 4, OPERAND_BYTES = 16384, STAGE_BYTES = 3 * OPERAND_BYTES;
constexpr int STAGING_BYTES = 32768, WARP_STAGING = STAGING_BYTES / CONSUMER_WARPS;
constexpr int UNIT_ROWS = 2 * RA_BLOCK_ROWS; /* of scores; what is known of each: 10 bytes */
constexpr int UNIT_SLOTS = 2, UNIT_BYTES = 64;

/* Shared memory, from a base aligned to 1024. */
constexpr int AT_STAGING = STAGES * STAGE_BYTES, AT_UNIT = AT_STAGING + STAGING_BYTES,
              AT_DEAD = AT_UNIT + UNIT_SLOTS * UNIT_BYTES, AT_LSE = AT_DEAD + STAGES * 8,
              AT_DELTA = AT_LSE + UNIT_ROWS * 4, AT_SPAN = AT_DELTA + UNIT_ROWS * 4,
              AT_BARRIER = AT_SPAN + UNIT_ROWS * 2;
enum {
    FULL,
    EMPTY = FULL + STAGES,
    UNIT_FULL = EMPTY + STAGES,
    UNIT_EMPTY = UNIT_FULL + UNIT_SLOTS,
    UNIT_ENDS = UNIT_EMPTY + UNIT_SLOTS,
    LSE_FULL = UNIT_ENDS + UNIT_SLOTS, /* and spans */
    LSE_EMPTY,
    DELTA_FULL,
    DELTA_EMPTY,
    BARRIERS,
};
constexpr int SHARED_BYTES = AT_BARRIER + 8 * BARRIERS;
static_assert(SHARED_BYTES <= 232448, "shared memory of an SM");

struct shared {
    char *bytes;
    uint32_t base;
    __device__ __forceinline__ uint32_t bar(int i) const { return base + AT_BARRIER + 8 * i; }
    __device__ __forceinline__ uint32_t stage(int i) const { return base + i * STAGE_BYTES; }
};

/* A place in a ring of N stages. */
template <int N> struct place_in_ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next()
    {
        if (++stage == N) {
            stage = 0;
            parity ^= 1;
        }
    }
};
using ring_place = place_in_ring<STAGES>;

/* A warpgroup is done with a stage: a thread each tells the loaders of both CTAs. */
RA_PTX void release_stage(shared sm, int stage, int thread)
{
    if ((thread & 31) == 0 && thread < 32 * CTAS) {
        mbarrier_arrive_cluster(mapa(sm.bar(EMPTY + stage), thread >> 5));
    }
}

/* ---- units: 64 bytes a CTA, of which the first word is not 0 */

constexpr uint32_t NO_UNIT = ~0u;

/* The next unit, at least unit_count if there is none left. PAIRS: as many units as there are
 * clusters come with a partner, the longest with the shortest of twice as many; NO_UNIT: none. */
template <bool PAIRS> RA_PTX uint32_t take_unit(uint32_t *counter, uint32_t &partner)
{
    const uint32_t clusters = gridDim.x / CTAS, unit = atomicAdd(counter, 1);
    partner = PAIRS && unit < clusters ? 2 * clusters - 1 - unit : NO_UNIT;
    return PAIRS && unit >= clusters ? clusters + unit : unit;
}

/* One thread of the cluster's first CTA: takes units for both CTAs, the first one before the last
 * kernel has ended. Whoever asks first gets the first: a cluster that starts late, because
 * something else holds its processors, finds what others have left. describe(unit, cta, words)
 * fills in what one CTA gets. LATE: takes the next one when the copies of the last one come to an
 * end, not away from clusters that end sooner. Otherwise it takes it at once; where there are too
 * few for a partner that is the end, as clusters that are about to start have none yet. */
template <bool LATE, typename F>
RA_PTX void hand_out(shared sm, const ra_grad_slab &slab, uint32_t unit_count, F describe)
{
    uint32_t partner = NO_UNIT;
#pragma unroll 1
    for (uint32_t n = 0;; n++) {
        const uint32_t slot = n % UNIT_SLOTS;
        if (n > 0) {
            mbarrier_wait(sm.bar(UNIT_EMPTY + slot), (n / UNIT_SLOTS & 1) ^ 1);
        }
        uint32_t unit = partner;
        partner = NO_UNIT;
        if (unit == NO_UNIT) {
            unit = take_unit<!LATE>(slab.counter, partner);
        }
#pragma unroll 1
        for (int cta = 0; cta < CTAS; cta++) {
            int4 word[4] = {};
            if (unit < unit_count) {
                describe(unit, cta, word);
            }
            const uint32_t full = mapa(sm.bar(UNIT_FULL + slot), cta);
            const uint32_t to = mapa(sm.base + AT_UNIT + UNIT_BYTES * slot, cta);
            mbarrier_arrive_expect_tx_cluster(full, UNIT_BYTES);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                st_async_v4(to + 16 * i, word[i], full);
            }
        }
        if (n == 0) { /* all launches before have ended */
            griddepcontrol_wait();
            if (blockIdx.x == 0) {
                *slab.later_counter = 0;
            }
        }
        if (unit >= unit_count) {
            break;
        }
        if constexpr (LATE) {
            mbarrier_wait(sm.bar(UNIT_ENDS + slot), n / UNIT_SLOTS & 1);
        }
    }
}

/* A role's place in the sequence of units. */
template <typename U> struct unit_reader {
    static_assert(sizeof(U) == UNIT_BYTES, "copied in 16-byte words");
    uint32_t n = 0;

    /* Waits for the next unit; false behind the last. Whole warps or single threads. */
    __device__ __forceinline__ bool wait(shared sm) const
    {
        mbarrier_wait(sm.bar(UNIT_FULL + n % UNIT_SLOTS), n / UNIT_SLOTS & 1);
        return *(const volatile int *)unit(sm) != 0;
    }
    __device__ __forceinline__ const U *unit(shared sm) const
    {
        return (const U *)(sm.bytes + AT_UNIT + n % UNIT_SLOTS * UNIT_BYTES);
    }
    /* The copies of the unit come to an end: once a unit, by the copying thread, where units are
     * taken late. */
    __device__ __forceinline__ void ends(shared sm) const
    {
        if (cluster_ctarank() == 0) { /* where units are taken */
            mbarrier_arrive(sm.bar(UNIT_ENDS + n % UNIT_SLOTS));
        }
    }
    /* The caller reads the unit no more. speaks: for itself and the threads in step with it. */
    __device__ __forceinline__ void release(shared sm, bool speaks)
    {
        if (speaks) {
            mbarrier_arrive_cluster(mapa(sm.bar(UNIT_EMPTY + n % UNIT_SLOTS), 0));
        }
        n++;
    }
};

/* ---- beginning and end of both kernels */

/* readers: warps and single threads of a CTA that read units. The next kernel may start, too: as
 * this one, it waits for the last one's end where it needs what that wrote, or writes what that
 * read. */
RA_PTX shared open_shared(char *bytes, int readers)
{
    const shared sm = {bytes, smem_address(bytes)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            mbarrier_init(sm.bar(FULL + i), 1);
            mbarrier_init(sm.bar(EMPTY + i), 2 * CTAS);
        }
        for (int i = 0; i < UNIT_SLOTS; i++) {
            mbarrier_init(sm.bar(UNIT_FULL + i), 1);
            mbarrier_init(sm.bar(UNIT_EMPTY + i), readers * CTAS);
            mbarrier_init(sm.bar(UNIT_ENDS + i), 1);
        }
        mbarrier_init(sm.bar(LSE_FULL), ROW_WARPS);
        mbarrier_init(sm.bar(LSE_EMPTY), CONSUMER_WARPS);
        mbarrier_init(sm.bar(DELTA_FULL), ROW_WARPS);
        mbarrier_init(sm.bar(DELTA_EMPTY), CONSUMER_WARPS);
        fence_mbarrier_init();
    }
    __syncthreads();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    griddepcontrol_launch_dependents();
    return sm;
}

/* Nobody leaves while another CTA may still write to it. */
RA_PTX void close_shared()
{
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

/* ---- launches */

template <typename A>
static inline ra_status launch(void (*kernel)(A), const A *args, int clusters, cudaStream_t stream)
{
    RA_CUDA_TRY(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES));
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = CTAS;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(CTAS * clusters);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = SHARED_BYTES;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = args->slab.first ? 1 : 2;
    RA_CUDA_TRY(cudaLaunchKernelEx(&config, kernel, *args));
    return RA_OK;
}

} /* namespace grad */

#endif
