/* What a step description may not say. */
#include "plan/desc.h"

#include <string.h>

#include "base/limits.h"
#include "support.h"

static void assert_refused(ra_step_desc desc, const char *part)
{
    assert_int_equal(ra_step_desc_check(&desc), RA_E_ARG);
    if (!strstr(ra_last_error(), part)) {
        fail_msg("message \"%s\" does not name \"%s\"", ra_last_error(), part);
    }
}

static void good_descriptions_pass(void **state)
{
    (void)state;
    const ra_run runs[] = {{0, 3}, {9, 0}, {10, 5}};
    ra_step_desc desc = {.size = sizeof desc, .rows = 2, .seq_local = 8};
    assert_int_equal(ra_step_desc_check(&desc), RA_OK);
    desc.runs = runs;
    desc.run_count = 3;
    assert_int_equal(ra_step_desc_check(&desc), RA_OK);
    desc.run_count = 0;
    desc.seq_local = 0;
    assert_int_equal(ra_step_desc_check(&desc), RA_OK);
    const ra_run end = {RA_SEQ_MAX - 1, 1};
    desc = (ra_step_desc){
        .size = sizeof desc, .rows = RA_ROWS_MAX, .seq_local = 1, .runs = &end, .run_count = 1};
    assert_int_equal(ra_step_desc_check(&desc), RA_OK);
}

static void bad_descriptions_are_named(void **state)
{
    (void)state;
    const ra_step_desc good = {.size = sizeof good, .rows = 2, .seq_local = 8};
    ra_step_desc d;
    assert_int_equal(ra_step_desc_check(NULL), RA_E_ARG);
#define REFUSED(member, value, part) d = good, d.member = (value), assert_refused(d, (part))
    REFUSED(size, 8, "desc.size: 8");
    REFUSED(rows, 0, "desc.rows: 0");
    REFUSED(rows, RA_ROWS_MAX + 1, "desc.rows: 16777217");
    REFUSED(seq_local, -1, "desc.seq_local: -1");
    REFUSED(seq_local, RA_SEQ_MAX + 1, "desc.seq_local: 2147483649");
    REFUSED(run_count, -2, "desc.run_count: -2");
    REFUSED(run_count, 1, "desc.runs: NULL");
    ra_run runs[2] = {{0, 4}, {4, 3}};
    d = good, d.runs = runs, d.run_count = 2;
    assert_refused(d, "desc.seq_local: 8, expected 7");
    runs[1] = (ra_run){-1, 4};
    assert_refused(d, "desc.runs[1].start: -1");
    runs[1] = (ra_run){4, -4};
    assert_refused(d, "desc.runs[1].count: -4");
    runs[1] = (ra_run){RA_SEQ_MAX - 3, 4};
    assert_refused(d, "desc.runs[1].count: 4");
    runs[1] = (ra_run){INT64_MAX, INT64_MAX};
    assert_refused(d, "desc.runs[1].start");
    d.run_count = 0;
    assert_refused(d, "desc.seq_local: 8, expected 0");
}

int main(int argc, char **argv)
{
    support_start(argc, argv);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(good_descriptions_pass),
        cmocka_unit_test(bad_descriptions_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
