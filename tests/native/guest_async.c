/* One case for each asynchronous op of calls.toml: the API call that sends it, at a moment when the driver's half fails.
 *
 * `async OP ARMED` makes what the call needs, creates the file ARMED (from then on the driver's function fails), makes the call and
 * two that wait. test_async_errors.py reads what each of them answered; an op without a case here fails there.
 */
#define _GNU_SOURCE
#include "guest.h"

#define BYTES 8192u

static CUdeviceptr at, more;
static CUstream stream;
static CUevent event;
static CUmodule module;
static CUfunction function;
static CUlibrary library_made;
static CUkernel kernel_made;
static CUlinkState linker;
static CUmemGenericAllocationHandle physical;
static CUgraph graph;
static CUgraphNode node;
static CUgraphExec exec;
static char *pinned, plain[BYTES];

static CUresult op_launch(void) { return launch(function, stream, NULL, NULL); }
static CUresult op_free(void) { return cu(cuMemFree_v2, more); }
static CUresult op_copy_in(void) { return cu(cuMemcpyHtoDAsync_v2, at, plain, (size_t)BYTES, stream); }
static CUresult op_arena_in(void) { return cu(cuMemcpyHtoDAsync_v2, at, pinned, (size_t)BYTES, stream); }
static CUresult op_arena_out(void) { return cu(cuMemcpyDtoHAsync_v2, pinned, at, (size_t)BYTES, stream); }
static CUresult op_settle(void) { return cu(cuMemcpyHtoD_v2, at, plain, (size_t)BYTES); }

/* 16 rows of 32 bytes, 64 apart where they are on the card. */
static CUresult rows(bool from_card)
{
    CUDA_MEMCPY2D copy = {.dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = at, .dstPitch = 64, .WidthInBytes = 32, .Height = 16};

    copy.srcMemoryType = from_card ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    copy.srcDevice = from_card ? at + 4096 : 0;
    copy.srcHost = from_card ? NULL : plain;
    copy.srcPitch = from_card ? 64 : 32;
    return cu(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *)&copy, stream);
}

static CUresult op_box_in(void) { return rows(false); }
static CUresult op_box_between(void) { return rows(true); }
static CUresult op_ctx_cache(void) { return cu(cuCtxSetCacheConfig, 1); }
static CUresult op_ctx_shared(void) { return cu(cuCtxSetSharedMemConfig, 1); }
static CUresult op_module_unload(void) { return cu(cuModuleUnload, module); }
static CUresult op_func_cache(void) { return cu(cuFuncSetCacheConfig, function, 1); }
static CUresult op_func_shared(void) { return cu(cuFuncSetSharedMemConfig, function, 1); }
static CUresult op_library_unload(void) { return cu(cuLibraryUnload, library_made); }
static CUresult op_kernel_cache(void) { return cu(cuKernelSetCacheConfig, kernel_made, 1, 0); }
static CUresult op_link_destroy(void) { return cu(cuLinkDestroy, linker); }
static CUresult op_reset_l2(void) { return cu(cuCtxResetPersistingL2Cache); }
static CUresult op_copy_between(void) { return cu(cuMemcpyDtoDAsync_v2, at, at + 4096, (size_t)64, stream); }
static CUresult op_set8(void) { return cu(cuMemsetD8Async, at, (unsigned char)1, (size_t)64, stream); }
static CUresult op_set16(void) { return cu(cuMemsetD16Async, at, (unsigned short)1, (size_t)64, stream); }
static CUresult op_set32(void) { return cu(cuMemsetD32Async, at, 1u, (size_t)64, stream); }
static CUresult op_set2d8(void) { return cu(cuMemsetD2D8Async, at, (size_t)64, (unsigned char)1, (size_t)8, (size_t)4, stream); }
static CUresult op_set2d16(void) { return cu(cuMemsetD2D16Async, at, (size_t)64, (unsigned short)1, (size_t)8, (size_t)4, stream); }
static CUresult op_set2d32(void) { return cu(cuMemsetD2D32Async, at, (size_t)64, 1u, (size_t)8, (size_t)4, stream); }
static CUresult op_stream(void) { return cu(cuStreamCreate, &stream, 1u); }
static CUresult op_stream_priority(void) { return cu(cuStreamCreateWithPriority, &stream, 1u, 0); }
static CUresult op_stream_destroy(void) { return cu(cuStreamDestroy_v2, stream); }
static CUresult op_stream_wait(void) { return cu(cuStreamWaitEvent, stream, event, 0u); }
static CUresult op_event(void) { return cu(cuEventCreate, &event, 0u); }
static CUresult op_record(void) { return cu(cuEventRecord, event, stream); }
static CUresult op_record_flags(void) { return cu(cuEventRecordWithFlags, event, stream, 0u); }
static CUresult op_event_destroy(void) { return cu(cuEventDestroy_v2, event); }
static void nothing(void *unused) { (void)unused; }
static CUresult op_host_func(void) { return cu(cuLaunchHostFunc, stream, nothing, NULL); }
static CUresult op_release(void) { return cu(cuMemRelease, physical); }
static CUresult op_graph_destroy(void) { return cu(cuGraphDestroy, graph); }
static CUresult op_exec_destroy(void) { return cu(cuGraphExecDestroy, exec); }
static CUresult op_graph_upload(void) { return cu(cuGraphUpload, exec, stream); }
static CUresult op_graph_launch(void) { return cu(cuGraphLaunch, exec, stream); }

