/*
 * Every wrapper of ptx.cuh and wgmma.cuh on the device, against plain arithmetic: copies with their
 * swizzle and zero fill, barriers within and across CTAs, matrix products for both layouts of both
 * operands, register moves. Runs alone on a Hopper GPU.
 */
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cuda.h>
#include <cuda_runtime.h>

#include "backend/cuda/ptx.cuh"
#include "backend/cuda/wgmma.cuh"

namespace
{

int failures;

void expect(bool ok, const char *what)
{
    if (!ok) {
        std::printf("FAILED  %s\n", what);
        failures++;
    }
}

void must(cudaError_t error, const char *what)
{
    if (error != cudaSuccess) {
        std::printf("FAILED  %s: %s\n", what, cudaGetErrorString(error));
        std::exit(1); /* the device is lost after a trap */
    }
}

/* Memory that host and device see. */
template <typename E> struct buffer {
    E *data;
    explicit buffer(size_t count)
    {
        must(cudaMallocManaged(&data, count * sizeof(E)), "managed memory");
        memset((void *)data, 0, count * sizeof(E));
    }
    ~buffer() { cudaFree(data); }
    buffer(const buffer &) = delete;
    E &operator[](size_t i) { return data[i]; }
};

void finish(const char *what)
{
    must(cudaGetLastError(), what);
    must(cudaDeviceSynchronize(), what);
    std::printf("ran     %s\n", what);
}

float small_number(int i)
{
    return (float)((i * 37 + i / 11) % 17 - 8) / 4;
}

/* Byte offset of element (row, column) of 16 bits in a tile of 128-byte rows with 128-byte swizzle.
 */
__host__ __device__ int swizzled(int row, int column)
{
    return row * 128 + ((column / 8 ^ (row & 7)) * 16) + column % 8 * 2;
}

/* ---- copies */

template <int RANK>
CUtensorMap make_map(void *data, CUtensorMapDataType type, const cuuint64_t (&extents)[RANK],
                     const cuuint64_t (&strides)[RANK - 1], const cuuint32_t (&box)[RANK],
                     CUtensorMapSwizzle swizzle)
{
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    must(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                          cudaEnableDefault, &result),
         "cuTensorMapEncodeTiled");
    cuuint32_t steps[RANK];
    for (int i = 0; i < RANK; i++) {
        steps[i] = 1;
    }
    CUtensorMap map;
    CUresult error = ((decltype(&cuTensorMapEncodeTiled))found)(
        &map, type, RANK, data, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    expect(error == CUDA_SUCCESS, "a tensor map");
    return map;
}

/* 16 rows of 64 channels from row `row` on, to `out`. */
template <int RANK, bool MULTICAST>
__global__ void copy_kernel(const __grid_constant__ CUtensorMap map, int row, uint16_t *out)
{
    __shared__ __align__(1024) uint16_t tile[16 * 64];
    __shared__ uint64_t barrier;
    const uint32_t to = smem_address(tile), bar = smem_address(&barrier);
    if (threadIdx.x == 0) {
        prefetch_tensormap(&map);
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        mbarrier_arrive_expect_tx(bar, sizeof tile);
    }
    __syncthreads();
    if (MULTICAST) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
    if (threadIdx.x == 0 && (!MULTICAST || cluster_ctarank() == 0)) {
        if (RANK == 3 && !MULTICAST) {
            cp_async_bulk_tensor_3d(to, &map, bar, 0, row, 1);
        } else if (RANK == 3) {
            cp_async_bulk_tensor_3d_multicast(to, &map, bar, 0, row, 1, 3);
        } else if (RANK == 4 && !MULTICAST) {
            cp_async_bulk_tensor_4d(to, &map, bar, 0, row, 1, 0);
        } else if (RANK == 4) {
            cp_async_bulk_tensor_4d_multicast(to, &map, bar, 0, row, 1, 0, 3);
        } else if (!MULTICAST) {
            cp_async_bulk_prefetch(out, 2 * sizeof tile);
            cp_async_bulk_prefetch_tensor_5d(&map, 0, row, 1, 0, 0);
            cp_async_bulk_tensor_5d(to, &map, bar, 0, row, 1, 0, 0);
        } else {
            cp_async_bulk_tensor_5d_multicast(to, &map, bar, 0, row, 1, 0, 0, 3);
        }
    }
    mbarrier_wait(bar, 0);
    for (int i = threadIdx.x; i < 16 * 64; i += blockDim.x) {
        out[blockIdx.x * 1024 + i] = tile[i];
    }
    if (MULTICAST) {
        barrier_cluster_arrive();
        barrier_cluster_wait();
    }
}

/* A tensor of 20 rows x 2 slabs of 64; rows 10 to 25 of slab 1 are read, six of them outside. */
template <int RANK, bool MULTICAST> void test_copy(const char *name)
{
    buffer<uint16_t> in(20 * 128), out(2 * 1024);
    for (int i = 0; i < 20 * 128; i++) {
        in[i] = (uint16_t)(i + 1);
    }
    const cuuint64_t all_extents[5] = {64, 20, 2, 1, 1}, all_strides[4] = {256, 128, 5120, 5120};
    const cuuint32_t all_boxes[5] = {64, 16, 1, 1, 1};
    cuuint64_t extents[RANK], strides[RANK - 1];
    cuuint32_t box[RANK];
    for (int i = 0; i < RANK; i++) {
        extents[i] = all_extents[i];
        box[i] = all_boxes[i];
        if (i > 0) {
            strides[i - 1] = all_strides[i - 1];
        }
    }
    CUtensorMap map = make_map<RANK>(in.data, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, extents, strides,
                                     box, CU_TENSOR_MAP_SWIZZLE_128B);
    const int ctas = MULTICAST ? 2 : 1;
    cudaLaunchAttribute cluster = {};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = ctas;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(ctas);
    config.blockDim = dim3(128);
    config.attrs = &cluster;
    config.numAttrs = 1;
    must(cudaLaunchKernelEx(&config, copy_kernel<RANK, MULTICAST>, map, 10, out.data), name);
    finish(name);
    for (int i = 0; i < ctas * 1024; i++) {
        const int row = i / 64 % 16, column = i % 64;
        const uint16_t want = row < 10 ? in[(10 + row) * 128 + 64 + column] : 0;
        const char *tile = (const char *)(out.data + i / 1024 * 1024);
        uint16_t got;
        memcpy(&got, tile + swizzled(row, column), sizeof got);
        if (got != want) {
            expect(false, name);
            return;
        }
    }
}

__global__ void store_kernel(const __grid_constant__ CUtensorMap store,
                             const __grid_constant__ CUtensorMap add)
{
    __shared__ __align__(1024) float tile[8 * 32];
    for (int i = threadIdx.x; i < 8 * 32; i += blockDim.x) {
        tile[i] = (float)i;
    }
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        cp_async_bulk_tensor_3d_store(&store, smem_address(tile), 0, 2, 0);
        cp_async_bulk_commit_group();
        cp_async_bulk_wait_group<0>();
        for (int i = 0; i < 2; i++) {
            cp_reduce_async_bulk_tensor_4d_add(&add, smem_address(tile), 0, 2, 0, 0);
            cp_async_bulk_commit_group();
        }
        cp_async_bulk_wait_group_read<0>();
    }
}

