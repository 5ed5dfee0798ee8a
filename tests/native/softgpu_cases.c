/* softgpu_cases.c: a program of the driver API that dlopens libcuda.so.1 by its soname and plays one case:
 *
 *     softgpu_cases KERNELS.ptx CASE [WORD...]
 *
 * Exit 0: all as CUDA promises. The cases that need another process's help print a line and read one. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_api.h"
#include "softgpu_api.h"

static char *ptx;
static char **words;
static CUcontext context;
static CUmodule module;

static void *library;

static void *name_of(const char *name)
{
    void *found = dlsym(library, name);

    if (!found) {
        fprintf(stderr, "libcuda.so.1 has no %s\n", name);
        exit(1);
    }
    return found;
}

static void expect(int line, const char *text, long got, long wanted)
{
    if (got == wanted)
        return;
    fprintf(stderr, "line %d: %s is %ld, not %ld\n", line, text, got, wanted);
    exit(1);
}

#define IS(call, wanted) expect(__LINE__, #call, (long)(call), (long)(wanted))
#define OK(call) IS(call, 0)

static void say(const char *text)
{
    puts(text);
    fflush(stdout);
}

static void wait_for_word(void)
{
    char line[16];

    if (!fgets(line, sizeof(line), stdin))
        exit(1);
}

static void begin(void)
{
    CUdevice device;

    OK(api.cuInit(0));
    OK(api.cuDeviceGet(&device, 0));
    OK(api.cuCtxCreate_v2(&context, 0, device));
    OK(api.cuModuleLoadData(&module, ptx));
}

static CUfunction kernel(const char *name)
{
    CUfunction function;

    OK(api.cuModuleGetFunction(&function, module, name));
    return function;
}

static CUdeviceptr allocate(size_t bytes)
{
    CUdeviceptr address;

    OK(api.cuMemAlloc_v2(&address, bytes));
    return address;
}

static CUresult launch(const char *name, unsigned grid, unsigned block, CUstream stream, void **params)
{
    return api.cuLaunchKernel(kernel(name), grid, 1, 1, block, 1, 1, 0, stream, params, NULL);
}

static CUresult late(CUdeviceptr to, int value, long rounds, CUstream stream)
{
    return launch("late", 1, 1, stream, (void *[]){&to, &value, &rounds});
}

static int read_int(CUdeviceptr from)
{
    int value;

    OK(api.cuMemcpyDtoH_v2(&value, from, sizeof(value)));
    return value;
}

#define LATE 100000000 /* rounds: some 100 ms */

/* ---- cases ---- */

static void vector_add(void)
{
    const int n = 1 << 20;
    size_t bytes = n * sizeof(float);
    float *a = malloc(bytes), *b = malloc(bytes), *c = calloc(1, bytes);
    CUdeviceptr da, db, dc;

    begin();
    for (int i = 0; i < n; i++) {
        a[i] = (float)i;
        b[i] = (float)(n - 2 * i);
    }
    da = allocate(bytes);
    db = allocate(bytes);
    dc = allocate(bytes);
    OK(api.cuMemcpyHtoD_v2(da, a, bytes));
    OK(api.cuMemcpyHtoD_v2(db, b, bytes));
    OK(launch("add", n / 256, 256, NULL, (void *[]){&da, &db, &dc, (int *)&n}));
    OK(api.cuMemcpyDtoH_v2(c, dc, bytes));
    for (int i = 0; i < n; i++)
        IS(c[i], a[i] + b[i]);
    OK(api.cuMemFree_v2(da));
    OK(api.cuCtxDestroy_v2(context));
    free(a);
    free(b);
    free(c);
}

