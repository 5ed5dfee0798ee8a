/* Nodes that a program adds itself. Kernels are checked and packed here as launches are; each node waits for the worker's answer. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

/* A node that is being added: its fields begin with graph, node and how many it needs; its tail with those. */
struct adding {
    uint64_t in[KP_IN_MAX];
    CUgraphNode made;
    uint32_t number, tail_bytes;
    unsigned char *tail;
};

static CUresult read_needs(struct adding *a, const CUgraphNode *needs, size_t count)
{
    uint64_t graph;
    uint32_t number;

    for (size_t i = 0; i < count; i++) {
        CUresult rc = kp_node_number(needs[i], &graph, &number);
        if (rc != CUDA_SUCCESS || graph != a->in[KP_NODE_KERNEL_GRAPH])
            return CUDA_ERROR_INVALID_VALUE;
        for (size_t j = 0; j < i; j++)
            if (needs[j] == needs[i])
                return CUDA_ERROR_INVALID_VALUE;
        memcpy(a->tail + i * sizeof number, &number, sizeof number);
    }
    return CUDA_SUCCESS;
}

static CUresult fail(struct adding *a, CUresult rc)
{
    if (a->made != NULL)
        kp_node_undo(a->in[KP_NODE_KERNEL_GRAPH], a->number);
    free(a->tail);
    return kp_leave(rc);
}

