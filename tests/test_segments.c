/* Segments of a query shard and a key chunk: the documented example, a quadratic definition on
 * random ids, sizes that overflow, and allocations that fail. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/alloc.h"
#include "ringattn.h"
#include "support.h"

static void the_documented_example(void **state)
{
    (void)state;
    const int32_t q[] = {1, 1, 2, 0}, k[] = {1, 2, 2, 2};
    ra_segments s;
    assert_int_equal(ra_segments_build(q, 4, k, 4, 1, &s), RA_OK);
    assert_int_equal(s.count, 2);
    assert_int_equal(s.q_total, 3);
    assert_int_equal(s.k_total, 4);
    assert_memory_equal(s.q_index, ((int64_t[]){0, 1, 2}), 3 * sizeof(int64_t));
    assert_memory_equal(s.k_index, ((int64_t[]){0, 1, 2, 3}), 4 * sizeof(int64_t));
    assert_memory_equal(s.cu_q, ((int32_t[]){0, 2, 3}), 3 * sizeof(int32_t));
    assert_memory_equal(s.cu_k, ((int32_t[]){0, 1, 4}), 3 * sizeof(int32_t));
    assert_int_equal(s.max_q, 2);
    assert_int_equal(s.max_k, 3);
    assert_false(s.dense_local || s.dense_cross);
    assert_memory_equal(s.pad_rows, ((uint8_t[]){0, 0, 0, 1}), 4);
    ra_segments_free(&s);
    assert_null(s.q_index);
    ra_segments_free(&s);
    ra_segments_free(NULL);
}

static void order_is_first_appearance_in_each_row(void **state)
{
    (void)state;
    /* Ids are scoped to their row, come in any order and may come back. */
    const int32_t q[] = {9, 9, 4, 9, 0, 4, /* row 1 */ 4, 2, 2, 8, 8, -3};
    const int32_t k[] = {4, 4, 9, 7, /* row 1 */ 8, 9, 4, 8};
    ra_segments s;
    assert_int_equal(ra_segments_build(q, 6, k, 4, 2, &s), RA_OK);
    assert_int_equal(s.count, 4); /* 9 and 4 of row 0, 4 and 8 of row 1 */
    assert_memory_equal(s.q_index, ((int64_t[]){0, 1, 3, 2, 5, 6, 9, 10}), 8 * sizeof(int64_t));
    assert_memory_equal(s.k_index, ((int64_t[]){2, 0, 1, 6, 4, 7}), 6 * sizeof(int64_t));
    assert_memory_equal(s.cu_q, ((int32_t[]){0, 3, 5, 6, 8}), 5 * sizeof(int32_t));
    assert_memory_equal(s.cu_k, ((int32_t[]){0, 1, 3, 4, 6}), 5 * sizeof(int32_t));
    assert_int_equal(s.max_q, 3);
    assert_int_equal(s.max_k, 2);
    ra_segments_free(&s);
}

static void nothing_shared_is_empty(void **state)
{
    (void)state;
    const int32_t q[] = {1, 1, 2, 2}, k[] = {3, 3, 0, 0}, none[] = {0, -1, 0, 0};
    ra_segments s;
    assert_int_equal(ra_segments_build(q, 4, k, 4, 1, &s), RA_OK);
    assert_true(s.count == 0 && s.q_total == 0 && s.k_total == 0 && s.max_q == 0 && s.max_k == 0);
    assert_null(s.pad_rows);
    assert_int_equal(s.cu_q[0], 0);
    ra_segments_free(&s);
    assert_int_equal(ra_segments_build(none, 4, none, 4, 1, &s), RA_OK);
    assert_true(s.count == 0 && !s.dense_local && s.pad_rows[0] && s.pad_rows[3]);
    ra_segments_free(&s);
    assert_int_equal(ra_segments_build(NULL, 0, k, 4, 1, &s), RA_OK);
    assert_true(s.count == 0 && !s.dense_local && !s.pad_rows);
    ra_segments_free(&s);
    assert_int_equal(ra_segments_build(q, 4, NULL, 0, 1, &s), RA_OK);
    assert_true(s.count == 0 && !s.dense_local && !s.dense_cross);
    ra_segments_free(&s);
    const int32_t single[] = {5, 5};
    assert_int_equal(ra_segments_build(single, 2, NULL, 0, 1, &s), RA_OK);
    assert_true(s.dense_local && !s.dense_cross);
    ra_segments_free(&s);
}

