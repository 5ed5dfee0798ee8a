/* Plans: the work of a graph, of its graphs too, in an order that keeps every edge. */
#include "cuda_graph.h"

#include <stdlib.h>
#include <string.h>

void sg_plan_free(struct sg_plan *plan)
{
	for (size_t i = 0; i < plan->count; i++)
		free(plan->step[i].op);
	free(plan->step);
	free(plan->edge);
	free(plan);
}

/* With sg_lock held. */
void sg_plan_put(struct sg_plan *plan)
{
	if (!--plan->refs)
		sg_plan_free(plan);
}

static CUresult append(struct sg_plan *plan, const struct sg_node *node)
{
	struct sg_step *step = realloc(plan->step, (plan->count + 1) * sizeof(*step));

	if (!step)
		return CUDA_ERROR_OUT_OF_MEMORY;
	plan->step = step;
	step[plan->count] = (struct sg_step){node, node->type, node->op ? sg_op_copy(node->op) : NULL};
	if (node->op && !step[plan->count].op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	plan->count++;
	return CUDA_SUCCESS;
}

static CUresult add_graph(struct sg_plan *plan, struct sg_graph *graph);

/* The node, whose needs are there already; its edges; and behind it the graph that it stands for. */
static CUresult add_node(struct sg_plan *plan, struct sg_node *node)
{
	size_t more = node->needs.count, *edge = plan->edge;

	if (more && !(edge = realloc(edge, (plan->edge_count + more) * 2 * sizeof(*edge))))
		return CUDA_ERROR_OUT_OF_MEMORY;
	plan->edge = edge;
	node->place = plan->count;
	for (size_t i = 0; i < more; i++) {
		edge[2 * plan->edge_count] = node->place;
		edge[2 * plan->edge_count++ + 1] = node->needs.node[i]->place;
	}
	SG_TRY(append(plan, node));
	return node->child ? add_graph(plan, node->child) : CUDA_SUCCESS;
}

static bool is_due(const struct sg_node *node)
{
	if (node->place != SIZE_MAX)
		return false;
	for (size_t i = 0; i < node->needs.count; i++)
		if (node->needs.node[i]->place == SIZE_MAX)
			return false;
	return true;
}

/* One sweep for a graph whose nodes were made in an order that its edges allow. */
static CUresult add_graph(struct sg_plan *plan, struct sg_graph *graph)
{
	size_t left = graph->count, before = left + 1;

	for (struct sg_node *node = graph->first; node; node = node->next)
		node->place = SIZE_MAX;
	while (left && left < before) {
		before = left;
		for (struct sg_node *node = graph->first; node; node = node->next)
			if (is_due(node)) {
				SG_TRY(add_node(plan, node));
				left--;
			}
	}
	return left ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; /* a circle */
}

CUresult sg_plan_make(struct sg_graph *graph, struct sg_plan **out)
{
	struct sg_plan *plan = calloc(1, sizeof(*plan));

	if (!plan)
		return CUDA_ERROR_OUT_OF_MEMORY;
	plan->refs = 1;
	CUresult rc = add_graph(plan, graph);
	if (rc)
		sg_plan_free(plan);
	else
		*out = plan;
	return rc;
}

struct sg_plan *sg_plan_copy(const struct sg_plan *from)
{
	struct sg_plan *plan = calloc(1, sizeof(*plan));

	if (!plan)
		return NULL;
	plan->refs = 1;
	plan->step = calloc(from->count + 1, sizeof(*plan->step));
	plan->edge = calloc(from->edge_count + 1, 2 * sizeof(*plan->edge));
	bool whole = plan->step && plan->edge;
	for (size_t i = 0; whole && i < from->count; i++) {
		plan->step[i] = from->step[i];
		plan->step[i].op = from->step[i].op ? sg_op_copy(from->step[i].op) : NULL;
		plan->count++;
		whole = plan->step[i].op || !from->step[i].op;
	}
	if (!whole) {
		sg_plan_free(plan);
		return NULL;
	}
	plan->edge_count = from->edge_count;
	memcpy(plan->edge, from->edge, from->edge_count * 2 * sizeof(*plan->edge));
	return plan;
}
