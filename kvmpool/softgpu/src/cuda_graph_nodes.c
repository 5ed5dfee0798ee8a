/* Nodes that a program adds itself: kernels, copies, fills, host functions, graphs in graphs and mere joints. */
#include "cuda_graph.h"

#include <stdlib.h>

static CUresult check_place(const CUgraphNode *out, CUgraph graph, const CUgraphNode *needs, size_t count)
{
	SG_TRY(sg_ready());
	if (!out || !sg_live(SG_GRAPH, graph) || (count && !needs))
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		if (!sg_live(SG_NODE, needs[i]) || needs[i]->graph != graph)
			return CUDA_ERROR_INVALID_VALUE;
		for (size_t j = 0; j < i; j++)
			if (needs[j] == needs[i])
				return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

static CUresult add(CUgraphNode *out, CUgraph graph, const CUgraphNode *needs, size_t count, enum sg_node_type type, struct sg_op *op)
{
	CUresult rc = sg_graph_add(graph, type, op, &(struct sg_node_set){(struct sg_node **)needs, count}, out);

	if (rc)
		free(op);
	return rc;
}

CUresult sg_kernel_node_op(const CUDA_KERNEL_NODE_PARAMS_v2 *params, struct sg_op **out)
{
	struct sg_context *context = NULL;

	if (!params)
		return CUDA_ERROR_INVALID_VALUE;
	if (params->ctx && !sg_live(SG_CONTEXT, params->ctx))
		return CUDA_ERROR_INVALID_VALUE;
	if (params->ctx)
		context = params->ctx;
	else
		SG_TRY(sg_enter(&context));
	return sg_launch_op(context, context, &(struct sg_launch){
		.function = params->func ? (const void *)params->func : (const void *)params->kern,
		.grid = {params->gridDimX, params->gridDimY, params->gridDimZ},
		.block = {params->blockDimX, params->blockDimY, params->blockDimZ},
		.shared = params->sharedMemBytes, .params = params->kernelParams, .extra = params->extra}, out);
}

CUDA_KERNEL_NODE_PARAMS_v2 sg_kernel_params(const CUDA_KERNEL_NODE_PARAMS_v1 *old)
{
	return (CUDA_KERNEL_NODE_PARAMS_v2){old->func, old->gridDimX, old->gridDimY, old->gridDimZ, old->blockDimX, old->blockDimY,
					    old->blockDimZ, old->sharedMemBytes, old->kernelParams, old->extra, NULL, NULL};
}

CU_API CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *needs, size_t count,
					const CUDA_KERNEL_NODE_PARAMS_v2 *params)
{
	struct sg_op *op;

	SG_TRY(check_place(out, graph, needs, count));
	SG_TRY(sg_kernel_node_op(params, &op));
	return add(out, graph, needs, count, SG_NODE_KERNEL, op);
}

CU_API CUresult cuGraphAddKernelNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *needs, size_t count,
				     const CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
	if (!params)
		return CUDA_ERROR_INVALID_VALUE;
	CUDA_KERNEL_NODE_PARAMS_v2 now = sg_kernel_params(params);
	return cuGraphAddKernelNode_v2(out, graph, needs, count, &now);
}

CU_API CUresult cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 *params)
{
	struct sg_op *op;

	SG_TRY(sg_ready());
	if (!sg_live(SG_NODE, node) || node->type != SG_NODE_KERNEL)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_kernel_node_op(params, &op));
	free(node->op);
	node->op = op;
	return CUDA_SUCCESS;
}

CU_API CUresult cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
	if (!params)
		return CUDA_ERROR_INVALID_VALUE;
	CUDA_KERNEL_NODE_PARAMS_v2 now = sg_kernel_params(params);
	return cuGraphKernelNodeSetParams_v2(node, &now);
}

/* `context` is where the memory is; here every context of a process reaches all of it. */
static CUresult check_context(CUcontext context)
{
	return sg_live(SG_CONTEXT, context) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CU_API CUresult cuGraphAddMemcpyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *needs, size_t count, const CUDA_MEMCPY3D *copy,
				     CUcontext context)
{
	struct sg_op *op;

	SG_TRY(check_place(out, graph, needs, count));
	SG_TRY(check_context(context));
	if (!copy)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_box_op(copy, &op));
	return add(out, graph, needs, count, SG_NODE_MEMCPY, op);
}

CU_API CUresult cuGraphAddMemsetNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *needs, size_t count,
				     const CUDA_MEMSET_NODE_PARAMS *set, CUcontext context)
{
	struct sg_op *op;

	SG_TRY(check_place(out, graph, needs, count));
	SG_TRY(check_context(context));
	if (!set || (set->elementSize != 1 && set->elementSize != 2 && set->elementSize != 4) || !set->width || !set->height)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_fill_op(&(struct sg_fill){set->dst, set->pitch, set->width, set->height, set->value, set->elementSize}, &op));
	return add(out, graph, needs, count, SG_NODE_MEMSET, op);
}

struct host_op {
	struct sg_op op;
	CUDA_HOST_NODE_PARAMS call;
};

static void run_host(struct sg_op *op, CUresult status)
{
	const struct host_op *host = (const struct host_op *)op;

	if (!status)
		host->call.fn(host->call.userData);
}

CU_API CUresult cuGraphAddHostNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *needs, size_t count,
				   const CUDA_HOST_NODE_PARAMS *params)
{
	SG_TRY(check_place(out, graph, needs, count));
	if (!params || !params->fn)
		return CUDA_ERROR_INVALID_VALUE;
	struct host_op *op = sg_op_new(sizeof(*op), run_host);
	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	op->call = *params;
	return add(out, graph, needs, count, SG_NODE_HOST, &op->op);
}

CU_API CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *needs, size_t count)
{
	SG_TRY(check_place(out, graph, needs, count));
	return add(out, graph, needs, count, SG_NODE_EMPTY, NULL);
}

CU_API CUresult cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *needs, size_t count, CUgraph child)
{
	struct sg_graph *clone;

	SG_TRY(check_place(out, graph, needs, count));
	if (!sg_live(SG_GRAPH, child) || child == graph)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_graph_clone(child, &clone));
	CUresult rc = add(out, graph, needs, count, SG_NODE_GRAPH, NULL);
	if (rc) {
		sg_graph_free(clone);
		return rc;
	}
	clone->inner = true;
	(*out)->child = clone;
	return CUDA_SUCCESS;
}

CU_API CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *out)
{
	SG_TRY(sg_ready());
	if (!out || !sg_live(SG_NODE, node) || node->type != SG_NODE_GRAPH)
		return CUDA_ERROR_INVALID_VALUE;
	*out = node->child;
	return CUDA_SUCCESS;
}
