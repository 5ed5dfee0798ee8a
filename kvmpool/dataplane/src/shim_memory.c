/* Device memory: allocation at addresses the shim chose, and copies, whose bytes follow their call. */
#include "shim.h"

#include <string.h>

static CUresult allocate(CUdeviceptr *dptr, size_t bytesize)
{
    struct kp_answer answer = {0};
    uint64_t in[KP_ALLOC_IN];
    CUresult rc;

    if (dptr == NULL || bytesize == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = kp_capture_unsafe()) != CUDA_SUCCESS || (rc = kp_enter()) != CUDA_SUCCESS)
        return rc;
    if (bytesize > kp_shim.welcome.memory_bytes || (in[KP_ALLOC_VA] = kp_space_take(bytesize, kp_current())) == 0)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    in[KP_ALLOC_BYTES] = bytesize;
    rc = kp_ask(KP_OP_alloc, in, KP_ALLOC_IN, NULL, 0, &answer);
    if (rc == CUDA_SUCCESS) {
        *dptr = in[KP_ALLOC_VA];
    } else {
        pthread_mutex_lock(&kp_shim.tx);
        kp_space_give(in[KP_ALLOC_VA]);
        kp_leave(rc);
    }
    return rc;
}

/* What pools hold unused is the claim's too: where there is no more, it goes back first. */
CUresult kp_cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    CUresult rc = allocate(dptr, bytesize);

    return rc == CUDA_ERROR_OUT_OF_MEMORY && kp_pools_give() ? allocate(dptr, bytesize) : rc;
}

CUresult kp_cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    size_t row = (width + 511) & ~(size_t)511, bytes;
    CUresult rc;

    if (pitch == NULL || width == 0 || height == 0 || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    if (row < width || __builtin_mul_overflow(row, height, &bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = kp_cuMemAlloc_v2(dptr, bytes)) == CUDA_SUCCESS)
        *pitch = row;
    return rc;
}

CUresult kp_cuMemFree_v2(CUdeviceptr dptr)
{
    uint64_t in[KP_FREE_IN] = {[KP_FREE_VA] = dptr};
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (dptr == 0 || atomic_load(&kp_shim.captures) > 0) {
        kp_leave(rc);
        if (dptr == 0 || (rc = kp_capture_unsafe()) != CUDA_SUCCESS || (rc = kp_enter()) != CUDA_SUCCESS)
            return rc;
    }
    if (!kp_pools_forget(dptr) || !kp_space_give(dptr))
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    return kp_send(KP_OP_free, in, KP_FREE_IN, NULL, 0);
}

CUresult kp_cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr dptr)
{
    CUdeviceptr start;
    size_t bytes;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (!kp_space_find(dptr, &start, &bytes))
        return kp_leave(CUDA_ERROR_NOT_FOUND);
    if (base != NULL)
        *base = start;
    if (size != NULL)
        *size = bytes;
    return kp_leave(CUDA_SUCCESS);
}

