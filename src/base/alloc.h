/* Host memory. Every allocation of the library passes here, so that a test can count the bytes of a
 * thread and make any one of them fail. Must not know what the memory is for. */
#ifndef RA_BASE_ALLOC_H
#define RA_BASE_ALLOC_H

#include <stdatomic.h>

#include "base/status.h"

enum { RA_ALIGN_BYTES = 64 }; /* a cache line, and a zmm register */

/* Watches the allocations of the threads it is installed on. Shared by several threads: fields are
 * atomic. */
typedef struct ra_alloc_probe {
    atomic_long fail_at; /* the n-th allocation from now fails (1 = the next); 0 = none */
    atomic_long count;   /* allocations so far */
    atomic_llong live_bytes, peak_bytes;
} ra_alloc_probe;

/* Installs a probe on the calling thread; NULL removes it. Returns the one before. Memory is freed
 * on a thread with the probe that it was allocated under. */
ra_alloc_probe *ra_alloc_watch(ra_alloc_probe *probe);

/* Zeroed, aligned to RA_ALIGN_BYTES; count * bytes is checked. *out stays as it was on failure.
 * bytes 0 gives NULL. */
ra_status ra_alloc(size_t count, size_t bytes, void *out);
void ra_free(void *memory);
/* What was asked for; 0 for NULL. */
size_t ra_alloc_bytes(const void *memory);

/* Makes room for `needed` elements in *array (of *capacity), at least doubling; content is kept,
 * the rest is zero. */
ra_status ra_reserve(void *array, int64_t *capacity, int64_t needed, size_t bytes);

/* RA_NEW(&pointer, count): zeroed array of the pointed-to type. */
#define RA_NEW(pointer, count) ra_alloc((size_t)(count), sizeof **(pointer), (pointer))
#define RA_RESERVE(pointer, capacity, needed)                                                      \
    ra_reserve((pointer), (capacity), (needed), sizeof **(pointer))

#endif
