/* Handles as the program sees them: made, checked and dropped, all with `tx` held. */
#include "shim.h"

#include <stdlib.h>

uint64_t kp_object_new(enum kp_kind kind)
{
    return kp_handles_new(&kp_shim.handles, kind, NULL, kp_current());
}

static void release(struct kp_handle *entry)
{
    switch (kp_handle_kind(entry->number)) {
    case KP_CONTEXT:
    case KP_FUNCTION:
    case KP_KERNEL: free(entry->value); break;
    case KP_LINK: kp_linker_free(entry->value); break;
    case KP_STREAM: kp_capture_forget(entry->number); break;
    case KP_GRAPH: kp_graph_free(entry->value); break;
    default: break; /* what is behind it is the worker's */
    }
}

void kp_object_drop(uint64_t number)
{
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, number, kp_handle_kind(number));

    if (entry == NULL)
        return;
    kp_handles_drop_children(&kp_shim.handles, number, release);
    release(entry);
    kp_handles_drop(&kp_shim.handles, number);
}

void kp_object_lose(uint64_t number)
{
    pthread_mutex_lock(&kp_shim.tx);
    kp_object_drop(number);
    pthread_mutex_unlock(&kp_shim.tx);
}

CUresult kp_object_number(enum kp_kind kind, const void *object, uint64_t *number)
{
    *number = (uint64_t)(uintptr_t)object;
    if (kind == KP_FUNCTION && kp_handle_kind(*number) == KP_KERNEL) /* a kernel may stand for a function */
        kind = KP_KERNEL;
    if (kp_handles_get(&kp_shim.handles, *number, kind) != NULL)
        return CUDA_SUCCESS;
    return kind == KP_GRAPH || kind == KP_EXEC ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE; /* as CUDA's */
}

/* The thread's own default stream in its context, made on first use: the worker has one thread, so none of its own. */
static CUresult own_stream(uint64_t *number)
{
    struct kp_thread *thread = kp_thread();
    uint64_t context = kp_current(), in[2] = {0, 0}; /* flags 0: it synchronises with the legacy stream, as CUDA's does */
    unsigned slot = KP_THREAD_STREAMS;

    for (unsigned i = 0; thread != NULL && i < KP_THREAD_STREAMS; i++) {
        uint64_t stream = thread->streams[i].stream;
        if (stream != 0 && kp_handles_get(&kp_shim.handles, stream, KP_STREAM) == NULL)
            stream = thread->streams[i].stream = 0; /* went with its context */
        if (stream != 0 && thread->streams[i].context == context) {
            *number = stream;
            return CUDA_SUCCESS;
        }
        if (stream == 0)
            slot = i;
    }
    if (slot == KP_THREAD_STREAMS || (in[0] = kp_object_new(KP_STREAM)) == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    thread->streams[slot].context = context;
    thread->streams[slot].stream = *number = in[0];
    kp_link_put(KP_OP_cuStreamCreate, 0, kp_shim.link.seq++, in, 2, NULL, 0);
    return CUDA_SUCCESS;
}

CUresult kp_stream_number(CUstream stream, uint64_t *number)
{
    if (stream == NULL || stream == CU_STREAM_LEGACY) {
        *number = 0;
        return CUDA_SUCCESS;
    }
    if (stream == CU_STREAM_PER_THREAD)
        return own_stream(number);
    return kp_object_number(KP_STREAM, stream, number);
}

CUstream kp_per_thread(CUstream stream)
{
    return stream == NULL ? CU_STREAM_PER_THREAD : stream;
}

/* `count` elements of `element` bytes in each of `rows` rows, `pitch` bytes apart: told now, not when the card finds out. */
CUresult kp_device_number(CUdeviceptr address, size_t element, size_t count, size_t rows, size_t pitch, uint64_t *number)
{
    size_t width, span;

    *number = address;
    if (address % element != 0 || (rows > 1 && pitch % element != 0))
        return CUDA_ERROR_INVALID_VALUE;
    if (count == 0 || rows == 0)
        return CUDA_SUCCESS;
    if (__builtin_mul_overflow(count, element, &width) || __builtin_mul_overflow(rows - 1, pitch, &span) ||
        __builtin_add_overflow(span, width, &span) || (rows > 1 && pitch < width))
        return CUDA_ERROR_INVALID_VALUE;
    return kp_device_range(address, span);
}
