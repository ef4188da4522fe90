/*
 * The PTX instructions of the Hopper kernels, each wrapped once under its PTX name; wgmma itself is
 * in wgmma.cuh. No other file holds asm. Shared memory is addressed by 32-bit shared-window
 * addresses. Must not know tiles, tensors or roles.
 *
 * SPIN_MAX > 0 makes a wait trap after so many cycles, less than 2^32: a wrong barrier protocol
 * then is an error and not a hang. For checks only; it costs time in the hot loops.
 */
#ifndef RA_BACKEND_CUDA_PTX_CUH
#define RA_BACKEND_CUDA_PTX_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#ifndef SPIN_MAX
#define SPIN_MAX 0
#endif

#define RA_PTX static __device__ __forceinline__

RA_PTX uint32_t smem_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- mbarrier */

RA_PTX void mbarrier_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
RA_PTX void fence_mbarrier_init()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
RA_PTX void mbarrier_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
RA_PTX void mbarrier_arrive_expect_tx(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
                 : "memory");
}
/* The address in CTA `cta` of the cluster of what is at `address` here. */
RA_PTX uint32_t mapa(uint32_t address, uint32_t cta)
{
    uint32_t remote;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(cta));
    return remote;
}
/* The cluster forms take an address of mapa. They say nothing of .release.cluster on purpose: that
 * form fences all of memory and costs a factor, and what these barriers order is either
 * asynchronous or carried by the barrier itself. */
RA_PTX void mbarrier_arrive_cluster(uint32_t remote_bar)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_bar) : "memory");
}
RA_PTX void mbarrier_arrive_expect_tx_cluster(uint32_t remote_bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(remote_bar),
                 "r"(bytes)
                 : "memory");
}
RA_PTX bool mbarrier_try_wait_parity(uint32_t bar, uint32_t parity)
{
    uint32_t done;
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;"
                 " selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(bar), "r"(parity)
                 : "memory");
    return done != 0;
}
/* Waits until the phase of that parity is over. */
RA_PTX void mbarrier_wait(uint32_t bar, uint32_t parity)
{
#if SPIN_MAX
    const uint32_t start = clock();
    while (!mbarrier_try_wait_parity(bar, parity)) {
        if ((uint32_t)clock() - start > SPIN_MAX) {
            __trap();
        }
    }
#else
    while (!mbarrier_try_wait_parity(bar, parity)) {
    }
#endif
}

/* A word of BYTES to shared memory, without a register to hold it; behind the wait the issuing
 * thread may read it. */
template <int BYTES> RA_PTX void cp_async_ca(uint32_t to, const void *from)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES)
                 : "memory");
}
RA_PTX void cp_async_wait_all()
{
    asm volatile("cp.async.wait_all;" ::: "memory");
}

/* ---- asynchronous copies between global and shared memory */

RA_PTX void prefetch_tensormap(const void *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
RA_PTX void cp_async_bulk_tensor_5d(uint32_t to, const void *map, uint32_t bar, int c0, int c1,
                                    int c2, int c3, int c4)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
                 "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}
/* The same bytes land, and complete, at the same offsets in every CTA of the mask. */
RA_PTX void cp_async_bulk_tensor_5d_multicast(uint32_t to, const void *map, uint32_t bar, int c0,
                                              int c1, int c2, int c3, int c4, uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(to),
                 "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "h"(mask)
                 : "memory");
}
/* The same box to L2 only. */
RA_PTX void cp_async_bulk_prefetch_tensor_5d(const void *map, int c0, int c1, int c2, int c3,
                                             int c4)
{
    asm volatile(
        "cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map),
        "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
        : "memory");
}
RA_PTX void cp_async_bulk_tensor_4d(uint32_t to, const void *map, uint32_t bar, int c0, int c1,
                                    int c2, int c3)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
                 "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
RA_PTX void cp_async_bulk_tensor_4d_multicast(uint32_t to, const void *map, uint32_t bar, int c0,
                                              int c1, int c2, int c3, uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
                 "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(mask)
                 : "memory");
}
RA_PTX void cp_async_bulk_tensor_3d(uint32_t to, const void *map, uint32_t bar, int c0, int c1,
                                    int c2)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
                 "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}
