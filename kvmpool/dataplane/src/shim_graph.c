/* Graphs as the program sees them. A node's handle stands for a graph and its number there, which is what travels. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

struct nodes {
    uint64_t original; /* whose clone it is, or 0 */
    uint32_t count, room;
    uint64_t *handle; /* by number; 0: nobody has asked for it yet */
};

void kp_graph_free(void *object)
{
    struct nodes *nodes = object;

    if (nodes != NULL)
        free(nodes->handle);
    free(nodes);
}

/* ---- with `tx` held ---- */

CUresult kp_graph_number(CUgraph graph, uint64_t *number)
{
    return kp_object_number(KP_GRAPH, graph, number);
}

CUresult kp_node_number(CUgraphNode node, uint64_t *graph, uint32_t *number)
{
    const struct kp_handle *entry = kp_handles_get(&kp_shim.handles, (uint64_t)(uintptr_t)node, KP_NODE);

    if (entry == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = entry->parent;
    *number = (uint32_t)(uintptr_t)entry->value;
    return CUDA_SUCCESS;
}

static struct nodes *nodes_of(uint64_t graph)
{
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, graph, KP_GRAPH);

    return entry != NULL ? entry->value : NULL;
}

/* Room for the nodes up to `count`. */
static bool make_room(struct nodes *nodes, uint32_t count)
{
    uint32_t room = nodes->room > 0 ? nodes->room : 16;
    uint64_t *handle;

    while (room < count)
        room *= 2;
    if (room == nodes->room)
        return true;
    if (count > KP_NODES_MAX || (handle = realloc(nodes->handle, room * sizeof *handle)) == NULL)
        return false;
    memset(handle + nodes->room, 0, (room - nodes->room) * sizeof *handle);
    nodes->handle = handle;
    nodes->room = room;
    return true;
}

CUgraphNode kp_node_of(uint64_t graph, uint32_t number)
{
    struct nodes *nodes = nodes_of(graph);

    if (nodes == NULL || number >= nodes->count)
        return NULL;
    if (nodes->handle[number] == 0)
        nodes->handle[number] = kp_handles_new(&kp_shim.handles, KP_NODE, (void *)(uintptr_t)number, graph);
    return (CUgraphNode)(uintptr_t)nodes->handle[number];
}

CUgraphNode kp_node_next(uint64_t graph, uint32_t *number)
{
    struct nodes *nodes = nodes_of(graph);
    CUgraphNode made;

    if (nodes == NULL || !make_room(nodes, nodes->count + 1))
        return NULL;
    *number = nodes->count++;
    if ((made = kp_node_of(graph, *number)) == NULL)
        nodes->count--;
    return made;
}

void kp_node_undo(uint64_t graph, uint32_t number)
{
    struct nodes *nodes = nodes_of(graph);

    if (nodes == NULL || number + 1 != nodes->count)
        return;
    kp_handles_drop(&kp_shim.handles, nodes->handle[number]);
    nodes->handle[number] = 0;
    nodes->count--;
}

/* ---- graphs ---- */

