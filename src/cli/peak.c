/*
 * One loop per instruction set: twelve independent sums hide the latency of a multiply-add (4
 * to 6 cycles, two issued a cycle) and fit the sixteen registers of the smaller sets. Must not be
 * called for a level the machine lacks.
 */
#include "cli/peak.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>

#include "base/clock.h"

enum { ACCUMULATORS = 12, BLOCK = 4096, HELPERS_MAX = 1023 };

/* Twelve variables, not an array: an array may end up in memory, and the loop measures that. */
#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)

/* Hides a value from the optimiser, which would else merge equal sums or compute them beforehand.
 */
#if defined(__x86_64__)
#define OPAQUE(x) __asm__ volatile("" : "+x"(x))
#else
#define OPAQUE(x) __asm__ volatile("" : "+w"(x))
#endif

#define BEGIN(i)                                                                                   \
    sum##i = zero;                                                                                 \
    OPAQUE(sum##i);
#define STEP(i) sum##i = MULTIPLY_ADD(sum##i, a, b);
#define END(i) total += sum##i;

/* The body of every loop: BLOCK times twelve multiply-adds; the result keeps them alive. */
#define LOOP(vector)                                                                               \
    vector sum0, sum1, sum2, sum3, sum4, sum5, sum6, sum7, sum8, sum9, sum10, sum11;               \
    vector zero = {0}, total = {0};                                                                \
    EACH(BEGIN)                                                                                    \
    for (int n = 0; n < BLOCK; n++) {                                                              \
        EACH(STEP)                                                                                 \
    }                                                                                              \
    EACH(END)                                                                                      \
    return total[0];

#if defined(__x86_64__)
#include <immintrin.h>

#define MULTIPLY_ADD(sum, a, b) _mm512_fmadd_ps(a, b, sum)
__attribute__((target("avx512f"))) static float loop_avx512(void)
{
    __m512 a = _mm512_set1_ps(0.5f), b = a;
    OPAQUE(a);
    LOOP(__m512)
}
#undef MULTIPLY_ADD

#define MULTIPLY_ADD(sum, a, b) _mm512_dpbf16_ps(sum, (__m512bh)(a), (__m512bh)(b))
__attribute__((target("avx512f,avx512bf16"))) static float loop_avx512bf16(void)
{
    __m512 a = _mm512_set1_ps(0.5f), b = a;
    OPAQUE(a);
    LOOP(__m512)
}
#undef MULTIPLY_ADD

#define MULTIPLY_ADD(sum, a, b) _mm256_fmadd_ps(a, b, sum)
__attribute__((target("avx2,fma"))) static float loop_avx2(void)
{
    __m256 a = _mm256_set1_ps(0.5f), b = a;
    OPAQUE(a);
    LOOP(__m256)
}
#undef MULTIPLY_ADD

/* Matrix tiles are registers by number, so this loop needs neither sums nor a barrier in C: 16 rows
 * of 16 pairs by 16 columns, four tiles of sums in turn. */
__attribute__((target("amx-tile,amx-bf16"))) static float loop_amxbf16(void)
{
    static const struct shapes {
        uint8_t palette, zero[15];
        uint16_t bytes[16];
        uint8_t rows[16];
    } whole = {1, {0}, {64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&whole);
    for (int n = 0; n < BLOCK; n++) {
        _tile_dpbf16ps(0, 4, 5);
        _tile_dpbf16ps(1, 4, 5);
        _tile_dpbf16ps(2, 4, 5);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_release();
    return 0;
}
#endif

/* The baseline: four lanes, a multiply and an add. */
typedef float vector4 __attribute__((vector_size(16)));

#define MULTIPLY_ADD(sum, a, b) ((a) * (b) + (sum))
static float loop_portable(void)
{
    vector4 a = {0.5f, 0.5f, 0.5f, 0.5f}, b = a;
    OPAQUE(a);
    LOOP(vector4)
}
#undef MULTIPLY_ADD

typedef float (*peak_loop)(void);

typedef struct choice {
    peak_loop loop;
    double flops; /* of one call */
} choice;

static choice choose(const char *level, ra_dtype dtype)
{
    const double operations = (double)BLOCK * ACCUMULATORS;
#if defined(__x86_64__)
    if (strcmp(level, "amxbf16") == 0 && dtype == RA_BF16) {
        return (choice){loop_amxbf16, (double)BLOCK * 4 * 16 * 16 * 16 * 4};
    }
    if (strcmp(level, "avx512bf16") == 0 && dtype == RA_BF16) {
        return (choice){loop_avx512bf16, operations * 64};
    }
    if (strncmp(level, "avx512", 6) == 0 || strcmp(level, "amxbf16") == 0) {
        return (choice){loop_avx512, operations * 32};
    }
    if (strncmp(level, "avx2", 4) == 0) {
        return (choice){loop_avx2, operations * 16};
    }
#endif
    (void)level;
    (void)dtype;
    return (choice){loop_portable, operations * 8};
}

typedef struct runner {
    choice chosen;
    double rate;
} runner;

/* The best of several short windows: another process may hold the core for a while. */
static void *run_loop(void *argument)
{
    enum { WINDOWS = 5 };
    const int64_t window_ns = 10 * 1000 * 1000;
    runner *r = argument;
    volatile float sink = 0;
    for (int window = 0; window < WINDOWS; window++) {
        int64_t begin = ra_clock_ns(), elapsed = 0, calls = 0;
        for (; elapsed < window_ns; calls++, elapsed = ra_clock_ns() - begin) {
            sink = sink + r->chosen.loop();
        }
        double rate = r->chosen.flops * (double)calls / ((double)elapsed * 1e-9);
        r->rate = rate > r->rate ? rate : r->rate;
    }
    return NULL;
}

double ra_peak_measure(const char *level, ra_dtype dtype, int threads)
{
    pthread_t helper[HELPERS_MAX];
    runner work[HELPERS_MAX + 1];
    int started = 0;
    for (int i = 0; i <= HELPERS_MAX; i++) {
        work[i] = (runner){.chosen = choose(level, dtype)};
    }
    while (started < threads - 1 && started < HELPERS_MAX &&
           pthread_create(&helper[started], NULL, run_loop, &work[started + 1]) == 0) {
        started++;
    }
    run_loop(&work[0]);
    double total = work[0].rate;
    for (int i = 0; i < started; i++) {
        pthread_join(helper[i], NULL);
        total += work[i + 1].rate;
    }
    return total;
}
