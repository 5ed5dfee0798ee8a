/* Graph cases of tests/dataplane/test_graphs.py: each says what it computed and what was answered, so that a run on the card's own
 * driver and a run through shim, relay and session can be compared line by line. Nothing here depends on time or addresses.
 *
 * usage: graph_cases KERNELS.ptx CASE
 */
#define _GNU_SOURCE
#include "guest.h"

void *library;
static char *kernels;

enum { N = 4096, BYTES = N * (int)sizeof(int), GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2, NON_BLOCKING = 1 };

static CUfunction mix, twice;
static CUcontext context;
static CUdeviceptr at, twin;
static CUstream stream, other;
static CUevent event, joined;
static int n = N, rounds = 3;
static void *params[] = {&at, &n, &rounds}, *twin_params[] = {&twin, &n, &rounds};

/* FNV-1a of what is on the card, as one line. */
static void say_card(const char *name, CUdeviceptr from)
{
    static unsigned char back[BYTES];
    uint64_t hash = 14695981039346656037ull;

    must(cuMemcpyDtoH_v2, back, from, (size_t)BYTES);
    for (size_t i = 0; i < sizeof back; i++)
        hash = (hash ^ back[i]) * 1099511628211ull;
    printf("%s=%016llx\n", name, (unsigned long long)hash);
}

static void prepare(void)
{
    CUmodule module;

    context = start();
    must(cuModuleLoadData, &module, kernels);
    must(cuModuleGetFunction, &mix, module, "mix");
    must(cuModuleGetFunction, &twice, module, "twice");
    must(cuMemAlloc_v2, &at, (size_t)BYTES);
    must(cuMemAlloc_v2, &twin, (size_t)BYTES);
    must(cuMemsetD32_v2, at, 7u, (size_t)N);
    must(cuMemsetD32_v2, twin, 9u, (size_t)N);
    must(cuStreamCreate, &stream, (unsigned)NON_BLOCKING);
    must(cuStreamCreate, &other, (unsigned)NON_BLOCKING);
    must(cuEventCreate, &event, 2u);
    must(cuEventCreate, &joined, 2u);
    must(cuCtxSynchronize);
}

static CUresult run(CUfunction f, CUstream in, void **with)
{
    return cu(cuLaunchKernel, f, (unsigned)(N + 63) / 64, 1u, 1u, 64u, 1u, 1u, 0u, in, with, NULL);
}

static void begin(CUstream in)
{
    must(cuStreamBeginCapture_v2, in, (int)GLOBAL);
}

/* How a capture ends that something made invalid, and that the stream is free again. */
static void say_end(const char *name, CUstream in)
{
    CUgraph graph = (CUgraph)1;
    int status = 9;

    say("status", (cu(cuStreamIsCapturing, in, &status), status));
    say(name, cu(cuStreamEndCapture, in, &graph));
    say("no_graph", graph == NULL);
    must(cuStreamIsCapturing, in, &status);
    say("status_after", status);
    say("runs_again", run(mix, in, params));
    must(cuStreamSynchronize, in);
}

static CUgraphExec instantiate(CUgraph graph)
{
    CUgraphExec exec;

    must(cuGraphInstantiateWithFlags, &exec, graph, 0ull);
    return exec;
}

static void say_shape(CUgraph graph)
{
    CUgraphNode node[32], from[64], to[64], roots[32];
    size_t nodes = 32, edges = 64, count = 32, none = 0;
    int type, types[8] = {0};

    must(cuGraphGetNodes, graph, NULL, &none);
    must(cuGraphGetNodes, graph, node, &nodes);
    say("nodes", nodes);
    say("nodes_asked", none);
    say("behind_them", node[31] == NULL);
    must(cuGraphGetRootNodes, graph, roots, &count);
    say("roots", count);
    must(cuGraphGetEdges, graph, from, to, &edges);
    say("edges", edges);
    for (size_t i = 0; i < nodes; i++) {
        size_t needs = 32, needed = 32;
        must(cuGraphNodeGetType, node[i], &type);
        types[type]++;
        must(cuGraphNodeGetDependencies, node[i], roots, &needs);
        must(cuGraphNodeGetDependentNodes, node[i], roots, &needed);
        printf("node=%d needs %zu needed by %zu\n", type, needs, needed);
    }
    printf("types=%d %d %d %d %d %d\n", types[0], types[1], types[2], types[3], types[4], types[5]);
    nodes = 1;
    must(cuGraphGetNodes, graph, node, &nodes);
    say("one", nodes);
}

