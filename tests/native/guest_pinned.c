/* Cases of test_window.py: page-locked memory, whose copies end when their stream says so. */
#define _GNU_SOURCE
#include "guest.h"

static unsigned char *pinned(size_t bytes, int value)
{
    void *memory;

    must(cuMemAllocHost_v2, &memory, bytes);
    memset(memory, value, bytes);
    return memory;
}

static int all_are(const unsigned char *memory, size_t bytes, int value)
{
    for (size_t i = 0; i < bytes; i++)
        if (memory[i] != value)
            return 0;
    return 1;
}

void case_pinned(size_t bytes)
{
    unsigned char *from, *to, *small, *plain = malloc(bytes);
    CUdeviceptr at, other;
    CUstream stream;

    start();
    must(cuStreamCreate, &stream, 1u);
    must(cuMemAlloc_v2, &at, bytes);
    must(cuMemAlloc_v2, &other, bytes);
    from = pinned(bytes, 3);
    small = pinned(100, 4);
    to = pinned(bytes, 5);
    say("apart", (from + bytes <= small || small + 100 <= from) && (to + bytes <= small || small + 100 <= to));
    must(cuMemcpyHtoDAsync_v2, at, from, bytes, stream);
    must(cuMemcpyDtoHAsync_v2, to, at, bytes, stream);
    must(cuStreamSynchronize, stream);
    say("async", all_are(to, bytes, 3));
    memset(from, 6, bytes);
    must(cuMemcpyHtoD_v2, at, from, bytes);
    memset(from, 0, bytes); /* a synchronous copy has read it */
    must(cuMemcpyDtoH_v2, to, at, bytes);
    say("sync", all_are(to, bytes, 6));
    must(cuMemcpy, other, at, bytes);
    must(cuMemcpy, (CUdeviceptr)(uintptr_t)from, other, bytes);
    say("unified", all_are(from, bytes, 6));
    must(cuMemcpyDtoH_v2, plain, other, bytes);
    say("plain", all_are(plain, bytes, 6));
    memset(from, 7, bytes);
    must(cuMemcpyHtoD_v2, at + 1, from + 1, bytes - 1);
    must(cuMemcpyDtoH_v2, to + 1, at + 1, bytes - 1);
    say("inside", to[0] == 6 && all_are(to + 1, bytes - 1, 7));
    say("beyond_allocation", cu(cuMemcpyHtoDAsync_v2, at + 1, from, bytes, stream));
    must(cuMemcpyHtoDAsync_v2, at, small, (size_t)100, stream);
    must(cuMemcpyDtoHAsync_v2, to, at, (size_t)100, stream);
    CUDA_MEMCPY2D rows = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = to, .srcPitch = 20, .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                          .dstDevice = other, .dstPitch = 10, .WidthInBytes = 10, .Height = 5};
    must(cuMemcpy2DAsync_v2, &rows, stream); /* in the stream's turn: it reads what the copy before brought */
    must(cuMemcpyDtoHAsync_v2, plain, other, (size_t)50, stream);
    say("rows", all_are(plain, 50, 4));
    must(cuMemFreeHost, from);
    say("freed_twice", cu(cuMemFreeHost, from));
    from = pinned(bytes, 8);
    say("small_untouched", all_are(small, 100, 4));
    must(cuMemcpyHtoD_v2, at, from, bytes);
    must(cuMemcpyDtoH_v2, plain, at, bytes);
    say("again", all_are(plain, bytes, 8));
    void *huge;
    must(cuMemAllocHost_v2, &huge, (size_t)(600 * MIB)); /* more than the window has */
    must(cuMemcpyHtoD_v2, at, huge, (size_t)100);
    must(cuMemFreeHost, huge);
    free(plain);
}

/* As case_lost: memory of the lost worker's window stays the program's, and is used with the next worker. */
void case_pinned_lost(void)
{
    CUcontext context = start();
    unsigned char *old = pinned(1000, 9), *back;
    CUdeviceptr at;

    puts("ready=1");
    fflush(stdout);
    getchar();
    say("synchronise", cu(cuCtxSynchronize));
    must(cuCtxDestroy_v2, context);
    must(cuCtxCreate_v2, &context, 0u, 0);
    back = pinned(1000, 0);
    must(cuMemAlloc_v2, &at, (size_t)1000);
    must(cuMemcpyHtoD_v2, at, old, (size_t)1000);
    must(cuMemcpyDtoH_v2, back, at, (size_t)1000);
    say("equal", all_are(back, 1000, 9));
    must(cuMemFreeHost, old);
    must(cuMemFreeHost, back);
}
