/* Graphs and their nodes: making, copying, taking apart, and what a program may ask of their shape. */
#include "cuda_graph.h"

#include <stdlib.h>
#include <string.h>

/* ---- sets of nodes ---- */

static bool holds(const struct sg_node_set *set, const struct sg_node *node)
{
	for (size_t i = 0; i < set->count; i++)
		if (set->node[i] == node)
			return true;
	return false;
}

CUresult sg_set_add(struct sg_node_set *set, const struct sg_node_set *more)
{
	struct sg_node **node = more->count ? realloc(set->node, (set->count + more->count) * sizeof(*node)) : set->node;

	if (more->count && !node)
		return CUDA_ERROR_OUT_OF_MEMORY;
	set->node = node;
	for (size_t i = 0; i < more->count; i++)
		if (!holds(set, more->node[i]))
			set->node[set->count++] = more->node[i];
	return CUDA_SUCCESS;
}

void sg_set_clear(struct sg_node_set *set)
{
	free(set->node);
	*set = (struct sg_node_set){NULL, 0};
}

static void take_out(struct sg_node_set *set, const struct sg_node *node)
{
	size_t kept = 0;

	for (size_t i = 0; i < set->count; i++)
		if (set->node[i] != node)
			set->node[kept++] = set->node[i];
	set->count = kept;
}

/* ---- graphs ---- */

struct sg_graph *sg_graph_new(void)
{
	struct sg_graph *graph = calloc(1, sizeof(*graph));

	if (!graph)
		return NULL;
	graph->last = &graph->first;
	sg_live_add(SG_GRAPH, graph);
	return graph;
}

static void free_node(struct sg_node *node)
{
	sg_live_remove(node);
	if (node->child)
		sg_graph_free(node->child);
	free(node->op);
	free(node->needs.node);
	free(node);
}

void sg_graph_free(struct sg_graph *graph)
{
	sg_live_remove(graph);
	for (struct sg_node *node = graph->first, *next; node; node = next) {
		next = node->next;
		free_node(node);
	}
	free(graph);
}

