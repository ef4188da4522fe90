/* Asks the driver. */
#include "backend/cuda/check.h"
#include "backend/cuda/device.h"
#include "backend/cuda/dispatch.h"
#include "ringattn_cuda.h"

int ra_cuda_device_count(void)
{
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return 0;
    }
    return count;
}

ra_status ra_cuda_device_check(int device, int *capability)
{
    int major = 0, minor = 0, count = 0;
    cudaError_t error = cudaGetDeviceCount(&count);
    cudaGetLastError();
    if (error && error != cudaErrorNoDevice && error != cudaErrorInsufficientDriver &&
        error != cudaErrorStubLibrary) {
        return ra_cuda_fail(error, "cudaGetDeviceCount");
    }
    if (count == 0) {
        return RA_FAIL(RA_E_UNAVAILABLE, "device: no CUDA device or driver on this machine");
    }
    if (device < 0 || device >= count) {
        return RA_FAIL(RA_E_ARG, "device: %d, expected 0 to %d", device, count - 1);
    }
    RA_CUDA_TRY(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    RA_CUDA_TRY(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    *capability = 10 * major + minor;
    return ra_cuda_capability_check(device, *capability);
}
