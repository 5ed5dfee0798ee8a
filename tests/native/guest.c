/* A guest's program for the shim's tests: one behaviour a run, results as `name=value` lines that the test reads.
 *
 * usage: guest CASE [ARGUMENT...]. Kernels are the stub driver's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"

#define MIB (1ull << 20)

static void *library;

static void *find(const char *name)
{
    void *function = dlsym(library, name);

    if (function == NULL) {
        printf("missing=%s\n", name);
        exit(9);
    }
    return function;
}

/* Arguments must have their exact types: there is no prototype. */
#define cu(name, ...) (((CUresult(*)())find(#name))(__VA_ARGS__))
#define must(name, ...)                                                                                                  \
    do {                                                                                                                 \
        CUresult must_result = cu(name, ##__VA_ARGS__);                                                                  \
        if (must_result != 0) {                                                                                          \
            printf("failed=%s at line %d: %d\n", #name, __LINE__, must_result);                                          \
            exit(8);                                                                                                     \
        }                                                                                                                \
    } while (0)
#define say(name, value) printf("%s=%lld\n", name, (long long)(value))

static CUcontext start(void)
{
    CUcontext context;

    must(cuInit, 0u);
    must(cuCtxCreate_v2, &context, 0u, 0);
    return context;
}

static CUfunction kernel(const char *name)
{
    CUmodule module;
    CUfunction function;

    must(cuModuleLoadData, &module, "ptx");
    must(cuModuleGetFunction, &function, module, name);
    return function;
}

static CUresult launch(CUfunction f, CUstream stream, void **params, void **extra)
{
    return cu(cuLaunchKernel, f, 1u, 1u, 1u, 32u, 1u, 1u, 0u, stream, params, extra);
}

static void case_memory(void)
{
    CUdeviceptr small[2], large, base;
    size_t room, total, bytes;
    unsigned char host[1000], back[1000];

    start();
    must(cuMemGetInfo_v2, &room, &total);
    say("total", total);
    say("free_at_start", room);
    must(cuMemAlloc_v2, &small[0], (size_t)1000);
    must(cuMemAlloc_v2, &small[1], (size_t)1000);
    must(cuMemAlloc_v2, &large, (size_t)(3 * MIB));
    say("small_0", small[0]);
    say("small_1", small[1]);
    say("large", large);
    must(cuMemGetInfo_v2, &room, &total);
    say("free_with_three", room);
    must(cuMemGetAddressRange_v2, &base, &bytes, small[1] + 17);
    say("range_base_right", base == small[1]);
    say("range_bytes", bytes);
    for (int i = 0; i < 1000; i++)
        host[i] = (unsigned char)i;
    must(cuMemcpyHtoD_v2, small[0], host, sizeof host);
    must(cuMemsetD8_v2, small[1], (unsigned char)7, (size_t)1000);
    must(cuMemcpyDtoD_v2, small[1] + 100, small[0], (size_t)300);
    must(cuMemcpyDtoH_v2, back, small[1], sizeof back);
    say("copies_right", back[99] == 7 && memcmp(back + 100, host, 300) == 0 && back[400] == 7);
    say("beyond_end", cu(cuMemcpyDtoH_v2, back, small[1] + 999, (size_t)2));
    say("free_inside", cu(cuMemFree_v2, small[0] + 512));
    must(cuMemFree_v2, small[0]);
    say("free_twice", cu(cuMemFree_v2, small[0]));
    say("use_after_free", cu(cuMemcpyDtoH_v2, back, small[0], (size_t)1));
    must(cuMemFree_v2, small[1]);
    must(cuMemFree_v2, large);
    must(cuMemGetInfo_v2, &room, &total);
    say("free_at_end", room);
}

/* Bulk of `bytes`, there and back, at an odd offset, through a stream. */
static void case_bulk(size_t bytes)
{
    unsigned char *host = malloc(bytes), *back = malloc(bytes);
    CUdeviceptr at;
    CUstream stream;

    for (size_t i = 0; i < bytes; i++)
        host[i] = (unsigned char)(i * 31 + i / 4096);
    start();
    must(cuStreamCreate, &stream, 1u);
    must(cuMemAlloc_v2, &at, bytes + 3);
    must(cuMemcpyHtoDAsync_v2, at + 3, host, bytes, stream);
    must(cuMemcpyDtoHAsync_v2, back, at + 3, bytes, stream);
    say("equal", memcmp(host, back, bytes) == 0);
    free(host);
    free(back);
}

static void case_batch(int launches, int synchronises)
{
    start();
    CUfunction none = kernel("none");

    for (int i = 0; i < launches; i++)
        if (launch(none, NULL, NULL, NULL) != 0)
            exit(7);
    for (int i = 0; i < synchronises; i++)
        must(cuCtxSynchronize);
}

/* One launch and then nothing: the flusher alone must bring it to the card. */
static void case_unflushed(void)
{
    CUstream stream;

    start();
    must(cuStreamCreate, &stream, 0u);
    puts("waiting=1");
    fflush(stdout);
    getchar();
}

static void case_fill(void)
{
    struct {
        CUdeviceptr at;
        unsigned n, value;
    } buffer;
    size_t size = sizeof buffer, offset, bytes;
    CUdeviceptr at;
    unsigned n = 100, value = 5, back[100];
    void *params[] = {&at, &n, &value};
    void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &buffer, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
    int most;

    start();
    CUfunction fill = kernel("fill");
    must(cuMemAlloc_v2, &at, sizeof back);
    say("params", launch(fill, NULL, params, NULL));
    must(cuMemcpyDtoH_v2, back, at, sizeof back);
    say("params_right", back[0] == 5 && back[99] == 104);
    buffer.at = at;
    buffer.n = 100;
    buffer.value = 1000;
    say("extra", launch(fill, NULL, NULL, extra));
    must(cuMemcpyDtoH_v2, back, at, sizeof back);
    say("extra_right", back[0] == 1000 && back[99] == 1099);
    say("both", launch(fill, NULL, params, extra));
    must(cuFuncGetAttribute, &most, 0, fill);
    say("function_threads", most);
    must(cuFuncGetParamInfo, fill, (size_t)1, &offset, &bytes);
    say("second_offset", offset);
    say("behind_last", cu(cuFuncGetParamInfo, fill, (size_t)3, &offset, &bytes));
}

static void case_checks(void)
{
    start();
    CUfunction none = kernel("none");
    CUmodule module;
    CUfunction function;

    say("grid_0", cu(cuLaunchKernel, none, 0u, 1u, 1u, 1u, 1u, 1u, 0u, NULL, NULL, NULL));
    say("grid_y", cu(cuLaunchKernel, none, 1u, 70000u, 1u, 1u, 1u, 1u, 0u, NULL, NULL, NULL));
    say("block", cu(cuLaunchKernel, none, 1u, 1u, 1u, 1024u, 2u, 1u, 0u, NULL, NULL, NULL));
    say("function_limit", cu(cuLaunchKernel, none, 1u, 1u, 1u, 600u, 1u, 1u, 0u, NULL, NULL, NULL));
    say("shared", cu(cuLaunchKernel, none, 1u, 1u, 1u, 1u, 1u, 1u, 50000u, NULL, NULL, NULL));
    say("function", cu(cuLaunchKernel, (CUfunction)0x1234, 1u, 1u, 1u, 1u, 1u, 1u, 0u, NULL, NULL, NULL));
    say("stream", launch(none, (CUstream)0x77, NULL, NULL));
    say("no_such_kernel", cu(cuModuleGetFunction, &function, (CUmodule)(void *)none, "fill"));
    must(cuModuleLoadData, &module, "ptx");
    say("unknown_name", cu(cuModuleGetFunction, &function, module, "nothing"));
    must(cuModuleUnload, module);
    say("after_unload", cu(cuModuleGetFunction, &function, module, "fill"));
    say("still_fine", cu(cuCtxSynchronize));
}

static void case_fault(void)
{
    CUdeviceptr at;
    CUcontext context = start();
    CUfunction fault = kernel("fault");

    say("launch", launch(fault, NULL, NULL, NULL));
    say("synchronise", cu(cuCtxSynchronize));
    say("launch_again", launch(fault, NULL, NULL, NULL));
    say("alloc", cu(cuMemAlloc_v2, &at, (size_t)100));
    say("destroy", cu(cuCtxDestroy_v2, context));
    say("create", cu(cuCtxCreate_v2, &context, 0u, 0));
    say("alloc_in_new", cu(cuMemAlloc_v2, &at, (size_t)100));
}

/* An asynchronous call that fails is heard of once, from the next call that waits. */
static void case_deferred(void)
{
    CUdeviceptr at;

    start();
    say("memset", cu(cuMemsetD16Async, 0x1000ull, (unsigned short)1, (size_t)1, NULL)); /* the stub has none */
    say("alloc", cu(cuMemAlloc_v2, &at, (size_t)100));
    say("alloc_again", cu(cuMemAlloc_v2, &at, (size_t)100));
}

static void case_fork(void)
{
    int status, count;
    CUdeviceptr at;
    pid_t child;

    start();
    must(cuMemAlloc_v2, &at, (size_t)100);
    fflush(stdout);
    if ((child = fork()) == 0) {
        say("child_alloc", cu(cuMemAlloc_v2, &at, (size_t)100));
        say("child_init", cu(cuInit, 0u));
        say("child_count", cu(cuDeviceGetCount, &count));
        exit(0); /* runs the child's destructors: they must not end the parent's session */
    }
    waitpid(child, &status, 0);
    say("child_exit", WIFEXITED(status) ? WEXITSTATUS(status) : 255);
    say("parent", cu(cuMemAlloc_v2, &at, (size_t)100));
    say("parent_synchronise", cu(cuCtxSynchronize));
}

static CUcontext shared_context;
static CUstream shared_stream;

static void *synchronise(void *unused)
{
    (void)unused;
    must(cuCtxSetCurrent, shared_context);
    return (void *)(intptr_t)cu(cuStreamSynchronize, shared_stream);
}

/* A thread waits for a kernel that does not end; the others work, then the gate is opened. */
static void case_threads(const char *gate)
{
    pthread_t waiting[3];
    struct timespec begin, end;
    CUdeviceptr at, more;
    size_t room, total;
    int64_t worst = 0;
    void *result;

    shared_context = start();
    must(cuStreamCreate, &shared_stream, 1u);
    must(cuMemAlloc_v2, &at, (size_t)100);
    CUfunction block = kernel("block");
    must(cuCtxSynchronize);
    launch(block, shared_stream, NULL, NULL);
    for (int i = 0; i < 3; i++)
        pthread_create(&waiting[i], NULL, synchronise, NULL);
    usleep(100000);
    for (int i = 0; i < 10; i++) {
        clock_gettime(CLOCK_MONOTONIC, &begin);
        must(cuMemGetInfo_v2, &room, &total);
        must(cuMemcpyHtoD_v2, at, "x", (size_t)1);
        must(cuMemAlloc_v2, &more, (size_t)(3 * MIB));
        must(cuMemFree_v2, more);
        clock_gettime(CLOCK_MONOTONIC, &end);
        int64_t ns = (end.tv_sec - begin.tv_sec) * 1000000000 + end.tv_nsec - begin.tv_nsec;
        worst = ns > worst ? ns : worst;
    }
    say("worst_us", worst / 1000);
    say("free_meanwhile", room);
    say("still_running", cu(cuStreamQuery, shared_stream));
    fclose(fopen(gate, "w"));
    for (int i = 0; i < 3; i++) {
        pthread_join(waiting[i], &result);
        say("waited", (intptr_t)result);
    }
}

/* The test ends the worker's session at "ready", and lets the program go on by a line on its input. */
static void case_lost(void)
{
    CUcontext context = start();
    CUdeviceptr at;
    int count;

    must(cuMemAlloc_v2, &at, (size_t)100);
    puts("ready=1");
    fflush(stdout);
    getchar();
    say("synchronise", cu(cuCtxSynchronize));
    say("alloc", cu(cuMemAlloc_v2, &at, (size_t)100));
    say("memset", cu(cuMemsetD8Async, at, (unsigned char)1, (size_t)1, NULL));
    say("count", cu(cuDeviceGetCount, &count));
    say("destroy", cu(cuCtxDestroy_v2, context));
    say("create", cu(cuCtxCreate_v2, &context, 0u, 0));
    say("alloc_in_new", cu(cuMemAlloc_v2, &at, (size_t)100));
    say("memset_in_new", cu(cuMemsetD8Async, at, (unsigned char)1, (size_t)1, NULL));
    say("synchronise_new", cu(cuCtxSynchronize));
}

static void case_quota(void)
{
    CUdeviceptr at[256];
    int n = 0, again;
    CUresult rc = 0;

    start();
    while (n < 256 && (rc = cu(cuMemAlloc_v2, &at[n], (size_t)(4 * MIB))) == 0)
        n++;
    say("granted", n);
    say("refused", rc);
    for (int i = 0; i < n; i++)
        must(cuMemFree_v2, at[i]);
    for (again = 0; again < n && cu(cuMemAlloc_v2, &at[again], (size_t)(4 * MIB)) == 0; again++)
        ;
    say("granted_again", again);
    say("more_than_all", cu(cuMemAlloc_v2, &at[0], (size_t)(1ull << 45)));
}

static void lookup(const char *name, int version, unsigned long long flags, const char *expected)
{
    void *function = (void *)1;
    int status = -1;
    CUresult rc = cu(cuGetProcAddress_v2, name, &function, version, flags, &status);

    printf("%s@%d/%llu=%d status %d %s\n", name, version, flags, rc, status,
           function == NULL ? "null" : expected[0] != 0 && function == find(expected) ? expected : "other");
}

static void case_lookup(void)
{
    lookup("", 0, 0, "");
    lookup("cuNoSuchThing", 13000, 0, "");
    lookup("cuMemAlloc", 12000, 0, "cuMemAlloc_v2");
    lookup("cuMemAlloc", 2000, 0, "cuMemAlloc");
    lookup("cuCtxCreate", 12000, 0, "cuCtxCreate_v3");
    lookup("cuCtxCreate", 13000, 0, "cuCtxCreate_v4");
    lookup("cuStreamSynchronize", 12000, 1, "cuStreamSynchronize");
    lookup("cuStreamSynchronize", 12000, 2, "cuStreamSynchronize_ptsz");
    lookup("cuMemcpyHtoD", 12000, 2, "cuMemcpyHtoD_v2_ptds");
    lookup("cuMemAlloc", 12000, 2, "cuMemAlloc_v2");
    lookup("cuGraphCreate", 12000, 0, "cuGraphCreate");
    lookup("cuFuncGetParamInfo", 12000, 0, "");
    say("graph", cu(cuGraphCreate, NULL, 0u));
    say("graph_again", cu(cuGraphCreate, NULL, 0u));
    say("before_init", cu(cuDeviceGetCount, (int *)library));
}

static void case_contexts(void)
{
    CUcontext first, second, got;
    CUdevice device;
    unsigned flags;
    int active;

    must(cuInit, 0u);
    say("none_current", cu(cuMemFree_v2, 0ull));
    must(cuCtxCreate_v2, &first, 0u, 0);
    must(cuCtxCreate_v2, &second, 4u, 0);
    must(cuCtxGetCurrent, &got);
    say("second_current", got == second);
    must(cuCtxGetFlags, &flags);
    say("flags", flags);
    must(cuCtxPopCurrent_v2, &got);
    must(cuCtxGetCurrent, &got);
    say("first_current", got == first);
    must(cuCtxGetDevice, &device);
    must(cuCtxDestroy_v2, second);
    say("push_destroyed", cu(cuCtxPushCurrent_v2, second));
    must(cuCtxDestroy_v2, first);
    must(cuCtxGetCurrent, &got);
    say("none_left", got == NULL);
    must(cuDevicePrimaryCtxGetState, 0, &flags, &active);
    say("primary_inactive", active == 0);
    must(cuDevicePrimaryCtxRetain, &first, 0);
    must(cuDevicePrimaryCtxRetain, &second, 0);
    say("one_primary", first == second);
    must(cuCtxSetCurrent, first);
    must(cuCtxSynchronize);
    must(cuDevicePrimaryCtxRelease_v2, 0);
    must(cuCtxSynchronize);
    must(cuDevicePrimaryCtxRelease_v2, 0);
    must(cuDevicePrimaryCtxGetState, 0, &flags, &active);
    say("primary_gone", active == 0);
}

static void *own_stream(void *unused)
{
    (void)unused;
    must(cuCtxSetCurrent, shared_context);
    must(cuStreamQuery_ptsz, (CUstream)NULL);
    must(cuStreamSynchronize, CU_STREAM_PER_THREAD);
    return NULL;
}

static void case_per_thread(void)
{
    pthread_t thread;

    shared_context = start();
    must(cuStreamSynchronize, (CUstream)NULL);
    for (int i = 0; i < 2; i++) {
        pthread_create(&thread, NULL, own_stream, NULL);
        pthread_join(thread, NULL);
    }
}

static void case_modules(void)
{
    char log[64] = "untouched";
    int options[2] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[2] = {log, (void *)sizeof log};
    CUmodule module;
    CUdeviceptr at;
    size_t bytes;

    start();
    say("bad_image", cu(cuModuleLoadDataEx, &module, "bad ptx", 2u, options, values));
    printf("log=%s\n", log);
    must(cuModuleLoadDataEx, &module, "ptx", 0u, NULL, NULL);
    must(cuModuleGetGlobal_v2, &at, &bytes, module, "counter");
    say("global_bytes", bytes);
    say("global_copy", cu(cuMemcpyHtoD_v2, at, "1234", (size_t)4));
    say("no_global", cu(cuModuleGetGlobal_v2, &at, &bytes, module, "other"));
}

static void case_events(void)
{
    CUevent begin, end;
    float ms;

    start();
    must(cuEventCreate, &begin, 0u);
    must(cuEventCreate, &end, 0u);
    must(cuEventRecord, begin, NULL);
    must(cuEventRecord, end, NULL);
    must(cuEventSynchronize, end);
    must(cuEventElapsedTime, &ms, begin, end);
    say("microseconds", ms * 1000);
    must(cuEventDestroy_v2, begin);
    say("destroyed_twice", cu(cuEventDestroy_v2, begin));
}

static void case_init(void)
{
    int count;

    say("init", cu(cuInit, 0u));
    say("count", cu(cuDeviceGetCount, &count));
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "", *second = argc > 2 ? argv[2] : "", *third = argc > 3 ? argv[3] : "0";
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"memory", case_memory}, {"fill", case_fill}, {"checks", case_checks}, {"fault", case_fault},
        {"deferred", case_deferred}, {"fork", case_fork}, {"lost", case_lost}, {"quota", case_quota},
        {"lookup", case_lookup}, {"contexts", case_contexts}, {"per_thread", case_per_thread}, {"modules", case_modules},
        {"events", case_events}, {"init", case_init}, {"unflushed", case_unflushed},
    };

    if ((library = dlopen("libcuda.so.1", RTLD_NOW)) == NULL) {
        printf("%s\n", dlerror());
        return 9;
    }
    if (strcmp(name, "bulk") == 0)
        return case_bulk(strtoull(second, NULL, 0)), 0;
    if (strcmp(name, "batch") == 0)
        return case_batch(atoi(second), atoi(third)), 0;
    if (strcmp(name, "threads") == 0)
        return case_threads(second), 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (strcmp(name, cases[i].name) == 0)
            return cases[i].run(), 0;
    return 2;
}
