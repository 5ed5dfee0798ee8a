/* Graphs and executable graphs: the driver's, with a table of the nodes, which are numbers on the wire. */
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- what is behind their handles ---- */

void kp_graph_free(void *object)
{
    struct kp_graph *graph = object;

    if (graph->graph != NULL)
        graph->driver->cuGraphDestroy(graph->graph);
    free(graph->node);
    free(graph);
}

void kp_exec_free(void *object)
{
    struct kp_exec *exec = object;

    if (exec->exec != NULL)
        exec->driver->cuGraphExecDestroy(exec->exec);
    free(exec);
}

CUresult kp_graph_of(struct kp_server *s, uint64_t number, struct kp_graph **graph)
{
    void *object;
    CUresult rc = kp_resolve(s, number, KP_GRAPH, &object);

    *graph = object;
    return rc;
}

CUresult kp_graph_node(const struct kp_graph *graph, uint64_t index, CUgraphNode *node)
{
    *node = index < graph->nodes ? graph->node[index] : NULL;
    return *node != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

bool kp_graph_room(struct kp_graph *graph)
{
    uint32_t room = graph->room > 0 ? 2 * graph->room : 16;
    CUgraphNode *node;

    if (graph->nodes < graph->room)
        return true;
    if (graph->nodes >= KP_NODES_MAX || (node = realloc(graph->node, room * sizeof *node)) == NULL)
        return false;
    graph->node = node;
    graph->room = room;
    return true;
}

/* The numbers of a captured graph's nodes are their places in the driver's list. */
static CUresult number_nodes(struct kp_graph *graph)
{
    size_t count = 0;
    CUresult rc = graph->driver->cuGraphGetNodes(graph->graph, NULL, &count);

    if (rc != CUDA_SUCCESS || count == 0)
        return rc;
    if (count > KP_NODES_MAX || (graph->node = calloc(count, sizeof *graph->node)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    graph->room = graph->nodes = (uint32_t)count;
    return graph->driver->cuGraphGetNodes(graph->graph, graph->node, &count);
}

/* Takes `made`, whatever it answers. */
static int enter(struct kp_server *s, struct kp_work *w, uint64_t number, struct kp_graph *made)
{
    int rc = kp_adopt(s, w, number, KP_GRAPH, made);

    if (rc != 0)
        kp_graph_free(made);
    return rc;
}

static struct kp_graph *wrap(struct kp_server *s, CUgraph graph)
{
    struct kp_graph *made = calloc(1, sizeof *made);

    if (made == NULL)
        s->driver.cuGraphDestroy(graph);
    else
        *made = (struct kp_graph){.driver = &s->driver, .graph = graph};
    return made;
}

int kp_graph_adopt(struct kp_server *s, struct kp_work *w, uint64_t number, CUgraph graph)
{
    struct kp_graph *made = wrap(s, graph);
    int rc = made != NULL ? number_nodes(made) : CUDA_ERROR_OUT_OF_MEMORY;

    if (rc == CUDA_SUCCESS)
        return enter(s, w, number, made);
    if (made != NULL)
        kp_graph_free(made);
    return rc;
}

int kp_do_graph_create(struct kp_server *s, struct kp_work *w)
{
    CUgraph graph = NULL;
    int rc = s->driver.cuGraphCreate(&graph, 0);

    return rc == CUDA_SUCCESS ? kp_graph_adopt(s, w, w->in[KP_GRAPH_CREATE_HANDLE], graph) : rc;
}

int kp_do_graph_clone(struct kp_server *s, struct kp_work *w)
{
    struct kp_graph *from, *made;
    CUgraph graph = NULL;
    int rc = kp_graph_of(s, w->in[KP_GRAPH_CLONE_GRAPH], &from);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuGraphClone(&graph, from->graph);
    if (rc != CUDA_SUCCESS)
        return rc;
    if ((made = wrap(s, graph)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->node = calloc(from->nodes + 1, sizeof *made->node);
    made->room = made->nodes = made->node != NULL ? from->nodes : 0;
    rc = made->node != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    for (uint32_t i = 0; i < made->nodes && rc == CUDA_SUCCESS; i++)
        if (from->node[i] != NULL)
            rc = s->driver.cuGraphNodeFindInClone(&made->node[i], from->node[i], graph);
    if (rc == CUDA_SUCCESS)
        return enter(s, w, w->in[KP_GRAPH_CLONE_HANDLE], made);
    kp_graph_free(made);
    return rc;
}

int kp_do_cuGraphDestroy(struct kp_server *s, struct kp_work *w)
{
    struct kp_graph *graph;
    int rc = kp_graph_of(s, w->in[0], &graph);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = s->driver.cuGraphDestroy(graph->graph); /* here and not with its handle, so that its error is told */
    graph->graph = NULL;
    kp_forget(s, w->in[0]);
    return rc;
}

/* ---- executable ones ---- */

int kp_do_graph_exec(struct kp_server *s, struct kp_work *w)
{
    struct kp_exec *exec = calloc(1, sizeof *exec);
    struct kp_graph *graph;
    size_t count = 0;
    int rc = kp_graph_of(s, w->in[KP_GRAPH_EXEC_GRAPH], &graph);

    if (exec == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    exec->driver = &s->driver;
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuGraphGetNodes(graph->graph, NULL, &count);
    exec->launches = count > 0 && count <= KP_NODES_MAX ? (unsigned)count : 1;
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuGraphInstantiateWithFlags(&exec->exec, graph->graph, w->in[KP_GRAPH_EXEC_FLAGS]);
    if (rc != CUDA_SUCCESS) {
        free(exec);
        return rc;
    }
    if ((rc = kp_own_charge(s)) == CUDA_SUCCESS)
        rc = kp_adopt(s, w, w->in[KP_GRAPH_EXEC_HANDLE], KP_EXEC, exec);
    if (rc != CUDA_SUCCESS)
        kp_exec_free(exec);
    return rc;
}

static CUresult exec_of(struct kp_server *s, uint64_t number, struct kp_exec **exec)
{
    void *object;
    CUresult rc = kp_resolve(s, number, KP_EXEC, &object);

    *exec = object;
    return rc;
}

unsigned kp_exec_launches(struct kp_server *s, uint64_t number)
{
    struct kp_exec *exec;

    return exec_of(s, number, &exec) == CUDA_SUCCESS ? exec->launches : 0;
}

static uint32_t index_of(const struct kp_graph *graph, CUgraphNode node)
{
    for (uint32_t i = 0; i < graph->nodes && node != NULL; i++)
        if (graph->node[i] == node)
            return i;
    return KP_NO_NODE;
}

int kp_do_exec_update(struct kp_server *s, struct kp_work *w)
{
    struct kp_update *update = calloc(1, sizeof *update);
    CUgraphExecUpdateResultInfo info = {0};
    struct kp_graph *graph;
    struct kp_exec *exec;
    int rc = exec_of(s, w->in[KP_EXEC_UPDATE_EXEC], &exec);

    if ((w->give = update) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    w->give_bytes = sizeof *update;
    update->node = KP_NO_NODE;
    if (rc == CUDA_SUCCESS)
        rc = kp_graph_of(s, w->in[KP_EXEC_UPDATE_GRAPH], &graph);
    if (rc != CUDA_SUCCESS)
        return rc;
    rc = s->driver.cuGraphExecUpdate_v2(exec->exec, graph->graph, &info);
    *update = (struct kp_update){info.result, index_of(graph, info.errorNode)};
    return rc;
}

int kp_do_cuGraphExecDestroy(struct kp_server *s, struct kp_work *w)
{
    struct kp_exec *exec;
    int rc = exec_of(s, w->in[0], &exec);

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = s->driver.cuGraphExecDestroy(exec->exec);
    exec->exec = NULL;
    kp_forget(s, w->in[0]);
    return rc;
}

int kp_do_cuGraphUpload(struct kp_server *s, struct kp_work *w)
{
    struct kp_exec *exec;
    void *stream;
    int rc = exec_of(s, w->in[0], &exec);

    if (rc == CUDA_SUCCESS)
        rc = kp_resolve(s, w->in[1], KP_STREAM, &stream);
    return rc == CUDA_SUCCESS ? s->driver.cuGraphUpload(exec->exec, stream) : rc;
}

/* Waited for where a launch is. */
int kp_do_cuGraphLaunch(struct kp_server *s, struct kp_work *w)
{
    struct kp_exec *exec;
    void *stream;
    int rc = exec_of(s, w->in[0], &exec);

    if (rc == CUDA_SUCCESS)
        rc = kp_resolve(s, w->in[1], KP_STREAM, &stream);
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuGraphLaunch(exec->exec, stream);
    return rc == CUDA_SUCCESS && w->wanted && !kp_capturing(s, stream) ? s->driver.cuStreamSynchronize(stream) : rc;
}