/* A fork and a join through events, copies and fills in both streams; launched again and again. */
static void case_capture(void)
{
    CUgraph graph;
    CUgraphExec exec;
    int status;
    cuuint64_t id = 0;

    begin(stream);
    must(cuStreamGetCaptureInfo, stream, &status, &id);
    say("active", status);
    say("has_id", id != 0);
    say("first", run(mix, stream, params));
    must(cuEventRecord, event, stream);
    must(cuStreamWaitEvent, other, event, 0u);
    must(cuStreamIsCapturing, other, &status);
    say("joins", status);
    must(cuMemcpyDtoDAsync_v2, twin, at, (size_t)BYTES / 2, other);
    say("second", run(mix, other, twin_params));
    must(cuMemsetD32Async, at, 5u, (size_t)100, stream);
    must(cuMemsetD2D8Async, at + 1024, (size_t)256, (unsigned char)3, (size_t)100, (size_t)4, stream);
    must(cuEventRecord, joined, other);
    must(cuStreamWaitEvent, stream, joined, 0u);
    say("third", run(twice, stream, params));
    must(cuStreamEndCapture, stream, &graph);
    must(cuStreamIsCapturing, other, &status);
    say("left", status);
    say_card("nothing_ran", at);
    say_shape(graph);
    exec = instantiate(graph);
    must(cuGraphDestroy, graph);
    for (int i = 0; i < 5; i++)
        must(cuGraphLaunch, exec, i % 2 ? stream : other);
    must(cuCtxSynchronize);
    say_card("at", at);
    say_card("twin", twin);
    must(cuGraphUpload, exec, stream);
    must(cuGraphLaunch, exec, NULL);
    must(cuGraphLaunch_ptsz, exec, NULL);
    must(cuGraphExecDestroy, exec);
    must(cuCtxSynchronize);
    say_card("at", at);
    say("destroyed", cu(cuGraphLaunch, exec, stream));
    say("destroyed_graph", cu(cuGraphDestroy, graph));
}

/* The per-thread stream, the relaxed mode, and what goes on beside a capture. */
static void case_beside(void)
{
    CUgraph graph;
    CUdeviceptr more;
    int mode = RELAXED, status;

    must(cuStreamBeginCapture_v2_ptsz, NULL, (int)THREAD_LOCAL);
    say("captured", cu(cuLaunchKernel_ptsz, mix, 64u, 1u, 1u, 64u, 1u, 1u, 0u, NULL, params, NULL));
    must(cuStreamIsCapturing_ptsz, NULL, &status);
    say("status", status);
    say("not_captured", run(mix, other, twin_params));
    must(cuStreamSynchronize, other);
    must(cuThreadExchangeStreamCaptureMode, &mode);
    say("mode_before", mode);
    say("alloc", cu(cuMemAlloc_v2, &more, (size_t)4096));
    must(cuThreadExchangeStreamCaptureMode, &mode);
    say("mode_again", mode);
    must(cuStreamEndCapture_ptsz, NULL, &graph);
    must(cuGraphLaunch, instantiate(graph), stream);
    must(cuStreamSynchronize, stream);
    must(cuStreamBeginCapture_v2, stream, (int)RELAXED);
    say("alloc_relaxed", cu(cuMemAlloc_v2, &more, (size_t)4096));
    say("query", cu(cuEventQuery, event));
    must(cuStreamEndCapture, stream, &graph);
    say_shape(graph);
    must(cuGraphLaunch, instantiate(graph), stream);
    must(cuCtxSynchronize);
    say_card("at", at);
    say_card("twin", twin);
}