static void launch_forms(void)
{
    struct { char a; double b; short c; CUdeviceptr out; } packed = {3, 5.5, -7, 0};
    size_t size = sizeof(packed);
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    void *params[] = {&packed.a, &packed.b, &packed.c, &packed.out};
    int got[3];

    begin();
    packed.out = allocate(sizeof(got));
    CUlaunchConfig config = {1, 1, 1, 1, 1, 1, 0, NULL, NULL, 0};
    for (int form = 0; form < 3; form++) {
        OK(api.cuMemsetD8_v2(packed.out, 0, sizeof(got)));
        if (form == 0)
            OK(api.cuLaunchKernel(kernel("mixed"), 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
        else if (form == 1)
            OK(api.cuLaunchKernel(kernel("mixed"), 1, 1, 1, 1, 1, 1, 0, NULL, NULL, extra));
        else
            OK(api.cuLaunchKernelEx(&config, kernel("mixed"), params, NULL));
        OK(api.cuMemcpyDtoH_v2(got, packed.out, sizeof(got)));
        IS(got[0], 3);
        IS(got[1], 5);
        IS(got[2], -7);
    }
    size = 8; /* shorter than the parameters */
    IS(api.cuLaunchKernel(kernel("mixed"), 1, 1, 1, 1, 1, 1, 0, NULL, NULL, extra), 1);
    IS(launch("mixed", 0, 1, NULL, params), 1);
    IS(launch("mixed", 1, 1025, NULL, params), 1);
    IS(api.cuLaunchKernel(kernel("reverse"), 1, 1, 1, 32, 1, 1, 64 << 10, NULL, params, NULL), 1);
    OK(api.cuFuncSetAttribute(kernel("reverse"), 8, 64 << 10));
    int numbers[32], back[32];
    CUdeviceptr tile = allocate(sizeof(numbers));
    for (int i = 0; i < 32; i++)
        numbers[i] = i * i;
    OK(api.cuMemcpyHtoD_v2(tile, numbers, sizeof(numbers)));
    OK(api.cuLaunchKernel(kernel("reverse"), 1, 1, 1, 32, 1, 1, 64 << 10, NULL, (void *[]){&tile}, NULL));
    OK(api.cuMemcpyDtoH_v2(back, tile, sizeof(back)));
    for (int i = 0; i < 32; i++)
        IS(back[i], (31 - i) * (31 - i));
}

static void streams_and_events(void)
{
    CUstream first, second;
    CUevent mark, begun;
    float ms;
    int *pinned;

    begin();
    CUdeviceptr p = allocate(8);
    OK(api.cuMemHostAlloc((void **)&pinned, 4, 0));
    OK(api.cuMemsetD32_v2(p, 0, 2));
    OK(api.cuStreamCreate(&first, CU_STREAM_NON_BLOCKING));
    OK(api.cuStreamCreate(&second, CU_STREAM_NON_BLOCKING));
    OK(api.cuEventCreate(&mark, 0));
    OK(api.cuEventCreate(&begun, 0));
    OK(api.cuCtxSynchronize());
    OK(api.cuEventQuery(mark)); /* never recorded: done */
    OK(api.cuEventRecord(begun, first));
    OK(late(p, 41, LATE, first));
    OK(api.cuEventRecord(mark, first));
    OK(api.cuStreamWaitEvent(second, mark, 0));
    *pinned = 0;
    OK(api.cuMemcpyDtoHAsync_v2(pinned, p, 4, second));
    IS(api.cuStreamQuery(first), 600);
    IS(api.cuStreamQuery(second), 600);
    IS(api.cuEventQuery(mark), 600);
    IS(api.cuEventElapsedTime(&ms, begun, mark), 600);
    IS(*(volatile int *)pinned, 0);
    OK(api.cuStreamSynchronize(second));
    IS(*(volatile int *)pinned, 41);
    OK(api.cuStreamQuery(first));
    OK(api.cuEventElapsedTime(&ms, begun, mark));
    IS(ms > 5 && ms < 60000, 1);
    /* destroying a stream with work in it lets the work end */
    OK(late(p, 42, LATE / 4, first));
    OK(api.cuEventRecord(mark, first));
    OK(api.cuStreamDestroy_v2(first));
    IS(api.cuStreamQuery(first), 400);
    OK(api.cuEventSynchronize(mark));
    IS(read_int(p), 42);
    OK(api.cuEventDestroy_v2(mark));
    IS(api.cuEventQuery(mark), 400);
}

static void default_stream(void)
{
    CUstream blocking, free_stream;
    int *pinned;

    begin();
    CUdeviceptr p = allocate(4), q = allocate(4);
    OK(api.cuMemHostAlloc((void **)&pinned, 8, 0));
    OK(api.cuStreamCreate(&blocking, 0));
    OK(api.cuStreamCreate(&free_stream, CU_STREAM_NON_BLOCKING));
    OK(api.cuMemsetD32_v2(p, 5, 1));
    OK(api.cuCtxSynchronize());
    /* the null stream waits for the blocking one: the copy sees the kernel's value */
    OK(late(p, 1, LATE, blocking));
    IS(read_int(p), 1);
    /* a blocking stream waits for the null stream */
    OK(late(p, 2, LATE, NULL));
    OK(api.cuMemcpyDtoHAsync_v2(pinned, p, 4, blocking));
    OK(api.cuStreamSynchronize(blocking));
    IS(pinned[0], 2);
    /* a non-blocking one does not */
    OK(late(p, 3, LATE, NULL));
    OK(api.cuMemcpyDtoHAsync_v2(pinned, p, 4, free_stream));
    OK(api.cuStreamSynchronize(free_stream));
    IS(pinned[0], 2);
    IS(api.cuStreamQuery(NULL), 600);
    OK(api.cuCtxSynchronize());
    IS(read_int(p), 3);
    /* the per-thread default stream (_ptsz) is a blocking stream of its own */
    OK(late(q, 9, LATE, CU_STREAM_PER_THREAD));
    IS(api.cuStreamQuery_ptsz(NULL), 600);
    IS(api.cuStreamQuery(CU_STREAM_PER_THREAD), 600);
    IS(read_int(q), 9);
    OK(api.cuStreamQuery_ptsz(NULL));
}

static void pageable_copies(void)
{
    CUstream stream;
    int value = 10, back = 0;

    begin();
    CUdeviceptr p = allocate(4), q = allocate(4);
    OK(api.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(late(q, 1, LATE, stream));
    OK(api.cuMemcpyHtoDAsync_v2(p, &value, 4, stream)); /* staged: the caller may overwrite it at once */
    value = 99;
    IS(api.cuStreamQuery(stream), 600);
    OK(api.cuMemcpyDtoHAsync_v2(&back, p, 4, stream)); /* to pageable memory: done when it returns */
    IS(back, 10);
}

static void *count_on_thread(void *argument)
{
    CUdeviceptr p = *(CUdeviceptr *)argument;

    OK(api.cuCtxSetCurrent(context));
    for (int i = 0; i < 50; i++) {
        OK(api.cuMemsetD32Async_ptsz(p, (unsigned)i, 1, NULL));
        OK(api.cuStreamSynchronize_ptsz(NULL));
        IS(read_int(p), i);
    }
    return NULL;
}

static void many_threads(void)
{
    enum { THREADS = 8 };
    pthread_t threads[THREADS];
    CUdeviceptr cells[THREADS];

    begin();
    for (int i = 0; i < THREADS; i++) {
        cells[i] = allocate(4);
        pthread_create(&threads[i], NULL, count_on_thread, &cells[i]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    OK(api.cuCtxDestroy_v2(context));
}

/* Everything is created and destroyed while other threads do the same. */
static void *churn_on_thread(void *argument)
{
    int me = *(int *)argument;

    OK(api.cuCtxSetCurrent(context));
    for (int i = 0; i < 60; i++) {
        CUstream one, two;
        CUevent event;
        int back = -1;
        CUdeviceptr p = allocate(4096), q = allocate(4096);
        OK(api.cuStreamCreate(&one, i & 1));
        OK(api.cuStreamCreate(&two, CU_STREAM_NON_BLOCKING));
        OK(api.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
        OK(api.cuMemsetD32Async(p, (unsigned)(me * 1000 + i), 1024, one));
        OK(api.cuEventRecord(event, one));
        OK(api.cuStreamWaitEvent(two, event, 0));
        OK(api.cuMemcpyDtoDAsync_v2(q, p, 4096, two));
        OK(api.cuStreamDestroy_v2(one));
        OK(api.cuMemcpyDtoHAsync_v2(&back, q + 4092, 4, two));
        IS(back, me * 1000 + i);
        OK(api.cuEventDestroy_v2(event));
        OK(api.cuStreamDestroy_v2(two));
        OK(api.cuMemFree_v2(p));
        OK(api.cuMemFree_v2(q));
    }
    return NULL;
}

static void churn(void)
{
    enum { THREADS = 6 };
    pthread_t threads[THREADS];
    int numbers[THREADS];
    size_t before, after, total;

    begin();
    OK(api.cuMemGetInfo_v2(&before, &total));
    for (int i = 0; i < THREADS; i++) {
        numbers[i] = i;
        pthread_create(&threads[i], NULL, churn_on_thread, &numbers[i]);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    OK(api.cuMemGetInfo_v2(&after, &total));
    IS(before - after, 0);
    OK(api.cuCtxDestroy_v2(context));
}

/* A context is destroyed with work in all its streams; its memory is free afterwards. */
static void destroyed_at_work(void)
{
    size_t before, after, total;

    OK(api.cuInit(0));
    for (int i = 0; i < 5; i++) {
        begin();
        if (!i)
            OK(api.cuMemGetInfo_v2(&before, &total));
        CUstream streams[4];
        CUevent event;
        OK(api.cuEventCreate(&event, 0));
        CUdeviceptr p = allocate(1 << 20);
        for (int k = 0; k < 4; k++) {
            OK(api.cuStreamCreate(&streams[k], (unsigned)k & 1));
            OK(late(p, k, LATE, streams[k]));
            OK(late(p, k, LATE, streams[k]));
            OK(api.cuEventRecord(event, streams[k]));
            OK(api.cuStreamWaitEvent(streams[0], event, 0));
        }
        OK(api.cuCtxDestroy_v2(context));
        IS(api.cuStreamQuery(streams[0]), 201);
    }
    begin();
    OK(api.cuMemGetInfo_v2(&after, &total));
    IS(before - after, 0);
}

static void bad_pointers(void)
{
    char buffer[64];

    begin();
    CUdeviceptr p = allocate(4096);
    IS(api.cuMemcpyHtoD_v2(0x1000, buffer, 64), 1);
    IS(api.cuMemcpyHtoD_v2(p + 4096 - 32, buffer, 64), 1);
    IS(api.cuMemcpyDtoH_v2(buffer, p - 1, 64), 1);
    IS(api.cuMemcpyHtoD_v2(p, NULL, 64), 1);
    IS(api.cuMemsetD8_v2(p, 0, 1 << 20), 1);
    IS(api.cuMemsetD32_v2(p + 1, 0, 1), 1);
    IS(api.cuMemsetD2D32_v2(p, 64, 0, 16, ~0ul / 2), 1);
    IS(api.cuMemFree_v2(p + 8), 1);
    OK(api.cuMemFree_v2(p));
    IS(api.cuMemFree_v2(p), 1);
    IS(api.cuMemcpyHtoD_v2(p, buffer, 64), 1);
    IS(api.cuMemAlloc_v2(&p, 0), 1);
    IS(api.cuMemAlloc_v2(&p, 1ul << 62), 2);
    IS(api.cuModuleUnload((CUmodule)buffer), 400);
    IS(api.cuStreamSynchronize((CUstream)buffer), 400);
    IS(api.cuCtxSetCurrent((CUcontext)buffer), 201);
    IS(api.cuLaunchKernel((CUfunction)buffer, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), 400);
    CUfunction function;
    IS(api.cuModuleGetFunction(&function, module, "no such kernel"), 500);
    IS(api.cuModuleLoadData(&module, "this is no PTX"), 218);
    IS(api.cuModuleLoadData(&module, "\x01\x02\x03\x04"), 200);
    OK(api.cuCtxSynchronize());
}

/* WORD: the kernel to run and the error it must end in */
static void sticky(void)
{
    CUdeviceptr bad = 64, good;
    int value = 1, n = 1;
    CUcontext dead;

    begin();
    dead = context;
    good = allocate(4);
    void *params[] = {&bad, &value, &n};
    OK(launch(words[0], 1, 1, NULL, params));
    int error = atoi(words[1]);
    IS(api.cuCtxSynchronize(), error);
    IS(api.cuMemAlloc_v2(&good, 4), error);
    IS(api.cuStreamQuery(NULL), error);
    IS(api.cuCtxDestroy_v2(dead), error);
    begin(); /* a new context works */
    good = allocate(4);
    OK(launch("set", 1, 1, NULL, (void *[]){&good, &value, &n}));
    IS(read_int(good), 1);
}

static void over_the_end(void)
{
    int value = 1, n = 2048;

    begin();
    CUdeviceptr p = allocate(4096);
    n = 1024;
    OK(launch("set", 8, 256, NULL, (void *[]){&p, &value, &n}));
    OK(api.cuCtxSynchronize());
    n = 1025;
    OK(launch("set", 8, 256, NULL, (void *[]){&p, &value, &n}));
    IS(api.cuCtxSynchronize(), 700);
}

static void variables(void)
{
    CUdeviceptr address;
    size_t bytes;
    int value;

    begin();
    CUdeviceptr p = allocate(4);
    OK(launch("count", 1, 1, NULL, (void *[]){&p}));
    IS(read_int(p), 7);
    OK(api.cuModuleGetGlobal_v2(&address, &bytes, module, "counter"));
    IS(bytes, 4);
    IS(read_int(address), 8);
    value = 100;
    OK(api.cuMemcpyHtoD_v2(address, &value, 4));
    OK(launch("count", 1, 1, NULL, (void *[]){&p}));
    IS(read_int(p), 100);
    IS(api.cuModuleGetGlobal_v2(&address, &bytes, module, "nothing"), 500);
}

static void libraries(void)
{
    CUlibrary loaded;
    CUkernel found, again;
    CUcontext other;
    CUdeviceptr address;
    size_t bytes, offset;
    unsigned count;

    begin();
    OK(api.cuLibraryLoadData(&loaded, ptx, NULL, NULL, 0, NULL, NULL, 0));
    OK(api.cuLibraryGetKernel(&found, loaded, "count"));
    OK(api.cuLibraryGetKernel(&again, loaded, "count"));
    IS(found == again, 1);
    OK(api.cuLibraryGetKernelCount(&count, loaded));
    IS(count, 8);
    OK(api.cuKernelGetParamInfo(found, 0, &offset, &bytes));
    IS(bytes, 8);
    IS(api.cuKernelGetParamInfo(found, 1, &offset, &bytes), 1);
    for (int i = 0; i < 2; i++) { /* each context has its own instance */
        CUdeviceptr p = allocate(4);
        OK(api.cuLaunchKernel((CUfunction)found, 1, 1, 1, 1, 1, 1, 0, NULL, (void *[]){&p}, NULL));
        IS(read_int(p), 7);
        OK(api.cuLibraryGetGlobal(&address, &bytes, loaded, "counter"));
        IS(read_int(address), 8);
        if (!i)
            OK(api.cuCtxCreate_v2(&other, 0, 0));
    }
    OK(api.cuLibraryUnload(loaded));
    IS(api.cuLibraryGetKernel(&found, loaded, "count"), 400);
}

static void linking(void)
{
    CUlinkState link;
    void *image;
    size_t size;

    begin();
    OK(api.cuLinkCreate_v2(0, NULL, NULL, &link));
    OK(api.cuLinkAddData_v2(link, 1, ptx, strlen(ptx) + 1, "kernels", 0, NULL, NULL));
    OK(api.cuLinkComplete(link, &image, &size));
    char *copy = memcpy(malloc(size), image, size);
    OK(api.cuLinkDestroy(link));
    OK(api.cuModuleLoadData(&module, copy));
    free(copy);
    CUdeviceptr p = allocate(4);
    OK(launch("count", 1, 1, NULL, (void *[]){&p}));
    IS(read_int(p), 7);
}

static void shaped(void)
{
    enum { W = 37, H = 11, D = 3 };
    unsigned char from[D][H][W], back[D][H][W];
    CUdeviceptr p;
    size_t pitch;

    begin();
    for (unsigned i = 0; i < sizeof(from); i++)
        (&from[0][0][0])[i] = (unsigned char)(i * 7);
    OK(api.cuMemAllocPitch_v2(&p, &pitch, W, H * D, 4));
    IS(pitch, 512);
    CUDA_MEMCPY3D up = {.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = from, .srcPitch = W, .srcHeight = H,
                        .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = p, .dstPitch = pitch, .dstHeight = H,
                        .WidthInBytes = W, .Height = H, .Depth = D};
    OK(api.cuMemcpy3D_v2(&up));
    memset(back, 0, sizeof(back));
    /* the middle of slice 1 */
    CUDA_MEMCPY2D down = {.srcXInBytes = 5, .srcY = H + 2, .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = p, .srcPitch = pitch,
                          .dstXInBytes = 5, .dstY = 2, .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = back[1], .dstPitch = W,
                          .WidthInBytes = 20, .Height = 6};
    OK(api.cuMemcpy2D_v2(&down));
    for (int y = 0; y < H; y++)
        for (int x = 0; x < W; x++)
            IS(back[1][y][x], x >= 5 && x < 25 && y >= 2 && y < 8 ? from[1][y][x] : 0);
    OK(api.cuMemsetD2D8_v2(p + pitch, pitch, 0xab, 3, 2));
    OK(api.cuMemcpy2DAsync_v2(&(CUDA_MEMCPY2D){.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = p, .srcPitch = pitch,
                                               .dstMemoryType = CU_MEMORYTYPE_HOST, .dstHost = back, .dstPitch = W, .WidthInBytes = W,
                                               .Height = 3}, NULL));
    IS(back[0][1][2], 0xab);
    IS(back[0][2][0], 0xab);
    IS(back[0][1][3], from[0][1][3]);
    IS(back[0][0][0], from[0][0][0]);
    down.WidthInBytes = pitch;
    IS(api.cuMemcpy2D_v2(&down), 1);
    up.Depth = 4000000;
    IS(api.cuMemcpy3D_v2(&up), 1);
    up.Depth = D;
    up.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    IS(api.cuMemcpy3D_v2(&up), 801);
}

static void fixed_addresses(void)
{
    const CUdeviceptr hint = 0x300000000000ull;
    CUmemAllocationProp properties = {.type = 1, .location = {1, 0}};
    CUmemAccessDesc access = {{1, 0}, 3};
    CUmemGenericAllocationHandle handle;
    size_t granularity, free_before, free_after, total;
    CUdeviceptr space, taken;
    int value = 3, n = 1;

    begin();
    OK(api.cuMemGetAllocationGranularity(&granularity, &properties, 0));
    IS(granularity, 2 << 20);
    OK(api.cuMemAddressReserve(&space, 8 << 20, 0, hint, 0));
    IS(space == hint, 1);
    OK(api.cuMemAddressReserve(&taken, 8 << 20, 0, hint, 0)); /* taken: somewhere else */
    IS(taken != hint && taken % granularity == 0, 1);
    OK(api.cuMemAddressFree(taken, 8 << 20));
    OK(api.cuMemGetInfo_v2(&free_before, &total));
    OK(api.cuMemCreate(&handle, 4 << 20, &properties, 0));
    OK(api.cuMemGetInfo_v2(&free_after, &total));
    IS(free_before - free_after, 4 << 20);
    OK(api.cuMemMap(space + (2 << 20), 4 << 20, 0, handle, 0));
    CUdeviceptr p = space + (2 << 20);
    IS(api.cuMemsetD32_v2(p, 1, 1), 1); /* no access yet */
    OK(api.cuMemSetAccess(p, 4 << 20, &access, 1));
    OK(api.cuMemRelease(handle)); /* lives on while it is mapped */
    OK(launch("set", 1, 1, NULL, (void *[]){&p, &value, &n}));
    IS(read_int(p), 3);
    IS(read_int(p + 4), 0);
    IS(api.cuMemAddressFree(space, 8 << 20), 1); /* something is mapped */
    OK(api.cuMemUnmap(p, 4 << 20));
    OK(api.cuMemGetInfo_v2(&free_after, &total));
    IS(free_before - free_after, 0);
    IS(api.cuMemcpyDtoH_v2(&value, p, 4), 1);
    OK(launch("set", 1, 1, NULL, (void *[]){&p, &value, &n}));
    IS(api.cuCtxSynchronize(), 700);
    OK(api.cuMemAddressFree(space, 8 << 20));
}

/* Asked by LeakSanitizer, where there is one: what only a thread of the parent points to is no leak of a child's. */
int __lsan_is_turned_off(void);
static int in_child;
int __lsan_is_turned_off(void)
{
    return in_child;
}

static void forked(void)
{
    int status, count;
    CUdeviceptr p;

    begin();
    p = allocate(1 << 20);
    OK(late(p, 5, LATE, NULL)); /* a stream thread at work meanwhile */
    fflush(stdout);
    pid_t child = fork();
    if (!child) {
        in_child = 1;
        IS(api.cuMemAlloc_v2(&p, 4), 3);
        IS(api.cuCtxSynchronize(), 3);
        IS(api.cuInit(0), 3);
        IS(api.cuDeviceGetCount(&count), 3);
        OK(api.cuDriverGetVersion(&count));
        exit(0);
    }
    IS(waitpid(child, &status, 0), child);
    OK(status);
    IS(read_int(p), 5);
    OK(api.cuMemFree_v2(p));
}

static void contexts(void)
{
    CUcontext a, b, current, primary, same;
    CUdevice device;
    unsigned flags;
    int active;

    OK(api.cuInit(0));
    IS(api.cuMemAlloc_v2(&(CUdeviceptr){0}, 4), 201);
    OK(api.cuCtxCreate_v2(&a, 0, 0));
    OK(api.cuCtxCreate_v2(&b, 0, 1));
    OK(api.cuCtxGetDevice(&device));
    IS(device, 1);
    OK(api.cuCtxPopCurrent_v2(&current));
    IS(current == b, 1);
    OK(api.cuCtxGetDevice(&device));
    IS(device, 0);
    OK(api.cuCtxDestroy_v2(b));
    IS(api.cuCtxDestroy_v2(b), 201);
    OK(api.cuDevicePrimaryCtxGetState(0, &flags, &active));
    IS(active, 0);
    OK(api.cuDevicePrimaryCtxRetain(&primary, 0));
    OK(api.cuDevicePrimaryCtxRetain(&same, 0));
    IS(primary == same, 1);
    OK(api.cuCtxSetCurrent(primary));
    allocate(1 << 20);
    OK(api.cuDevicePrimaryCtxRelease_v2(0));
    OK(api.cuCtxSynchronize());
    OK(api.cuDevicePrimaryCtxRelease_v2(0));
    IS(api.cuCtxSynchronize(), 709);
    IS(api.cuDevicePrimaryCtxRelease_v2(0), 201);
    OK(api.cuCtxSetCurrent(a));
    OK(api.cuCtxDestroy_v2(a));
    IS(api.cuCtxSynchronize(), 201);
}

static void names(void)
{
    int (*fresh)(void **) = name_of("cuTexObjectCreate");
    void *found, *legacy, *thread;
    int status;
    const char *text;

    IS(fresh(&found), 801);
    OK(api.cuGetProcAddress_v2("cuMemAlloc", &found, 12000, 0, &status));
    IS(found == (void *)api.cuMemAlloc_v2, 1);
    OK(api.cuGetProcAddress_v2("cuLaunchKernel", &legacy, 13000, 0, &status));
    OK(api.cuGetProcAddress_v2("cuLaunchKernel", &thread, 13000, 2, &status));
    IS(legacy == (void *)api.cuLaunchKernel, 1);
    IS(thread == name_of("cuLaunchKernel_ptsz"), 1);
    OK(api.cuGetProcAddress_v2("", &found, 0, 0, &status));
    IS(status, 1);
    IS(found == NULL, 1);
    OK(api.cuGetProcAddress_v2("cuLaunchKernelEx", &found, 9000, 0, &status));
    IS(status, 2);
    IS(api.cuGetProcAddress_v2("cuNoSuchThing", &found, 12000, 0, NULL), 500);
    OK(api.cuGetErrorName(700, &text));
    IS(strcmp(text, "CUDA_ERROR_ILLEGAL_ADDRESS"), 0);
    IS(api.cuGetErrorName(12345, &text), 1);
    IS(text == NULL, 1);
}

/* WORD: a list of "elf-name asked-name version ..." lines. Says how many were asked for and found. */
static void ask(void)
{
    char line[256], elf[128], asked[128];
    int version, count = 0;
    void *found;

    FILE *list = fopen(words[0], "r");
    while (list && fgets(line, sizeof(line), list)) {
        if (line[0] == '#' || sscanf(line, "%127s %127s %d", elf, asked, &version) != 3)
            continue;
        found = NULL;
        OK(api.cuGetProcAddress_v2(asked, &found, version, 0, NULL));
        IS(found == name_of(elf), 1);
        count++;
    }
    printf("%d\n", count);
    fclose(list);
}

static void query(void)
{
    int count, value;
    size_t bytes;
    char name[64], address[32];
    CUuuid uuid;

    OK(api.cuInit(0));
    OK(api.cuDeviceGetCount(&count));
    for (int i = 0; i < count; i++) {
        OK(api.cuDeviceGetName(name, sizeof(name), i));
        OK(api.cuDeviceGetUuid_v2(&uuid, i));
        OK(api.cuDeviceTotalMem_v2(&bytes, i));
        OK(api.cuDeviceGetPCIBusId(address, sizeof(address), i));
        OK(api.cuDeviceGetAttribute(&value, 75, i));
        printf("%d|%s|%02x%02x|%zu|%s|%d\n", i, name, uuid.bytes[0], uuid.bytes[3], bytes >> 20, address, value);
    }
}

static void init(void)
{
    printf("%d\n", api.cuInit(0));
}

/* WORDS: MiB to take. Says what the allocation answered, then waits for a line. */
static void hold(void)
{
    CUdeviceptr p;

    begin();
    printf("%d\n", api.cuMemAlloc_v2(&p, (size_t)atoi(words[0]) << 20));
    say("");
    wait_for_word();
}

/* Launch and synchronise until an error; says "running", then the error. */
static void loop(void)
{
    CUresult rc = 0;
    int value = 1, n = 1;

    begin();
    CUdeviceptr p = allocate(4);
    CUfunction set = kernel("set");
    for (long i = 0; !rc; i++) {
        rc = api.cuLaunchKernel(set, 1, 1, 1, 1, 1, 1, 0, NULL, (void *[]){&p, &value, &n}, NULL);
        if (!rc)
            rc = api.cuCtxSynchronize();
        if (i == 10)
            say("running");
    }
    printf("%d %d\n", rc, api.cuMemFree_v2(p));
    say("");
    IS(api.cuCtxDestroy_v2(context), rc);
    CUresult fresh = api.cuCtxCreate_v2(&context, 0, 0);
    printf("%d\n", fresh);
}

/* Launch one kernel that ends, when told to; says how long it took in ms. */
static void timed(void)
{
    CUevent from, to;
    float ms;

    begin();
    CUdeviceptr p = allocate(4);
    OK(late(p, 1, 1000, NULL));
    OK(api.cuCtxSynchronize());
    OK(api.cuEventCreate(&from, 0));
    OK(api.cuEventCreate(&to, 0));
    say("ready");
    wait_for_word();
    OK(api.cuEventRecord(from, NULL));
    OK(late(p, 1, LATE / 5, NULL));
    OK(api.cuEventRecord(to, NULL));
    say("launched");
    OK(api.cuEventSynchronize(to));
    OK(api.cuEventElapsedTime(&ms, from, to));
    printf("%.0f\n", ms);
    IS(read_int(p), 1);
}

/* A kernel that never ends by itself. */
static void endless(void)
{
    begin();
    CUdeviceptr p = allocate(4);
    OK(api.cuMemsetD32_v2(p, 0, 1));
    OK(launch("forever", 1, 1, NULL, (void *[]){&p}));
    say("launched");
    printf("%d\n", api.cuCtxSynchronize());
}

static void host_calls_back(void *data)
{
    ++*(int *)data;
}

static void host_functions(void)
{
    int calls = 0;
    CUstream stream;

    begin();
    CUdeviceptr p = allocate(4);
    OK(api.cuStreamCreate(&stream, 0));
    OK(late(p, 1, LATE / 4, stream));
    OK(api.cuLaunchHostFunc(stream, host_calls_back, &calls));
    IS(*(volatile int *)&calls, 0);
    OK(api.cuStreamSynchronize(stream));
    IS(*(volatile int *)&calls, 1);
}

static void occupancy(void)
{
    int blocks, grid, block;

    begin();
    OK(api.cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel("add"), 256, 0));
    IS(blocks > 0 && blocks <= 8, 1);
    OK(api.cuOccupancyMaxPotentialBlockSize(&grid, &block, kernel("add"), NULL, 0, 0));
    IS(block > 0 && block <= 1024 && grid % 132 == 0, 1);
    IS(api.cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel("add"), 0, 0), 1);
}

static void pointers(void)
{
    int type;
    CUdeviceptr base;
    size_t size;
    void *pinned;
    char plain[64];

    begin();
    CUdeviceptr p = allocate(1000);
    OK(api.cuPointerGetAttribute(&type, 2, p + 10));
    IS(type, CU_MEMORYTYPE_DEVICE);
    OK(api.cuMemGetAddressRange_v2(&base, &size, p + 10));
    IS(base == p, 1);
    OK(api.cuMemHostAlloc(&pinned, 64, 0));
    OK(api.cuPointerGetAttribute(&type, 2, (CUdeviceptr)(uintptr_t)pinned));
    IS(type, CU_MEMORYTYPE_HOST);
    IS(api.cuPointerGetAttribute(&type, 2, (CUdeviceptr)(uintptr_t)plain), 1);
    OK(api.cuMemHostRegister_v2(plain, sizeof(plain), 0));
    IS(api.cuMemHostRegister_v2(plain, sizeof(plain), 0), 712);
    OK(api.cuMemHostUnregister(plain));
    IS(api.cuMemHostUnregister(plain), 713);
    OK(api.cuMemFreeHost(pinned));
    IS(api.cuMemFreeHost(pinned), 1);
}

static const struct {
    const char *name;
    void (*run)(void);
} cases[] = {
    {"vector_add", vector_add}, {"launch_forms", launch_forms}, {"streams_and_events", streams_and_events},
    {"default_stream", default_stream}, {"pageable_copies", pageable_copies}, {"many_threads", many_threads}, {"churn", churn}, {"destroyed_at_work", destroyed_at_work},
    {"bad_pointers", bad_pointers}, {"sticky", sticky}, {"over_the_end", over_the_end}, {"variables", variables},
    {"libraries", libraries}, {"linking", linking}, {"shaped", shaped}, {"fixed_addresses", fixed_addresses}, {"forked", forked},
    {"contexts", contexts}, {"names", names}, {"ask", ask}, {"query", query}, {"init", init}, {"hold", hold}, {"loop", loop}, {"timed", timed},
    {"endless", endless}, {"host_functions", host_functions}, {"occupancy", occupancy}, {"pointers", pointers},
};

static char *read_text(const char *path)
{
    FILE *file = fopen(path, "r");
    char *text = calloc(1, 1 << 20);

    if (!file || !fread(text, 1, (1 << 20) - 1, file))
        exit(2);
    fclose(file);
    return text;
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    ptx = read_text(argv[1]);
    words = argv + 3;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    bind_api(name_of);
    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        if (strcmp(cases[i].name, argv[2]))
            continue;
        cases[i].run();
        free(ptx);
        return 0;
    }
    fprintf(stderr, "no case %s\n", argv[2]);
    return 2;
}
