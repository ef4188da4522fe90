/* The list of instruction sets that are built in, slowest first, and the choice among them. */
#include "backend/cpu/level.h"

#include <stdio.h>
#include <string.h>

#include "base/limits.h"

static const ra_level *const levels[] = {
    &ra_level_portable,
#ifdef RA_CPU_X86
    &ra_level_avx2,     &ra_level_avx512, &ra_level_avx512bf16, &ra_level_amxbf16,
#endif
};
enum { LEVEL_COUNT = sizeof levels / sizeof *levels };

const char *ra_cpu_level_name(int index)
{
    return index >= 0 && index < LEVEL_COUNT ? levels[index]->name : NULL;
}

bool ra_cpu_level_runs(int index)
{
    return index >= 0 && index < LEVEL_COUNT && levels[index]->runs();
}

static ra_status refuse_unknown(const char *name)
{
    char list[RA_MESSAGE_BYTES / 2] = "";
    size_t used = 0;
    for (int i = 0; i < LEVEL_COUNT && used < sizeof list; i++) {
        const char *separator = i == 0 ? "" : i + 1 == LEVEL_COUNT ? " or " : ", ";
        used +=
            (size_t)snprintf(list + used, sizeof list - used, "%s%s", separator, levels[i]->name);
    }
    return RA_FAIL(RA_E_ARG, "level: \"%.100s\", expected %s", name, list);
}

/* Intel's cores multiply pairs of bf16 at half the rate of f32, where others double it: the level
 * below takes bf16 inputs 1.3 to 1.8 times faster there (docs/kernels.md). */
static bool pays(const ra_level *level)
{
#ifdef RA_CPU_X86
    return level != &ra_level_avx512bf16 || !__builtin_cpu_is("intel");
#else
    (void)level;
    return true;
#endif
}

ra_status ra_level_find(const char *name, const ra_level **out)
{
    for (int i = LEVEL_COUNT - 1; i >= 0; i--) {
        if (!name && levels[i]->runs() && pays(levels[i])) {
            *out = levels[i];
            return RA_OK;
        }
        if (name && strcmp(name, levels[i]->name) == 0) {
            if (!levels[i]->runs()) {
                return RA_FAIL(RA_E_UNSUPPORTED,
                               "level: \"%s\", expected instructions that this machine has", name);
            }
            *out = levels[i];
            return RA_OK;
        }
    }
    return refuse_unknown(name);
}
