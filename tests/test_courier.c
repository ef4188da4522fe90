/* The thread that runs exchanges: order, the moment at which a task says that it is under way, and
 * the first failure, which is final. */
#include <pthread.h>
#include <string.h>

#include "ring/courier.h"
#include "support.h"

/* A task that says it is under way, then waits to be let go. */
typedef struct gate {
    ra_courier *courier;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool says, open;
    int order, *next; /* which of the tasks it was */
    ra_status status;
} gate;

static ra_status pass(void *arg)
{
    gate *g = arg;
    if (g->says) {
        ra_courier_say_begun(g->courier, g);
    }
    pthread_mutex_lock(&g->lock);
    while (!g->open) {
        pthread_cond_wait(&g->changed, &g->lock);
    }
    g->order = (*g->next)++;
    pthread_mutex_unlock(&g->lock);
    return g->status ? ra_fail(g->status, "task %d failed", g->order) : RA_OK;
}

static void let_go(gate *g)
{
    pthread_mutex_lock(&g->lock);
    g->open = true;
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->lock);
}

static gate gate_of(ra_courier *courier, bool says, int *next)
{
    return (gate){.courier = courier,
                  .lock = PTHREAD_MUTEX_INITIALIZER,
                  .changed = PTHREAD_COND_INITIALIZER,
                  .says = says,
                  .order = -1,
                  .next = next};
}

static void test_begun(void **state)
{
    (void)state;
    ra_courier *c = NULL;
    int next = 0;
    support_limit(30, "a task that says it is under way");
    assert_int_equal(ra_courier_create(true, &c), RA_OK);
    assert_true(ra_courier_overlaps(c));
    gate first = gate_of(c, true, &next), second = gate_of(c, true, &next);
    gate silent = gate_of(c, false, &next);
    int64_t a = ra_courier_post(c, (ra_task){pass, &first});
    assert_ptr_equal(ra_courier_wait_begun(c, a), &first);
    int64_t b = ra_courier_post(c, (ra_task){pass, &second});
    assert_null(ra_courier_wait_begun(c, b)); /* not while another is before it */
    let_go(&first);
    assert_int_equal(ra_courier_wait(c, a), RA_OK);
    assert_ptr_equal(ra_courier_wait_begun(c, b), &second);
    let_go(&second);
    assert_int_equal(ra_courier_wait(c, b), RA_OK);
    assert_null(ra_courier_wait_begun(c, b)); /* done */
    let_go(&silent);
    int64_t d = ra_courier_post(c, (ra_task){pass, &silent});
    assert_null(ra_courier_wait_begun(c, d)); /* until it is done */
    assert_int_equal(ra_courier_wait(c, d), RA_OK);
    assert_true(first.order == 0 && second.order == 1 && silent.order == 2);
    ra_courier_free(c);
}

static void test_failure_is_final(void **state)
{
    (void)state;
    for (int own_thread = 0; own_thread < 2; own_thread++) {
        ra_courier *c = NULL;
        int next = 0;
        support_limit(30, "a task that fails, thread %d", own_thread);
        assert_int_equal(ra_courier_create(own_thread, &c), RA_OK);
        gate bad = gate_of(c, true, &next), good = gate_of(c, true, &next);
        bad.status = RA_E_COMM;
        let_go(&bad);
        let_go(&good);
        int64_t a = ra_courier_post(c, (ra_task){pass, &bad});
        int64_t b = ra_courier_post(c, (ra_task){pass, &good});
        assert_int_equal(ra_courier_wait(c, b), RA_E_COMM);
        assert_string_equal(ra_last_error(), "task 0 failed");
        assert_int_equal(ra_courier_wait(c, a), RA_E_COMM);
        assert_null(ra_courier_wait_begun(c, b));
        assert_int_equal(good.order, -1); /* was not run */
        ra_courier_drain(c);
        b = ra_courier_post(c, (ra_task){pass, &good});
        assert_int_equal(ra_courier_wait(c, b), RA_OK);
        assert_int_equal(good.order, 1);
        ra_courier_free(c);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_begun),
        cmocka_unit_test(test_failure_is_final),
    };
    support_start(argc, argv);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
