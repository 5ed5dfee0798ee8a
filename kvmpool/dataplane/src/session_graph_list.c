/* What a guest asks of a graph's shape: the driver's nodes, told as their numbers. */
#include "session_state.h"

#include <stdlib.h>

struct question {
    struct kp_graph *graph;
    uint64_t what;
    CUgraphNode node;
};

/* `first` NULL: only how many there are. */
static CUresult ask(const struct question *q, CUgraphNode *first, CUgraphNode *second, size_t *count)
{
    const struct kp_driver *d = q->graph->driver;

    switch (q->what) {
    case KP_LIST_NODES: return d->cuGraphGetNodes(q->graph->graph, first, count);
    case KP_LIST_ROOTS: return d->cuGraphGetRootNodes(q->graph->graph, first, count);
    case KP_LIST_EDGES: return d->cuGraphGetEdges(q->graph->graph, first, second, count);
    case KP_LIST_NEEDS: return d->cuGraphNodeGetDependencies(q->node, first, count);
    case KP_LIST_NEEDED_BY: return d->cuGraphNodeGetDependentNodes(q->node, first, count);
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

struct numbered {
    CUgraphNode node;
    uint32_t number;
};

static int by_node(const void *a, const void *b)
{
    uintptr_t left = (uintptr_t)((const struct numbered *)a)->node, right = (uintptr_t)((const struct numbered *)b)->node;

    return (left > right) - (left < right);
}

/* The numbers of `count` nodes; `step` apart in `out`. */
static void number_them(const struct numbered *table, uint32_t known, const CUgraphNode *node, size_t count, uint32_t *out, size_t step)
{
    for (size_t i = 0; i < count; i++) {
        const struct numbered *found = bsearch(&(struct numbered){node[i], 0}, table, known, sizeof *table, by_node);
        out[i * step] = found != NULL ? found->number : KP_NO_NODE;
    }
}

static CUresult tell(const struct question *q, struct kp_work *w, CUgraphNode *first, size_t count)
{
    size_t step = q->what == KP_LIST_EDGES ? 2 : 1;
    uint32_t *give = calloc(count * step + 1, sizeof *give), known = 0;
    struct numbered *table = calloc(q->graph->nodes + 1, sizeof *table);

    w->give = give;
    if (give == NULL || table == NULL) {
        free(table);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (uint32_t i = 0; i < q->graph->nodes; i++)
        if (q->graph->node[i] != NULL)
            table[known++] = (struct numbered){q->graph->node[i], i};
    qsort(table, known, sizeof *table, by_node);
    number_them(table, known, first, count, give, step);
    if (step == 2)
        number_them(table, known, first + count, count, give + 1, step);
    free(table);
    w->give_bytes = (uint32_t)(count * step * sizeof *give);
    return CUDA_SUCCESS;
}

static CUresult tell_type(const struct question *q, struct kp_work *w)
{
    uint32_t *give = calloc(1, sizeof *give);
    CUgraphNodeType type = 0;
    CUresult rc = q->graph->driver->cuGraphNodeGetType(q->node, &type);

    if ((w->give = give) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *give = (uint32_t)type;
    w->give_bytes = sizeof *give;
    return rc;
}

int kp_do_graph_list(struct kp_server *s, struct kp_work *w)
{
    struct question q = {.what = w->in[KP_GRAPH_LIST_WHAT]};
    CUgraphNode *first;
    size_t count = 0;
    int rc = kp_graph_of(s, w->in[KP_GRAPH_LIST_GRAPH], &q.graph);

    if (rc == CUDA_SUCCESS && q.what >= KP_LIST_NEEDS)
        rc = kp_graph_node(q.graph, w->in[KP_GRAPH_LIST_NODE], &q.node);
    if (rc == CUDA_SUCCESS && q.what == KP_LIST_TYPE)
        return tell_type(&q, w);
    if (rc == CUDA_SUCCESS)
        rc = ask(&q, NULL, NULL, &count);
    if (rc != CUDA_SUCCESS)
        return rc;
    if (2 * count > KP_LIST_MAX || (first = calloc(2 * count + 1, sizeof *first)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (count > 0)
        rc = ask(&q, first, first + count, &count);
    if (rc == CUDA_SUCCESS)
        rc = tell(&q, w, first, count);
    free(first);
    return rc;
}
