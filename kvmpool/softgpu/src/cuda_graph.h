/* Graphs: what a capture or a program puts together, and what is launched of it.
 *
 * A node's work is a piece of work as streams take it (struct sg_op), run again at each launch. An executable graph is a plan: the
 * work in an order that keeps every edge, copied, so that the graph may change or go. A launch is one piece of work of its stream.
 */
#ifndef KVMPOOL_SOFTGPU_CUDA_GRAPH_H
#define KVMPOOL_SOFTGPU_CUDA_GRAPH_H

#include "cuda_core.h"

struct sg_node {
	struct sg_graph *graph;
	enum sg_node_type type;
	struct sg_op *op;          /* NULL: an empty node, or a graph */
	struct sg_graph *child;
	struct sg_node_set needs;  /* what comes before it */
	struct sg_node *next;      /* of its graph, in the order of making */
	const struct sg_node *original; /* of a clone's */
	size_t place;              /* scratch: in the order of a plan */
};

struct sg_graph {
	struct sg_node *first, **last;
	size_t count;
	bool inner; /* a node's child: not to be destroyed by the program */
};

/* ---- cuda_graph.c ---- */
struct sg_graph *sg_graph_new(void);
void sg_graph_free(struct sg_graph *graph);
/* Takes `op` where it answers 0. `op` NULL: nothing is done at this node. */
CUresult sg_graph_add(struct sg_graph *graph, enum sg_node_type type, struct sg_op *op, const struct sg_node_set *needs, struct sg_node **out);
CUresult sg_graph_clone(const struct sg_graph *graph, struct sg_graph **out);
struct sg_op *sg_op_copy(const struct sg_op *op);
CUresult sg_set_add(struct sg_node_set *set, const struct sg_node_set *more);
void sg_set_clear(struct sg_node_set *set);

/* ---- cuda_graph_plan.c ---- */
struct sg_step {
	const struct sg_node *node; /* it may be gone: only compared */
	enum sg_node_type type;
	struct sg_op *op;           /* its own; NULL: nothing */
};

struct sg_plan {
	unsigned refs; /* guarded by sg_lock */
	size_t count, edge_count;
	struct sg_step *step;
	size_t *edge;  /* pairs of places, the later one first: what an update must not change */
};

CUresult sg_plan_make(struct sg_graph *graph, struct sg_plan **out); /* INVALID_VALUE: its edges go in a circle */
struct sg_plan *sg_plan_copy(const struct sg_plan *from);
void sg_plan_free(struct sg_plan *plan);
void sg_plan_put(struct sg_plan *plan); /* with sg_lock held */

/* ---- cuda_graph_nodes.c ---- */
CUresult sg_kernel_node_op(const CUDA_KERNEL_NODE_PARAMS_v2 *params, struct sg_op **out);
CUDA_KERNEL_NODE_PARAMS_v2 sg_kernel_params(const CUDA_KERNEL_NODE_PARAMS_v1 *old);

#endif