/* An address in the window must be in an allocation and end in it; others are module variables, the driver knows them. */
CUresult kp_device_range(CUdeviceptr address, size_t bytes)
{
    CUdeviceptr start;
    size_t room;

    if (address == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (address < KP_VA_BASE || address - KP_VA_BASE >= KP_VA_WINDOW)
        return CUDA_SUCCESS;
    while (kp_space_find(address, &start, &room)) {
        room -= address - start;
        if (bytes <= room)
            return CUDA_SUCCESS;
        if (!kp_space_reserved(address, room + 1)) /* only mappings of the program lie side by side */
            break;
        address += room;
        bytes -= room;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

/* With `tx` held, which it gives back. */
static CUresult copy_shared(uint16_t op, CUdeviceptr device, size_t bytes, uint64_t offset, uint64_t stream)
{
    uint64_t in[KP_ARENA_IN_IN] = {
        [KP_ARENA_IN_VA] = device, [KP_ARENA_IN_BYTES] = bytes, [KP_ARENA_IN_OFFSET] = offset, [KP_ARENA_IN_STREAM] = stream,
    };

    kp_thread()->unsettled = true;
    return kp_send(op, in, KP_ARENA_IN_IN, NULL, 0);
}

/* The host's bytes are read before this returns, so nobody need wait: CUDA promises no more for pageable memory. Memory in
 * the window is read in the stream's turn, as CUDA reads page-locked memory. */
CUresult kp_cuMemcpyHtoDAsync_v2(CUdeviceptr dstDevice, const void *srcHost, size_t bytes, CUstream hStream)
{
    uint64_t in[KP_COPY_IN_IN] = {[KP_COPY_IN_VA] = dstDevice, [KP_COPY_IN_BYTES] = bytes}, offset;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (bytes == 0)
        return kp_leave(CUDA_SUCCESS);
    if (srcHost == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if ((rc = kp_device_range(dstDevice, bytes)) != CUDA_SUCCESS)
        return kp_leave(rc);
    if ((rc = kp_stream_number(hStream, &in[KP_COPY_IN_STREAM])) != CUDA_SUCCESS)
        return kp_leave(rc);
    if (kp_host_shared(srcHost, bytes, &offset))
        return copy_shared(KP_OP_arena_in, dstDevice, bytes, offset, in[KP_COPY_IN_STREAM]);
    return kp_send_bulk(KP_OP_copy_in, in, KP_COPY_IN_IN, NULL, 0, srcHost, bytes, NULL);
}

/* Waits for the bytes, unless they arrive in the window, also where the host memory is page-locked: later than the program must expect, never earlier. */
CUresult kp_cuMemcpyDtoHAsync_v2(void *dstHost, CUdeviceptr srcDevice, size_t bytes, CUstream hStream)
{
    uint64_t in[KP_COPY_OUT_IN] = {[KP_COPY_OUT_VA] = srcDevice, [KP_COPY_OUT_BYTES] = bytes}, offset;
    struct kp_answer answer = {.bulk = dstHost, .bulk_bytes = bytes};
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (bytes == 0)
        return kp_leave(CUDA_SUCCESS);
    if (dstHost == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if ((rc = kp_device_range(srcDevice, bytes)) != CUDA_SUCCESS)
        return kp_leave(rc);
    if ((rc = kp_stream_number(hStream, &in[KP_COPY_OUT_STREAM])) != CUDA_SUCCESS)
        return kp_leave(rc);
    if (kp_host_shared(dstHost, bytes, &offset))
        return copy_shared(KP_OP_arena_out, srcDevice, bytes, offset, in[KP_COPY_OUT_STREAM]);
    return kp_ask(KP_OP_copy_out, in, KP_COPY_OUT_IN, NULL, 0, &answer);
}

CUresult kp_settle(CUresult result, CUstream stream)
{
    uint64_t in[KP_SETTLE_IN];
    CUresult rc = result == CUDA_SUCCESS ? kp_enter() : result;

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_stream_number(stream, &in[KP_SETTLE_STREAM])) != CUDA_SUCCESS)
        return kp_leave(rc);
    return kp_send(KP_OP_settle, in, KP_SETTLE_IN, NULL, 0);
}

bool kp_on_device(CUdeviceptr address)
{
    CUdeviceptr start;
    size_t bytes;

    return (address >= KP_VA_BASE && address - KP_VA_BASE < KP_VA_WINDOW) || kp_global_find(address, &start, &bytes, NULL);
}

static bool both_in_host_memory(CUdeviceptr one, CUdeviceptr other)
{
    bool found;

    pthread_mutex_lock(&kp_shim.tx);
    found = kp_host_find((void *)(uintptr_t)one, NULL, NULL) && kp_host_find((void *)(uintptr_t)other, NULL, NULL);
    pthread_mutex_unlock(&kp_shim.tx);
    return found;
}

/* Unified addressing: which side an address is on shows in the address, because the window is the shim's and a variable's pages
 * are taken. */
CUresult kp_cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream hStream)
{
    if (kp_on_device(dst) && kp_on_device(src))
        return kp_cuMemcpyDtoDAsync_v2(dst, src, bytes, hStream);
    if (kp_on_device(dst))
        return kp_cuMemcpyHtoDAsync_v2(dst, (const void *)(uintptr_t)src, bytes, hStream);
    if (kp_on_device(src))
        return kp_cuMemcpyDtoHAsync_v2((void *)(uintptr_t)dst, src, bytes, hStream);
    if (both_in_host_memory(dst, src)) {
        CUresult rc = kp_cuStreamSynchronize(hStream);
        if (rc == CUDA_SUCCESS)
            memmove((void *)(uintptr_t)dst, (void *)(uintptr_t)src, bytes);
        return rc;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult check_peer(CUcontext context)
{
    return kp_context_of((uint64_t)(uintptr_t)context) != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

/* Both contexts are of the one card. */
CUresult kp_cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext dst_context, CUdeviceptr src, CUcontext src_context, size_t bytes, CUstream hStream)
{
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = check_peer(dst_context)) == CUDA_SUCCESS)
        rc = check_peer(src_context);
    kp_leave(rc);
    if (rc == CUDA_SUCCESS && src_context != dst_context && (rc = kp_cuCtxSynchronize_v2(src_context)) == CUDA_SUCCESS)
        rc = kp_cuCtxSynchronize_v2(dst_context); /* what was begun in either comes first, as CUDA has it */
    return rc == CUDA_SUCCESS ? kp_cuMemcpyDtoDAsync_v2(dst, src, bytes, hStream) : rc;
}

/* One attribute of a device address; `data` is of the attribute's type. */
static CUresult attribute_of(CUdeviceptr ptr, CUpointer_attribute attribute, void *data)
{
    CUdeviceptr start;
    size_t bytes;

    if (!kp_space_find(ptr, &start, &bytes))
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(uint64_t *)data = kp_space_context(ptr); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)data = 2 /* device */; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)data = ptr; break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: *(unsigned long long *)data = start; break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: *(unsigned *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)data = 0; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *(CUdeviceptr *)data = start; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *(size_t *)data = bytes; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: *(int *)data = 1; break;
    default: return kp_unsupported("cuPointerGetAttribute of this attribute");
    }
    return CUDA_SUCCESS;
}

CUresult kp_cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (data == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if (kp_host_find((void *)(uintptr_t)ptr, NULL, NULL) && attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE) {
        *(unsigned *)data = 1; /* host */
        return kp_leave(CUDA_SUCCESS);
    }
    return kp_leave(attribute_of(ptr, attribute, data));
}

CUresult kp_cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr ptr)
{
    if (count == 0 || attributes == NULL || data == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) /* an unknown pointer is no error here: what cannot be told becomes 0 */
        if (kp_cuPointerGetAttribute(data[i], attributes[i], ptr) == CUDA_ERROR_INVALID_VALUE && data[i] != NULL)
            *(unsigned *)data[i] = attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? (unsigned)-2 : 0;
    return CUDA_SUCCESS;
}