/* Stored once and added twice: three times the tile, from row 2 on; row 10 on is outside. */
void test_store()
{
    buffer<float> out(10 * 32 + 64);
    const cuuint64_t extents3[3] = {32, 8, 1}, strides3[2] = {128, 1280};
    const cuuint64_t extents4[4] = {32, 8, 1, 1}, strides4[3] = {128, 1280, 1280};
    const cuuint32_t box3[3] = {32, 8, 1}, box4[4] = {32, 8, 1, 1};
    CUtensorMap store = make_map<3>(out.data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, extents3, strides3,
                                    box3, CU_TENSOR_MAP_SWIZZLE_NONE);
    CUtensorMap add = make_map<4>(out.data, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, extents4, strides4,
                                  box4, CU_TENSOR_MAP_SWIZZLE_NONE);
    store_kernel<<<1, 64>>>(store, add);
    finish("cp.async.bulk.tensor stores and cp.reduce");
    bool ok = true;
    for (int i = 0; i < 10 * 32; i++) {
        const bool inside = i / 32 >= 2 && i / 32 < 8;
        ok = ok && out[i] == (inside ? 3.0f * (float)(i - 64) : 0.0f);
    }
    expect(ok, "cp.async.bulk.tensor stores and cp.reduce");
}

/* ---- barriers across CTAs */

/* CTA 0 sends 16 bytes to both, both arrive at CTA 0's barrier when they have them. */
__global__ void __cluster_dims__(2, 1, 1) cluster_kernel(int *out)
{
    __shared__ __align__(16) int mail[4];
    __shared__ uint64_t barriers[2];
    const uint32_t full = smem_address(&barriers[0]), done = smem_address(&barriers[1]);
    const uint32_t rank = cluster_ctarank();
    if (threadIdx.x == 0) {
        mbarrier_init(full, 1);
        mbarrier_init(done, 2);
        fence_mbarrier_init();
    }
    __syncthreads();
    barrier_cluster_arrive();
    barrier_cluster_wait();
    if (threadIdx.x == 0) {
        for (uint32_t cta = 0; cta < 2 && rank == 0; cta++) {
            mbarrier_arrive_expect_tx_cluster(mapa(full, cta), 16);
            st_async_v4(mapa(smem_address(mail), cta), make_int4(1, 2, 3, 40 + cta),
                        mapa(full, cta));
        }
        mbarrier_wait(full, 0);
        const int4 got = ld_shared_v4(smem_address(mail));
        out[rank] = got.x + 10 * got.y + 100 * got.z + 1000 * got.w;
        mbarrier_arrive_cluster(mapa(done, 0));
        if (rank == 0) {
            mbarrier_wait(done, 0);
            out[2] = 1;
        }
    }
    __syncwarp();
    barrier_cluster_arrive();
    barrier_cluster_wait();
}

