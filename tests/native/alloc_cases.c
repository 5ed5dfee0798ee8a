/* Every way to have memory of a card, or of its host, until no more is given: what was granted, what the refusal says, and
 * whether all of it is there again once it was given back. See tests/dataplane/test_allocation_paths.py.
 *
 * usage: alloc_cases VARIABLES.ptx PATH | alloc_cases - neighbour
 */
#define _GNU_SOURCE
#include <stdbool.h>

#include "guest.h"

#define MOST 100000 /* of one path */

void *library;
static char *image;
static void *held[MOST];

static CUresult alloc(unsigned i)
{
    return cu(cuMemAlloc_v2, (CUdeviceptr *)&held[i], (size_t)(4 * MIB));
}

static void alloc_back(unsigned i)
{
    must(cuMemFree_v2, (CUdeviceptr)(uintptr_t)held[i]);
}

static CUresult pitch(unsigned i)
{
    size_t got;

    return cu(cuMemAllocPitch_v2, (CUdeviceptr *)&held[i], &got, (size_t)1000, (size_t)4096, 4u);
}

static CUresult alloc_async(unsigned i)
{
    return cu(cuMemAllocAsync, (CUdeviceptr *)&held[i], (size_t)(4 * MIB), NULL);
}

static CUresult from_pool(unsigned i)
{
    static CUmemoryPool pool;
    CUmemPoolProps props = {.allocType = 1, .location = {.type = 1}};

    if (pool == NULL)
        must(cuMemPoolCreate, &pool, &props);
    return cu(cuMemAllocFromPoolAsync, (CUdeviceptr *)&held[i], (size_t)(4 * MIB), pool, NULL);
}

static void async_back(unsigned i)
{
    must(cuMemFreeAsync, (CUdeviceptr)(uintptr_t)held[i], NULL);
}

/* What a pool holds unused is no reason to be refused. */
static CUresult beside_pool(unsigned i)
{
    static CUdeviceptr of_pool[8];

    for (int k = 0; i == 0 && k < 8; k++)
        must(cuMemAllocAsync, &of_pool[k], (size_t)(4 * MIB), NULL);
    for (int k = 0; i == 0 && k < 8; k++)
        must(cuMemFreeAsync, of_pool[k], NULL);
    return alloc(i);
}

static CUresult physical(unsigned i)
{
    CUmemAllocationProp prop = {.type = 1, .location = {.type = 1}};

    return cu(cuMemCreate, (CUmemGenericAllocationHandle *)&held[i], (size_t)(4 * MIB), &prop, 0ull);
}

static void physical_back(unsigned i)
{
    must(cuMemRelease, (CUmemGenericAllocationHandle)(uintptr_t)held[i]);
}

static CUresult module(unsigned i)
{
    return cu(cuModuleLoadData, (CUmodule *)&held[i], image);
}

static void module_back(unsigned i)
{
    must(cuModuleUnload, (CUmodule)held[i]);
}

/* While no context is current: its variables come to a context with the first use there. */
static void load_library(unsigned i)
{
    CUcontext context;

    must(cuCtxPopCurrent_v2, &context);
    must(cuLibraryLoadData, (CUlibrary *)&held[i], image, NULL, NULL, 0u, NULL, NULL, 0u);
    must(cuCtxPushCurrent_v2, context);
}

static CUresult library_now(unsigned i)
{
    return cu(cuLibraryLoadData, (CUlibrary *)&held[i], image, NULL, NULL, 0u, NULL, NULL, 0u);
}

static CUresult library_global(unsigned i)
{
    CUdeviceptr at;
    size_t bytes;

    load_library(i);
    return cu(cuLibraryGetGlobal, &at, &bytes, (CUlibrary)held[i], "big");
}

static CUresult library_module(unsigned i)
{
    CUmodule of;

    load_library(i);
    return cu(cuLibraryGetModule, &of, (CUlibrary)held[i]);
}

static CUresult library_function(unsigned i)
{
    CUkernel each;
    CUfunction f;

    load_library(i);
    must(cuLibraryGetKernel, &each, (CUlibrary)held[i], "touch");
    return cu(cuKernelGetFunction, &f, each);
}

static CUresult library_launch(unsigned i)
{
    CUkernel each;

    load_library(i);
    must(cuLibraryGetKernel, &each, (CUlibrary)held[i], "touch");
    must(cuLaunchKernel, (CUfunction)each, 1u, 1u, 1u, 1u, 1u, 1u, 0u, NULL, NULL, NULL);
    return cu(cuCtxSynchronize);
}

static void library_back(unsigned i)
{
    must(cuLibraryUnload, (CUlibrary)held[i]);
}

static CUresult stack_limit(unsigned i)
{
    return cu(cuCtxSetLimit, 0, (size_t)(1024 + 64 * (i + 1)));
}

static CUresult printf_limit(unsigned i)
{
    return cu(cuCtxSetLimit, 1, (size_t)(4 * MIB * (i + 1)));
}

static CUresult heap_limit(unsigned i)
{
    return cu(cuCtxSetLimit, 2, (size_t)(8 + 4 * (i + 1)) * MIB);
}

static void limits_back(unsigned i)
{
    if (i != 0)
        return;
    must(cuCtxSetLimit, 0, (size_t)1024);
    must(cuCtxSetLimit, 1, (size_t)MIB);
    must(cuCtxSetLimit, 2, (size_t)(8 * MIB));
}

