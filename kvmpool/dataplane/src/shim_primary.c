/* The primary context: one for the process, made by the first who retains it, gone with the last who releases it. */
#include "shim.h"

static struct {
    pthread_mutex_t lock; /* also while the context is made: two that retain get the same one; taken before `tx` */
    uint64_t number;      /* its handle, 0: there is none */
    unsigned refs, flags;
} primary = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* Takes the lock where it returns 0. */
static CUresult enter(CUdevice dev)
{
    CUresult rc = kp_ready();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (dev != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&primary.lock);
    return CUDA_SUCCESS;
}

static CUresult leave(CUresult result)
{
    pthread_mutex_unlock(&primary.lock);
    return result;
}

CUresult kp_cuDevicePrimaryCtxRetain(CUcontext *pctx, CUdevice dev)
{
    CUresult rc = enter(dev);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (pctx == NULL)
        return leave(CUDA_ERROR_INVALID_VALUE);
    if (primary.number == 0 && (rc = kp_context_create(primary.flags, true, &primary.number)) != CUDA_SUCCESS)
        primary.number = 0;
    primary.refs += rc == CUDA_SUCCESS;
    *pctx = (CUcontext)(uintptr_t)primary.number;
    return leave(rc);
}

/* Ends the primary context where `all`, else once nobody holds it. */
static CUresult let_go(CUdevice dev, bool all)
{
    CUresult rc = enter(dev);
    uint64_t number;

    if (rc != CUDA_SUCCESS)
        return rc;
    number = primary.number;
    if (number == 0)
        return leave(all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT);
    if (!all && --primary.refs > 0)
        return leave(CUDA_SUCCESS);
    primary.number = 0;
    primary.refs = 0;
    leave(CUDA_SUCCESS);
    return kp_context_destroy(number);
}

CUresult kp_cuDevicePrimaryCtxRelease_v2(CUdevice dev)
{
    return let_go(dev, false);
}

CUresult kp_cuDevicePrimaryCtxReset_v2(CUdevice dev)
{
    return let_go(dev, true);
}

CUresult kp_cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
    CUresult rc = enter(dev);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (flags != NULL)
        *flags = primary.flags;
    if (active != NULL)
        *active = primary.number != 0;
    return leave(rc);
}

CUresult kp_cuDevicePrimaryCtxSetFlags_v2(CUdevice dev, unsigned int flags)
{
    CUresult rc = enter(dev);

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((flags & ~KP_CONTEXT_FLAGS) != 0)
        return leave(CUDA_ERROR_INVALID_VALUE);
    primary.flags = flags;
    return leave(rc);
}