void test_cluster()
{
    buffer<int> out(3);
    cluster_kernel<<<2, 32>>>(out.data);
    finish("mapa, st.async, mbarrier across CTAs");
    expect(out[0] == 40321 && out[1] == 41321 && out[2] == 1,
           "mapa, st.async, mbarrier across CTAs");
}

/* ---- matrix products: 64 x N, depth 16, with A[m][k] = a(m * 16 + k) and so on. An operand's tile
 * has 64 elements to a row: MN-major tiles have a row for each k, K-major ones for each m or n. */

template <typename E> __device__ void put(char *tile, int row, int column, float x)
{
    *(E *)(tile + swizzled(row, column)) = (E)x;
}

template <typename E, int N, bool RS, int TA, int TB>
__global__ void product_kernel(const float *a, const float *b, float *out)
{
    __shared__ __align__(1024) char tile_a[8192], tile_b[32768];
    const int thread = threadIdx.x, lane = thread % 32, row = thread / 32 * 16 + lane / 4;
    const int slab = TB ? 16 * 128 : 0; /* of MN-major B: 16 rows of 64 columns */
    for (int i = thread; i < 64 * 16; i += 128) {
        const int m = i / 16, k = i % 16;
        put<E>(tile_a, TA ? k : m, TA ? m : k, a[i]);
    }
    for (int i = thread; i < N * 16; i += 128) {
        const int n = i / 16, k = i % 16;
        put<E>(tile_b + n / 64 * slab, TB ? k : n, TB ? n % 64 : k, b[i]);
    }
    fence_proxy_async();
    __syncthreads();
    float d[N / 2];
    for (int i = 0; i < N / 2; i++) {
        d[i] = 1.0f;
    }
    wgmma_fence_operand(d);
    const uint64_t db = descriptor(opaque(TB ? descriptor_low_mn(smem_address(tile_b), 16 * 128)
                                             : descriptor_low_k(smem_address(tile_b))));
    const uint64_t da = descriptor(TA ? descriptor_low_mn(smem_address(tile_a), 16 * 128)
                                      : descriptor_low_k(smem_address(tile_a)));
    if constexpr (RS) {
        const float *r0 = a + row * 16 + lane % 4 * 2, *r8 = r0 + 8 * 16;
        const uint32_t p[4] = {cvt_rn_x2<E>(r0[0], r0[1]), cvt_rn_x2<E>(r8[0], r8[1]),
                               cvt_rn_x2<E>(r0[8], r0[9]), cvt_rn_x2<E>(r8[8], r8[9])};
        wgmma_fence();
        wgmma_rs<E, TB>(d, p[0], p[1], p[2], p[3], db, 0);
        wgmma_rs<E, TB>(d, p[0], p[1], p[2], p[3], db, 1);
    } else {
        wgmma_fence();
        wgmma_ss<E, TA, TB>(d, da, db, 0);
        wgmma_ss<E, TA, TB>(d, da, db, 1);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_fence_operand(d);
    for (int i = 0; i < N / 2; i++) {
        out[(row + (i & 2) * 4) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
    }
}

template <typename E, int N, bool RS, int TA, int TB> void test_product(const char *name)
{
    buffer<float> a(64 * 16), b(N * 16), out(64 * N);
    for (int i = 0; i < N * 16 || i < 64 * 16; i++) {
        if (i < 64 * 16) {
            a[i] = small_number(i);
        }
        if (i < N * 16) {
            b[i] = small_number(3 * i + 5);
        }
    }
    product_kernel<E, N, RS, TA, TB><<<1, 128>>>(a.data, b.data, out.data);
    finish(name);
    bool ok = true;
    for (int i = 0; i < 64 * N; i++) {
        float want = 0;
        for (int k = 0; k < 16; k++) {
            want += 2 * a[i / N * 16 + k] * b[i % N * 16 + k];
        }
        ok = ok && out[i] == want;
    }
    expect(ok, name);
}

/* ---- registers, warpgroups, dependent launches */

/* A value each: of ex2, rcp and cvt, of blocks that went through shared memory both ways. */
__global__ void __launch_bounds__(512, 1) register_kernel(float *out)
{
    __shared__ __align__(1024) uint16_t block[4 * 64];
    const int thread = threadIdx.x, lane = thread % 32;
    if (thread < 128) {
        setmaxnreg_dec<24>();
        bar_arrive<3, 256>();
    } else if (thread >= 256) {
        setmaxnreg_dec<24>();
    } else {
        setmaxnreg_inc<240>();
        bar_sync<3, 256>();
        bar_sync(4 + thread / 192, 64);
        if (thread < 160) {
            const uint32_t at = smem_address(block) + lane * 16;
            uint32_t r[4];
            stmatrix_x4(at, lane, lane + 100, lane + 200, lane + 300);
            __syncwarp();
            ldmatrix_x4(at, r[0], r[1], r[2], r[3]);
            out[lane] =
                r[0] == lane && r[1] == lane + 100 && r[2] == lane + 200 && r[3] == lane + 300;
            __syncwarp();
            /* Halves are (row, column) of a block: transposed back by reading columns. */
            const uint32_t word = (lane / 4 * 8 + lane % 4 * 2) | (lane / 4 * 8 + lane % 4 * 2 + 1)
                                                                      << 16;
            stmatrix_x4_trans(at, word, word, word, word);
            __syncwarp();
            out[32 + lane] = block[64 + lane] == lane % 8 * 8 + lane / 8;
            st_shared_v4(at, make_uint4(lane, 1, 2, 3));
            const int4 v = ld_shared_v4(at);
            out[64 + lane] = v.x == lane && v.w == 3 && ex2_approx(3.0f) == 8.0f &&
                             fabsf(rcp_approx(3.0f) * 3.0f - 1.0f) < 1e-6f &&
                             cvt_rn_x2<__nv_bfloat16>(1.0f, -2.0f) == 0xc0003f80u &&
                             cvt_rn_x2<__half>(1.0f, -2.0f) == 0xc0003c00u;
        }
    }
}

void test_registers()
{
    buffer<float> out(96);
    register_kernel<<<1, 512>>>(out.data);
    finish("stmatrix, ldmatrix, cvt, ex2, rcp, setmaxnreg, named barriers");
    bool ok = true;
    for (int i = 0; i < 96; i++) {
        ok = ok && out[i] == 1.0f;
    }
    expect(ok, "stmatrix, ldmatrix, cvt, ex2, rcp, setmaxnreg, named barriers");
}

__global__ void first_kernel(int *out)
{
    griddepcontrol_launch_dependents();
    __nanosleep(100000);
    out[0] = 7;
}
__global__ void second_kernel(int *out)
{
    griddepcontrol_wait();
    out[1] = out[0] + 1;
}

void test_dependents()
{
    buffer<int> out(2);
    cudaLaunchAttribute early = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = config.blockDim = dim3(1);
    config.attrs = &early;
    config.numAttrs = 1;
    first_kernel<<<1, 1>>>(out.data);
    must(cudaLaunchKernelEx(&config, second_kernel, out.data), "griddepcontrol");
    finish("griddepcontrol");
    expect(out[1] == 8, "griddepcontrol");
}

} // namespace

int main()
{
    test_copy<3, false>("cp.async.bulk.tensor.3d");
    test_copy<3, true>("cp.async.bulk.tensor.3d multicast");
    test_copy<4, false>("cp.async.bulk.tensor.4d");
    test_copy<4, true>("cp.async.bulk.tensor.4d multicast");
    test_copy<5, false>("cp.async.bulk.tensor.5d");
    test_copy<5, true>("cp.async.bulk.tensor.5d multicast");
    test_store();
    test_cluster();
    test_product<__nv_bfloat16, 64, false, 0, 0>("wgmma ss n64, both K-major");
    test_product<__nv_bfloat16, 80, false, 0, 0>("wgmma ss n80, both K-major");
    test_product<__half, 128, false, 0, 0>("wgmma ss n128 f16, both K-major");
    test_product<__nv_bfloat16, 128, false, 0, 1>("wgmma ss n128, B MN-major");
    test_product<__nv_bfloat16, 256, false, 0, 1>("wgmma ss n256, B MN-major");
    test_product<__nv_bfloat16, 256, false, 1, 1>("wgmma ss n256, both MN-major");
    test_product<__half, 64, false, 1, 0>("wgmma ss n64 f16, A MN-major");
    test_product<__nv_bfloat16, 256, true, 0, 1>("wgmma rs n256, B MN-major");
    test_product<__half, 256, true, 0, 1>("wgmma rs n256 f16, B MN-major");
    test_registers();
    test_dependents();
    std::printf("%d failed\n", failures);
    return failures != 0;
}
