/* A libcuda.so.1 for tests of shim and session alone: device memory is host memory at the address that was asked for,
 * kernels are C functions found by name, and a kernel named "block" runs until the file STUB_GATE exists.
 *
 * It executes no PTX; whatever needs that is tested over softgpu.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cuda_abi.h"

#define API __attribute__((visibility("default")))
#define PAGE (2ull << 20)

struct CUctx_st {
    int broken;
};
struct CUmod_st {
    unsigned global;
};
struct CUfunc_st {
    char name[32];
};
struct CUlib_st {
    struct CUfunc_st function;
};
struct CUstream_st {
    int unused;
};
struct CUevent_st {
    int unused;
};

static struct CUctx_st *all_broken; /* the context whose last kernel failed */
static __thread struct CUctx_st *current;
static char card_name[] = "stub";
static int blocked; /* a kernel named block is running */

static void count(const char *what)
{
    const char *path = getenv("STUB_COUNT");
    FILE *file = path != NULL ? fopen(path, "a") : NULL;

    if (file != NULL) {
        fprintf(file, "%s\n", what);
        fclose(file);
    }
}

static int gate_open(void)
{
    const char *gate = getenv("STUB_GATE");

    return gate == NULL || access(gate, F_OK) == 0;
}

static CUresult wait_idle(void)
{
    while (blocked && !gate_open())
        usleep(1000);
    blocked = 0;
    return current != NULL && current->broken ? current->broken : 0;
}

/* Every function: exported, with its prototype, so that a wrong one is found at compile time. */
#define DEFINE(name, ...) API CUresult name(__VA_ARGS__); CUresult name(__VA_ARGS__)

DEFINE(cuInit, unsigned flags)
{
    (void)flags;
    return getenv("STUB_INIT_FAILS") != NULL ? 999 : 0;
}

DEFINE(cuDriverGetVersion, int *version)
{
    *version = 12080;
    return 0;
}

DEFINE(cuDeviceGet, CUdevice *device, int ordinal)
{
    *device = ordinal;
    return ordinal == 0 ? 0 : 101;
}

DEFINE(cuDeviceGetName, char *name, int room, CUdevice device)
{
    (void)device;
    snprintf(name, (size_t)room, "%s", card_name);
    return 0;
}

DEFINE(cuDeviceGetAttribute, int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)device;
    *value = attribute == 1 ? 1024 : attribute >= 2 && attribute <= 4 ? 1024 : attribute >= 5 && attribute <= 7 ? 65535
           : attribute == 8 ? 49152 : 1000 + attribute;
    return attribute < 140 ? 0 : 1;
}

DEFINE(cuCtxCreate_v2, CUcontext *context, unsigned flags, CUdevice device)
{
    (void)flags;
    (void)device;
    current = *context = calloc(1, sizeof **context);
    return 0;
}

DEFINE(cuCtxDestroy_v2, CUcontext context)
{
    if (current == context)
        current = NULL;
    if (all_broken == context)
        all_broken = NULL;
    free(context);
    return 0;
}

DEFINE(cuCtxSetCurrent, CUcontext context)
{
    current = context;
    return 0;
}

DEFINE(cuCtxSynchronize, void)
{
    return wait_idle();
}

DEFINE(cuStreamCreate, CUstream *stream, unsigned flags)
{
    if (flags > 1)
        return 1;
    count("cuStreamCreate");
    *stream = calloc(1, sizeof **stream);
    return 0;
}

DEFINE(cuStreamDestroy_v2, CUstream stream)
{
    count("cuStreamDestroy");
    free(stream);
    return 0;
}

DEFINE(cuStreamQuery, CUstream stream)
{
    (void)stream;
    if (blocked && !gate_open())
        return 600;
    return wait_idle();
}

DEFINE(cuStreamSynchronize, CUstream stream)
{
    (void)stream;
    return wait_idle();
}

DEFINE(cuStreamWaitEvent, CUstream stream, CUevent event, unsigned flags)
{
    (void)stream;
    (void)event;
    return flags > 1;
}

DEFINE(cuEventCreate, CUevent *event, unsigned flags)
{
    if (flags > 7)
        return 1;
    *event = calloc(1, sizeof **event);
    return 0;
}

DEFINE(cuEventDestroy_v2, CUevent event)
{
    free(event);
    return 0;
}

DEFINE(cuEventRecord, CUevent event, CUstream stream)
{
    (void)event;
    (void)stream;
    return 0;
}

DEFINE(cuEventQuery, CUevent event)
{
    (void)event;
    return 0;
}

DEFINE(cuEventSynchronize, CUevent event)
{
    (void)event;
    return 0;
}