CUresult sg_graph_add(struct sg_graph *graph, enum sg_node_type type, struct sg_op *op, const struct sg_node_set *needs, struct sg_node **out)
{
	struct sg_node *node = calloc(1, sizeof(*node));

	if (!node || sg_set_add(&node->needs, needs)) {
		free(node);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	node->graph = graph;
	node->type = type;
	node->op = op;
	*graph->last = node;
	graph->last = &node->next;
	graph->count++;
	sg_live_add(SG_NODE, node);
	*out = node;
	return CUDA_SUCCESS;
}

struct sg_op *sg_op_copy(const struct sg_op *op)
{
	struct sg_op *copy = malloc(op->size);

	return copy ? memcpy(copy, op, op->size) : NULL;
}

static CUresult clone_node(const struct sg_node *from, struct sg_graph *to, struct sg_node **by_place)
{
	struct sg_op *op = from->op ? sg_op_copy(from->op) : NULL;
	struct sg_graph *child = NULL;
	struct sg_node *node;

	if (from->op && !op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult rc = from->child ? sg_graph_clone(from->child, &child) : CUDA_SUCCESS;
	if (!rc)
		rc = sg_graph_add(to, from->type, op, &(struct sg_node_set){NULL, 0}, &node);
	if (rc) {
		if (child)
			sg_graph_free(child);
		free(op);
		return rc;
	}
	if (child)
		child->inner = true;
	node->child = child;
	node->original = from;
	by_place[from->place] = node;
	return CUDA_SUCCESS;
}

CUresult sg_graph_clone(const struct sg_graph *graph, struct sg_graph **out)
{
	struct sg_graph *clone = sg_graph_new();
	struct sg_node **by_place = calloc(graph->count + 1, sizeof(*by_place));
	CUresult rc = clone && by_place ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	size_t place = 0;

	for (struct sg_node *node = graph->first; node; node = node->next)
		node->place = place++;
	for (struct sg_node *node = graph->first; node && !rc; node = node->next)
		rc = clone_node(node, clone, by_place);
	for (struct sg_node *node = graph->first; node && !rc; node = node->next)
		for (size_t i = 0; i < node->needs.count && !rc; i++)
			rc = sg_set_add(&by_place[node->place]->needs, &(struct sg_node_set){&by_place[node->needs.node[i]->place], 1});
	free(by_place);
	if (rc && clone)
		sg_graph_free(clone);
	else
		*out = clone;
	return rc;
}

CU_API CUresult cuGraphCreate(CUgraph *out, unsigned flags)
{
	SG_TRY(sg_ready());
	if (!out || flags)
		return CUDA_ERROR_INVALID_VALUE;
	*out = sg_graph_new();
	return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult check_graph(CUgraph graph)
{
	SG_TRY(sg_ready());
	return sg_live(SG_GRAPH, graph) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_API CUresult cuGraphDestroy(CUgraph graph)
{
	SG_TRY(check_graph(graph));
	if (graph->inner)
		return CUDA_ERROR_INVALID_VALUE;
	sg_graph_free(graph);
	return CUDA_SUCCESS;
}

CU_API CUresult cuGraphClone(CUgraph *out, CUgraph graph)
{
	SG_TRY(check_graph(graph));
	return out ? sg_graph_clone(graph, out) : CUDA_ERROR_INVALID_VALUE;
}

CU_API CUresult cuGraphNodeFindInClone(CUgraphNode *out, CUgraphNode original, CUgraph clone)
{
	SG_TRY(check_graph(clone));
	if (!out || !sg_live(SG_NODE, original))
		return CUDA_ERROR_INVALID_VALUE;
	for (struct sg_node *node = clone->first; node; node = node->next)
		if (node->original == original) {
			*out = node;
			return CUDA_SUCCESS;
		}
	return CUDA_ERROR_INVALID_VALUE;
}

CU_API CUresult cuGraphDestroyNode(CUgraphNode node)
{
	SG_TRY(sg_ready());
	if (!sg_live(SG_NODE, node))
		return CUDA_ERROR_INVALID_VALUE;
	struct sg_graph *graph = node->graph;
	struct sg_node **at = &graph->first;
	while (*at != node)
		at = &(*at)->next;
	*at = node->next;
	if (graph->last == &node->next)
		graph->last = at;
	graph->count--;
	for (struct sg_node *other = graph->first; other; other = other->next)
		take_out(&other->needs, node);
	free_node(node);
	return CUDA_SUCCESS;
}

/* ---- edges ---- */

static CUresult check_edges(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data, size_t count)
{
	const CUgraphEdgeData plain = {0};

	SG_TRY(check_graph(graph));
	if (count && (!from || !to))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		if (!sg_live(SG_NODE, from[i]) || !sg_live(SG_NODE, to[i]) || from[i]->graph != graph || to[i]->graph != graph || from[i] == to[i])
			return CUDA_ERROR_INVALID_VALUE;
		if (data && memcmp(&data[i], &plain, sizeof(plain)))
			return CUDA_ERROR_NOT_SUPPORTED;
	}
	return CUDA_SUCCESS;
}

CU_API CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data,
					  size_t count)
{
	SG_TRY(check_edges(graph, from, to, data, count));
	for (size_t i = 0; i < count; i++) {
		if (holds(&to[i]->needs, from[i]))
			return CUDA_ERROR_INVALID_VALUE;
		SG_TRY(sg_set_add(&to[i]->needs, &(struct sg_node_set){(struct sg_node **)&from[i], 1}));
	}
	return CUDA_SUCCESS;
}

CU_API CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
	return cuGraphAddDependencies_v2(graph, from, to, NULL, count);
}

CU_API CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, const CUgraphEdgeData *data,
					     size_t count)
{
	SG_TRY(check_edges(graph, from, to, data, count));
	for (size_t i = 0; i < count; i++) {
		if (!holds(&to[i]->needs, from[i]))
			return CUDA_ERROR_INVALID_VALUE;
		take_out(&to[i]->needs, from[i]);
	}
	return CUDA_SUCCESS;
}

