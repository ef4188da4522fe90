/* The shared parts of the test executables. */
#include "support.h"

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { LIMIT_FACTOR = 8 }; /* sanitizers are slow */
#else
enum { LIMIT_FACTOR = 1 };
#endif
enum { LIMIT_DEFAULT_SECONDS = 60 };

static uint64_t seed = 1;
static char case_name[256] = "start";

rng rng_of(uint64_t value)
{
    rng r = {value * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du};
    return r;
}

uint64_t rng_next(rng *r)
{
    uint64_t z = r->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

int64_t rng_int(rng *r, int64_t low, int64_t high)
{
    return low + (int64_t)(rng_next(r) % (uint64_t)(high - low + 1));
}

bool rng_chance(rng *r, int percent)
{
    return rng_int(r, 1, 100) <= percent;
}

double rng_normal(rng *r)
{
    double u = ((double)(rng_next(r) >> 11) + 0.5) * 0x1p-53;
    double v = (double)(rng_next(r) >> 11) * 0x1p-53;
    return sqrt(-2.0 * log(u)) * cos(2.0 * 3.14159265358979323846 * v);
}

static void on_limit(int signal_number)
{
    (void)signal_number;
    static const char text[] = "\ntime limit reached, a hang, in: ";
    if (write(STDERR_FILENO, text, sizeof text - 1) < 0 ||
        write(STDERR_FILENO, case_name, strlen(case_name)) < 0 ||
        write(STDERR_FILENO, "\n", 1) < 0) {
        _exit(98);
    }
    _exit(97);
}

void support_limit(int seconds, const char *format, ...)
{
    alarm(0);
    va_list args;
    va_start(args, format);
    vsnprintf(case_name, sizeof case_name, format, args);
    va_end(args);
    alarm((unsigned)(seconds * LIMIT_FACTOR));
}

const char *support_case(void)
{
    return case_name;
}

void support_start(int argc, char **argv)
{
    const char *text = getenv("RA_TEST_SEED");
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--seed") == 0) {
            text = argv[i + 1];
        }
    }
    if (text) {
        seed = strtoull(text, NULL, 0);
    }
    printf("seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    signal(SIGALRM, on_limit);
    support_limit(LIMIT_DEFAULT_SECONDS, "%s", argc > 0 ? argv[0] : "test");
}

uint64_t support_seed(void)
{
    return seed;
}

int64_t support_steps(int64_t steps)
{
    const char *text = getenv("RA_TEST_STEPS");
    int64_t percent = text ? strtoll(text, NULL, 0) : 100;
    int64_t scaled = steps * percent / 100;
    return scaled > 0 ? scaled : 1;
}

bool support_thin(void)
{
    return support_steps(100) < 100;
}

bool support_slow(void)
{
    const char *text = getenv("RA_TEST_SLOW");
    return text && strcmp(text, "0") != 0;
}

double support_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