DEFINE(cuEventElapsedTime_v2, float *milliseconds, CUevent start, CUevent end)
{
    (void)start;
    (void)end;
    *milliseconds = 1.5f;
    return 0;
}

DEFINE(cuMemAllocHost_v2, void **memory, size_t bytes)
{
    *memory = malloc(bytes);
    return 0;
}

DEFINE(cuMemHostRegister_v2, void *memory, size_t bytes, unsigned flags)
{
    count("cuMemHostRegister");
    return memory != NULL && bytes % 4096 == 0 && flags == 1 ? 0 : 1;
}

DEFINE(cuMemHostUnregister, void *memory)
{
    count("cuMemHostUnregister");
    return memory != NULL ? 0 : 1;
}

/* With STUB_COPIES=count the bytes stay where they are: what is measured then is the way to the driver. */
static int moves(void)
{
    static int known; /* 1: they move, 2: they do not */
    const char *wish = known == 0 ? getenv("STUB_COPIES") : NULL;

    if (known == 0)
        known = wish != NULL && strcmp(wish, "count") == 0 ? 2 : 1;
    return known == 1;
}

DEFINE(cuMemcpyHtoDAsync_v2, CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
    (void)stream;
    if (moves())
        memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}

DEFINE(cuMemcpyDtoHAsync_v2, void *to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    (void)stream;
    CUresult rc = wait_idle();
    if (rc == 0 && moves())
        memcpy(to, (void *)(uintptr_t)from, bytes);
    return rc;
}

