/* The primary context: the one that libraries of a process share, counted. */
#include "shim.h"

CUresult kp_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    static pthread_mutex_t retaining = PTHREAD_MUTEX_INITIALIZER;
    CUresult rc = kp_ready();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (pctx == NULL || dev != 0)
        return pctx == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&retaining);
    if (kp_shim.primary == 0)
        rc = kp_context_create(kp_shim.primary_flags, true, &kp_shim.primary);
    if (rc != CUDA_SUCCESS)
        kp_shim.primary = 0;
    else
        kp_shim.primary_refs++;
    *pctx = (CUcontext)(uintptr_t)kp_shim.primary;
    pthread_mutex_unlock(&retaining);
    return rc;
}

/* Ends the primary context where `all`, else once nobody holds it. */
static CUresult let_primary_go(CUdevice dev, bool all)
{
    CUresult rc = kp_ready();
    uint64_t number;

    if (rc != CUDA_SUCCESS)
        return rc;
    if (dev != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&kp_shim.tx);
    number = kp_shim.primary;
    if (number == 0)
        return kp_leave(all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT);
    if (!all && --kp_shim.primary_refs > 0)
        return kp_leave(CUDA_SUCCESS);
    kp_shim.primary = 0;
    kp_shim.primary_refs = 0;
    kp_leave(CUDA_SUCCESS);
    return kp_context_destroy(number);
}

CUresult kp_cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    return let_primary_go(dev, false);
}

CUresult kp_cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
    return let_primary_go(dev, true);
}

CUresult kp_cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
    CUresult rc = kp_ready();

    if (rc == CUDA_SUCCESS && dev != 0)
        rc = CUDA_ERROR_INVALID_DEVICE;
    if (rc == CUDA_SUCCESS && flags != NULL)
        *flags = kp_shim.primary_flags;
    if (rc == CUDA_SUCCESS && active != NULL)
        *active = kp_shim.primary != 0;
    return rc;
}

CUresult kp_cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
    CUresult rc = kp_ready();

    if (rc == CUDA_SUCCESS && dev != 0)
        rc = CUDA_ERROR_INVALID_DEVICE;
    if (rc == CUDA_SUCCESS && (flags & ~KP_CONTEXT_FLAGS) != 0)
        rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS)
        kp_shim.primary_flags = flags;
    return rc;
}
