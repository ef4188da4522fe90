/*
 * ringattn_cuda.h - the CUDA backend of ringattn: one NVIDIA GPU per rank.
 *
 * libringattn-cuda holds everything of libringattn and what is declared here; a program links one
 * of the two. Tensors of calls on a CUDA backend are device memory of its device; metadata stays on
 * the host. Calls order their work on the ra_stream they are given (a cudaStream_t; NULL is the
 * default stream) and return as soon as it is queued, but for waits on other ranks. They set the
 * calling thread's current device to the backend's. A device that failed stays failed: close the
 * backend and end the process.
 */
#ifndef RINGATTN_CUDA_H
#define RINGATTN_CUDA_H

#include "ringattn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Devices that this library can run on; 0 also where there is no driver. */
RA_API int ra_cuda_device_count(void);

typedef struct ra_cuda_options {
    size_t size;
    size_t workspace_bytes; /* at most, of tuned backward kernels; 0 = 544 MiB */
    bool simple_only;       /* no tuned kernels: slow, for comparisons */
} ra_cuda_options;

/* options may be NULL. RA_E_UNAVAILABLE without a driver, RA_E_UNSUPPORTED for a device older than
 * Hopper. */
RA_API ra_status ra_backend_open_cuda(int device, const ra_cuda_options *options, ra_backend **out);

/* What one forward and one backward of a plan take on this rank, on an H200, predicted from the
 * plan alone: no device is needed. Within 20 % of what docs/kernels.md has measured; time that
 * waits for other ranks is not in it. A plan of a CPU's ctx has a window's backward in two
 * computations, of which a GPU makes one: a percent less. */
typedef struct ra_cuda_forecast {
    size_t size;
    const char *forward_kernel, *backward_kernel; /* for contiguous tensors; "simple" is the plain
                                                     one, whose time is not predicted: 0 */
    double forward_seconds, backward_seconds;
    uint64_t workspace_bytes; /* of the backend, beside the ctx's scratch; 0 if not used */
} ra_cuda_forecast;

/* options: those of ra_backend_open_cuda; may be NULL. out->size is set by the caller. */
RA_API ra_status ra_cuda_forecast_plan(const ra_plan *plan, const ra_cuda_options *options,
                                       ra_cuda_forecast *out);

/* Name of the kernel that the last forward or backward of this backend ran, "" before the first;
 * "simple" is the plain one. */
RA_API const char *ra_cuda_kernel(const ra_backend *backend, bool backward);

/* size ranks in one process, each driven by its own thread, on one or several devices: like
 * ra_comm_open_threads, for tensors in device or host memory. */
RA_API ra_status ra_comm_open_threads_cuda(int size, ra_comm **out_by_rank);

/* ---- ranks as processes, one GPU each, over NCCL ------------------------------------------ */

/* What the ranks of one communicator must share; plain bytes, to be sent as they are. */
typedef struct ra_nccl_id {
    unsigned char bytes[128];
} ra_nccl_id;

/* On one rank; the caller brings it to all others, by MPI, a file, a socket. RA_E_UNAVAILABLE
 * without NCCL: the copy in the process (PyTorch's, say) is used, else libnccl.so.2. */
RA_API ra_status ra_nccl_id_create(ra_nccl_id *out);

/* Collective over `size` ranks that hold the same id, each with a device of its own: NCCL refuses
 * two ranks on one device. Tensors of calls are in memory of that device. RA_E_COMM if not all
 * ranks come within 30 s. Exchanges run on a stream of the comm's own, which takes precedence over
 * the computation's; what does not lie in one piece passes through at most 512 MiB of device memory
 * for each message under way.
 *
 * No call waits for a rank that is gone: a watch on every exchange ends it after its time-out and
 * aborts the NCCL communicator, which frees its memory; the process lives on and may open another.
 * ra_comm_close of a comm without a failure waits for the other ranks to close theirs, at most 5 s.
 */
RA_API ra_status ra_comm_open_nccl(const ra_nccl_id *id, int rank, int size, int device,
                                   ra_comm **out);

/* Of the library that the two use, such as "2.28.9"; "" if there is none. Valid until this thread
 * calls again. */
RA_API const char *ra_nccl_version(void);

/* ---- memory ------------------------------------------------------------------------------- */

/* Device memory, zeroed; free accepts NULL. copy waits for the stream, in either direction, between
 * host and device memory. */
RA_API ra_status ra_cuda_alloc(int device, size_t bytes, void **out);
RA_API void ra_cuda_free(void *memory);
RA_API ra_status ra_cuda_copy(void *to, const void *from, size_t bytes, ra_stream stream);
RA_API ra_status ra_cuda_wait(ra_stream stream);

#ifdef __cplusplus
}
#endif
#endif