RA_PTX void cp_async_bulk_tensor_3d_multicast(uint32_t to, const void *map, uint32_t bar, int c0,
                                              int c1, int c2, uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(to),
                 "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "h"(mask)
                 : "memory");
}
RA_PTX void cp_async_bulk_tensor_3d_store(const void *map, uint32_t from, int c0, int c1, int c2)
{
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}],"
                 " [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2)
                 : "memory");
}
/* Adds f32 values of shared memory to global memory. */
RA_PTX void cp_reduce_async_bulk_tensor_4d_add(const void *map, uint32_t from, int c0, int c1,
                                               int c2, int c3)
{
    asm volatile("cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group"
                 " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
/* To L2 only; address and bytes are multiples of 16. */
RA_PTX void cp_async_bulk_prefetch(const void *from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
RA_PTX void cp_async_bulk_commit_group()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/* Until at most N groups still read their shared memory. */
template <int N> RA_PTX void cp_async_bulk_wait_group_read()
{
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
/* Until at most N groups are not yet visible in global memory. */
template <int N> RA_PTX void cp_async_bulk_wait_group()
{
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
/* Orders this thread's ordinary writes to shared memory before later asynchronous reads of it. */
RA_PTX void fence_proxy_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
/* Stores into another CTA's shared memory; the barrier, in the same CTA, counts 16 bytes when they
 * are there. Both addresses are of mapa. */
RA_PTX void st_async_v4(uint32_t remote, int4 v, uint32_t remote_bar)
{
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32"
                 " [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote_bar)
                 : "memory");
}

/* ---- warpgroup matrix products: order of registers and groups */

RA_PTX void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
RA_PTX void wgmma_commit_group()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int N> RA_PTX void wgmma_wait_group()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
/* Keeps the compiler from moving uses of accumulators across a wait. */
template <int N> RA_PTX void wgmma_fence_operand(float (&d)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}
/* Hides where a number comes from, so that what depends on it is computed next to its use and not
 * kept in registers over the whole loop. */
RA_PTX uint32_t opaque(uint32_t x)
{
    asm volatile("" : "+r"(x));
    return x;
}
RA_PTX void opaque(float &x)
{
    asm volatile("" : "+f"(x)::"memory");
}

/* Shared-memory matrix descriptors, 128-byte swizzle; the pattern repeats every 1024 bytes. */
enum : uint32_t { DESCRIPTOR_HIGH = 1u << 30 | 1024 >> 4 }; /* 8-row groups lie 1024 bytes apart */

/* K-major: rows of 128 bytes. */
RA_PTX uint32_t descriptor_low_k(uint32_t address)
{
    return (address & 0x3ffff) >> 4 | 1u << 16;
}
/* MN-major: slabs of 64 elements along MN, slab_bytes apart, each of rows of 128 bytes along K. */
RA_PTX uint32_t descriptor_low_mn(uint32_t address, uint32_t slab_bytes)
{
    return (address & 0x3ffff) >> 4 | slab_bytes >> 4 << 16;
}
RA_PTX uint64_t descriptor(uint32_t low)
{
    return (uint64_t)DESCRIPTOR_HIGH << 32 | low;
}

/* ---- warps, warpgroups, clusters */

template <int R> RA_PTX void setmaxnreg_inc()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R));
}
template <int R> RA_PTX void setmaxnreg_dec()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R));
}
/* A named barrier of N threads; ids are constants, or the compiler reserves all sixteen. */
template <int ID, int N> RA_PTX void bar_sync()
{
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(N) : "memory");
}
/* An id that is no constant. */
RA_PTX void bar_sync(int id, int n)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}
template <int ID, int N> RA_PTX void bar_arrive()
{
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(N) : "memory");
}
RA_PTX void barrier_cluster_arrive()
{
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
RA_PTX void barrier_cluster_wait()
{
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
RA_PTX uint32_t cluster_ctarank()
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
/* Programmatic dependent launch: the next kernel of the stream may start; the one before is done.
 */
RA_PTX void griddepcontrol_launch_dependents()
{
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
RA_PTX void griddepcontrol_wait()
{
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* ---- registers */

RA_PTX void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(a), "r"(b), "r"(c), "r"(d)
                 : "memory");
}
/* Each 8x8 block is stored transposed. */
RA_PTX void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    asm volatile(
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
        "r"(a), "r"(b), "r"(c), "r"(d)
        : "memory");
}
RA_PTX void ldmatrix_x4(uint32_t address, uint32_t &a, uint32_t &b, uint32_t &c, uint32_t &d)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(address)
                 : "memory");
}
RA_PTX void st_shared_v4(uint32_t address, uint4 v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}
RA_PTX int4 ld_shared_v4(uint32_t address)
{
    int4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}
/* Two values rounded to nearest and packed, `low` in the low half. */
template <typename T> RA_PTX uint32_t cvt_rn_x2(float low, float high);
template <> __device__ __forceinline__ uint32_t cvt_rn_x2<__nv_bfloat16>(float low, float high)
{
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
template <> __device__ __forceinline__ uint32_t cvt_rn_x2<__half>(float low, float high)
{
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
RA_PTX float rcp_approx(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
RA_PTX float ex2_approx(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* ---- additions of the backward */

RA_PTX void cp_async_bulk_tensor_5d_store(const void *map, uint32_t from, int c0, int c1, int c2,
                                          int c3, int c4)
{
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.tile.bulk_group"
                 " [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}
RA_PTX void cp_async_bulk_tensor_4d_store(const void *map, uint32_t from, int c0, int c1, int c2,
                                          int c3)
{
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group"
                 " [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
                 "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
                 : "memory");
}
RA_PTX void st_shared_v2(uint32_t address, float x, float y)
{
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}

#endif
