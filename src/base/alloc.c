/* malloc with a header that remembers the size. */
#include "base/alloc.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mathx.h"

static _Thread_local ra_alloc_probe *watcher;

typedef struct header {
    size_t bytes;
} header;

ra_alloc_probe *ra_alloc_watch(ra_alloc_probe *probe)
{
    ra_alloc_probe *before = watcher;
    watcher = probe;
    return before;
}

static bool probe_refuses(void)
{
    if (!watcher) {
        return false;
    }
    atomic_fetch_add(&watcher->count, 1);
    long left = atomic_load(&watcher->fail_at);
    return left > 0 && atomic_fetch_sub(&watcher->fail_at, 1) == 1;
}

static void probe_add(long long bytes)
{
    if (!watcher) {
        return;
    }
    long long live = atomic_fetch_add(&watcher->live_bytes, bytes) + bytes;
    long long peak = atomic_load(&watcher->peak_bytes);
    while (live > peak && !atomic_compare_exchange_weak(&watcher->peak_bytes, &peak, live)) {
    }
}

/* From LARGE on, in huge pages where the machine grants them: kernels walk over tiles with a page
 * between rows, and more small pages than it remembers would have to be looked up. */
static header *take(size_t bytes)
{
    enum { LARGE = 1 << 20, HUGE_PAGE = 2 << 20 };
    if (bytes < LARGE) {
        return aligned_alloc(RA_ALIGN_BYTES, bytes);
    }
    size_t whole = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    if (whole < bytes) {
        return NULL;
    }
    header *base = aligned_alloc(HUGE_PAGE, whole);
    if (base) {
        (void)madvise(base, whole, MADV_HUGEPAGE); /* a wish: refusing it costs time alone */
    }
    return base;
}

ra_status ra_alloc(size_t count, size_t bytes, void *out)
{
    size_t total, padded;
    if (__builtin_mul_overflow(count, bytes, &total) ||
        __builtin_add_overflow(total, (size_t)2 * RA_ALIGN_BYTES, &padded)) {
        return RA_FAIL(RA_E_NOMEM, "%zu elements of %zu bytes: more than memory can address", count,
                       bytes);
    }
    void *memory = NULL;
    if (total > 0) {
        padded = padded / RA_ALIGN_BYTES * RA_ALIGN_BYTES;
        header *base = probe_refuses() ? NULL : take(padded);
        if (!base) {
            return RA_FAIL(RA_E_NOMEM, "%zu bytes of host memory: allocation failed", total);
        }
        base->bytes = total;
        probe_add((long long)total);
        memory = (char *)base + RA_ALIGN_BYTES;
        memset(memory, 0, total);
    }
    memcpy(out, &memory, sizeof memory);
    return RA_OK;
}

void ra_free(void *memory)
{
    if (memory) {
        header *base = (header *)(void *)((char *)memory - RA_ALIGN_BYTES);
        probe_add(-(long long)base->bytes);
        free(base);
    }
}

size_t ra_alloc_bytes(const void *memory)
{
    return memory ? ((const header *)(const void *)((const char *)memory - RA_ALIGN_BYTES))->bytes
                  : 0;
}

ra_status ra_reserve(void *array, int64_t *capacity, int64_t needed, size_t bytes)
{
    if (needed <= *capacity) {
        return RA_OK;
    }
    int64_t wanted = ra_max_i64(needed, *capacity * 2);
    void *old, *grown = NULL;
    memcpy(&old, array, sizeof old);
    RA_TRY(ra_alloc((size_t)wanted, bytes, &grown));
    if (old) {
        memcpy(grown, old, (size_t)*capacity * bytes);
    }
    ra_free(old);
    memcpy(array, &grown, sizeof grown);
    *capacity = wanted;
    return RA_OK;
}
