/* Random numbers of the GPU benchmarks: the same on every device and in every shard. */
#ifndef RA_BENCH_GPU_BENCH_RANDOM_CUH
#define RA_BENCH_GPU_BENCH_RANDOM_CUH

#include <cstdint>

static inline __host__ __device__ uint32_t bench_hash(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)((x ^ x >> 31) >> 32);
}

/* A normal deviate: data with few distinct bits would use less power. */
static inline __device__ float bench_normal(uint64_t seed, int64_t i)
{
    float u = ((float)bench_hash(seed + 2 * (uint64_t)i) + 1.0f) * 0x1p-32f;
    float v = (float)bench_hash(seed + 2 * (uint64_t)i + 1) * 0x1p-32f;
    return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

#endif
