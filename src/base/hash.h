/* A 64-bit hash by which ranks compare what they hold. Not against an adversary. */
#ifndef RA_BASE_HASH_H
#define RA_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define RA_HASH_START 0xcbf29ce484222325u

/* Of what was hashed before, and of data. */
static inline uint64_t ra_hash(uint64_t before, const void *data, size_t bytes)
{
    uint64_t hash = before;
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word = 0;
        size_t left = bytes - at;
        memcpy(&word, (const char *)data + at, left < sizeof word ? left : sizeof word);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return hash;
}

#endif