/* Takes `tx` where it answers 0; `room`: of the tail behind the needs. */
static CUresult begin(struct adding *a, const CUgraphNode *out, CUgraph graph, const CUgraphNode *needs, size_t count, size_t room)
{
    CUresult rc;

    memset(a, 0, sizeof *a);
    if (out == NULL || (count > 0 && needs == NULL))
        return CUDA_ERROR_INVALID_VALUE;
    if (count > KP_NEEDS_MAX)
        return kp_unsupported("cuGraphAddNode that needs more than 4096 nodes");
    if ((a->tail = malloc(count * sizeof(uint32_t) + room + 1)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if ((rc = kp_enter()) != CUDA_SUCCESS) {
        free(a->tail);
        return rc;
    }
    rc = kp_graph_number(graph, &a->in[KP_NODE_KERNEL_GRAPH]);
    if (rc == CUDA_SUCCESS)
        rc = read_needs(a, needs, count);
    a->in[KP_NODE_KERNEL_NEEDS] = count;
    a->tail_bytes = (uint32_t)(count * sizeof(uint32_t));
    if (rc == CUDA_SUCCESS && (a->made = kp_node_next(a->in[KP_NODE_KERNEL_GRAPH], &a->number)) == NULL)
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    a->in[KP_NODE_KERNEL_NODE] = a->number;
    return rc == CUDA_SUCCESS ? rc : fail(a, rc);
}

/* Sends it and gives `tx` back. */
static CUresult end(struct adding *a, uint16_t op, unsigned fields, CUgraphNode *out)
{
    struct kp_answer answer = {0};
    CUresult rc = kp_ask(op, a->in, fields, a->tail, a->tail_bytes, &answer);

    if (rc == CUDA_SUCCESS) {
        *out = a->made;
        free(a->tail);
        return rc;
    }
    pthread_mutex_lock(&kp_shim.tx);
    return fail(a, rc);
}

/* ---- kernels ---- */

/* With `tx` held: fills what both ops of a kernel node have behind their first three fields. */
static CUresult read_kernel(const CUDA_KERNEL_NODE_PARAMS *params, uint64_t *in, const void **buffer, uint32_t *bytes)
{
    const struct kp_launch launch = {
        .grid = {params->gridDimX, params->gridDimY, params->gridDimZ},
        .block = {params->blockDimX, params->blockDimY, params->blockDimZ},
        .shared = params->sharedMemBytes,
    };
    CUfunction function = params->func != NULL ? params->func : (CUfunction)params->kern;

    if (params->kernelParams != NULL && params->extra != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    in[KP_NODE_KERNEL_FUNCTION] = (uint64_t)(uintptr_t)function;
    for (int i = 0; i < 3; i++) {
        in[KP_NODE_KERNEL_GRID_X + i] = launch.grid[i];
        in[KP_NODE_KERNEL_BLOCK_X + i] = launch.block[i];
    }
    in[KP_NODE_KERNEL_SHARED] = launch.shared;
    return kp_launch_pack(function, &launch, params->kernelParams, params->extra, buffer, bytes);
}

static CUDA_KERNEL_NODE_PARAMS now(const CUDA_KERNEL_NODE_PARAMS_v1 *old)
{
    return (CUDA_KERNEL_NODE_PARAMS){old->func, old->gridDimX, old->gridDimY, old->gridDimZ, old->blockDimX, old->blockDimY,
                                     old->blockDimZ, old->sharedMemBytes, old->kernelParams, old->extra, NULL, NULL};
}

CUresult kp_cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                                    const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
    struct adding a;
    const void *buffer;
    uint32_t bytes;
    CUresult rc;

    if (nodeParams == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = begin(&a, phGraphNode, hGraph, dependencies, numDependencies, KP_PARAM_BYTES_MAX)) != CUDA_SUCCESS)
        return rc;
    if ((rc = read_kernel(nodeParams, a.in, &buffer, &bytes)) != CUDA_SUCCESS)
        return fail(&a, rc);
    memcpy(a.tail + a.tail_bytes, buffer, bytes);
    a.tail_bytes += bytes;
    return end(&a, KP_OP_node_kernel, KP_NODE_KERNEL_IN, phGraphNode);
}

CUresult kp_cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                                 const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    CUDA_KERNEL_NODE_PARAMS params;

    if (nodeParams == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    params = now(nodeParams);
    return kp_cuGraphAddKernelNode_v2(phGraphNode, hGraph, dependencies, numDependencies, &params);
}

/* `exec` 0: of the graph itself. Not waited for: what could be wrong with it was looked at here. */
static CUresult set_kernel(const CUgraphExec *exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params)
{
    uint64_t in[KP_NODE_KERNEL_SET_IN] = {0};
    const void *buffer;
    uint32_t number, bytes;
    CUresult rc = params == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = kp_node_number(node, &in[KP_NODE_KERNEL_SET_GRAPH], &number);
    in[KP_NODE_KERNEL_SET_NODE] = number;
    if (rc == CUDA_SUCCESS && exec != NULL)
        rc = kp_object_number(KP_EXEC, *exec, &in[KP_NODE_KERNEL_SET_EXEC]);
    if (rc == CUDA_SUCCESS)
        rc = read_kernel(params, in, &buffer, &bytes);
    if (rc != CUDA_SUCCESS)
        return kp_leave(rc);
    return kp_send(KP_OP_node_kernel_set, in, KP_NODE_KERNEL_SET_IN, buffer, bytes);
}
_Static_assert((int)KP_NODE_KERNEL_FUNCTION == (int)KP_NODE_KERNEL_SET_FUNCTION &&
               (int)KP_NODE_KERNEL_SHARED == (int)KP_NODE_KERNEL_SET_SHARED, "read_kernel");

CUresult kp_cuGraphKernelNodeSetParams_v2(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
    return set_kernel(NULL, hNode, nodeParams);
}

CUresult kp_cuGraphKernelNodeSetParams(CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    CUDA_KERNEL_NODE_PARAMS params;

    if (nodeParams == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    params = now(nodeParams);
    return set_kernel(NULL, hNode, &params);
}

CUresult kp_cuGraphExecKernelNodeSetParams_v2(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
    return set_kernel(&hGraphExec, hNode, nodeParams);
}

CUresult kp_cuGraphExecKernelNodeSetParams(CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    CUDA_KERNEL_NODE_PARAMS params;

    if (nodeParams == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    params = now(nodeParams);
    return set_kernel(&hGraphExec, hNode, &params);
}

/* ---- memory ---- */

/* A node is of the current context: the worker's other ones are not told apart here. */
static CUresult check_context(CUcontext context)
{
    if (kp_context_of((uint64_t)(uintptr_t)context) == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    return (uint64_t)(uintptr_t)context == kp_current() ? CUDA_SUCCESS : kp_unsupported("a graph's node of a context that is not current");
}

CUresult kp_cuGraphAddMemsetNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                                 const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx)
{
    const CUDA_MEMSET_NODE_PARAMS *set = memsetParams;
    struct adding a;
    CUresult rc;

    if (set == NULL || (set->elementSize != 1 && set->elementSize != 2 && set->elementSize != 4) || set->width == 0 || set->height == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = begin(&a, phGraphNode, hGraph, dependencies, numDependencies, 0)) != CUDA_SUCCESS)
        return rc;
    if ((rc = check_context(ctx)) == CUDA_SUCCESS)
        rc = kp_device_number(set->dst, set->elementSize, set->width, set->height, set->pitch, &a.in[KP_NODE_FILL_VA]);
    if (rc != CUDA_SUCCESS)
        return fail(&a, rc);
    a.in[KP_NODE_FILL_PITCH] = set->pitch;
    a.in[KP_NODE_FILL_VALUE] = set->value;
    a.in[KP_NODE_FILL_ELEMENT] = set->elementSize;
    a.in[KP_NODE_FILL_WIDTH] = set->width;
    a.in[KP_NODE_FILL_HEIGHT] = set->height;
    return end(&a, KP_OP_node_fill, KP_NODE_FILL_IN, phGraphNode);
}

CUresult kp_cuGraphAddMemcpyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                                 const CUDA_MEMCPY3D *copyParams, CUcontext ctx)
{
    struct adding a;
    CUresult rc;

    if (copyParams == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = begin(&a, phGraphNode, hGraph, dependencies, numDependencies, 0)) != CUDA_SUCCESS)
        return rc;
    if ((rc = check_context(ctx)) == CUDA_SUCCESS)
        rc = kp_box_node(copyParams, a.in);
    if (rc != CUDA_SUCCESS)
        return fail(&a, rc);
    return end(&a, KP_OP_node_copy, KP_NODE_COPY_IN, phGraphNode);
}