/* What must not be done while something is captured, each with its own code, and what becomes of the capture. */
static void case_forbidden(void)
{
    CUstream blocking;
    CUdeviceptr more;
    char host[16];
    int status;

    begin(stream);
    say("begin_again", cu(cuStreamBeginCapture_v2, stream, (int)GLOBAL));
    say("synchronise", cu(cuStreamSynchronize, stream));
    say("launch_then", run(mix, stream, params));
    say_end("end", stream);
    begin(stream);
    say("query", cu(cuStreamQuery, stream));
    say_end("end", stream);
    begin(stream);
    say("context", cu(cuCtxSynchronize));
    say_end("end", stream);
    begin(stream);
    say("alloc", cu(cuMemAlloc_v2, &more, (size_t)64));
    say_end("end", stream);
    begin(stream);
    say("alloc_in_order", cu(cuMemAllocAsync, &more, (size_t)64, stream));
    say_end("end", stream);
    begin(stream);
    say("free", cu(cuMemFree_v2, twin));
    say_end("end", stream);
    begin(stream);
    say("event", cu(cuEventQuery, joined));
    say_end("end", stream);
    begin(stream);
    must(cuEventRecord, event, stream);
    say("captured_event", cu(cuEventSynchronize, event));
    say_end("end", stream);
    say("still", cu(cuEventQuery, event));
    must(cuEventRecord, event, other);
    must(cuEventSynchronize, event);
    begin(stream);
    say("outside", cu(cuStreamWaitEvent, stream, event, 0u));
    say_end("end", stream);
    must(cuStreamCreate, &blocking, 0u);
    begin(blocking);
    say("captured", run(mix, blocking, params));
    say("legacy_launch", run(mix, NULL, params));
    say("after_it", run(mix, blocking, params));
    say_end("end", blocking);
    begin(blocking);
    say("legacy_status", cu(cuStreamIsCapturing, NULL, &status));
    say("legacy_copy", cu(cuMemcpyDtoH_v2, host, at, sizeof host));
    say_end("end", blocking);
    begin(blocking);
    say("legacy_record", cu(cuEventRecord, event, NULL));
    say_end("end", blocking);
    begin(stream);
    say("legacy_beside", run(mix, NULL, twin_params)); /* nothing blocks it */
    must(cuStreamSynchronize, NULL);
    must(cuEventDestroy_v2, joined);
    say("begin_legacy", cu(cuStreamBeginCapture_v2, NULL, (int)GLOBAL));
    say("no_such_mode", cu(cuStreamBeginCapture_v2, other, 3));
    CUgraph graph;
    must(cuStreamEndCapture, stream, &graph);
    must(cuGraphDestroy, graph);
    say("not_begun", cu(cuStreamEndCapture, stream, &graph));
}

static void *end_elsewhere(void *unused)
{
    CUgraph graph;

    (void)unused;
    must(cuCtxSetCurrent, context);
    say("elsewhere", cu(cuStreamEndCapture, stream, &graph));
    return NULL;
}

/* Two captures, forks that do not come back, ends in the wrong place. */
static void case_joints(void)
{
    CUgraph graph;
    pthread_t thread;

    begin(stream);
    must(cuEventRecord, event, stream);
    must(cuStreamWaitEvent, other, event, 0u);
    say("forked", run(mix, other, twin_params));
    say("end_of_other", cu(cuStreamEndCapture, other, &graph));
    say_end("end", stream);
    begin(stream);
    must(cuEventRecord, event, stream);
    must(cuStreamWaitEvent, other, event, 0u);
    say("forked", run(mix, other, twin_params));
    say_end("unjoined", stream);
    say("free", run(mix, other, twin_params));
    begin(stream);
    begin(other);
    must(cuEventRecord, event, stream);
    say("merge", cu(cuStreamWaitEvent, other, event, 0u));
    say_end("end_of_one", stream);
    say_end("end_of_other", other);
    begin(stream);
    pthread_create(&thread, NULL, end_elsewhere, NULL);
    pthread_join(thread, NULL);
    say_end("end_here", stream);
    must(cuStreamBeginCapture_v2, stream, (int)RELAXED);
    pthread_create(&thread, NULL, end_elsewhere, NULL);
    pthread_join(thread, NULL);
    begin(other);
    must(cuStreamDestroy_v2, other);
    must(cuStreamSynchronize, stream);
    say_card("at", at);
    say_card("twin", twin);
}

