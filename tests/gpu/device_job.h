/* One fold or grad of a backend on the device over a cover, its tensors in host memory: lists are
 * prepared, tensors copied there and back. A failure fails the test. Must not know what is right.
 */
#ifndef RA_TESTS_DEVICE_JOB_H
#define RA_TESTS_DEVICE_JOB_H

#include "on_device.h"
#include "support_cover.h"

/* simple_only: without tuned kernels. Close it with device_job_close. */
ra_backend *device_job_open(bool simple_only);
void device_job_close(ra_backend *backend);

/* Fails the test with ra_last_error unless RA_OK. */
void device_job_expect(ra_status status);

void device_job_fold(const ra_backend *backend, const cover_case *c, ra_fold_job *job);
void device_job_grad(const ra_backend *backend, const cover_case *c, ra_grad_job *job);

/* Of the largest element. The plain kernels round nothing but the results, tuned ones also p and
 * ds. */
double device_job_tolerance(ra_dtype dtype, bool simple);

#endif
