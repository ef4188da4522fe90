/* Sustained time of calls on the default stream, and of cuBLAS, the measure of all rows. */
#include <ctime>

#include <cublas_v2.h>

#include "gpu_bench.h"

#define MUST_CUBLAS(call) must((call) == CUBLAS_STATUS_SUCCESS, #call, "cuBLAS failed")

static double now()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double time_sustained(double seconds, const std::function<void()> &call)
{
    cudaEvent_t begin, end;
    MUST_CUDA(cudaEventCreate(&begin));
    MUST_CUDA(cudaEventCreate(&end));
    int64_t calls = 0;
    double start = now(), elapsed = 0;
    for (; elapsed < seconds; calls++) {
        call();
        MUST_CUDA(cudaStreamSynchronize(nullptr));
        elapsed = now() - start;
    }
    int64_t batch = (int64_t)((double)calls * seconds / elapsed) + 1;
    MUST_CUDA(cudaEventRecord(begin, nullptr));
    for (int64_t i = 0; i < batch; i++) {
        call();
    }
    MUST_CUDA(cudaEventRecord(end, nullptr));
    MUST_CUDA(cudaEventSynchronize(end));
    float milliseconds = 0;
    MUST_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
    MUST_CUDA(cudaEventDestroy(begin));
    MUST_CUDA(cudaEventDestroy(end));
    return (double)milliseconds / (double)batch;
}

double time_cublas(double seconds)
{
    enum { N = 8192 };
    cublasHandle_t handle;
    ra_tensor a = device_tensor(RA_BF16, 1, 1, N, N, 5), b = device_tensor(RA_BF16, 1, 1, N, N, 6);
    ra_tensor c = device_tensor(RA_BF16, 1, 1, N, N, 0);
    float one = 1, zero = 0;
    MUST_CUBLAS(cublasCreate(&handle));
    double milliseconds = time_sustained(seconds, [&] {
        MUST_CUBLAS(cublasGemmEx(handle, CUBLAS_OP_N, CUBLAS_OP_N, N, N, N, &one, a.data,
                                 CUDA_R_16BF, N, b.data, CUDA_R_16BF, N, &zero, c.data, CUDA_R_16BF,
                                 N, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    });
    MUST_CUBLAS(cublasDestroy(handle));
    for (ra_tensor *t : {&a, &b, &c}) {
        ra_cuda_free(t->data);
    }
    return 2.0 * N * N * N / milliseconds * 1e-9;
}