CU_API CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
	return cuGraphRemoveDependencies_v2(graph, from, to, NULL, count);
}

/* ---- questions ---- */

/* Room for answers: `count` of them in `first` and (of edges) `second`; both NULL: only their number is asked for. */
struct answers {
	CUgraphNode *first, *second;
	size_t room, count;
};

static void answer(struct answers *answers, struct sg_node *first, struct sg_node *second)
{
	if (answers->first && answers->count < answers->room)
		answers->first[answers->count] = first;
	if (answers->second && answers->count < answers->room)
		answers->second[answers->count] = second;
	answers->count++;
}

/* As with CUDA: the rest of the room is NULL, and *count how many there are (what fitted, where somebody gave room). */
static CUresult conclude(struct answers *answers, size_t *count)
{
	size_t told = answers->first && answers->room < answers->count ? answers->room : answers->count;

	for (size_t i = told; answers->first && i < answers->room; i++)
		answers->first[i] = NULL;
	for (size_t i = told; answers->second && i < answers->room; i++)
		answers->second[i] = NULL;
	*count = told;
	return CUDA_SUCCESS;
}

static CUresult list_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count, bool roots)
{
	SG_TRY(check_graph(graph));
	if (!count)
		return CUDA_ERROR_INVALID_VALUE;
	struct answers answers = {nodes, NULL, *count, 0};
	for (struct sg_node *node = graph->first; node; node = node->next)
		if (!roots || !node->needs.count)
			answer(&answers, node, NULL);
	return conclude(&answers, count);
}

CU_API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	return list_nodes(graph, nodes, count, false);
}

CU_API CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	return list_nodes(graph, nodes, count, true);
}

CU_API CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *data, size_t *count)
{
	SG_TRY(check_graph(graph));
	if (!count || !from != !to)
		return CUDA_ERROR_INVALID_VALUE;
	struct answers answers = {from, to, *count, 0};
	for (struct sg_node *node = graph->first; node; node = node->next)
		for (size_t i = 0; i < node->needs.count; i++)
			answer(&answers, node->needs.node[i], node);
	conclude(&answers, count);
	if (data && from)
		memset(data, 0, *count * sizeof(*data));
	return CUDA_SUCCESS;
}

CU_API CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
	return cuGraphGetEdges_v2(graph, from, to, NULL, count);
}

static CUresult list_around(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count, bool before)
{
	SG_TRY(sg_ready());
	if (!count || !sg_live(SG_NODE, node))
		return CUDA_ERROR_INVALID_VALUE;
	struct answers answers = {nodes, NULL, *count, 0};
	for (size_t i = 0; before && i < node->needs.count; i++)
		answer(&answers, node->needs.node[i], NULL);
	for (struct sg_node *other = node->graph->first; !before && other; other = other->next)
		if (holds(&other->needs, node))
			answer(&answers, other, NULL);
	conclude(&answers, count);
	if (data && nodes)
		memset(data, 0, *count * sizeof(*data));
	return CUDA_SUCCESS;
}

CU_API CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *nodes, size_t *count)
{
	return list_around(node, nodes, NULL, count, true);
}

CU_API CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count)
{
	return list_around(node, nodes, data, count, true);
}

CU_API CUresult cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode *nodes, size_t *count)
{
	return list_around(node, nodes, NULL, count, false);
}

CU_API CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *data, size_t *count)
{
	return list_around(node, nodes, data, count, false);
}

CU_API CUresult cuGraphNodeGetType(CUgraphNode node, int *type)
{
	SG_TRY(sg_ready());
	if (!type || !sg_live(SG_NODE, node))
		return CUDA_ERROR_INVALID_VALUE;
	*type = (int)node->type;
	return CUDA_SUCCESS;
}