static CUDA_KERNEL_NODE_PARAMS kernel_node(CUfunction f, void **with)
{
    return (CUDA_KERNEL_NODE_PARAMS){.func = f, .gridDimX = N / 64, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 64, .blockDimY = 1,
                                     .blockDimZ = 1, .kernelParams = with};
}

/* Every kind of node that a program adds itself, edges made and unmade, clones, and a graph in a graph. */
static void case_explicit(void)
{
    CUDA_KERNEL_NODE_PARAMS first = kernel_node(mix, params), second = kernel_node(twice, twin_params);
    CUDA_KERNEL_NODE_PARAMS_v1 old = {.func = mix, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 64, .blockDimY = 1,
                                      .blockDimZ = 1, .kernelParams = twin_params};
    CUDA_MEMSET_NODE_PARAMS fill = {.dst = at + 512, .value = 0x11223344, .elementSize = 4, .width = 30, .height = 5, .pitch = 256};
    CUDA_MEMCPY3D copy = {.srcMemoryType = 2, .srcDevice = at, .srcPitch = 128, .srcHeight = 8, .dstMemoryType = 2, .dstDevice = twin,
                          .dstPitch = 256, .dstHeight = 8, .dstXInBytes = 16, .WidthInBytes = 100, .Height = 8, .Depth = 3};
    CUgraphNode a, b, c, d, e, f, found, needs[4];
    CUgraph graph, clone, outer;
    CUgraphExec exec;

    must(cuGraphCreate, &graph, 0u);
    must(cuGraphAddKernelNode_v2, &a, graph, NULL, (size_t)0, &first);
    must(cuGraphAddMemsetNode, &b, graph, &a, (size_t)1, &fill, context);
    must(cuGraphAddMemcpyNode, &c, graph, &b, (size_t)1, &copy, context);
    must(cuGraphAddEmptyNode, &d, graph, NULL, (size_t)0);
    needs[0] = c;
    needs[1] = d;
    must(cuGraphAddKernelNode_v2, &e, graph, needs, (size_t)2, &second);
    must(cuGraphAddKernelNode, &f, graph, NULL, (size_t)0, &old);
    must(cuGraphAddDependencies, graph, &e, &f, (size_t)1);
    say("same_edge", cu(cuGraphAddDependencies, graph, &e, &f, (size_t)1));
    must(cuGraphAddDependencies_v2, graph, &a, &d, NULL, (size_t)1);
    must(cuGraphRemoveDependencies, graph, &a, &d, (size_t)1);
    say("no_edge", cu(cuGraphRemoveDependencies_v2, graph, &a, &d, NULL, (size_t)1));
    say_shape(graph);
    must(cuGraphClone, &clone, graph);
    must(cuGraphNodeFindInClone, &found, f, clone);
    must(cuGraphDestroyNode, found);
    say("no_original", cu(cuGraphNodeFindInClone, &found, found, clone));
    must(cuGraphNodeFindInClone, &found, d, clone);
    must(cuGraphDestroyNode, found);
    say("gone", cu(cuGraphDestroyNode, found));
    say_shape(clone);
    must(cuGraphCreate, &outer, 0u);
    must(cuGraphAddChildGraphNode, &found, outer, NULL, (size_t)0, clone);
    must(cuGraphAddChildGraphNode, &found, outer, &found, (size_t)1, graph);
    must(cuGraphDestroy, clone);
    say_shape(outer);
    must(cuGraphLaunch, instantiate(graph), stream);
    must(cuGraphInstantiate_v2, &exec, outer, &found, NULL, (size_t)0);
    must(cuGraphLaunch, exec, stream);
    must(cuStreamSynchronize, stream);
    say_card("at", at);
    say_card("twin", twin);
    say("foreign_need", cu(cuGraphAddEmptyNode, &found, outer, &a, (size_t)1));
    say("no_params", cu(cuGraphAddKernelNode_v2, &found, graph, NULL, (size_t)0, NULL));
    first.gridDimX = 0;
    say("no_grid", cu(cuGraphAddKernelNode_v2, &found, graph, NULL, (size_t)0, &first));
    fill.dst = at + BYTES - 100;
    say("beyond", cu(cuGraphAddMemsetNode, &found, graph, NULL, (size_t)0, &fill, context));
    fill.elementSize = 3;
    say("element", cu(cuGraphAddMemsetNode, &found, graph, NULL, (size_t)0, &fill, context));
    copy.dstDevice = twin + BYTES - 500;
    say("copy_beyond", cu(cuGraphAddMemcpyNode, &found, graph, NULL, (size_t)0, &copy, context));
    must(cuGraphAddDependencies, graph, &f, &a, (size_t)1);
    say("circle", cu(cuGraphInstantiateWithFlags, &exec, graph, 0ull));
    say("no_flags", cu(cuGraphInstantiateWithFlags, &exec, outer, 64ull));
    say("flags", cu(cuGraphCreate, &graph, 1u));
}

