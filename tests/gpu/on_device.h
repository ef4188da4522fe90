/*
 * Included before every file of a test that is built for the device (-include): the calls of the
 * public API that compute are replaced by ones that bring the test's host tensors to the device,
 * compute there, and bring them back whole, so that tests written for the CPU check the device
 * without a change. Must not change what a test sees of anything else.
 */
#ifndef RA_TESTS_ON_DEVICE_H
#define RA_TESTS_ON_DEVICE_H

#include "oracle/plain.h"

/* The device of this process from now on, 0 before. */
void device_choose(int index);

/* threads and level are those of the CPU; ignored. A closed backend is kept and opened again. */
ra_status device_backend_open(int threads, const char *level, ra_backend **out);
void device_backend_close(ra_backend *backend);
ra_status device_comms_open(int size, ra_comm **out_by_rank);

ra_status device_forward(ra_ctx *ctx, const ra_plan *plan, const ra_forward_io *io,
                         ra_stream stream);
ra_status device_backward(ra_ctx *ctx, const ra_plan *plan, const ra_backward_io *io,
                          ra_stream stream);
ra_status device_varlen_forward(ra_backend *backend, const ra_layer *layer, const ra_varlen *lens,
                                const ra_forward_io *io);
ra_status device_varlen_backward(ra_backend *backend, const ra_layer *layer, const ra_varlen *lens,
                                 const ra_backward_io *io);

/* How the kernels that run this layer add up channels. */
ra_plain_sum device_sum(const ra_layer *layer);

/* Copies of strided tensors, gaps included, in one piece of device memory. */
enum { DEVICE_TENSORS_MAX = 16 };
typedef struct device_copy {
    int count;
    void *memory;  /* of the device */
    char *staging; /* its image */
    size_t total;
    ra_tensor *host[DEVICE_TENSORS_MAX]; /* the caller's, as they were */
    void *host_data[DEVICE_TENSORS_MAX];
    size_t bytes[DEVICE_TENSORS_MAX];
    int owner[DEVICE_TENSORS_MAX]; /* the tensor whose copy it shares, or itself */
} device_copy;

/* Makes each tensor point to its copy; those without data or elements stay. Equal addresses share
 * one copy. */
ra_status device_copy_put(device_copy *copy, ra_tensor *const *tensors, int count);
/* Copies back, frees, and makes the tensors point to host memory again. */
ra_status device_copy_get(device_copy *copy);

#ifndef RA_TESTS_ON_DEVICE_ITSELF
#define ra_backend_open_cpu device_backend_open
#define ra_backend_close device_backend_close
#define ra_comm_open_threads device_comms_open
#define ra_attn_forward device_forward
#define ra_attn_backward device_backward
#define ra_varlen_forward device_varlen_forward
#define ra_varlen_backward device_varlen_backward
#define reference_sum device_sum
#endif

#endif
