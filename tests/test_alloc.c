/* base/alloc.h: zeroed aligned memory, checked sizes, the probe that counts and that refuses. */
#include "base/alloc.h"

#include <stdint.h>
#include <string.h>

#include "support.h"

static void memory_is_zeroed_and_aligned(void **state)
{
    (void)state;
    for (size_t count = 1; count < 300; count += 7) {
        int64_t *numbers = NULL;
        assert_int_equal(RA_NEW(&numbers, count), RA_OK);
        assert_int_equal((uintptr_t)numbers % RA_ALIGN_BYTES, 0);
        for (size_t i = 0; i < count; i++) {
            assert_true(numbers[i] == 0);
            numbers[i] = -1; /* the next allocation may get this memory again */
        }
        ra_free(numbers);
    }
    ra_free(NULL);
}

static void nothing_asked_is_null(void **state)
{
    (void)state;
    char *nothing = (char *)"not null";
    assert_int_equal(RA_NEW(&nothing, 0), RA_OK);
    assert_null(nothing);
}

static void sizes_that_overflow_are_refused(void **state)
{
    (void)state;
    int64_t marker = 0, *numbers = &marker;
    assert_int_equal(ra_alloc(SIZE_MAX / 4, 8, &numbers), RA_E_NOMEM);
    assert_ptr_equal(numbers, &marker);
    assert_int_equal(ra_alloc(SIZE_MAX, 1, &numbers), RA_E_NOMEM);
    assert_ptr_equal(numbers, &marker);
    assert_non_null(strstr(ra_last_error(), "bytes"));
}

static void the_probe_counts_bytes(void **state)
{
    (void)state;
    ra_alloc_probe probe = {0};
    char *a = NULL, *b = NULL;
    assert_null(ra_alloc_watch(&probe));
    assert_int_equal(RA_NEW(&a, 100), RA_OK);
    assert_int_equal(RA_NEW(&b, 50), RA_OK);
    assert_int_equal(atomic_load(&probe.live_bytes), 150);
    ra_free(a);
    assert_int_equal(atomic_load(&probe.live_bytes), 50);
    assert_int_equal(RA_NEW(&a, 20), RA_OK);
    ra_free(a);
    ra_free(b);
    assert_int_equal(atomic_load(&probe.live_bytes), 0);
    assert_int_equal(atomic_load(&probe.peak_bytes), 150);
    assert_int_equal(atomic_load(&probe.count), 3);
    assert_ptr_equal(ra_alloc_watch(NULL), &probe);
}

static void the_probe_refuses_the_nth(void **state)
{
    (void)state;
    ra_alloc_probe probe = {.fail_at = 3};
    ra_alloc_watch(&probe);
    for (int i = 1; i <= 5; i++) {
        char *memory = NULL;
        assert_int_equal(RA_NEW(&memory, 8), i == 3 ? RA_E_NOMEM : RA_OK);
        assert_true((memory == NULL) == (i == 3));
        ra_free(memory);
    }
    assert_int_equal(atomic_load(&probe.live_bytes), 0);
    ra_alloc_watch(NULL);
}

static void reserve_keeps_content_and_doubles(void **state)
{
    (void)state;
    int32_t *numbers = NULL;
    int64_t capacity = 0, growths = 0;
    for (int32_t i = 0; i < 1000; i++) {
        int64_t before = capacity;
        assert_int_equal(RA_RESERVE(&numbers, &capacity, i + 1), RA_OK);
        assert_true(capacity > i);
        growths += capacity != before;
        assert_int_equal(numbers[i], 0);
        numbers[i] = i + 1;
    }
    for (int32_t i = 0; i < 1000; i++) {
        assert_int_equal(numbers[i], i + 1);
    }
    assert_true(growths <= 11);
    ra_alloc_probe probe = {.fail_at = 1};
    int64_t before = capacity;
    ra_alloc_watch(&probe);
    assert_int_equal(RA_RESERVE(&numbers, &capacity, capacity + 1), RA_E_NOMEM);
    ra_alloc_watch(NULL);
    assert_true(capacity == before);
    assert_int_equal(numbers[999], 1000);
    ra_free(numbers);
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(memory_is_zeroed_and_aligned),
        cmocka_unit_test(nothing_asked_is_null),
        cmocka_unit_test(sizes_that_overflow_are_refused),
        cmocka_unit_test(the_probe_counts_bytes),
        cmocka_unit_test(the_probe_refuses_the_nth),
        cmocka_unit_test(reserve_keeps_content_and_doubles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
