/* The nodes of a graph: added, changed, taken out. Memory is checked here as for copies and launches. */
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A node that is being added: its number must be the next one of its graph. */
struct adding {
    struct kp_graph *graph;
    CUgraphNode *needs, node;
    uint32_t count;
};

/* All that add a node begin alike: graph, node, how many it needs. The tail is then what follows those. */
static int begin(struct kp_server *s, struct kp_work *w, struct adding *a)
{
    uint64_t count = w->in[KP_NODE_KERNEL_NEEDS];
    uint32_t index;
    int rc = kp_graph_of(s, w->in[KP_NODE_KERNEL_GRAPH], &a->graph);

    a->needs = NULL;
    a->node = NULL;
    a->count = (uint32_t)count;
    if (count > KP_NEEDS_MAX || count * sizeof index > w->tail_bytes)
        return -EPROTO;
    if (rc != CUDA_SUCCESS)
        return rc;
    if (w->in[KP_NODE_KERNEL_NODE] != a->graph->nodes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!kp_graph_room(a->graph) || (a->needs = calloc(count + 1, sizeof *a->needs)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (uint32_t i = 0; i < count && rc == CUDA_SUCCESS; i++) {
        memcpy(&index, w->tail + i * sizeof index, sizeof index);
        rc = kp_graph_node(a->graph, index, &a->needs[i]);
    }
    w->tail += count * sizeof index;
    w->tail_bytes -= (uint32_t)(count * sizeof index);
    return rc;
}

static int end(struct adding *a, int rc)
{
    if (rc == CUDA_SUCCESS)
        a->graph->node[a->graph->nodes++] = a->node;
    free(a->needs);
    return rc;
}
_Static_assert((int)KP_NODE_KERNEL_NEEDS == (int)KP_NODE_FILL_NEEDS && (int)KP_NODE_KERNEL_NEEDS == (int)KP_NODE_COPY_NEEDS &&
               (int)KP_NODE_KERNEL_NEEDS == (int)KP_NODE_GRAPH_NEEDS && KP_NODE_KERNEL_GRAPH == 0 && KP_NODE_KERNEL_NODE == 1, "begin");

/* ---- kernels ---- */

/* A kernel with its packed parameters, which are the tail; `extra` and `bytes` must live as long as `params`. */
struct packed {
    CUDA_KERNEL_NODE_PARAMS params;
    size_t bytes;
    void *extra[5];
};

static int read_kernel(struct kp_server *s, const struct kp_work *w, struct packed *packed)
{
    const uint64_t *in = w->in;
    CUDA_KERNEL_NODE_PARAMS *params = &packed->params;
    void *function;
    int rc = kp_resolve(s, in[KP_NODE_KERNEL_FUNCTION], KP_FUNCTION, &function);

    packed->bytes = w->tail_bytes;
    packed->extra[0] = CU_LAUNCH_PARAM_BUFFER_POINTER;
    packed->extra[1] = (void *)(uintptr_t)w->tail;
    packed->extra[2] = CU_LAUNCH_PARAM_BUFFER_SIZE;
    packed->extra[3] = &packed->bytes;
    packed->extra[4] = CU_LAUNCH_PARAM_END;
    *params = (CUDA_KERNEL_NODE_PARAMS){
        .gridDimX = (unsigned)in[KP_NODE_KERNEL_GRID_X],   .gridDimY = (unsigned)in[KP_NODE_KERNEL_GRID_Y],
        .gridDimZ = (unsigned)in[KP_NODE_KERNEL_GRID_Z],   .blockDimX = (unsigned)in[KP_NODE_KERNEL_BLOCK_X],
        .blockDimY = (unsigned)in[KP_NODE_KERNEL_BLOCK_Y], .blockDimZ = (unsigned)in[KP_NODE_KERNEL_BLOCK_Z],
        .sharedMemBytes = (unsigned)in[KP_NODE_KERNEL_SHARED], .extra = packed->bytes > 0 ? packed->extra : NULL,
    };
    if (kp_handle_kind(in[KP_NODE_KERNEL_FUNCTION]) == KP_KERNEL)
        params->kern = function;
    else
        params->func = function;
    if (rc == CUDA_SUCCESS && params->kern != NULL) /* its library may not be in this context yet */
        rc = kp_have_library(s, w->home, kp_parent_of(s, in[KP_NODE_KERNEL_FUNCTION], KP_KERNEL));
    return rc;
}
_Static_assert((int)KP_NODE_KERNEL_FUNCTION == (int)KP_NODE_KERNEL_SET_FUNCTION &&
               (int)KP_NODE_KERNEL_SHARED == (int)KP_NODE_KERNEL_SET_SHARED, "read_kernel");

int kp_do_node_kernel(struct kp_server *s, struct kp_work *w)
{
    struct packed packed;
    struct adding a;
    int rc = begin(s, w, &a);

    if (rc == CUDA_SUCCESS)
        rc = read_kernel(s, w, &packed);
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuGraphAddKernelNode_v2(&a.node, a.graph->graph, a.needs, a.count, &packed.params);
    return end(&a, rc);
}

int kp_do_node_kernel_set(struct kp_server *s, struct kp_work *w)
{
    uint64_t number = w->in[KP_NODE_KERNEL_SET_EXEC];
    struct packed packed;
    struct kp_graph *graph;
    CUgraphNode node;
    void *exec = NULL;
    int rc = kp_graph_of(s, w->in[KP_NODE_KERNEL_SET_GRAPH], &graph);

    if (rc == CUDA_SUCCESS)
        rc = kp_graph_node(graph, w->in[KP_NODE_KERNEL_SET_NODE], &node);
    if (rc == CUDA_SUCCESS && number != 0)
        rc = kp_resolve(s, number, KP_EXEC, &exec);
    if (rc == CUDA_SUCCESS)
        rc = read_kernel(s, w, &packed);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (number == 0)
        return s->driver.cuGraphKernelNodeSetParams_v2(node, &packed.params);
    return s->driver.cuGraphExecKernelNodeSetParams_v2(((struct kp_exec *)exec)->exec, node, &packed.params);
}

/* ---- memory ---- */

int kp_do_node_fill(struct kp_server *s, struct kp_work *w)
{
    CUDA_MEMSET_NODE_PARAMS set = {
        .dst = w->in[KP_NODE_FILL_VA],         .pitch = w->in[KP_NODE_FILL_PITCH], .value = (unsigned)w->in[KP_NODE_FILL_VALUE],
        .elementSize = (unsigned)w->in[KP_NODE_FILL_ELEMENT], .width = w->in[KP_NODE_FILL_WIDTH], .height = w->in[KP_NODE_FILL_HEIGHT],
    };
    uint64_t row;
    struct adding a;
    int rc = begin(s, w, &a);

    if (rc == CUDA_SUCCESS &&
        (__builtin_mul_overflow(set.width, (uint64_t)set.elementSize, &row) ||
         !kp_box_holds(s, set.dst, row, set.height, 1, set.height > 1 ? set.pitch : row, set.height)))
        rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuGraphAddMemsetNode(&a.node, a.graph->graph, a.needs, a.count, &set, w->home->context);
    return end(&a, rc);
}

/* One end of a copy: card memory, or page-locked memory in the window, whose address is then an offset. */
static bool end_holds(struct kp_server *s, struct kp_work *w, uint64_t at, uint64_t pitch, uint64_t rows, bool window)
{
    const uint64_t *in = &w->in[KP_NODE_COPY_WIDTH]; /* width, height, depth */
    uint64_t span;

    if (!window)
        return kp_box_holds(s, at, in[0], in[1], in[2], pitch, rows);
    if (s->window.base == NULL || !kp_box_span(in[0], in[1], in[2], pitch, rows, &span))
        return false;
    if (at > KP_ARENA_BYTES || span > KP_ARENA_BYTES - at)
        return false;
    kp_arena_register(s, w->home, at, span);
    return true;
}

static CUDA_MEMCPY3D copy_of(const struct kp_server *s, const uint64_t *in)
{
    bool from = (in[KP_NODE_COPY_WINDOW] & 1) != 0, to = (in[KP_NODE_COPY_WINDOW] & 2) != 0;

    return (CUDA_MEMCPY3D){
        .srcMemoryType = from ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE,
        .srcDevice = from ? 0 : in[KP_NODE_COPY_FROM],
        .srcHost = from ? s->window.base + KP_ARENA_AT + in[KP_NODE_COPY_FROM] : NULL,
        .srcPitch = in[KP_NODE_COPY_FROM_PITCH], .srcHeight = in[KP_NODE_COPY_FROM_ROWS],
        .dstMemoryType = to ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE,
        .dstDevice = to ? 0 : in[KP_NODE_COPY_TO],
        .dstHost = to ? s->window.base + KP_ARENA_AT + in[KP_NODE_COPY_TO] : NULL,
        .dstPitch = in[KP_NODE_COPY_TO_PITCH], .dstHeight = in[KP_NODE_COPY_TO_ROWS],
        .WidthInBytes = in[KP_NODE_COPY_WIDTH], .Height = in[KP_NODE_COPY_HEIGHT], .Depth = in[KP_NODE_COPY_DEPTH],
    };
}

int kp_do_node_copy(struct kp_server *s, struct kp_work *w)
{
    const uint64_t *in = w->in;
    uint64_t window = in[KP_NODE_COPY_WINDOW];
    CUDA_MEMCPY3D copy;
    struct adding a;
    int rc = begin(s, w, &a);

    if (rc == CUDA_SUCCESS &&
        (!end_holds(s, w, in[KP_NODE_COPY_FROM], in[KP_NODE_COPY_FROM_PITCH], in[KP_NODE_COPY_FROM_ROWS], window & 1) ||
         !end_holds(s, w, in[KP_NODE_COPY_TO], in[KP_NODE_COPY_TO_PITCH], in[KP_NODE_COPY_TO_ROWS], window & 2)))
        rc = CUDA_ERROR_INVALID_VALUE;
    if (rc == CUDA_SUCCESS) {
        copy = copy_of(s, in);
        rc = s->driver.cuGraphAddMemcpyNode(&a.node, a.graph->graph, a.needs, a.count, &copy, w->home->context);
    }
    return end(&a, rc);
}

/* ---- shape ---- */

int kp_do_node_graph(struct kp_server *s, struct kp_work *w)
{
    uint64_t number = w->in[KP_NODE_GRAPH_CHILD];
    struct kp_graph *child = NULL;
    struct adding a;
    int rc = begin(s, w, &a);

    if (rc == CUDA_SUCCESS && number != 0)
        rc = kp_graph_of(s, number, &child);
    if (rc == CUDA_SUCCESS)
        rc = child != NULL ? s->driver.cuGraphAddChildGraphNode(&a.node, a.graph->graph, a.needs, a.count, child->graph)
                           : s->driver.cuGraphAddEmptyNode(&a.node, a.graph->graph, a.needs, a.count);
    return end(&a, rc);
}

int kp_do_node_destroy(struct kp_server *s, struct kp_work *w)
{
    struct kp_graph *graph;
    CUgraphNode node;
    int rc = kp_graph_of(s, w->in[KP_NODE_DESTROY_GRAPH], &graph);

    if (rc == CUDA_SUCCESS)
        rc = kp_graph_node(graph, w->in[KP_NODE_DESTROY_NODE], &node);
    if (rc == CUDA_SUCCESS && (rc = s->driver.cuGraphDestroyNode(node)) == CUDA_SUCCESS)
        graph->node[w->in[KP_NODE_DESTROY_NODE]] = NULL;
    return rc;
}

int kp_do_graph_edges(struct kp_server *s, struct kp_work *w)
{
    size_t count = w->tail_bytes / (2 * sizeof(uint32_t));
    CUgraphNode *from = calloc(2 * count + 1, sizeof *from), *to = from + count;
    struct kp_graph *graph;
    uint32_t pair[2];
    int rc = kp_graph_of(s, w->in[KP_GRAPH_EDGES_GRAPH], &graph);

    if (from == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; i < count && rc == CUDA_SUCCESS; i++) {
        memcpy(pair, w->tail + i * sizeof pair, sizeof pair);
        rc = kp_graph_node(graph, pair[0], &from[i]);
        if (rc == CUDA_SUCCESS)
            rc = kp_graph_node(graph, pair[1], &to[i]);
    }
    if (rc == CUDA_SUCCESS)
        rc = w->in[KP_GRAPH_EDGES_REMOVE] != 0 ? s->driver.cuGraphRemoveDependencies(graph->graph, from, to, count)
                                               : s->driver.cuGraphAddDependencies(graph->graph, from, to, count);
    free(from);
    return rc;
}
