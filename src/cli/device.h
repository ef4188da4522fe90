/*
 * Where the ranks of the command line compute: opens backends and transports, and brings tensors
 * to the backend's memory and back. A build without CUDA knows the CPU only. Must not know what is
 * computed.
 */
#ifndef RA_CLI_DEVICE_H
#define RA_CLI_DEVICE_H

#include "oracle/plain.h"

typedef enum ra_device { RA_DEVICE_CPU, RA_DEVICE_CUDA } ra_device;

/* "cpu", "cuda" or "auto": CUDA if this build and this machine have it. */
ra_status ra_device_parse(const char *text, ra_device *out);

/* Devices that ranks can take; 1 for the CPU. */
int ra_device_count(ra_device device);
/* The CUDA device of a rank: ranks take them in turn. */
int ra_device_index(int rank);

/* threads and cpu_level are those of ra_backend_open_cpu. */
ra_status ra_device_backend(ra_device device, int rank, int threads, const char *cpu_level,
                            ra_backend **out);
ra_status ra_device_comms(ra_device device, int ranks, ra_comm **out_by_rank);

/* *out = a contiguous host tensor in the device's memory: on the CPU itself, else a copy. */
ra_status ra_device_put(ra_device device, int rank, const ra_tensor *host, ra_tensor *out);
/* Waits, and copies what `put` made back to the host tensor. */
ra_status ra_device_get(ra_device device, const ra_tensor *from, const ra_tensor *host);
void ra_device_drop(ra_device device, const ra_tensor *t);
/* Until all that was called is done. */
ra_status ra_device_wait(ra_device device);

/* What a plan's computations take on one GPU, predicted. */
typedef struct ra_device_forecast {
    const char *forward, *backward;           /* kernels; NULL on the CPU: nothing is predicted */
    double forward_seconds, backward_seconds; /* 0 if that is not predicted */
    uint64_t workspace_bytes;                 /* of the backend, beside the scratch */
} ra_device_forecast;
ra_status ra_device_predict(ra_device device, const ra_plan *plan, ra_device_forecast *out);

/* How the kernels that run this layer add up channels: what its tolerance is measured by. */
ra_plain_sum ra_device_sum(ra_device device, const ra_layer *layer);

#endif