CUresult kp_graph_has(uint64_t graph, uint32_t count)
{
    struct nodes *nodes = calloc(1, sizeof *nodes);
    struct kp_handle *entry;
    bool fine;

    pthread_mutex_lock(&kp_shim.tx);
    entry = kp_handles_get(&kp_shim.handles, graph, KP_GRAPH);
    fine = nodes != NULL && entry != NULL && make_room(nodes, count);
    if (fine) {
        nodes->count = count;
        entry->value = nodes;
    } else {
        kp_graph_free(nodes);
    }
    pthread_mutex_unlock(&kp_shim.tx);
    return fine ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Asks for a graph that will have `count` nodes; with `tx` held, which it gives back. in[at]: its handle. */
static CUresult make(uint16_t op, uint64_t *in, unsigned fields, unsigned at, uint32_t count, CUgraph *out)
{
    struct kp_answer answer = {0};
    CUresult rc;

    if ((in[at] = kp_object_new(KP_GRAPH)) == 0)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    rc = kp_ask(op, in, fields, NULL, 0, &answer);
    if (rc == CUDA_SUCCESS)
        rc = kp_graph_has(in[at], count);
    if (rc == CUDA_SUCCESS)
        *out = (CUgraph)(uintptr_t)in[at];
    else
        kp_object_lose(in[at]);
    return rc;
}

CUresult kp_cuGraphCreate(CUgraph *phGraph, unsigned int flags)
{
    uint64_t in[KP_GRAPH_CREATE_IN];
    CUresult rc;

    if (phGraph == NULL || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    rc = kp_enter();
    return rc == CUDA_SUCCESS ? make(KP_OP_graph_create, in, KP_GRAPH_CREATE_IN, KP_GRAPH_CREATE_HANDLE, 0, phGraph) : rc;
}

CUresult kp_cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)
{
    uint64_t in[KP_GRAPH_CLONE_IN];
    struct nodes *nodes;
    CUresult rc;

    if (phGraphClone == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = kp_enter()) != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_graph_number(originalGraph, &in[KP_GRAPH_CLONE_GRAPH])) != CUDA_SUCCESS)
        return kp_leave(rc);
    if ((nodes = nodes_of(in[KP_GRAPH_CLONE_GRAPH])) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    rc = make(KP_OP_graph_clone, in, KP_GRAPH_CLONE_IN, KP_GRAPH_CLONE_HANDLE, nodes->count, phGraphClone);
    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    if ((nodes = nodes_of(in[KP_GRAPH_CLONE_HANDLE])) != NULL)
        nodes->original = in[KP_GRAPH_CLONE_GRAPH];
    return kp_leave(rc);
}

/* A clone's nodes have the numbers of the original's. */
CUresult kp_cuGraphNodeFindInClone(CUgraphNode *phNode, CUgraphNode hOriginalNode, CUgraph hClonedGraph)
{
    uint64_t graph, clone;
    const struct nodes *nodes;
    uint32_t number;
    CUresult rc = phNode == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_graph_number(hClonedGraph, &clone)) == CUDA_SUCCESS)
        rc = kp_node_number(hOriginalNode, &graph, &number);
    if (rc == CUDA_SUCCESS && ((nodes = nodes_of(clone)) == NULL || nodes->original != graph || (*phNode = kp_node_of(clone, number)) == NULL))
        rc = CUDA_ERROR_INVALID_VALUE;
    return kp_leave(rc);
}

CUresult kp_cuGraphDestroyNode(CUgraphNode hNode)
{
    uint64_t in[KP_NODE_DESTROY_IN], handle = (uint64_t)(uintptr_t)hNode;
    struct kp_answer answer = {0};
    uint32_t number;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_node_number(hNode, &in[KP_NODE_DESTROY_GRAPH], &number)) != CUDA_SUCCESS)
        return kp_leave(rc);
    in[KP_NODE_DESTROY_NODE] = number;
    kp_handles_drop(&kp_shim.handles, handle);
    return kp_ask(KP_OP_node_destroy, in, KP_NODE_DESTROY_IN, NULL, 0, &answer);
}

/* ---- questions ---- */

struct question {
    uint64_t in[KP_GRAPH_LIST_IN];
    uint32_t *told;
    size_t count;
};

/* With `tx` held, which it gives back; `told` is to be freed. */
static CUresult ask(struct question *q, enum kp_list what)
{
    struct kp_answer answer = {.room = KP_LIST_MAX * sizeof *q->told};
    CUresult rc;

    q->in[KP_GRAPH_LIST_WHAT] = what;
    if ((answer.bytes = q->told = malloc(answer.room)) == NULL)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    rc = kp_ask(KP_OP_graph_list, q->in, KP_GRAPH_LIST_IN, NULL, 0, &answer);
    q->count = answer.got / sizeof *q->told;
    return rc;
}

/* As CUDA gives lists: only how many, or as many as there is room for, with NULL behind them. */
static CUresult give(const struct question *q, unsigned step, unsigned at, CUgraphNode *out, size_t room)
{
    CUresult rc = CUDA_SUCCESS;

    pthread_mutex_lock(&kp_shim.tx);
    for (size_t i = 0; i < room && rc == CUDA_SUCCESS; i++) {
        out[i] = i < q->count / step ? kp_node_of(q->in[KP_GRAPH_LIST_GRAPH], q->told[i * step + at]) : NULL;
        if (i < q->count / step && out[i] == NULL)
            rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&kp_shim.tx);
    return rc;
}