static CUDA_KERNEL_NODE_PARAMS one_thread(void)
{
    return (CUDA_KERNEL_NODE_PARAMS){.func = function, 1, 1, 1, 1, 1, 1};
}

static CUresult op_node_kernel_set(void)
{
    CUDA_KERNEL_NODE_PARAMS params = one_thread();

    return cu(cuGraphKernelNodeSetParams_v2, node, &params);
}

static const struct {
    const char *op;
    CUresult (*call)(void);
} cases[] = {
    {"launch", op_launch},
    {"free", op_free},
    {"copy_in", op_copy_in},
    {"arena_in", op_arena_in},
    {"arena_out", op_arena_out},
    {"settle", op_settle},
    {"box_in", op_box_in},
    {"box_between", op_box_between},
    {"cuCtxSetCacheConfig", op_ctx_cache},
    {"cuCtxSetSharedMemConfig", op_ctx_shared},
    {"cuModuleUnload", op_module_unload},
    {"cuFuncSetCacheConfig", op_func_cache},
    {"cuFuncSetSharedMemConfig", op_func_shared},
    {"cuLibraryUnload", op_library_unload},
    {"cuKernelSetCacheConfig", op_kernel_cache},
    {"cuLinkDestroy", op_link_destroy},
    {"cuCtxResetPersistingL2Cache", op_reset_l2},
    {"cuMemcpyDtoDAsync_v2", op_copy_between},
    {"cuMemsetD8Async", op_set8},
    {"cuMemsetD16Async", op_set16},
    {"cuMemsetD32Async", op_set32},
    {"cuMemsetD2D8Async", op_set2d8},
    {"cuMemsetD2D16Async", op_set2d16},
    {"cuMemsetD2D32Async", op_set2d32},
    {"cuStreamCreate", op_stream},
    {"cuStreamCreateWithPriority", op_stream_priority},
    {"cuStreamDestroy_v2", op_stream_destroy},
    {"cuStreamWaitEvent", op_stream_wait},
    {"cuEventCreate", op_event},
    {"cuEventRecord", op_record},
    {"cuEventRecordWithFlags", op_record_flags},
    {"cuEventDestroy_v2", op_event_destroy},
    {"host_func", op_host_func},
    {"physical_release", op_release},
    {"node_kernel_set", op_node_kernel_set},
    {"cuGraphDestroy", op_graph_destroy},
    {"cuGraphExecDestroy", op_exec_destroy},
    {"cuGraphUpload", op_graph_upload},
    {"cuGraphLaunch", op_graph_launch},
};

static void make_all(void)
{
    CUmemAllocationProp property = {.type = 1, .location = {.type = 1}};
    CUDA_KERNEL_NODE_PARAMS params;

    must(cuMemAlloc_v2, &at, (size_t)BYTES);
    must(cuMemAlloc_v2, &more, (size_t)(3 * MIB));
    must(cuMemHostAlloc, (void **)&pinned, (size_t)BYTES, 0u);
    must(cuStreamCreate, &stream, 1u);
    must(cuEventCreate, &event, 0u);
    must(cuModuleLoadData, &module, "ptx");
    must(cuModuleGetFunction, &function, module, "none");
    must(cuLibraryLoadData, &library_made, "ptx", NULL, NULL, 0u, NULL, NULL, 0u);
    must(cuLibraryGetKernel, &kernel_made, library_made, "none");
    must(cuLinkCreate_v2, 0u, NULL, NULL, &linker);
    must(cuMemCreate, &physical, (size_t)(2 * MIB), &property, 0ull);
    params = one_thread();
    must(cuGraphCreate, &graph, 0u);
    must(cuGraphAddKernelNode_v2, &node, graph, NULL, (size_t)0, &params);
    must(cuGraphInstantiateWithFlags, &exec, graph, 0ull);
    must(cuCtxSynchronize); /* behind all that was not waited for */
}

/* Freed memory is given back behind the work that may use it: some call that waits tells its error, not always the first. */
static CUresult reaped(void)
{
    CUresult rc = 0;

    for (int tries = 0; rc == 0 && tries < 10000; tries++, usleep(1000))
        rc = cu(cuCtxSynchronize);
    return rc;
}

/* Where `destroy` the next call that waits is the end of the context. */
void case_async(const char *op, const char *armed, bool destroy)
{
    CUcontext context = start();
    CUdeviceptr next;

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        if (strcmp(cases[i].op, op) != 0)
            continue;
        make_all();
        fclose(fopen(armed, "w"));
        say("call", cases[i].call());
        if (destroy) {
            say("next", cu(cuCtxDestroy_v2, context));
            return;
        }
        say("next", strcmp(op, "free") == 0 ? reaped() : cu(cuMemAlloc_v2, &next, (size_t)100));
        say("after", cu(cuMemAlloc_v2, &next, (size_t)100));
        say("not_waited_for", cu(cuMemsetD8Async, at, (unsigned char)1, (size_t)1, NULL));
        return;
    }
    exit(2);
}
