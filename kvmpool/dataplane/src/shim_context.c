/* Contexts: each thread's stack is kept here, the contexts themselves are the worker's.
 *
 * A context of a lost connection stays a valid handle that answers CUDA_ERROR_DEVICE_UNAVAILABLE until it is destroyed;
 * the next one that is created dials again.
 */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

#define API_VERSION 3020 /* what cuCtxGetApiVersion has answered since CUDA 3.2 */

uint64_t kp_current(void)
{
    struct kp_thread *thread = kp_thread();

    return thread != NULL && thread->depth > 0 ? thread->contexts[thread->depth - 1] : 0;
}

static CUresult push(uint64_t number)
{
    struct kp_thread *thread = kp_thread();

    if (thread == NULL || thread->depth == KP_CONTEXTS_MAX)
        return CUDA_ERROR_OUT_OF_MEMORY;
    thread->contexts[thread->depth++] = number;
    return CUDA_SUCCESS;
}

/* 0 where the thread has none. */
static uint64_t pop(void)
{
    struct kp_thread *thread = kp_thread();

    return thread != NULL && thread->depth > 0 ? thread->contexts[--thread->depth] : 0;
}

struct kp_context *kp_context_of(uint64_t number)
{
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, number, KP_CONTEXT);

    return entry != NULL ? entry->value : NULL;
}

CUresult kp_ready(void)
{
    return atomic_load(&kp_shim.forked) || !atomic_load(&kp_shim.ready) ? CUDA_ERROR_NOT_INITIALIZED : CUDA_SUCCESS;
}

