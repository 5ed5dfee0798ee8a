/* Cases of test_shim_calls.py: what each call does. */
#define _GNU_SOURCE
#include "guest.h"

void case_memory(void)
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
void case_bulk(size_t bytes)
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

void case_fill(void)
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

void case_checks(void)
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

void case_fault(void)
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
void case_deferred(void)
{
    CUdeviceptr at;

    start();
    say("memset", cu(cuMemsetD16Async, 0x1000ull, (unsigned short)1, (size_t)1, NULL)); /* the stub has none */
    say("alloc", cu(cuMemAlloc_v2, &at, (size_t)100));
    say("alloc_again", cu(cuMemAlloc_v2, &at, (size_t)100));
}

void case_quota(void)
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

void case_lookup(void)
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
    lookup("cuTexObjectCreate", 12000, 0, "cuTexObjectCreate");
    lookup("cuFuncGetParamInfo", 12000, 0, "");
    say("texture", cu(cuTexObjectCreate, NULL, 0u));
    say("texture_again", cu(cuTexObjectCreate, NULL, 0u));
    say("before_init", cu(cuDeviceGetCount, (int *)library));
}

void case_contexts(void)
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

void case_modules(void)
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

void case_events(void)
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