static void assert_flags(const int32_t *q, const int32_t *k, bool local, bool cross)
{
    ra_segments s;
    assert_int_equal(ra_segments_build(q, 3, k, 2, 2, &s), RA_OK);
    assert_int_equal(s.dense_local, local);
    assert_int_equal(s.dense_cross, cross);
    ra_segments_free(&s);
}

static void dense_flags(void **state)
{
    (void)state;
    const int32_t plain[] = {1, 1, 1, 5, 5, 5}, suffix[] = {1, 1, 0, 5, 0, -1};
    const int32_t prefix[] = {0, 1, 1, 5, 5, 5}, hole[] = {1, 0, 1, 5, 5, 5};
    const int32_t two[] = {1, 1, 1, 5, 5, 6}, empty_row[] = {1, 1, 1, 0, 0, 0};
    const int32_t same[] = {1, 1, 5, 5}, swapped[] = {5, 5, 1, 1}, padded[] = {1, 0, 5, 5};
    const int32_t first_only[] = {1, 1, 1, 1}, mixed[] = {1, 1, 5, 1};
    assert_flags(plain, same, true, true);
    assert_flags(suffix, same, true, true);
    assert_flags(plain, swapped, true, false); /* each row has its own counterpart */
    assert_flags(plain, first_only, true, false);
    assert_flags(plain, padded, true, false);
    assert_flags(plain, mixed, true, false);
    assert_flags(prefix, same, false, false);
    assert_flags(hole, same, false, false);
    assert_flags(two, same, false, false);
    assert_flags(empty_row, same, false, false);
}

/* The definition, pair by pair. */
static void assert_definition(const int32_t *q, int64_t q_seq, const int32_t *k, int64_t k_seq,
                              int64_t rows, const ra_segments *s)
{
    int64_t q_at = 0, k_at = 0, count = 0;
    int32_t max_q = 0, max_k = 0;
    for (int64_t row = 0; row < rows; row++) {
        const int32_t *mine = q + row * q_seq, *theirs = k + row * k_seq;
        for (int64_t i = 0; i < q_seq; i++) {
            bool first = mine[i] > 0, shared = false;
            for (int64_t j = 0; j < i; j++) {
                first = first && mine[j] != mine[i];
            }
            for (int64_t j = 0; j < k_seq; j++) {
                shared = shared || theirs[j] == mine[i];
            }
            if (!first || !shared) {
                continue;
            }
            int64_t q_from = q_at, k_from = k_at;
            for (int64_t j = 0; j < q_seq; j++) {
                if (mine[j] == mine[i]) {
                    assert_int_equal(s->q_index[q_at++], row * q_seq + j);
                }
            }
            for (int64_t j = 0; j < k_seq; j++) {
                if (theirs[j] == mine[i]) {
                    assert_int_equal(s->k_index[k_at++], row * k_seq + j);
                }
            }
            count++;
            assert_int_equal(s->cu_q[count], q_at);
            assert_int_equal(s->cu_k[count], k_at);
            max_q = q_at - q_from > max_q ? (int32_t)(q_at - q_from) : max_q;
            max_k = k_at - k_from > max_k ? (int32_t)(k_at - k_from) : max_k;
        }
    }
    assert_true(s->count == count && s->q_total == q_at && s->k_total == k_at);
    assert_true(s->max_q == max_q && s->max_k == max_k);
    for (int64_t i = 0; i < rows * q_seq; i++) {
        assert_int_equal(s->pad_rows ? s->pad_rows[i] : 0, q[i] <= 0);
    }
}

static void random_ids_match_the_definition(void **state)
{
    (void)state;
    rng r = rng_of(support_seed());
    int32_t q[3 * 24], k[3 * 24];
    for (int step = 0; step < 3000; step++) {
        int64_t rows = rng_int(&r, 1, 3), q_seq = rng_int(&r, 1, 24), k_seq = rng_int(&r, 1, 24);
        int64_t ids = rng_int(&r, 1, 12), stay = rng_int(&r, 0, 90);
        int32_t id = 1;
        for (int64_t i = 0; i < 3 * 24; i++) {
            id = rng_chance(&r, (int)stay) ? id : (int32_t)rng_int(&r, -1, ids) * 1000003;
            q[i] = id;
        }
        for (int64_t i = 0; i < 3 * 24; i++) {
            id = rng_chance(&r, (int)stay) ? id : (int32_t)rng_int(&r, -1, ids) * 1000003;
            k[i] = id;
        }
        ra_segments s;
        assert_int_equal(ra_segments_build(q, q_seq, k, k_seq, rows, &s), RA_OK);
        assert_definition(q, q_seq, k, k_seq, rows, &s);
        ra_segments_free(&s);
    }
}

