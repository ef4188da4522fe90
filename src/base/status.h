/* Turns a failure into a status and a thread-local sentence about it. Must not know who failed. */
#ifndef RA_BASE_STATUS_H
#define RA_BASE_STATUS_H

#include <assert.h>

#include "ringattn.h"

/* Stores the message for ra_last_error and returns status. */
ra_status ra_fail(ra_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* return RA_FAIL(RA_E_ARG, "window: %lld, expected 0 or more", ...): argument, value, expectation.
 */
#define RA_FAIL(status, ...) ra_fail((status), __VA_ARGS__)

/* Passes a failure on. */
#define RA_TRY(call)                                                                               \
    do {                                                                                           \
        ra_status try_status_ = (call);                                                            \
        if (try_status_) {                                                                         \
            return try_status_;                                                                    \
        }                                                                                          \
    } while (0)

/* Programmer errors inside the library; caller errors are statuses. */
#define RA_CHECK(condition) assert(condition)

#endif
