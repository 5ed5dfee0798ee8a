/* Questions about streams that the shim answers, most without a trip: what it asked once it remembers. */
#include "shim.h"

#include <string.h>

CUresult kp_cuStreamGetCtx(CUstream hStream, CUcontext *pctx)
{
    uint64_t number;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (pctx == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if ((rc = kp_stream_number(hStream, &number)) != CUDA_SUCCESS)
        return kp_leave(rc);
    *pctx = (CUcontext)(uintptr_t)(number == 0 ? kp_current() : kp_handles_get(&kp_shim.handles, number, KP_STREAM)->parent);
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuStreamGetCtx_v2(CUstream hStream, CUcontext *pCtx, CUgreenCtx *pGreenCtx)
{
    CUresult rc = kp_cuStreamGetCtx(hStream, pCtx);

    if (rc == CUDA_SUCCESS && pGreenCtx != NULL)
        *pGreenCtx = NULL; /* there are no green contexts here */
    return rc;
}

CUresult kp_cuStreamGetDevice(CUstream hStream, CUdevice *device)
{
    CUcontext context;
    CUresult rc = device == NULL ? CUDA_ERROR_INVALID_VALUE : kp_cuStreamGetCtx(hStream, &context);

    if (rc == CUDA_SUCCESS)
        *device = 0;
    return rc;
}

CUresult kp_cuStreamGetId(CUstream hStream, unsigned long long *streamId)
{
    uint64_t number;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (streamId == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if ((rc = kp_stream_number(hStream, &number)) == CUDA_SUCCESS)
        *streamId = number != 0 ? number : kp_current(); /* the default stream of each context is another */
    return kp_leave(rc);
}

/* Priority and flags do not change while a stream lives. They are kept in its handle's value, with this bit set. */
#define KNOWN (1ull << 63)

static CUresult fetch_info(uint64_t number, struct kp_stream_info *info)
{
    struct kp_answer answer = {.bytes = info, .room = sizeof *info};
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, number, KP_STREAM);
    uint64_t known = entry != NULL ? (uint64_t)(uintptr_t)entry->value : 0;
    CUresult rc;

    if (number == 0 || (known & KNOWN) != 0) { /* the default stream has neither */
        *info = (struct kp_stream_info){(int32_t)(int16_t)(known & UINT16_MAX), (uint32_t)(known >> 16 & UINT32_MAX)};
        return kp_leave(CUDA_SUCCESS);
    }
    rc = kp_ask(KP_OP_stream_info, &number, KP_STREAM_INFO_IN, NULL, 0, &answer);
    if (rc == CUDA_SUCCESS && answer.got != sizeof *info)
        rc = CUDA_ERROR_UNKNOWN;
    pthread_mutex_lock(&kp_shim.tx);
    entry = kp_handles_get(&kp_shim.handles, number, KP_STREAM);
    if (rc == CUDA_SUCCESS && entry != NULL)
        entry->value = (void *)(uintptr_t)(KNOWN | (uint64_t)info->flags << 16 | (uint16_t)info->priority);
    return kp_leave(rc);
}

static CUresult stream_info(CUstream stream, const void *must, struct kp_stream_info *info)
{
    uint64_t number;
    CUresult rc = must == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_stream_number(stream, &number)) != CUDA_SUCCESS)
        return kp_leave(rc);
    return fetch_info(number, info);
}

CUresult kp_cuStreamGetPriority(CUstream hStream, int *priority)
{
    struct kp_stream_info info;
    CUresult rc = stream_info(hStream, priority, &info);

    if (rc == CUDA_SUCCESS)
        *priority = info.priority;
    return rc;
}

CUresult kp_cuStreamGetFlags(CUstream hStream, unsigned int *flags)
{
    struct kp_stream_info info;
    CUresult rc = stream_info(hStream, flags, &info);

    if (rc == CUDA_SUCCESS)
        *flags = info.flags;
    return rc;
}
