/* The few names of cmocka that the tests for the device use, for machines with a GPU but without
 * cmocka: the first failure ends the process. Found only where cmocka is not. */
#ifndef RA_TESTS_HARNESS_CMOCKA_H
#define RA_TESTS_HARNESS_CMOCKA_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CMUnitTest {
    const char *name;
    void (*run)(void **state);
};

#define cmocka_unit_test(function)                                                                 \
    {                                                                                              \
#function, function                                                                        \
    }
#define print_message(...) printf(__VA_ARGS__)
#define print_error(...) fprintf(stderr, __VA_ARGS__)
#define fail_msg(...)                                                                              \
    (fprintf(stderr, "%s:%d: ", __FILE__, __LINE__), fprintf(stderr, __VA_ARGS__),                 \
     fputc('\n', stderr), exit(1))
#define fail() fail_msg("failed")
#define skip() return
#define assert_true(condition) ((condition) ? (void)0 : (void)fail_msg("not true: %s", #condition))
#define assert_false(condition) assert_true(!(condition))
#define assert_null(pointer) assert_true((pointer) == NULL)
#define assert_non_null(pointer) assert_true((pointer) != NULL)
#define assert_int_equal(a, b)                                                                     \
    ((long long)(a) == (long long)(b) ? (void)0                                                    \
                                      : (void)fail_msg("%s is %lld, expected %s, %lld", #a,        \
                                                       (long long)(a), #b, (long long)(b)))
#define assert_int_not_equal(a, b) assert_true((long long)(a) != (long long)(b))
#define assert_ptr_equal(a, b) assert_true((const void *)(a) == (const void *)(b))
#define assert_in_range(x, low, high)                                                              \
    assert_true((long long)(x) >= (long long)(low) && (long long)(x) <= (long long)(high))
#define assert_string_equal(a, b) assert_true(strcmp((a), (b)) == 0)
#define assert_memory_equal(a, b, bytes) assert_true(memcmp((a), (b), (bytes)) == 0)
#define cmocka_run_group_tests(tests, set_up, tear_down)                                           \
    ra_harness_run((tests), sizeof(tests) / sizeof *(tests))

static inline int ra_harness_run(const struct CMUnitTest *tests, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        void *state = NULL;
        printf("[ RUN      ] %s\n", tests[i].name);
        fflush(stdout);
        tests[i].run(&state);
        printf("[       OK ] %s\n", tests[i].name);
    }
    return 0;
}

#endif