static CUresult context(unsigned i)
{
    CUcontext first, same;
    CUresult rc;

    must(cuCtxGetCurrent, &first);
    if ((rc = cu(cuCtxCreate_v2, (CUcontext *)&held[i], 0u, 0)) == 0)
        must(cuCtxPopCurrent_v2, &same);
    return rc;
}

static void context_back(unsigned i)
{
    must(cuCtxDestroy_v2, (CUcontext)held[i]);
}

static CUresult host_alloc(unsigned i)
{
    return cu(cuMemHostAlloc, &held[i], (size_t)(4 * MIB), 0u);
}

static CUresult alloc_host(unsigned i)
{
    return cu(cuMemAllocHost_v2, &held[i], (size_t)(4 * MIB));
}

static void host_back(unsigned i)
{
    must(cuMemFreeHost, held[i]);
}

static CUresult host_register(unsigned i)
{
    CUresult rc;

    if (posix_memalign(&held[i], 4096, 4 * MIB) != 0)
        exit(7);
    if ((rc = cu(cuMemHostRegister_v2, held[i], (size_t)(4 * MIB), 0u)) != 0)
        free(held[i]);
    return rc;
}

static void unregister(unsigned i)
{
    must(cuMemHostUnregister, held[i]);
    free(held[i]);
}

static CUresult stream(unsigned i)
{
    return cu(cuStreamCreate, (CUstream *)&held[i], 1u);
}

static void stream_back(unsigned i)
{
    must(cuStreamDestroy_v2, (CUstream)held[i]);
}

static CUresult event(unsigned i)
{
    return cu(cuEventCreate, (CUevent *)&held[i], 2u);
}

static void event_back(unsigned i)
{
    must(cuEventDestroy_v2, (CUevent)held[i]);
}

static const struct path {
    const char *name;
    CUresult (*take)(unsigned i);
    void (*give)(unsigned i);
    bool refused_too; /* the one that was refused has something to give back */
} paths[] = {
    {"alloc", alloc, alloc_back, false},
    {"pitch", pitch, alloc_back, false},
    {"alloc_async", alloc_async, async_back, false},
    {"from_pool", from_pool, async_back, false},
    {"beside_pool", beside_pool, alloc_back, false},
    {"physical", physical, physical_back, false},
    {"module", module, module_back, false},
    {"library", library_now, library_back, false},
    {"library_global", library_global, library_back, true},
    {"library_module", library_module, library_back, true},
    {"library_function", library_function, library_back, true},
    {"library_launch", library_launch, library_back, true},
    {"stack_limit", stack_limit, limits_back, false},
    {"printf_limit", printf_limit, limits_back, false},
    {"heap_limit", heap_limit, limits_back, false},
    {"context", context, context_back, false},
    {"host_alloc", host_alloc, host_back, false},
    {"alloc_host", alloc_host, host_back, false},
    {"host_register", host_register, unregister, false},
    {"stream", stream, stream_back, false},
    {"event", event, event_back, false},
};

/* Takes until it is refused, waits for a word where the test has one to say, gives all back, and once more. */
static void exhaust(const struct path *path)
{
    for (int turn = 0; turn < 2; turn++) {
        unsigned granted = 0;
        CUresult refused = 0;
        while (granted < MOST && (refused = path->take(granted)) == 0)
            granted++;
        say("refused", refused);
        say("granted", granted);
        fflush(stdout);
        if (turn == 0)
            getchar();
        for (unsigned i = granted + path->refused_too; i-- > 0;)
            path->give(i);
    }
    say("synchronise", cu(cuCtxSynchronize));
}

/* Has half its claim while another session has all of its own and wants more; then takes the rest. */
static void neighbour(void)
{
    enum { HALF = 24 << 20 };
    unsigned char *bytes = malloc(HALF), *back = malloc(HALF);
    CUdeviceptr at, more;
    void *pinned;

    for (unsigned i = 0; i < HALF; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 24);
    must(cuMemAlloc_v2, &at, (size_t)HALF);
    must(cuMemcpyHtoD_v2, at, bytes, (size_t)HALF);
    say("ready", 1);
    fflush(stdout);
    getchar();
    say("more", cu(cuMemAlloc_v2, &more, (size_t)HALF));
    say("pinned", cu(cuMemAllocHost_v2, &pinned, (size_t)(8 * MIB)));
    must(cuMemcpyDtoD_v2, more, at, (size_t)HALF);
    must(cuMemcpyDtoH_v2, back, more, (size_t)HALF);
    say("same", memcmp(bytes, back, HALF) == 0);
}

static void read_image(const char *name)
{
    FILE *file = fopen(name, "rb");

    image = calloc(1, 1 << 20);
    if (file == NULL || image == NULL || fread(image, 1, (1 << 20) - 1, file) == 0)
        exit(9);
    fclose(file);
}

int main(int argc, char **argv)
{
    if (argc < 3 || (library = dlopen("libcuda.so.1", RTLD_NOW)) == NULL)
        return 2;
    start();
    if (strcmp(argv[2], "neighbour") == 0) {
        neighbour();
        return 0;
    }
    read_image(argv[1]);
    for (unsigned i = 0; i < sizeof paths / sizeof paths[0]; i++)
        if (strcmp(paths[i].name, argv[2]) == 0) {
            exhaust(&paths[i]);
            return 0;
        }
    return 2;
}