/* Executable graphs that are changed: one kernel's parameters, then all by another graph of the same shape. */
static void case_change(void)
{
    CUDA_KERNEL_NODE_PARAMS first = kernel_node(mix, params), second = kernel_node(twice, params);
    CUDA_GRAPH_INSTANTIATE_PARAMS how = {.flags = 2, .hUploadStream = stream};
    CUgraphExecUpdateResultInfo info;
    CUgraphNode node, then, wrong;
    CUgraph graph, changed;
    CUgraphExec exec, early;
    cuuint64_t flags = 99;
    int result = 9;

    must(cuGraphCreate, &graph, 0u);
    must(cuGraphAddKernelNode_v2, &node, graph, NULL, (size_t)0, &first);
    must(cuGraphAddKernelNode_v2, &then, graph, &node, (size_t)1, &second);
    must(cuGraphInstantiateWithParams, &exec, graph, &how);
    say("made", how.result_out);
    must(cuGraphExecGetFlags, exec, &flags);
    early = instantiate(graph);
    must(cuGraphLaunch, exec, stream);
    first.kernelParams = twin_params;
    must(cuGraphExecKernelNodeSetParams_v2, exec, node, &first); /* the launch under way is not changed */
    must(cuGraphLaunch, exec, stream);
    second.func = mix;
    must(cuGraphKernelNodeSetParams_v2, then, &second);
    must(cuGraphLaunch, early, stream); /* nor what was made before */
    must(cuGraphLaunch, instantiate(graph), stream);
    must(cuStreamSynchronize, stream);
    say_card("at", at);
    say_card("twin", twin);
    first.blockDimX = 4096;
    say("too_large", cu(cuGraphExecKernelNodeSetParams_v2, exec, node, &first));
    say("no_node", cu(cuGraphExecKernelNodeSetParams_v2, exec, (CUgraphNode)exec, &second));
    begin(stream);
    say("captured", run(twice, stream, twin_params));
    say("captured", run(twice, stream, twin_params));
    must(cuStreamEndCapture, stream, &changed);
    say("update", cu(cuGraphExecUpdate_v2, exec, changed, &info));
    say("updated", info.result);
    must(cuGraphLaunch, exec, stream);
    must(cuStreamSynchronize, stream);
    say_card("twin", twin);
    must(cuGraphAddEmptyNode, &wrong, changed, NULL, (size_t)0);
    say("other_shape", cu(cuGraphExecUpdate_v2, exec, changed, &info));
    say("why", info.result);
    must(cuGraphDestroyNode, then);
    must(cuGraphAddEmptyNode, &wrong, graph, &node, (size_t)1);
    say("other_kind", cu(cuGraphExecUpdate, exec, graph, &then, &result));
    say("why", result);
    say("named", then == wrong);
    must(cuGraphLaunch, exec, stream);
    must(cuStreamSynchronize, stream);
    say_card("twin", twin);
}

