/* Cases of tests/dataplane/test_same_results.py: each says what it computed, so that a run on the card's own driver and
 * a run through shim, relay and session can be compared line by line. Nothing here depends on time or addresses.
 *
 * usage: api_cases KERNELS.ptx CALLEE.ptx CALLER.ptx CASE
 */
#define _GNU_SOURCE
#include "guest.h"

void *library;
static char *kernels, *device_code, *caller_path;

static char *read_text(const char *path)
{
    FILE *file = fopen(path, "rb");
    char *text = calloc(1, 1 << 20);

    if (file == NULL || text == NULL || fread(text, 1, (1 << 20) - 1, file) == 0) {
        printf("unreadable=%s\n", path);
        exit(9);
    }
    fclose(file);
    return text;
}

/* FNV-1a of what came back, as one line. */
static void say_bytes(const char *name, const void *bytes, size_t count)
{
    uint64_t hash = 14695981039346656037ull;

    for (size_t i = 0; i < count; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211ull;
    printf("%s=%016llx of %zu\n", name, (unsigned long long)hash, count);
}

static unsigned char *pattern(size_t bytes, unsigned seed)
{
    unsigned char *memory = malloc(bytes);

    for (size_t i = 0; i < bytes; i++) {
        seed = seed * 1664525u + 1013904223u;
        memory[i] = (unsigned char)(seed >> 24);
    }
    return memory;
}

static CUdeviceptr on_card(const void *bytes, size_t count)
{
    CUdeviceptr at;

    must(cuMemAlloc_v2, &at, count);
    must(cuMemcpyHtoD_v2, at, bytes, count);
    return at;
}

static void say_card(const char *name, CUdeviceptr at, size_t count)
{
    void *back = malloc(count);

    must(cuMemcpyDtoH_v2, back, at, count);
    say_bytes(name, back, count);
    free(back);
}

/* Rectangles: every pair of ends, odd offsets, pitches given and not, more than one frame of bulk. */
static void case_boxes2d(void)
{
    enum { PITCH = 3000, ROWS = 700, BYTES = PITCH * ROWS };
    unsigned char *host = pattern(BYTES, 1), *back = pattern(BYTES, 2);
    CUdeviceptr a = on_card(host, BYTES), b = on_card(back, BYTES);
    CUstream stream;

    must(cuStreamCreate, &stream, 1u);
    CUDA_MEMCPY2D in = {.srcMemoryType = 1, .srcHost = host, .srcPitch = PITCH, .srcXInBytes = 7, .srcY = 3,
                        .dstMemoryType = 2, .dstDevice = b, .dstPitch = PITCH, .dstXInBytes = 11, .dstY = 5,
                        .WidthInBytes = 2500, .Height = 690};
    must(cuMemcpy2D_v2, &in);
    say_card("in", b, BYTES);
    CUDA_MEMCPY2D between = {.srcMemoryType = 2, .srcDevice = b, .srcPitch = PITCH, .srcXInBytes = 1, .dstMemoryType = 2,
                             .dstDevice = a, .dstPitch = 2990, .dstY = 1, .WidthInBytes = 2900, .Height = 500};
    must(cuMemcpy2DAsync_v2, &between, stream);
    must(cuStreamSynchronize, stream);
    say_card("between", a, BYTES);
    CUDA_MEMCPY2D out = {.srcMemoryType = 2, .srcDevice = a, .srcPitch = PITCH, .srcXInBytes = 13, .dstMemoryType = 1,
                         .dstHost = back, .dstPitch = 2000, .dstXInBytes = 3, .dstY = 2, .WidthInBytes = 1990, .Height = 600};
    must(cuMemcpy2DUnaligned_v2, &out);
    say_bytes("out", back, BYTES);
    CUDA_MEMCPY2D packed = {.srcMemoryType = 4, .srcDevice = a, .srcPitch = PITCH, .dstMemoryType = 1, .dstHost = back,
                            .WidthInBytes = 1999, .Height = 699};
    must(cuMemcpy2DAsync_v2, &packed, stream);
    must(cuStreamSynchronize, stream);
    say_bytes("packed", back, BYTES);
    CUDA_MEMCPY2D here = {.srcMemoryType = 1, .srcHost = host, .srcPitch = 100, .dstMemoryType = 1, .dstHost = back,
                          .dstPitch = 150, .WidthInBytes = 90, .Height = 50};
    must(cuMemcpy2D_v2, &here);
    say_bytes("here", back, BYTES);
    in.WidthInBytes = PITCH;
    say("too_wide", cu(cuMemcpy2D_v2, &in));
    in.WidthInBytes = 0;
    say("nothing", cu(cuMemcpy2D_v2, &in));
    between.Height = 800;
    say("beyond_end", cu(cuMemcpy2DAsync_v2, &between, stream));
    between.srcMemoryType = 9;
    say("no_memory_type", cu(cuMemcpy2DAsync_v2, &between, stream));
    say("null", cu(cuMemcpy2D_v2, NULL));
}

static void case_boxes3d(void)
{
    enum { PITCH = 256, ROWS = 100, DEPTH = 60, BYTES = PITCH * ROWS * DEPTH };
    unsigned char *host = pattern(BYTES, 3), *back = pattern(BYTES, 4);
    CUdeviceptr a = on_card(host, BYTES), b = on_card(back, BYTES);

    CUDA_MEMCPY3D in = {.srcMemoryType = 1, .srcHost = host, .srcPitch = PITCH, .srcHeight = ROWS, .srcXInBytes = 9, .srcY = 2,
                        .srcZ = 1, .dstMemoryType = 2, .dstDevice = b, .dstPitch = PITCH, .dstHeight = ROWS, .dstXInBytes = 4,
                        .dstY = 7, .dstZ = 3, .WidthInBytes = 201, .Height = 88, .Depth = 55};
    must(cuMemcpy3D_v2, &in);
    say_card("in", b, BYTES);
    CUDA_MEMCPY3D between = {.srcMemoryType = 2, .srcDevice = b, .srcPitch = PITCH, .srcHeight = 90, .dstMemoryType = 2,
                             .dstDevice = a, .dstPitch = 250, .dstHeight = 95, .dstZ = 2, .WidthInBytes = 249, .Height = 81, .Depth = 57};
    must(cuMemcpy3DAsync_v2, &between, NULL);
    say_card("between", a, BYTES);
    CUDA_MEMCPY3D out = {.srcMemoryType = 2, .srcDevice = a, .srcPitch = PITCH, .srcHeight = ROWS, .srcZ = 5, .srcY = 1,
                         .dstMemoryType = 1, .dstHost = back, .dstPitch = 130, .dstHeight = 70, .WidthInBytes = 129,
                         .Height = 70, .Depth = 50};
    must(cuMemcpy3D_v2, &out);
    say_bytes("out", back, BYTES);
    out.Height = 71;
    say("higher_than_layer", cu(cuMemcpy3D_v2, &out));
    out.srcLOD = 1;
    say("level", cu(cuMemcpy3D_v2, &out));
}

static void case_memsets(void)
{
    enum { PITCH = 512, ROWS = 40, BYTES = PITCH * ROWS };
    unsigned char *host = pattern(BYTES, 5);
    CUdeviceptr at = on_card(host, BYTES);
    CUstream stream;

    must(cuStreamCreate, &stream, 0u);
    must(cuMemsetD8_v2, at + 3, (unsigned char)0x5a, (size_t)101);
    must(cuMemsetD16_v2, at + 200, (unsigned short)0xbeef, (size_t)33);
    must(cuMemsetD32_v2, at + 400, 0xdeadbeefu, (size_t)17);
    must(cuMemsetD2D8_v2, at + PITCH, (size_t)PITCH, (unsigned char)1, (size_t)9, (size_t)5);
    must(cuMemsetD2D16_v2, at + 8 * PITCH, (size_t)PITCH, (unsigned short)0x1234, (size_t)11, (size_t)6);
    must(cuMemsetD2D32_v2, at + 16 * PITCH, (size_t)PITCH, 0x01020304u, (size_t)13, (size_t)7);
    must(cuMemsetD8Async, at + 25 * PITCH, (unsigned char)7, (size_t)90, stream);
    must(cuMemsetD16Async, at + 26 * PITCH, (unsigned short)0x0708, (size_t)90, stream);
    must(cuMemsetD32Async, at + 28 * PITCH, 0x090a0b0cu, (size_t)90, stream);
    must(cuMemsetD2D8Async, at + 30 * PITCH, (size_t)PITCH, (unsigned char)2, (size_t)300, (size_t)3, stream);
    must(cuMemsetD2D16Async, at + 33 * PITCH, (size_t)PITCH, (unsigned short)3, (size_t)200, (size_t)3, stream);
    must(cuMemsetD2D32Async, at + 36 * PITCH, (size_t)PITCH, 4u, (size_t)100, (size_t)4, stream);
    must(cuStreamSynchronize, stream);
    say_card("all", at, BYTES);
    say("unaligned", cu(cuMemsetD32_v2, at + 2, 1u, (size_t)1));
    say("unaligned_16", cu(cuMemsetD16_v2, at + 1, (unsigned short)1, (size_t)1));
    say("beyond_end", cu(cuMemsetD8_v2, at + BYTES - 1, (unsigned char)1, (size_t)2));
    say("beyond_last_row", cu(cuMemsetD2D32_v2, at + PITCH, (size_t)PITCH, 1u, (size_t)1, (size_t)(ROWS)));
    say("narrow_pitch", cu(cuMemsetD2D8_v2, at, (size_t)8, (unsigned char)1, (size_t)9, (size_t)2));
    say("none", cu(cuMemsetD8_v2, at, (unsigned char)1, (size_t)0));
    say("copy_beyond_end", cu(cuMemcpyDtoD_v2, at, at + BYTES - 100, (size_t)101));
    say_card("still", at, BYTES);
}

static CUresult run(CUfunction f, unsigned blocks, CUstream stream, void **params)
{
    return cu(cuLaunchKernel, f, blocks, 1u, 1u, 64u, 1u, 1u, 0u, stream, params, NULL);
}

static CUfunction named(CUmodule module, const char *name)
{
    CUfunction f;

    must(cuModuleGetFunction, &f, module, name);
    return f;
}

/* Two streams that wait for each other through events, copies in both, and the per-thread stream. */
static void case_streams(void)
{
    enum { N = 50000 };
    int *host = (int *)pattern(N * sizeof(int), 6), n = N, rounds = 40;
    CUstream a, b, prior;
    CUevent made, done, copied;
    CUmodule module;
    CUdeviceptr at, twin;
    int least, greatest, priority;
    unsigned flags;
    float ms = -1;

    must(cuModuleLoadData, &module, kernels);
    CUfunction mix = named(module, "mix");
    must(cuStreamCreate, &a, 1u);
    must(cuStreamCreate, &b, 0u);
    must(cuCtxGetStreamPriorityRange, &least, &greatest);
    say("least", least);
    say("greatest", greatest);
    must(cuStreamCreateWithPriority, &prior, 1u, greatest - 3);
    must(cuStreamGetPriority, prior, &priority);
    say("priority", priority);
    must(cuStreamGetFlags, prior, &flags);
    say("flags", flags);
    must(cuStreamGetFlags, b, &flags);
    say("flags_of_other", flags);
    must(cuEventCreate, &made, 0u);
    must(cuEventCreate, &done, 0u);
    must(cuEventCreate, &copied, 2u);
    must(cuMemAlloc_v2, &at, sizeof(int) * N);
    must(cuMemAlloc_v2, &twin, sizeof(int) * N);
    void *params[] = {&at, &n, &rounds};
    void *twin_params[] = {&twin, &n, &rounds};
    must(cuMemcpyHtoDAsync_v2, at, host, sizeof(int) * N, a);
    must(cuEventRecord, made, a);
    say("first", run(mix, (N + 63) / 64, a, params));
    must(cuEventRecord, done, a);
    must(cuStreamWaitEvent, b, done, 0u);
    must(cuMemcpyDtoDAsync_v2, twin, at, sizeof(int) * N, b);
    must(cuEventRecord, copied, b);
    say("second", run(mix, (N + 63) / 64, b, twin_params));
    must(cuStreamWaitEvent, prior, copied, 0u);
    say("third", run(mix, (N + 63) / 64, prior, params));
    must(cuEventSynchronize, done);
    must(cuEventElapsedTime, &ms, made, done);
    say("took_time", ms >= 0);
    must(cuStreamSynchronize, b);
    must(cuStreamSynchronize, prior);
    say("query", cu(cuStreamQuery, b));
    say_card("at", at, sizeof(int) * N);
    say_card("twin", twin, sizeof(int) * N);
    must(cuLaunchKernel_ptsz, mix, 8u, 1u, 1u, 64u, 1u, 1u, 0u, NULL, params, NULL);
    must(cuMemcpyDtoH_v2_ptds, host, at, sizeof(int) * N);
    say_bytes("per_thread", host, sizeof(int) * N);
    must(cuEventDestroy_v2, done);
    say("destroyed_event", cu(cuEventQuery, done));
    must(cuStreamDestroy_v2, a);
    say("destroyed_stream", cu(cuStreamQuery, a));
}

static size_t no_shared(int block)
{
    return (size_t)block * 8;
}

static void case_occupancy(void)
{
    CUmodule module;
    int blocks, grid, block;
    size_t room;

    must(cuModuleLoadData, &module, kernels);
    CUfunction mix = named(module, "mix"), shared = named(module, "shared_sum");
    for (int size = 32; size <= 1024; size *= 2) {
        must(cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, mix, size, (size_t)0);
        say("mix", blocks);
        must(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, &blocks, shared, size, (size_t)8192, 0u);
        say("shared", blocks);
    }
    say("no_block", cu(cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, mix, 0, (size_t)0));
    must(cuOccupancyMaxPotentialBlockSize, &grid, &block, mix, NULL, (size_t)0, 0);
    say("grid", grid);
    say("block", block);
    must(cuOccupancyMaxPotentialBlockSizeWithFlags, &grid, &block, shared, no_shared, (size_t)0, 200, 0u);
    say("grid_shared", grid);
    say("block_shared", block);
    must(cuOccupancyAvailableDynamicSMemPerBlock, &room, mix, 2, 256);
    say("room", room);
}

struct fat {
    char *bytes;
    size_t count;
};

/* One more entry, as fatbinary writes them: kind 1 is PTX, 2 machine code. */
static void add_entry(struct fat *fat, unsigned short kind, unsigned target, const void *payload, size_t bytes)
{
    struct {
        unsigned short kind, version;
        unsigned header_bytes;
        unsigned long long bytes;
        unsigned compressed, options;
        unsigned short minor, major;
        unsigned target, name_offset, name_bytes;
        unsigned long long flags, reserved, plain_bytes;
    } entry = {kind, 0x101, 64, (bytes + 7) & ~7ull, 0, 0, 0, 8, target, 0, 0, 0x11, 0, 0};

    _Static_assert(sizeof entry == 64, "entry");
    memcpy(fat->bytes + fat->count, &entry, sizeof entry);
    memcpy(fat->bytes + fat->count + sizeof entry, payload, bytes);
    fat->count += sizeof entry + entry.bytes;
}

/* A container for eight kinds of card; FAT_WHOLE_BYTES is said so that the test can see how much was sent. */
static void case_fatbin(void)
{
    enum { JUNK = 300000, N = 512 };
    unsigned char *junk = pattern(JUNK, 9);
    struct fat fat = {.bytes = calloc(1, 4 << 20), .count = 16};
    struct {
        unsigned magic, version;
        const void *data;
        void *unused;
    } wrapper = {0x466243b1u, 1, fat.bytes, NULL};
    CUmodule module;
    CUlibrary lib;
    CUkernel kernel;
    CUdeviceptr at;
    int n = N, rounds = 2;
    void *params[] = {&at, &n, &rounds};
    static const unsigned elf[] = {70, 75, 80, 86, 89, 100};

    for (unsigned i = 0; i < sizeof elf / sizeof *elf; i++)
        add_entry(&fat, 2, elf[i], junk, JUNK);
    add_entry(&fat, 2, 90, junk, 1000);
    add_entry(&fat, 1, 52, junk, JUNK);
    add_entry(&fat, 1, 75, kernels, strlen(kernels) + 1);
    add_entry(&fat, 1, 100, junk, JUNK);
    unsigned long long inside = fat.count - 16;
    memcpy(fat.bytes, &(unsigned[]){0xba55ed50u, 0x00100001u}, 8);
    memcpy(fat.bytes + 8, &inside, 8);
    say("whole", fat.count);
    must(cuModuleLoadFatBinary, &module, &wrapper);
    must(cuMemAlloc_v2, &at, sizeof(int) * N);
    must(cuMemsetD32_v2, at, 3u, (size_t)N);
    say("run", run(named(module, "mix"), N / 64, NULL, params));
    must(cuLibraryLoadData, &lib, fat.bytes, NULL, NULL, 0u, NULL, NULL, 0u);
    must(cuLibraryGetKernel, &kernel, lib, "mix");
    say("run_library", run((CUfunction)kernel, N / 64, NULL, params));
    say_card("result", at, sizeof(int) * N);
    inside -= 400000; /* the last entry now leaves it */
    memcpy(fat.bytes + 8, &inside, 8);
    say("damaged", cu(cuModuleLoadData, &module, fat.bytes) != 0);
}

/* A large image, loaded LOADS times. */
static void case_load(void)
{
    enum { PADDING = 1 << 20 };
    char *image = malloc(PADDING + strlen(kernels) + 1);
    CUmodule module;
    CUdeviceptr at;
    int n = 64, rounds = 1;
    void *params[] = {&at, &n, &rounds};

    memset(image, '\n', PADDING);
    strcpy(image + PADDING, kernels);
    memcpy(image, "// ", 3);
    snprintf(image + 3, 40, "%s", getenv("IMAGE"));
    image[3 + strlen(getenv("IMAGE"))] = '\n';
    must(cuMemAlloc_v2, &at, (size_t)4096);
    must(cuMemsetD8_v2, at, (unsigned char)3, (size_t)4096);
    for (int i = 0; i < atoi(getenv("LOADS")); i++) {
        must(cuModuleLoadData, &module, image);
        say("run", run(named(module, "mix"), 1, NULL, params));
    }
    say_card("result", at, 4096);
}

/* A copy that names no stream is over before a kernel in a stream that waits for nobody. */
static void case_overtaking(void)
{
    enum { BYTES = 16 << 20 };
    int n = BYTES / (int)sizeof(int), rounds = 1;
    unsigned char *host = pattern(BYTES, 8), *back = malloc(BYTES);
    CUmodule module;
    CUstream stream;
    CUdeviceptr at;
    void *params[] = {&at, &n, &rounds};

    must(cuModuleLoadData, &module, kernels);
    CUfunction mix = named(module, "mix");
    must(cuStreamCreate, &stream, 1u);
    must(cuMemAlloc_v2, &at, (size_t)BYTES);
    for (int i = 0; i < 4; i++) {
        must(cuMemcpyHtoD_v2, at, host, (size_t)BYTES);
        say("run", run(mix, (unsigned)(n + 63) / 64, stream, params));
        must(cuStreamSynchronize, stream);
        must(cuMemcpyDtoH_v2, back, at, (size_t)BYTES);
        say_bytes("result", back, BYTES);
        host[i]++;
    }
}

/* A context that is made or ended beside the current one leaves that current. */
static void case_context_stack(void)
{
    CUcontext first, primary, again, second;
    CUdeviceptr at;
    size_t room, total;

    must(cuCtxGetCurrent, &first);
    must(cuMemAlloc_v2, &at, (size_t)64);
    must(cuDevicePrimaryCtxRetain, &primary, 0);
    say("alloc_after_retain", cu(cuMemAlloc_v2, &at, (size_t)64));
    must(cuCtxPushCurrent_v2, primary);
    say("alloc_in_primary", cu(cuMemAlloc_v2, &at, (size_t)64));
    must(cuCtxPopCurrent_v2, &again);
    say("popped_it", again == primary);
    must(cuCtxCreate_v2, &second, 0u, 0);
    must(cuCtxPopCurrent_v2, &again);
    say("memory_info", cu(cuMemGetInfo_v2, &room, &total));
    must(cuCtxDestroy_v2, second);
    say("alloc_after_destroy", cu(cuMemAlloc_v2, &at, (size_t)64));
    must(cuDevicePrimaryCtxRelease_v2, 0);
    say("alloc_after_release", cu(cuMemAlloc_v2, &at, (size_t)64));
    say("pushed_dead", cu(cuCtxPushCurrent_v2, second));
}

/* Two PTX files become one image, by each way of adding; it is loaded, looked into and run. */
static void case_linking(void)
{
    char info[4096] = "x", error[4096] = "x";
    int options[] = {3, 4, 5, 6, 7, 12}; /* both logs with their sizes, optimisation level, verbose */
    void *values[] = {info, (void *)sizeof info, error, (void *)sizeof error, (void *)2, (void *)1};
    CUlinkState state;
    CUmodule module;
    CUdeviceptr at, variable;
    void *image;
    size_t bytes = 0, variable_bytes;
    int n = 256, back[256];

    must(cuLinkCreate_v2, 6u, options, values, &state);
    must(cuLinkAddData_v2, state, 1, device_code, strlen(device_code) + 1, "callee", 0u, NULL, NULL);
    must(cuLinkAddFile_v2, state, 1, caller_path, 0u, NULL, NULL);
    must(cuLinkComplete, state, &image, &bytes);
    say("image_is_elf", bytes > 64 && memcmp(image, "\177ELF", 4) == 0);
    say_bytes("image", image, bytes);
    void *copy = memcpy(malloc(bytes), image, bytes);
    must(cuLinkDestroy, state);
    say("destroyed", cu(cuLinkComplete, state, &image, &bytes));
    must(cuModuleLoadData, &module, copy);
    must(cuModuleGetGlobal_v2, &variable, &variable_bytes, module, "offset");
    say("variable_bytes", variable_bytes);
    must(cuMemsetD32_v2, variable, 1000u, (size_t)1);
    must(cuMemAlloc_v2, &at, sizeof back);
    must(cuMemsetD32_v2, at, 5u, (size_t)256);
    void *params[] = {&at, &n};
    say("run", run(named(module, "call_it"), 4, NULL, params));
    must(cuMemcpyDtoH_v2, back, at, sizeof back);
    say_bytes("result", back, sizeof back);
    must(cuModuleUnload, module);
    must(cuLinkCreate_v2, 6u, options, values, &state);
    say("bad", cu(cuLinkAddFile_v2, state, 1, "/nonexistent", 0u, NULL, NULL));
    must(cuLinkAddFile_v2, state, 1, caller_path, 0u, NULL, NULL);
    say("unresolved", cu(cuLinkComplete, state, &image, &bytes) != 0);
    must(cuLinkDestroy, state);
}

/* A library outlives contexts; its kernels run in each, also cast to a function. */
static void case_libraries(void)
{
    CUlibrary lib;
    CUkernel mix, all[8], twice;
    CUfunction f, again;
    CUmodule module, of_function;
    CUcontext first, second;
    CUdeviceptr at, scale;
    const char *name;
    size_t offset, size, count;
    int n = 512, rounds = 3, value, host[512];
    unsigned kernels_in;
    void *params[] = {&at, &n, &rounds};

    must(cuCtxGetCurrent, &first);
    must(cuLibraryLoadData, &lib, kernels, NULL, NULL, 0u, NULL, NULL, 0u);
    must(cuLibraryGetKernel, &mix, lib, "mix");
    say("no_kernel", cu(cuLibraryGetKernel, &twice, lib, "nothing"));
    must(cuLibraryGetKernelCount, &kernels_in, lib);
    say("kernels", kernels_in);
    must(cuLibraryEnumerateKernels, all, kernels_in, lib);
    for (unsigned i = 0; i < kernels_in; i++) {
        must(cuKernelGetName, &name, all[i]);
        printf("kernel=%s\n", name);
    }
    must(cuKernelGetParamInfo, mix, (size_t)2, &offset, &size);
    say("third_at", offset * 100 + size);
    say("no_fourth", cu(cuKernelGetParamInfo, mix, (size_t)3, &offset, &size));
    must(cuKernelGetParamCount, mix, &count);
    say("params", count);
    must(cuKernelGetAttribute, &value, 0, mix, 0);
    say("threads", value);
    must(cuKernelSetAttribute, 8, 40000, mix, 0);
    must(cuKernelGetAttribute, &value, 8, mix, 0);
    say("dynamic_shared", value);
    must(cuKernelSetCacheConfig, mix, 1, 0);
    must(cuMemAlloc_v2, &at, sizeof host);
    must(cuMemsetD32_v2, at, 9u, (size_t)n);
    say("cast", run((CUfunction)mix, 8, NULL, params));
    say_card("first", at, sizeof host);
    must(cuKernelGetFunction, &f, mix);
    must(cuKernelGetFunction, &again, mix);
    say("same_function", f == again);
    say("as_function", run(f, 8, NULL, params));
    must(cuFuncGetName, &name, f);
    printf("name=%s\n", name);
    must(cuLibraryGetModule, &module, lib);
    must(cuFuncGetModule, &of_function, f);
    say("same_module", module == of_function);
    must(cuLibraryGetGlobal, &scale, &size, lib, "scale");
    say("scale_bytes", size);
    must(cuMemcpyDtoH_v2, &value, scale, sizeof value);
    say("scale", value);
    say("no_global", cu(cuLibraryGetGlobal, &scale, &size, lib, "nothing"));
    say("no_managed", cu(cuLibraryGetManaged, &scale, &size, lib, "scale"));
    must(cuCtxCreate_v2, &second, 0u, 0);
    must(cuMemAlloc_v2, &at, sizeof host);
    must(cuMemsetD32_v2, at, 9u, (size_t)n);
    say("in_second", run((CUfunction)mix, 8, NULL, params));
    say_card("second", at, sizeof host);
    must(cuCtxDestroy_v2, second);
    must(cuCtxPopCurrent_v2, &second);
    must(cuKernelGetName, &name, mix); /* needs no context */
    must(cuKernelGetAttribute, &value, 0, mix, 0);
    must(cuCtxPushCurrent_v2, first);
    say_card("still_first", at = on_card("abcd", 4), 4);
    must(cuLibraryUnload, lib);
    say("unloaded", cu(cuLibraryUnload, lib));
    say("gone", cu(cuKernelGetName, &name, mix));
    say("launch_gone", run((CUfunction)mix, 1, NULL, params));
    say("function_gone", run(f, 1, NULL, params));
}

/* Both ways of asking that all blocks run at once, and a grid that is too large for it. */
static void case_cooperative(void)
{
    CUmodule module;
    CUdeviceptr at;
    unsigned back[4] = {0};
    CUlaunchAttribute attribute = {.id = 2, .value = {1}};
    CUlaunchConfig config = {4, 1, 1, 32, 1, 1, 0, NULL, &attribute, 1};

    must(cuModuleLoadData, &module, kernels);
    CUfunction meet = named(module, "meet");
    must(cuMemAlloc_v2, &at, sizeof back);
    must(cuMemsetD32_v2, at, 0u, (size_t)4);
    void *params[] = {&at};
    must(cuLaunchCooperativeKernel, meet, 4u, 1u, 1u, 32u, 1u, 1u, 0u, NULL, params);
    say_card("once", at, sizeof back);
    must(cuLaunchKernelEx, &config, meet, params, NULL);
    say_card("twice", at, sizeof back);
    say("too_large", cu(cuLaunchCooperativeKernel, meet, 1000000u, 1u, 1u, 1024u, 1u, 1u, 0u, NULL, params));
    attribute.value[0] = 0;
    say("not_cooperative", cu(cuLaunchKernelEx, &config, meet, params, NULL));
    must(cuCtxSynchronize);
}

/* A training step as design 03 section 3.4 measured it on real stacks: some 5,100 calls, 280 of which reach the card and
 * one is waited for. What surrounds a launch is asked anew each time. STEPS of them are made after everything is warm.
 */
static unsigned calls;

#define step(name, ...)                                                                                                  \
    do {                                                                                                                 \
        calls++;                                                                                                         \
        must(name, ##__VA_ARGS__);                                                                                       \
    } while (0)

static void around_a_launch(CUfunction f, CUstream stream, CUdeviceptr at)
{
    CUcontext context;
    CUdevice device;
    int value, capturing;
    unsigned flags;
    CUmodule module;
    const char *name;
    size_t offset, size;
    void *pointer_data[2] = {&value, &offset};
    int pointer_attributes[2] = {2, 12};

    for (int i = 0; i < 2; i++) {
        calls += 10;
        must(cuCtxGetCurrent, &context);
        must(cuCtxGetDevice, &device);
        must(cuCtxSetCurrent, context);
        must(cuDeviceGetAttribute, &value, 16, 0);
        must(cuStreamIsCapturing, stream, &capturing);
        must(cuStreamGetCtx, stream, &context);
        must(cuFuncGetAttribute, &value, 0, f);
        must(cuFuncGetName, &name, f);
        must(cuPointerGetAttributes, 2u, pointer_attributes, pointer_data, at);
        must(cuStreamGetPriority, stream, &value);
    }
    calls += 4;
    must(cuStreamGetFlags, stream, &flags);
    must(cuFuncGetModule, &module, f);
    must(cuFuncGetParamInfo, f, (size_t)1, &offset, &size);
    must(cuOccupancyMaxActiveBlocksPerMultiprocessor, &value, f, 64, (size_t)0);
}

static void training_step(CUfunction f, CUstream streams[2], CUevent event, CUdeviceptr at, CUdeviceptr twin)
{
    int n = 64, rounds = 1;
    void *params[] = {&at, &n, &rounds};
    char batch[512] = {1, 2, 3};

    step(cuMemcpyHtoDAsync_v2, twin, batch, sizeof batch, streams[0]);
    for (int i = 0; i < 200; i++) {
        around_a_launch(f, streams[i % 2], at);
        step(cuLaunchKernel, f, 1u, 1u, 1u, 64u, 1u, 1u, 0u, streams[i % 2], params, NULL);
        if (i % 10 == 0) {
            step(cuEventRecord, event, streams[i % 2]);
            step(cuStreamWaitEvent, streams[(i + 1) % 2], event, 0u);
            step(cuMemsetD32Async, twin, 0u, (size_t)16, streams[i % 2]);
            if (i % 20 == 0)
                step(cuMemcpyDtoDAsync_v2, twin, at, (size_t)64, streams[i % 2]);
        }
    }
    step(cuStreamWaitEvent, streams[0], event, 0u);
    step(cuStreamSynchronize, streams[0]);
}

static void case_step(void)
{
    int steps = atoi(getenv("STEPS")), priority;
    CUmodule module;
    CUstream streams[2];
    CUevent event;
    CUdeviceptr at, twin;
    unsigned flags;

    must(cuModuleLoadData, &module, kernels);
    CUfunction f = named(module, "mix");
    must(cuEventCreate, &event, 2u);
    must(cuMemAlloc_v2, &at, (size_t)4096);
    must(cuMemAlloc_v2, &twin, (size_t)4096);
    for (int i = 0; i < 2; i++) {
        must(cuStreamCreate, &streams[i], 1u);
        must(cuStreamGetPriority, streams[i], &priority);
        must(cuStreamGetFlags, streams[i], &flags);
    }
    around_a_launch(f, streams[0], at);
    calls = 0;
    for (int i = 0; i < steps; i++)
        training_step(f, streams, event, at, twin);
    say("calls", calls);
}

/* Allocated and freed again, in each way that there is, with every size used at once. */
static void case_allocations(void)
{
    int wanted = atoi(getenv("ALLOCATIONS")), made = 0;
    size_t pitch;

    for (int i = 0; i < wanted; i++) {
        CUdeviceptr small, large, pitched;
        must(cuMemAlloc_v2, &small, (size_t)(1 + i * 77));
        must(cuMemAlloc_v2, &large, (size_t)(i % 3 + 1) << 21);
        must(cuMemAllocPitch_v2, &pitched, &pitch, (size_t)300, (size_t)(1 + i), 4u);
        must(cuMemFree_v2, small);
        must(cuMemFree_v2, large);
        must(cuMemFree_v2, pitched);
        made += 3;
    }
    say("allocations", made);
}

/* A kernel's fault: when it is told, by whom, with which code, and that it stays. */
static void case_faults(void)
{
    CUmodule module;
    CUdeviceptr at, more;
    CUcontext context, next;
    CUevent event;
    char host[16];

    must(cuCtxGetCurrent, &context);
    must(cuModuleLoadData, &module, kernels);
    must(cuMemAlloc_v2, &at, (size_t)64);
    must(cuEventCreate, &event, 0u);
    CUfunction wild = named(module, "wild");
    void *params[] = {&at};
    say("launch", run(wild, 1, NULL, params));
    say("synchronise", cu(cuCtxSynchronize));
    say("again", cu(cuCtxSynchronize));
    say("alloc", cu(cuMemAlloc_v2, &more, (size_t)64));
    say("launch_after", run(wild, 1, NULL, params));
    say("copy", cu(cuMemcpyDtoH_v2, host, at, sizeof host));
    say("memset", cu(cuMemsetD8_v2, at, (unsigned char)1, (size_t)1));
    say("record", cu(cuEventRecord, event, NULL));
    say("query", cu(cuStreamQuery, NULL));
    say("destroy", cu(cuCtxDestroy_v2, context));
    must(cuCtxCreate_v2, &next, 0u, 0);
    say("alloc_in_next", cu(cuMemAlloc_v2, &more, (size_t)64));
    must(cuModuleLoadData, &module, kernels);
    CUfunction trap = named(module, "trap");
    say("trap", run(trap, 1, NULL, NULL));
    say("told_by_copy", cu(cuMemcpyDtoH_v2, host, more, sizeof host));
    say("still", cu(cuMemAlloc_v2, &more, (size_t)64));
}

/* Where a variable lies the driver says; unified calls know it for the card's all the same. */
static void case_variables(void)
{
    CUmodule module;
    CUlibrary made;
    CUdeviceptr scale, other, at, start;
    size_t bytes;
    unsigned type = 0;
    int value = 0, host[2] = {41, 0};

    must(cuModuleLoadData, &module, kernels);
    must(cuModuleGetGlobal_v2, &scale, &bytes, module, "scale");
    say("bytes", bytes);
    must(cuModuleGetGlobal_v2, &at, NULL, module, "scale");
    say("same", at == scale);
    must(cuLibraryLoadData, &made, kernels, NULL, NULL, 0u, NULL, NULL, 0u);
    must(cuLibraryGetGlobal, &other, NULL, made, "scale");
    must(cuMemAlloc_v2, &at, sizeof host);
    say("out", cu(cuMemcpy, (CUdeviceptr)(uintptr_t)&value, scale, sizeof value));
    say("value", value);
    say("in", cu(cuMemcpy, scale, (CUdeviceptr)(uintptr_t)host, sizeof value));
    say("across", cu(cuMemcpy, other, scale, sizeof value));
    say("away", cu(cuMemcpyAsync, at, other, sizeof value, NULL));
    say("copy", cu(cuMemcpyDtoH_v2, &host[1], at, sizeof value));
    say("value", host[1]);
    say("type", cu(cuPointerGetAttribute, &type, 2, scale));
    say("type", type);
    say("range", cu(cuMemGetAddressRange_v2, &start, &bytes, scale));
    say("start", start == scale);
    say("bytes", bytes);
    must(cuModuleUnload, module);
    must(cuModuleLoadData, &module, kernels);
    must(cuModuleGetGlobal_v2, &scale, &bytes, module, "scale");
    say("out", cu(cuMemcpy, (CUdeviceptr)(uintptr_t)&value, scale, sizeof value));
    say("value", value);
}

static void *wait_in(void *context)
{
    must(cuCtxSetCurrent, context);
    return (void *)(uintptr_t)cu(cuCtxSynchronize);
}

/* One context's fault is no other's, whoever waits and whoever is told. */
static void case_two_contexts(void)
{
    CUcontext bad, good;
    CUmodule module;
    CUdeviceptr at;
    pthread_t thread;
    int host[16] = {0};
    void *told;

    must(cuCtxGetCurrent, &bad);
    must(cuModuleLoadData, &module, kernels);
    CUfunction trap = named(module, "trap");
    must(cuCtxCreate_v2, &good, 0u, 0);
    must(cuMemAlloc_v2, &at, sizeof host);
    must(cuCtxSetCurrent, bad);
    say("trap", run(trap, 1, NULL, NULL));
    if (pthread_create(&thread, NULL, wait_in, bad) != 0)
        exit(7);
    must(cuCtxSetCurrent, good);
    say("meanwhile", cu(cuMemsetD32_v2, at, 7u, (size_t)16));
    pthread_join(thread, &told);
    say("waited", (uintptr_t)told);
    say("synchronise", cu(cuCtxSynchronize));
    say("copy", cu(cuMemcpyDtoH_v2, host, at, sizeof host));
    say("value", host[15]);
    must(cuCtxSetCurrent, bad);
    say("bad", cu(cuCtxSynchronize));
    say("bad_alloc", cu(cuMemAlloc_v2, &at, (size_t)16));
    must(cuCtxSetCurrent, good);
    say("good", cu(cuCtxSynchronize));
    say("destroy_bad", cu(cuCtxDestroy_v2, bad));
    say("good_alloc", cu(cuMemAlloc_v2, &at, (size_t)16));
    say("destroy_good", cu(cuCtxDestroy_v2, good));
}

/* The end of a context waits for its work. */
static void case_destroy_waits(void)
{
    CUcontext context, other;
    CUmodule module;
    CUdeviceptr at;
    int *host, n = 64, rounds = 200000;

    must(cuCtxCreate_v2, &other, 0u, 0);
    must(cuMemHostAlloc, (void **)&host, sizeof *host * 64, 1u /* portable */);
    memset(host, 0, sizeof *host * 64);
    must(cuCtxCreate_v2, &context, 0u, 0);
    must(cuModuleLoadData, &module, kernels);
    CUfunction mix = named(module, "mix");
    must(cuMemAlloc_v2, &at, sizeof *host * 64);
    must(cuMemsetD32_v2, at, 1u, (size_t)64);
    for (int i = 0; i < 8; i++)
        must(cuLaunchKernel, mix, 1u, 1u, 1u, 64u, 1u, 1u, 0u, NULL, (void *[]){&at, &n, &rounds}, NULL);
    must(cuMemcpyDtoHAsync_v2, host, at, sizeof *host * 64, NULL);
    say("destroy", cu(cuCtxDestroy_v2, context));
    for (int i = 0; i < 64; i++)
        printf("%08x ", (unsigned)host[i]);
    printf("\n");
}

/* Launches that cannot be: refused at the call. */
static void case_refused(void)
{
    CUmodule module;
    CUdeviceptr at;
    int n = 1, rounds = 1;
    void *params[] = {&at, &n, &rounds}, *missing[] = {&at, NULL, &rounds};

    must(cuModuleLoadData, &module, kernels);
    must(cuMemAlloc_v2, &at, (size_t)64);
    CUfunction mix = named(module, "mix");
    say("grid", cu(cuLaunchKernel, mix, 0u, 1u, 1u, 32u, 1u, 1u, 0u, NULL, params, NULL));
    say("block", cu(cuLaunchKernel, mix, 1u, 1u, 1u, 2048u, 1u, 1u, 0u, NULL, params, NULL));
    say("block_z", cu(cuLaunchKernel, mix, 1u, 1u, 1u, 1u, 1u, 65u, 0u, NULL, params, NULL));
    say("grid_y", cu(cuLaunchKernel, mix, 1u, 65536u, 1u, 1u, 1u, 1u, 0u, NULL, params, NULL));
    say("shared", cu(cuLaunchKernel, mix, 1u, 1u, 1u, 32u, 1u, 1u, 500000u, NULL, params, NULL));
    say("no_params", cu(cuLaunchKernel, mix, 1u, 1u, 1u, 32u, 1u, 1u, 0u, NULL, NULL, NULL));
    say("null_param", cu(cuLaunchKernel, mix, 1u, 1u, 1u, 32u, 1u, 1u, 0u, NULL, missing, NULL) != 0);
    say("no_function", cu(cuLaunchKernel, NULL, 1u, 1u, 1u, 32u, 1u, 1u, 0u, NULL, params, NULL));
    say("fine", run(mix, 1, NULL, params));
    say("synchronise", cu(cuCtxSynchronize));
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"boxes2d", case_boxes2d}, {"boxes3d", case_boxes3d}, {"memsets", case_memsets}, {"streams", case_streams},
        {"occupancy", case_occupancy}, {"linking", case_linking}, {"libraries", case_libraries}, {"cooperative", case_cooperative},
        {"step", case_step}, {"load", case_load}, {"allocations", case_allocations}, {"fatbin", case_fatbin}, {"overtaking", case_overtaking}, {"context_stack", case_context_stack}, {"faults", case_faults}, {"refused", case_refused},
        {"two_contexts", case_two_contexts}, {"variables", case_variables}, {"destroy_waits", case_destroy_waits},
    };
    const char *wanted = argv[argc - 1];

    if (argc < 5 || (library = dlopen("libcuda.so.1", RTLD_NOW)) == NULL)
        return 2;
    kernels = read_text(argv[1]);
    device_code = read_text(argv[2]);
    caller_path = argv[3];
    start();
    for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (strcmp(cases[i].name, wanted) == 0) {
            cases[i].run();
            return 0;
        }
    return 2;
}
