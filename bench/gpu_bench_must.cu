/* How a benchmark ends when it cannot go on. */
#include "gpu_bench.h"

void must(bool ok, const char *what, const char *why)
{
    if (!ok) {
        std::fprintf(stderr, "benchmark: %s: %s\n", what, why);
        std::exit(3);
    }
}