/* Page-locked host memory at both ends: what is in it counts at each launch. */
static void case_host(void)
{
    CUDA_MEMCPY3D copy = {.srcMemoryType = 2, .srcDevice = at, .dstMemoryType = 1, .WidthInBytes = 400, .Height = 1, .Depth = 1};
    CUgraphNode node;
    CUgraph graph;
    CUgraphExec exec, outward;
    int *pinned, *back;

    must(cuMemHostAlloc, (void **)&pinned, (size_t)BYTES, 0u);
    must(cuMemHostAlloc, (void **)&back, (size_t)BYTES, 0u);
    begin(stream);
    must(cuMemcpyHtoDAsync_v2, at, pinned, (size_t)BYTES, stream);
    say("captured", run(mix, stream, params));
    must(cuMemcpyDtoHAsync_v2, back, at, (size_t)BYTES, stream);
    must(cuStreamEndCapture, stream, &graph);
    say_shape(graph);
    exec = instantiate(graph);
    must(cuGraphCreate, &graph, 0u);
    copy.dstHost = back + 1000;
    must(cuGraphAddMemcpyNode, &node, graph, NULL, (size_t)0, &copy, context);
    outward = instantiate(graph);
    for (int turn = 0; turn < 3; turn++) {
        for (int i = 0; i < N; i++)
            pinned[i] = turn * 1000 + i;
        must(cuGraphLaunch, exec, stream);
        must(cuGraphLaunch, outward, stream);
        must(cuStreamSynchronize, stream);
        printf("back=%d %d %d\n", back[0], back[N - 1], back[1001]);
    }
}

/* A fault in a graph is a launch's fault. */
static void case_wild(void)
{
    CUmodule module;
    CUfunction wild;
    CUgraph graph;
    CUgraphExec exec;

    must(cuModuleLoadData, &module, kernels);
    must(cuModuleGetFunction, &wild, module, "wild");
    begin(stream);
    say("captured", run(wild, stream, params));
    say("captured", run(mix, stream, params));
    must(cuStreamEndCapture, stream, &graph);
    exec = instantiate(graph);
    say("launch", cu(cuGraphLaunch, exec, stream));
    say("synchronise", cu(cuStreamSynchronize, stream));
    say("launch_then", cu(cuGraphLaunch, exec, stream));
    say("destroy", cu(cuCtxDestroy_v2, context));
}

/* LAUNCHES launches of a graph of 20 kernels and one wait. */
static void case_loop(void)
{
    int launches = atoi(getenv("LAUNCHES"));
    CUgraph graph;
    CUgraphExec exec;

    begin(stream);
    for (int i = 0; i < 20; i++)
        must(cuLaunchKernel, mix, 1u, 1u, 1u, 32u, 1u, 1u, 0u, stream, params, NULL);
    must(cuStreamEndCapture, stream, &graph);
    exec = instantiate(graph);
    must(cuStreamSynchronize, stream);
    for (int i = 0; i < launches; i++)
        must(cuGraphLaunch, exec, stream);
    must(cuStreamSynchronize, stream);
    say_card("at", at);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {
        {"capture", case_capture}, {"beside", case_beside}, {"forbidden", case_forbidden}, {"joints", case_joints},
        {"explicit", case_explicit}, {"change", case_change}, {"host", case_host}, {"fault", case_wild}, {"loop", case_loop},
    };
    FILE *file = argc == 3 ? fopen(argv[1], "rb") : NULL;

    kernels = calloc(1, 1 << 20);
    if (file == NULL || fread(kernels, 1, (1 << 20) - 1, file) == 0 || (library = dlopen("libcuda.so.1", RTLD_NOW)) == NULL)
        return 2;
    fclose(file);
    prepare();
    for (unsigned i = 0; i < sizeof cases / sizeof cases[0]; i++)
        if (strcmp(cases[i].name, argv[2]) == 0) {
            cases[i].run();
            return 0;
        }
    return 2;
}