/* A quadratic build would need hours. */
static void a_million_documents(void **state)
{
    (void)state;
    enum { COUNT = 1 << 20 };
    support_limit(60, "a million documents");
    int32_t *ids = malloc(COUNT * sizeof *ids);
    assert_non_null(ids);
    for (int32_t i = 0; i < COUNT; i++) {
        ids[i] = 1 + (int32_t)((uint32_t)i * 2654435761u % COUNT); /* a permutation */
    }
    ra_segments s;
    assert_int_equal(ra_segments_build(ids, COUNT, ids, COUNT, 1, &s), RA_OK);
    assert_int_equal(s.count, COUNT);
    for (int32_t i = 0; i < COUNT; i++) {
        assert_true(s.q_index[i] == i && s.k_index[i] == i && s.cu_k[i] == i);
    }
    ra_segments_free(&s);
    free(ids);
}

static void bad_arguments_are_named(void **state)
{
    (void)state;
    const int32_t id = 1;
    ra_segments s;
    memset(&s, 0x5a, sizeof s);
    const ra_segments before = s;
    assert_int_equal(ra_segments_build(NULL, 1, &id, 1, 1, &s), RA_E_ARG);
    assert_non_null(strstr(ra_last_error(), "q_ids"));
    assert_int_equal(ra_segments_build(&id, 1, NULL, 1, 1, &s), RA_E_ARG);
    assert_non_null(strstr(ra_last_error(), "k_ids"));
    assert_int_equal(ra_segments_build(&id, -1, &id, 1, 1, &s), RA_E_ARG);
    assert_non_null(strstr(ra_last_error(), "q_seq: -1"));
    assert_int_equal(ra_segments_build(&id, 1, &id, 1, 0, &s), RA_E_ARG);
    assert_non_null(strstr(ra_last_error(), "rows: 0"));
    assert_int_equal(ra_segments_build(&id, 1, &id, 1, 1, NULL), RA_E_ARG);
    assert_memory_equal(&s, &before, sizeof s);
}

/* 2^31 keys of one document: prefix sums of int32 cannot hold them. The ids are one small piece of
 * memory mapped again and again. */
static void prefix_sums_that_overflow_are_refused(void **state)
{
    (void)state;
    enum { PIECE = 1 << 24 };
    const size_t total = (size_t)1 << 33;
    support_limit(120, "prefix sums that overflow");
    int file = memfd_create("ids", 0);
    char *base = mmap(NULL, total, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (file < 0 || base == MAP_FAILED || ftruncate(file, PIECE) != 0) {
        print_message("SKIPPED: no 8 GiB of address space\n");
        skip();
    }
    for (size_t at = 0; at < total; at += PIECE) {
        void *piece =
            mmap(base + at, PIECE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
        assert_ptr_equal(piece, base + at);
    }
    int32_t *ids = (int32_t *)(void *)base;
    for (size_t i = 0; i < PIECE / sizeof *ids; i++) {
        ids[i] = 1;
    }
    ra_segments s;
    assert_int_equal(ra_segments_build(ids, 1, ids, (int64_t)1 << 31, 1, &s), RA_E_SHAPE);
    assert_non_null(strstr(ra_last_error(), "2147483648"));
    munmap(base, total);
    close(file);
}

static void failed_allocations_leave_nothing(void **state)
{
    (void)state;
    const int32_t q[] = {1, 1, 2, 0}, k[] = {1, 2, 2, 2};
    for (long fail = 1;; fail++) {
        ra_alloc_probe probe = {.fail_at = fail};
        ra_segments s = {.count = 77};
        ra_alloc_watch(&probe);
        ra_status status = ra_segments_build(q, 4, k, 4, 1, &s);
        if (status == RA_OK) {
            ra_segments_free(&s);
        } else {
            assert_int_equal(status, RA_E_NOMEM);
            assert_int_equal(s.count, 77);
        }
        ra_alloc_watch(NULL);
        assert_int_equal(atomic_load(&probe.live_bytes), 0);
        if (status == RA_OK) {
            assert_true(fail > 7);
            return;
        }
    }
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_documented_example),
        cmocka_unit_test(order_is_first_appearance_in_each_row),
        cmocka_unit_test(nothing_shared_is_empty),
        cmocka_unit_test(dense_flags),
        cmocka_unit_test(random_ids_match_the_definition),
        cmocka_unit_test(a_million_documents),
        cmocka_unit_test(bad_arguments_are_named),
        cmocka_unit_test(prefix_sums_that_overflow_are_refused),
        cmocka_unit_test(failed_allocations_leave_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