static CUresult answer(struct question *q, CUresult rc, unsigned step, CUgraphNode *first, CUgraphNode *second, size_t *count)
{
    size_t room = *count, all = q->count / step;

    if (rc == CUDA_SUCCESS && first != NULL)
        rc = give(q, step, 0, first, room);
    if (rc == CUDA_SUCCESS && second != NULL)
        rc = give(q, step, 1, second, room);
    if (rc == CUDA_SUCCESS)
        *count = first != NULL && room < all ? room : all;
    free(q->told);
    return rc;
}

static CUresult list_graph(CUgraph graph, enum kp_list what, CUgraphNode *first, CUgraphNode *second, size_t *count)
{
    struct question q = {0};
    CUresult rc = count == NULL || (what == KP_LIST_EDGES && !first != !second) ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_graph_number(graph, &q.in[KP_GRAPH_LIST_GRAPH])) != CUDA_SUCCESS)
        return kp_leave(rc);
    rc = ask(&q, what);
    return answer(&q, rc, what == KP_LIST_EDGES ? 2 : 1, first, second, count);
}

/* Takes `tx` where it answers 0. */
static CUresult enter_node(struct question *q, CUgraphNode node)
{
    uint32_t number;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_node_number(node, &q->in[KP_GRAPH_LIST_GRAPH], &number)) != CUDA_SUCCESS)
        return kp_leave(rc);
    q->in[KP_GRAPH_LIST_NODE] = number;
    return rc;
}

static CUresult list_around(CUgraphNode node, enum kp_list what, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count)
{
    struct question q = {0};
    CUresult rc = count == NULL ? CUDA_ERROR_INVALID_VALUE : enter_node(&q, node);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = ask(&q, what);
    rc = answer(&q, rc, 1, nodes, NULL, count);
    if (rc == CUDA_SUCCESS && data != NULL && nodes != NULL)
        memset(data, 0, *count * sizeof *data);
    return rc;
}

CUresult kp_cuGraphGetNodes(CUgraph hGraph, CUgraphNode *nodes, size_t *numNodes)
{
    return list_graph(hGraph, KP_LIST_NODES, nodes, NULL, numNodes);
}

CUresult kp_cuGraphGetRootNodes(CUgraph hGraph, CUgraphNode *rootNodes, size_t *numRootNodes)
{
    return list_graph(hGraph, KP_LIST_ROOTS, rootNodes, NULL, numRootNodes);
}

CUresult kp_cuGraphGetEdges_v2(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edgeData, size_t *numEdges)
{
    CUresult rc = list_graph(hGraph, KP_LIST_EDGES, from, to, numEdges);

    if (rc == CUDA_SUCCESS && edgeData != NULL && from != NULL)
        memset(edgeData, 0, *numEdges * sizeof *edgeData);
    return rc;
}

CUresult kp_cuGraphGetEdges(CUgraph hGraph, CUgraphNode *from, CUgraphNode *to, size_t *numEdges)
{
    return kp_cuGraphGetEdges_v2(hGraph, from, to, NULL, numEdges);
}

CUresult kp_cuGraphNodeGetDependencies_v2(CUgraphNode hNode, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count)
{
    return list_around(hNode, KP_LIST_NEEDS, nodes, data, count);
}

CUresult kp_cuGraphNodeGetDependencies(CUgraphNode hNode, CUgraphNode *nodes, size_t *count)
{
    return list_around(hNode, KP_LIST_NEEDS, nodes, NULL, count);
}

CUresult kp_cuGraphNodeGetDependentNodes_v2(CUgraphNode hNode, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count)
{
    return list_around(hNode, KP_LIST_NEEDED_BY, nodes, data, count);
}

CUresult kp_cuGraphNodeGetDependentNodes(CUgraphNode hNode, CUgraphNode *nodes, size_t *count)
{
    return list_around(hNode, KP_LIST_NEEDED_BY, nodes, NULL, count);
}

CUresult kp_cuGraphNodeGetType(CUgraphNode hNode, CUgraphNodeType *type)
{
    struct question q = {0};
    CUresult rc = type == NULL ? CUDA_ERROR_INVALID_VALUE : enter_node(&q, hNode);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = ask(&q, KP_LIST_TYPE);
    if (rc == CUDA_SUCCESS && q.count != 1)
        rc = CUDA_ERROR_UNKNOWN;
    if (rc == CUDA_SUCCESS)
        *type = (CUgraphNodeType)q.told[0];
    free(q.told);
    return rc;
}
