/* Executable graphs: made, changed and launched.
 *
 * A change makes another plan, because a launch may have the one there is. Launches of one executable graph come one after the
 * other, whatever their streams, as with CUDA.
 */
#include "cuda_graph.h"

#include <stdlib.h>
#include <string.h>

#define FLAGS_KNOWN 15ull
#define FLAG_DEVICE_LAUNCH 4ull

enum { UPDATE_DONE, UPDATE_ERROR, UPDATE_TOPOLOGY_CHANGED, UPDATE_TYPE_CHANGED };

struct sg_exec {
	struct sg_plan *plan;
	struct sg_progress *progress; /* of its launches */
	uint64_t launched;
	unsigned long long flags;
};

static void change_plan(struct sg_exec *exec, struct sg_plan *plan)
{
	pthread_mutex_lock(&sg_lock);
	sg_plan_put(exec->plan);
	exec->plan = plan;
	pthread_mutex_unlock(&sg_lock);
}

/* ---- launches ---- */

struct graph_op {
	struct sg_op op;
	struct sg_plan *plan;
	struct sg_progress *progress;
	uint64_t target;
};

static void run_graph(struct sg_op *op, CUresult status)
{
	struct graph_op *launch = (struct graph_op *)op;
	const struct sg_context *context = op->stream->context;

	for (size_t i = 0; i < launch->plan->count && !status; i++) {
		struct sg_op *step = launch->plan->step[i].op;
		if (!step)
			continue;
		step->stream = op->stream;
		step->run(step, 0);
		status = __atomic_load_n(&context->error, __ATOMIC_SEQ_CST);
	}
}

static void finish_graph(struct sg_op *op)
{
	struct graph_op *launch = (struct graph_op *)op;

	sg_progress_reach(launch->progress, launch->target);
	sg_progress_put(launch->progress);
	sg_plan_put(launch->plan);
}

static CUresult check_exec(CUgraphExec exec)
{
	SG_TRY(sg_ready());
	return sg_live(SG_EXEC, exec) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult launch(CUgraphExec exec, CUstream handle, bool per_thread)
{
	struct sg_stream *stream;

	SG_ENTER(context);
	SG_TRY(check_exec(exec));
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	struct graph_op *op = sg_op_new(sizeof(*op), run_graph);
	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult rc = sg_op_wait_for(&op->op, exec->progress, exec->launched);
	if (rc) {
		sg_op_free(&op->op);
		return rc;
	}
	op->op.finish = finish_graph;
	pthread_mutex_lock(&sg_lock);
	op->plan = exec->plan;
	op->plan->refs++;
	op->progress = exec->progress;
	op->progress->refs++;
	op->target = ++exec->launched;
	pthread_mutex_unlock(&sg_lock);
	struct sg_plan *plan = op->plan;
	rc = sg_submit(stream, &op->op);
	if (rc) { /* it will never come: nobody shall wait for it */
		pthread_mutex_lock(&sg_lock);
		sg_plan_put(plan);
		sg_progress_reach(exec->progress, exec->launched);
		sg_progress_put(exec->progress);
		pthread_mutex_unlock(&sg_lock);
	}
	return rc;
}

/* There is nothing to bring to this card beforehand. */
static CUresult upload(CUgraphExec exec, CUstream handle, bool per_thread)
{
	struct sg_stream *stream;

	SG_ENTER(context);
	SG_TRY(check_exec(exec));
	return sg_stream_of(context, handle, per_thread, &stream);
}

#define PAIR(name, impl) \
	CU_API CUresult name(CUgraphExec e, CUstream s) { return impl(e, s, false); } \
	CU_API CUresult name##_ptsz(CUgraphExec e, CUstream s) { return impl(e, s, true); }

PAIR(cuGraphLaunch, launch)
PAIR(cuGraphUpload, upload)

/* ---- making and changing ---- */

CU_API CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
	struct sg_plan *plan;

	SG_TRY(sg_ready());
	if (!out || !sg_live(SG_GRAPH, graph) || flags & ~FLAGS_KNOWN)
		return CUDA_ERROR_INVALID_VALUE;
	if (flags & FLAG_DEVICE_LAUNCH)
		return CUDA_ERROR_NOT_SUPPORTED;
	SG_TRY(sg_plan_make(graph, &plan));
	struct sg_exec *exec = calloc(1, sizeof(*exec));
	if (!exec || !(exec->progress = sg_progress_new())) {
		free(exec);
		sg_plan_free(plan);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	exec->plan = plan;
	exec->flags = flags;
	sg_live_add(SG_EXEC, exec);
	*out = exec;
	return CUDA_SUCCESS;
}

CU_API CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log, size_t room)
{
	if (error_node)
		*error_node = NULL;
	if (log && room)
		*log = 0;
	return cuGraphInstantiateWithFlags(out, graph, 0);
}