CUresult kp_context_create(unsigned flags, bool primary, uint64_t *number)
{
    struct kp_answer answer = {0};
    struct kp_context *context;
    uint64_t in[KP_CONTEXT_CREATE_IN];
    CUresult rc;

    if ((rc = kp_enter_device()) != CUDA_SUCCESS)
        return rc;
    if ((context = calloc(1, sizeof *context)) == NULL)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *context = (struct kp_context){.epoch = kp_shim.link.epoch, .flags = flags, .version = API_VERSION, .primary = primary, .attached = 1};
    context->number = kp_handles_new(&kp_shim.handles, KP_CONTEXT, context, 0);
    if (context->number == 0) {
        free(context);
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    *number = in[KP_CONTEXT_CREATE_HANDLE] = context->number;
    in[KP_CONTEXT_CREATE_FLAGS] = flags;
    kp_shim.link.context = 0; /* behind it the worker has none current: the next call names its own */
    rc = kp_ask(KP_OP_context_create, in, KP_CONTEXT_CREATE_IN, NULL, 0, &answer);
    if (rc != CUDA_SUCCESS) {
        pthread_mutex_lock(&kp_shim.tx);
        kp_object_drop(*number);
        kp_leave(rc);
    }
    return rc;
}

CUresult kp_context_destroy(uint64_t number)
{
    struct kp_link *link = &kp_shim.link;
    struct kp_answer answer = {0};
    struct kp_context *context;
    CUresult rc = kp_ready();
    uint32_t epoch;

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    if ((context = kp_context_of(number)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_CONTEXT);
    epoch = context->epoch;
    kp_object_drop(number);
    kp_pools_drop(number);
    kp_space_drop(number);
    if (kp_current() == number) /* this thread's only, as CUDA does; others get CONTEXT_IS_DESTROYED */
        pop();
    link->context = 0; /* as in create */
    if (epoch != link->epoch || atomic_load(&link->lost))
        return kp_leave(CUDA_SUCCESS);
    rc = kp_ask(KP_OP_context_destroy, &number, 1, NULL, 0, &answer);
    return atomic_load(&link->lost) ? CUDA_SUCCESS : rc;
}

CUresult kp_cuCtxCreate_v2(CUcontext *pctx, unsigned int flags, CUdevice dev)
{
    uint64_t number = 0;
    CUresult rc = kp_ready();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (dev != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (pctx == NULL || (flags & ~KP_CONTEXT_FLAGS) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = kp_context_create(flags, false, &number)) != CUDA_SUCCESS)
        return rc;
    if ((rc = push(number)) != CUDA_SUCCESS) {
        kp_context_destroy(number);
        return rc;
    }
    *pctx = (CUcontext)(uintptr_t)number;
    return CUDA_SUCCESS;
}

CUresult kp_cuCtxCreate_v3(CUcontext *pctx, CUexecAffinityParam *params, int count, unsigned int flags, CUdevice dev)
{
    return params != NULL || count != 0 ? kp_unsupported("cuCtxCreate_v3") : kp_cuCtxCreate_v2(pctx, flags, dev);
}

CUresult kp_cuCtxCreate_v4(CUcontext *pctx, CUctxCreateParams *params, unsigned int flags, CUdevice dev)
{
    if (params != NULL && (params->execAffinityParams != NULL || params->cigParams != NULL))
        return kp_unsupported("cuCtxCreate_v4");
    return kp_cuCtxCreate_v2(pctx, flags, dev);
}

/* Copies the context out, so that it may be read without `tx`. NULL means the current one. */
static CUresult read_context(CUcontext ctx, struct kp_context *to)
{
    uint64_t number = ctx != NULL ? (uint64_t)(uintptr_t)ctx : kp_current();
    struct kp_context *context;
    CUresult rc = kp_ready();

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    if ((context = kp_context_of(number)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_CONTEXT);
    *to = *context;
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuCtxDestroy_v2(CUcontext ctx)
{
    struct kp_context context = {0};
    CUresult rc = ctx != NULL ? read_context(ctx, &context) : CUDA_ERROR_INVALID_CONTEXT;

    if (rc != CUDA_SUCCESS)
        return rc;
    return context.primary ? CUDA_ERROR_INVALID_CONTEXT : kp_context_destroy(context.number);
}

CUresult kp_cuCtxAttach(CUcontext *pctx, unsigned int flags)
{
    struct kp_context *context;
    CUresult rc = kp_ready();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (pctx == NULL || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&kp_shim.tx);
    if ((context = kp_context_of(kp_current())) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_CONTEXT);
    context->attached++;
    *pctx = (CUcontext)(uintptr_t)context->number;
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuCtxDetach(CUcontext ctx)
{
    uint64_t number = (uint64_t)(uintptr_t)ctx;
    struct kp_context *context;
    CUresult rc = kp_ready();

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    if ((context = kp_context_of(number)) == NULL || number != kp_current())
        return kp_leave(CUDA_ERROR_INVALID_CONTEXT);
    bool last = --context->attached == 0;
    kp_leave(CUDA_SUCCESS);
    return last ? kp_cuCtxDestroy_v2(ctx) : CUDA_SUCCESS;
}

static CUresult check_context(CUcontext ctx)
{
    CUresult rc = kp_ready();

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    return kp_leave(kp_context_of((uint64_t)(uintptr_t)ctx) != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT);
}

CUresult kp_cuCtxPushCurrent_v2(CUcontext ctx)
{
    CUresult rc = check_context(ctx);

    return rc == CUDA_SUCCESS ? push((uint64_t)(uintptr_t)ctx) : rc;
}

CUresult kp_cuCtxPopCurrent_v2(CUcontext *pctx)
{
    CUresult rc = kp_ready();
    uint64_t number;

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((number = pop()) == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (pctx != NULL)
        *pctx = (CUcontext)(uintptr_t)number;
    return CUDA_SUCCESS;
}

CUresult kp_cuCtxSetCurrent(CUcontext ctx)
{
    CUresult rc = ctx != NULL ? check_context(ctx) : kp_ready();

    if (rc != CUDA_SUCCESS)
        return rc;
    pop();
    return ctx != NULL ? push((uint64_t)(uintptr_t)ctx) : CUDA_SUCCESS;
}

CUresult kp_cuCtxGetCurrent(CUcontext *pctx)
{
    CUresult rc = kp_ready();

    if (rc == CUDA_SUCCESS && pctx == NULL)
        rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS)
        *pctx = (CUcontext)(uintptr_t)kp_current();
    return rc;
}

CUresult kp_cuCtxGetDevice(CUdevice *device)
{
    return kp_cuCtxGetDevice_v2(device, NULL);
}

CUresult kp_cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx)
{
    struct kp_context context = {0};
    CUresult rc = device == NULL ? CUDA_ERROR_INVALID_VALUE : read_context(ctx, &context);

    if (rc == CUDA_SUCCESS)
        *device = 0;
    return rc;
}

CUresult kp_cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
    struct kp_context context = {0};
    CUresult rc = version == NULL ? CUDA_ERROR_INVALID_VALUE : read_context(ctx, &context);

    if (rc == CUDA_SUCCESS)
        *version = context.version;
    return rc;
}

CUresult kp_cuCtxGetFlags(unsigned int *flags)
{
    struct kp_context context = {0};
    CUresult rc = flags == NULL ? CUDA_ERROR_INVALID_VALUE : read_context(NULL, &context);

    if (rc == CUDA_SUCCESS)
        *flags = context.flags;
    return rc;
}

CUresult kp_cuCtxSetFlags(unsigned int flags)
{
    struct kp_context *context;
    CUresult rc = (flags & ~KP_CONTEXT_FLAGS) != 0 ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((context = kp_context_of(kp_current())) != NULL) /* how a thread waits is of no matter to the card */
        context->flags = flags;
    return kp_leave(CUDA_SUCCESS);
}

/* A property of the device, which has one card all its life. */
CUresult kp_cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    static int32_t range[2];
    static bool known; /* both guarded by `tx` */
    int32_t got[2] = {0, 0};
    struct kp_answer answer = {.bytes = got, .room = sizeof got};
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (!known) {
        rc = kp_ask(KP_OP_priority_range, NULL, 0, NULL, 0, &answer);
        pthread_mutex_lock(&kp_shim.tx);
        known = rc == CUDA_SUCCESS && answer.got == sizeof got;
        memcpy(range, got, sizeof got);
    }
    if (rc == CUDA_SUCCESS && least != NULL)
        *least = range[0];
    if (rc == CUDA_SUCCESS && greatest != NULL)
        *greatest = range[1];
    return kp_leave(rc);
}

CUresult kp_cuCtxGetId(CUcontext ctx, unsigned long long *id)
{
    struct kp_context context = {0};
    CUresult rc = id == NULL ? CUDA_ERROR_INVALID_VALUE : read_context(ctx, &context);

    if (rc == CUDA_SUCCESS)
        *id = context.number;
    return rc;
}

CUresult kp_cuCtxSynchronize_v2(CUcontext ctx)
{
    CUresult rc = ctx != NULL ? kp_cuCtxPushCurrent_v2(ctx) : CUDA_SUCCESS;

    if (rc == CUDA_SUCCESS)
        rc = kp_cuCtxSynchronize();
    if (ctx != NULL && rc != CUDA_ERROR_INVALID_CONTEXT)
        kp_cuCtxPopCurrent_v2(NULL);
    return rc;
}