/* ---- shape ---- */

CUresult kp_cuGraphAddEmptyNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies)
{
    struct adding a;
    CUresult rc = begin(&a, phGraphNode, hGraph, dependencies, numDependencies, 0);

    return rc == CUDA_SUCCESS ? end(&a, KP_OP_node_graph, KP_NODE_GRAPH_IN, phGraphNode) : rc;
}

CUresult kp_cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                                     CUgraph childGraph)
{
    struct adding a;
    CUresult rc;

    if (childGraph == hGraph)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = begin(&a, phGraphNode, hGraph, dependencies, numDependencies, 0)) != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_graph_number(childGraph, &a.in[KP_NODE_GRAPH_CHILD])) != CUDA_SUCCESS)
        return fail(&a, rc);
    return end(&a, KP_OP_node_graph, KP_NODE_GRAPH_IN, phGraphNode);
}

static CUresult read_edges(uint64_t graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t count,
                           uint32_t *pairs)
{
    const CUgraphEdgeData plain = {0};
    uint64_t of[2];

    for (size_t i = 0; i < count; i++) {
        if (kp_node_number(from[i], &of[0], &pairs[2 * i]) != CUDA_SUCCESS || kp_node_number(to[i], &of[1], &pairs[2 * i + 1]) != CUDA_SUCCESS)
            return CUDA_ERROR_INVALID_VALUE;
        if (of[0] != graph || of[1] != graph)
            return CUDA_ERROR_INVALID_VALUE;
        if (data != NULL && memcmp(&data[i], &plain, sizeof plain) != 0)
            return kp_unsupported("a graph's edge with data");
    }
    return CUDA_SUCCESS;
}

static CUresult change_edges(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t count,
                             bool remove)
{
    uint64_t in[KP_GRAPH_EDGES_IN] = {[KP_GRAPH_EDGES_REMOVE] = remove};
    struct kp_answer answer = {0};
    uint32_t *pairs;
    CUresult rc;

    if (count > 0 && (from == NULL || to == NULL))
        return CUDA_ERROR_INVALID_VALUE;
    if (count > KP_NEEDS_MAX)
        return kp_unsupported("more than 4096 edges of a graph at once");
    if ((pairs = calloc(2 * count + 1, sizeof *pairs)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if ((rc = kp_enter()) == CUDA_SUCCESS) {
        if ((rc = kp_graph_number(graph, &in[KP_GRAPH_EDGES_GRAPH])) == CUDA_SUCCESS)
            rc = read_edges(in[KP_GRAPH_EDGES_GRAPH], from, to, data, count, pairs);
        rc = rc != CUDA_SUCCESS ? kp_leave(rc)
                                : kp_ask(KP_OP_graph_edges, in, KP_GRAPH_EDGES_IN, pairs, (uint32_t)(2 * count * sizeof *pairs), &answer);
    }
    free(pairs);
    return rc;
}

CUresult kp_cuGraphAddDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edgeData,
                                      size_t numDependencies)
{
    return change_edges(hGraph, from, to, edgeData, numDependencies, false);
}

CUresult kp_cuGraphAddDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies)
{
    return change_edges(hGraph, from, to, NULL, numDependencies, false);
}

CUresult kp_cuGraphRemoveDependencies_v2(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *edgeData,
                                         size_t numDependencies)
{
    return change_edges(hGraph, from, to, edgeData, numDependencies, true);
}

CUresult kp_cuGraphRemoveDependencies(CUgraph hGraph, const CUgraphNode *from, const CUgraphNode *to, size_t numDependencies)
{
    return change_edges(hGraph, from, to, NULL, numDependencies, true);
}