CU_API CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *error_node, char *log, size_t room)
{
	return cuGraphInstantiate_v2(out, graph, error_node, log, room);
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	if (!params)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult rc = cuGraphInstantiateWithFlags(out, graph, params->flags);
	params->hErrNode_out = NULL;
	params->result_out = rc ? 1 : 0;
	return rc;
}

CU_API CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	return instantiate(out, graph, params);
}

CU_API CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	return instantiate(out, graph, params);
}

CU_API CUresult cuGraphExecGetFlags(CUgraphExec exec, uint64_t *flags)
{
	SG_TRY(check_exec(exec));
	if (!flags)
		return CUDA_ERROR_INVALID_VALUE;
	*flags = exec->flags;
	return CUDA_SUCCESS;
}

/* Launches that are under way keep what they have. */
CU_API CUresult cuGraphExecDestroy(CUgraphExec exec)
{
	SG_TRY(check_exec(exec));
	sg_live_remove(exec);
	pthread_mutex_lock(&sg_lock);
	sg_plan_put(exec->plan);
	sg_progress_put(exec->progress);
	pthread_mutex_unlock(&sg_lock);
	free(exec);
	return CUDA_SUCCESS;
}

/* Takes `op`, whatever it answers. */
static CUresult change_step(CUgraphExec exec, const struct sg_node *node, enum sg_node_type type, struct sg_op *op)
{
	struct sg_plan *plan = sg_plan_copy(exec->plan);

	for (size_t i = 0; plan && i < plan->count; i++) {
		if (plan->step[i].node != node || plan->step[i].type != type)
			continue;
		free(plan->step[i].op);
		plan->step[i].op = op;
		change_plan(exec, plan);
		return CUDA_SUCCESS;
	}
	free(op);
	if (plan)
		sg_plan_free(plan);
	return plan ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
}

CU_API CUresult cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v2 *params)
{
	struct sg_op *op;

	SG_TRY(check_exec(exec));
	SG_TRY(sg_kernel_node_op(params, &op));
	return change_step(exec, node, SG_NODE_KERNEL, op);
}

CU_API CUresult cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
	if (!params)
		return CUDA_ERROR_INVALID_VALUE;
	CUDA_KERNEL_NODE_PARAMS_v2 now = sg_kernel_params(params);
	return cuGraphExecKernelNodeSetParams_v2(exec, node, &now);
}

/* The plan of a graph of the same shape takes the place of the one it has, whose nodes it goes on being asked by. */
static CUresult update(CUgraphExec exec, CUgraph graph, int *result, CUgraphNode *at)
{
	const struct sg_plan *old = exec->plan;
	struct sg_plan *plan;

	*result = UPDATE_ERROR;
	SG_TRY(sg_plan_make(graph, &plan));
	bool same = plan->count == old->count && plan->edge_count == old->edge_count &&
		    !memcmp(plan->edge ? plan->edge : (size_t *)"", old->edge ? old->edge : (size_t *)"", 2 * old->edge_count * sizeof(size_t));
	*result = same ? UPDATE_DONE : UPDATE_TOPOLOGY_CHANGED;
	for (size_t i = 0; same && i < plan->count && *result == UPDATE_DONE; i++) {
		if (plan->step[i].type != old->step[i].type) {
			*result = UPDATE_TYPE_CHANGED;
			*at = (CUgraphNode)plan->step[i].node;
		}
		plan->step[i].node = old->step[i].node;
	}
	if (*result != UPDATE_DONE) {
		sg_plan_free(plan);
		return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
	}
	change_plan(exec, plan);
	return CUDA_SUCCESS;
}

CU_API CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
	SG_TRY(check_exec(exec));
	if (!info || !sg_live(SG_GRAPH, graph))
		return CUDA_ERROR_INVALID_VALUE;
	*info = (CUgraphExecUpdateResultInfo){0};
	return update(exec, graph, &info->result, &info->errorNode);
}

CU_API CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error_node, int *result)
{
	CUgraphExecUpdateResultInfo info = {0};

	if (!error_node || !result)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult rc = cuGraphExecUpdate_v2(exec, graph, &info);
	*error_node = info.errorNode;
	*result = info.result;
	return rc;
}