DEFINE(cuMemcpyDtoDAsync_v2, CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream)
{
    (void)stream;
    memmove((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return 0;
}

DEFINE(cuMemcpy2DAsync_v2, const CUDA_MEMCPY2D *copy, CUstream stream)
{
    char *to = copy->dstMemoryType == 1 ? copy->dstHost : (char *)(uintptr_t)copy->dstDevice;
    const char *from = copy->srcMemoryType == 1 ? copy->srcHost : (const char *)(uintptr_t)copy->srcDevice;
    CUresult rc = copy->dstMemoryType == 1 ? wait_idle() : 0;

    (void)stream;
    for (size_t y = 0; rc == 0 && y < copy->Height; y++)
        memcpy(to + y * copy->dstPitch, from + y * copy->srcPitch, copy->WidthInBytes);
    return rc;
}

DEFINE(cuMemsetD8Async, CUdeviceptr to, unsigned char value, size_t n, CUstream stream)
{
    (void)stream;
    memset((void *)(uintptr_t)to, value, n);
    return 0;
}

DEFINE(cuMemsetD32Async, CUdeviceptr to, unsigned value, size_t n, CUstream stream)
{
    (void)stream;
    for (size_t i = 0; i < n; i++)
        ((unsigned *)(uintptr_t)to)[i] = value;
    return 0;
}

DEFINE(cuMemAddressReserve, CUdeviceptr *at, size_t bytes, size_t align, CUdeviceptr wanted, unsigned long long flags)
{
    (void)flags;
    if (bytes % PAGE != 0 || align > PAGE)
        return 1;
    void *got = mmap((void *)(uintptr_t)wanted, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
    *at = (CUdeviceptr)(uintptr_t)got;
    return got == MAP_FAILED ? 2 : 0;
}

DEFINE(cuMemAddressFree, CUdeviceptr at, size_t bytes)
{
    return munmap((void *)(uintptr_t)at, bytes) == 0 ? 0 : 1;
}

DEFINE(cuMemCreate, CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *property, unsigned long long flags)
{
    (void)flags;
    count("cuMemCreate");
    *handle = bytes;
    return property->type == 1 && property->location.type == 1 ? 0 : 1;
}

DEFINE(cuMemRelease, CUmemGenericAllocationHandle handle)
{
    (void)handle;
    count("cuMemRelease");
    return 0;
}

DEFINE(cuMemMap, CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)at;
    (void)flags;
    return offset == 0 && handle == bytes ? 0 : 1;
}

DEFINE(cuMemSetAccess, CUdeviceptr at, size_t bytes, const CUmemAccessDesc *access, size_t n)
{
    if (n != 1 || access->flags != 3)
        return 1;
    return mprotect((void *)(uintptr_t)at, bytes, PROT_READ | PROT_WRITE) == 0 ? 0 : 2;
}

DEFINE(cuMemUnmap, CUdeviceptr at, size_t bytes)
{
    return mprotect((void *)(uintptr_t)at, bytes, PROT_NONE) == 0 ? 0 : 1;
}

/* There is one graph, and of what it holds only the number. */
static char a_graph, a_node, an_exec;
static size_t nodes_held;

DEFINE(cuGraphCreate, CUgraph *graph, unsigned flags)
{
    (void)flags;
    nodes_held = 0;
    *graph = (CUgraph)(void *)&a_graph;
    return 0;
}

DEFINE(cuGraphAddKernelNode_v2, CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t n, const CUDA_KERNEL_NODE_PARAMS *params)
{
    (void)graph, (void)needs, (void)n, (void)params;
    *node = (CUgraphNode)(void *)&a_node;
    nodes_held++;
    return 0;
}

DEFINE(cuGraphGetNodes, CUgraph graph, CUgraphNode *nodes, size_t *n)
{
    (void)graph, (void)nodes;
    *n = nodes_held;
    return 0;
}

DEFINE(cuGraphInstantiateWithFlags, CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    (void)graph, (void)flags;
    *exec = (CUgraphExec)(void *)&an_exec;
    return 0;
}

DEFINE(cuModuleLoadDataEx, CUmodule *module, const void *image, unsigned n, CUjit_option *options, void **values)
{
    for (unsigned i = 0; i < n; i++)
        if (options[i] == CU_JIT_ERROR_LOG_BUFFER && strncmp(image, "bad", 3) == 0)
            strcpy(values[i], "line 1: bad");
    *module = calloc(1, sizeof **module);
    return strncmp(image, "bad", 3) == 0 ? 218 : 0;
}

DEFINE(cuModuleUnload, CUmodule module)
{
    free(module);
    return 0;
}

DEFINE(cuModuleGetGlobal_v2, CUdeviceptr *at, size_t *bytes, CUmodule module, const char *name)
{
    *at = (CUdeviceptr)(uintptr_t)&module->global;
    *bytes = sizeof module->global;
    return strcmp(name, "counter") == 0 ? 0 : 500;
}

DEFINE(cuModuleGetFunction, CUfunction *function, CUmodule module, const char *name)
{
    static const char *const known[] = {"fill", "fault", "block", "none"};

    (void)module;
    for (unsigned i = 0; i < 4; i++) {
        if (strcmp(name, known[i]) != 0)
            continue;
        *function = calloc(1, sizeof **function);
        strcpy((*function)->name, name);
        return 0;
    }
    return 500;
}

DEFINE(cuLibraryLoadData, CUlibrary *library, const void *code, CUjit_option *o, void **v, unsigned n, void *p, void **q, unsigned m)
{
    (void)code, (void)o, (void)v, (void)n, (void)p, (void)q, (void)m;
    *library = calloc(1, sizeof **library);
    strcpy((*library)->function.name, "none");
    return 0;
}

/* A kernel is its library. */
DEFINE(cuLibraryGetKernel, CUkernel *kernel, CUlibrary library, const char *name)
{
    (void)name;
    *kernel = (CUkernel)(void *)library;
    return 0;
}

DEFINE(cuKernelGetFunction, CUfunction *function, CUkernel kernel)
{
    *function = &((CUlibrary)(void *)kernel)->function;
    return 0;
}

DEFINE(cuLibraryUnload, CUlibrary library)
{
    free(library);
    return 0;
}

DEFINE(cuFuncGetAttribute, int *value, CUfunction_attribute attribute, CUfunction function)
{
    (void)function;
    *value = attribute == 0 ? 512 : attribute == 8 ? 49152 : attribute;
    return attribute < 10 ? 0 : 1;
}

DEFINE(cuFuncGetParamInfo, CUfunction function, size_t index, size_t *offset, size_t *size)
{
    static const size_t offsets[] = {0, 8, 12}, sizes[] = {8, 4, 4};

    if (index >= (strcmp(function->name, "fill") == 0 ? 3u : 0u))
        return 1;
    *offset = offsets[index];
    *size = sizes[index];
    return 0;
}

/* fill(u64 at, u32 n, u32 value) */
DEFINE(cuLaunchKernel, CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
       unsigned shared, CUstream stream, void **params, void **extra)
{
    struct {
        uint64_t at;
        uint32_t n, value;
    } fill;

    (void)shared;
    (void)stream;
    (void)params;
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz;
    if (current == NULL || current->broken)
        return current == NULL ? 201 : current->broken;
    if (strcmp(f->name, "fault") == 0)
        current->broken = CUDA_ERROR_ILLEGAL_ADDRESS;
    if (strcmp(f->name, "block") == 0)
        blocked = 1;
    if (strcmp(f->name, "fill") == 0) {
        if (extra == NULL || *(size_t *)extra[3] != sizeof fill)
            return 1;
        memcpy(&fill, extra[1], sizeof fill);
        for (uint32_t i = 0; i < fill.n; i++)
            ((uint32_t *)(uintptr_t)fill.at)[i] = fill.value + i;
    }
    return 0;
}
