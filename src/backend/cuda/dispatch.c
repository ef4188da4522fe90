/* The tables of kernels, best first. Must not know what a kernel needs: each says so itself. */
#include "backend/cuda/dispatch.h"

#include "backend/cuda/fold.h"
#include "backend/cuda/grad.h"

static const ra_cuda_fold_kernel *const folds[] = {
    &ra_cuda_fold_512,
    &ra_cuda_fold_256,
    &ra_cuda_simple_fold,
};

static const ra_cuda_grad_kernel *const grads[] = {
    &ra_cuda_block_grad,
    &ra_cuda_simple_grad,
};

enum { OLDEST_CAPABILITY = 90 };

ra_status ra_cuda_capability_check(int device, int capability)
{
    if (capability < OLDEST_CAPABILITY) {
        return RA_FAIL(RA_E_UNSUPPORTED, "device: %d has compute capability %d.%d, expected 9.0",
                       device, capability / 10, capability % 10);
    }
    return RA_OK;
}

const ra_cuda_fold_kernel *ra_cuda_fold_choose(const ra_fold_job *job, const ra_cuda_work *work,
                                               const ra_cuda_launch *at, bool simple_only)
{
    size_t i = 0, last = sizeof folds / sizeof *folds - 1;
    for (i = simple_only ? last : 0; i < last && !folds[i]->supports(job, work, at);) {
        i++;
    }
    return folds[i];
}

const ra_cuda_grad_kernel *ra_cuda_grad_choose(const ra_grad_job *job, const ra_cuda_work *work,
                                               const ra_cuda_launch *at, bool simple_only)
{
    size_t i = 0, last = sizeof grads / sizeof *grads - 1;
    for (i = simple_only ? last : 0; i < last && !grads[i]->supports(job, work, at);) {
        i++;
    }
    return grads[i];
}
