/* Launches: checked at once, run in their stream, their errors made sticky, their XIDs raised, their time counted. */
#include "cuda_core.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define NAP_NS 5000000

struct launch_op {
	struct sg_op op;
	struct sg_function *function;
	uint32_t grid[3], block[3];
	uint32_t shared;
	bool cooperative;
	size_t params_size;
	char params[];
};

static void nap(void)
{
	nanosleep(&(struct timespec){.tv_nsec = NAP_NS}, NULL);
}

static bool alive(const struct sg_context *context)
{
	return !__atomic_load_n(&context->error, __ATOMIC_SEQ_CST);
}

/* A card that hangs keeps the launch until it is healed or the context dies. */
static void wait_while_hung(struct sg_context *context)
{
	while (__atomic_load_n(&context->device->map.card->hang, __ATOMIC_SEQ_CST) && !sg_context_status(context))
		nap();
}

/* A slow card takes the rest of the time it needs; so does nothing once the context is dead. */
static void wait_while_slow(struct sg_context *context, uint64_t busy_ns)
{
	uint32_t slow = __atomic_load_n(&context->device->map.card->slow, __ATOMIC_SEQ_CST);
	uint64_t end_ns = sg_now_ns() + (slow > 1 ? busy_ns * (slow - 1) : 0);

	for (uint64_t now_ns; (now_ns = sg_now_ns()) < end_ns && !sg_context_status(context);) {
		uint64_t left_ns = end_ns - now_ns;
		nanosleep(&(struct timespec){.tv_nsec = (long)(left_ns < NAP_NS ? left_ns : NAP_NS)}, NULL);
	}
}

static void count_time(struct sg_context *context, uint64_t busy_ns)
{
	struct sg_slot *slot = sg_slot_mine(&context->device->map);
	struct sg_card *card = context->device->map.card;

	__atomic_add_fetch(&card->busy_ns, busy_ns, __ATOMIC_RELAXED);
	__atomic_add_fetch(&card->launches, 1, __ATOMIC_RELAXED);
	if (slot) {
		__atomic_add_fetch(&slot->busy_ns, busy_ns, __ATOMIC_RELAXED);
		__atomic_add_fetch(&slot->launches, 1, __ATOMIC_RELAXED);
	}
}

/* The kernel log's text for an error of the kernel's own doing. */
static void raise_xid(struct sg_context *context, const struct kp_launch_ctl *ctl, CUresult error)
{
	char detail[256];
	uint32_t xid = (uint32_t)ctl->xid;

	if (!xid && error == CUDA_ERROR_LAUNCH_TIMEOUT)
		xid = 43;
	if (xid == 31)
		snprintf(detail, sizeof(detail),
			 "Ch 00000008, intr 00000000. MMU Fault: ENGINE GRAPHICS GPCCLIENT_T1_0 faulted @ 0x%x_%08x. Fault is of type FAULT_PDE "
			 "ACCESS_TYPE_VIRT_WRITE",
			 (unsigned)(ctl->fault_address >> 32), (unsigned)ctl->fault_address);
	else if (xid == 13)
		snprintf(detail, sizeof(detail), "Graphics SM Warp Exception on (GPC 0, TPC 0, SM 0): %s",
			 error == CUDA_ERROR_MISALIGNED_ADDRESS ? "Misaligned Address" : "Illegal Instruction Encoding");
	else
		snprintf(detail, sizeof(detail), "Ch 00000008");
	if (xid)
		sg_raise_xid(&context->device->map, xid, detail);
}

static void run_launch(struct sg_op *op, CUresult status)
{
	struct launch_op *launch = (struct launch_op *)op;
	struct sg_context *context = op->stream->context;
	struct kp_launch_ctl ctl = {.cooperative = launch->cooperative};

	(void)status;
	wait_while_hung(context);
	if (!alive(context))
		return;
	sg_watch_begin(context, &ctl);
	CUresult rc = kp_launch(launch->function->kernel, launch->grid, launch->block, launch->shared, launch->params, launch->params_size,
				&ctl);
	sg_watch_end(&ctl);
	count_time(context, ctl.busy_ns);
	wait_while_slow(context, ctl.busy_ns);
	if (!rc || !alive(context))
		return;
	raise_xid(context, &ctl, rc);
	sg_context_kill(context, rc);
}

/* ---- what is asked for ---- */

/* The packed buffer in `extra`: pairs of a name and a pointer, ended by CU_LAUNCH_PARAM_END. */
static CUresult read_extra(void **extra, const void **buffer, size_t *size)
{
	*buffer = NULL;
	*size = 0;
	for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
		if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
			*buffer = extra[1];
		else if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE && extra[1])
			*size = *(const size_t *)extra[1];
		else
			return CUDA_ERROR_INVALID_VALUE;
	}
	return *size && !*buffer ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

static CUresult pack(const struct sg_function *function, const struct sg_launch *request, char *to)
{
	size_t need = function->attributes.param_bytes, size;
	const void *buffer;

	if (request->extra) {
		SG_TRY(read_extra(request->extra, &buffer, &size));
		if (request->params || size < need)
			return CUDA_ERROR_INVALID_VALUE;
		memcpy(to, buffer, need);
		return CUDA_SUCCESS;
	}
	if (!request->params)
		return function->attributes.param_count ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	for (uint32_t i = 0; i < function->attributes.param_count; i++) {
		size_t offset, bytes;
		SG_TRY(kp_function_param(function->kernel, i, &offset, &bytes));
		if (!request->params[i])
			return CUDA_ERROR_INVALID_VALUE;
		memcpy(to + offset, request->params[i], bytes);
	}
	return CUDA_SUCCESS;
}

static CUresult check_shape(const struct sg_context *context, const struct sg_function *function, const struct sg_launch *request)
{
	const uint32_t *grid = request->grid, *block = request->block;
	uint64_t threads = (uint64_t)block[0] * block[1] * block[2];

	if (!grid[0] || !grid[1] || !grid[2] || grid[0] > 0x7fffffff || grid[1] > 65535 || grid[2] > 65535)
		return CUDA_ERROR_INVALID_VALUE;
	if (!threads || block[0] > 1024 || block[1] > 1024 || block[2] > 64 || threads > KP_MAX_THREADS_PER_BLOCK)
		return CUDA_ERROR_INVALID_VALUE;
	if (threads > function->attributes.max_threads_per_block)
		return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
	if (request->shared > (uint32_t)function->max_dynamic_shared)
		return CUDA_ERROR_INVALID_VALUE;
	if (!request->cooperative)
		return CUDA_SUCCESS;
	uint64_t fit = (uint64_t)sg_blocks_on_processor(function, (int)threads, request->shared) * context->device->map.card->sm_count;
	return (uint64_t)grid[0] * grid[1] * grid[2] > fit ? CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE : CUDA_SUCCESS;
}

CUresult sg_launch_op(struct sg_context *context, const struct sg_context *where, const struct sg_launch *request, struct sg_op **out)
{
	struct sg_function *function;

	SG_TRY(sg_function_of(context, request->function, &function));
	if (function->module->context != where)
		return CUDA_ERROR_INVALID_HANDLE;
	SG_TRY(check_shape(context, function, request));
	size_t size = function->attributes.param_bytes;
	struct launch_op *op = sg_op_new(sizeof(*op) + size, run_launch);
	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult rc = pack(function, request, op->params);
	if (rc) {
		sg_op_free(&op->op);
		return rc;
	}
	op->op.type = SG_NODE_KERNEL;
	op->function = function;
	memcpy(op->grid, request->grid, sizeof(op->grid));
	memcpy(op->block, request->block, sizeof(op->block));
	op->shared = request->shared;
	op->cooperative = request->cooperative;
	op->params_size = size;
	*out = &op->op;
	return CUDA_SUCCESS;
}

static CUresult launch(const struct sg_launch *request, CUstream handle, bool per_thread)
{
	struct sg_stream *stream;
	struct sg_op *op;

	SG_ENTER(context);
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	SG_TRY(sg_launch_op(context, stream->context, request, &op));
	return sg_submit(stream, op);
}

#define LAUNCH_PARAMS CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream s, void **p

#define LAUNCH(per_thread) \
	launch(&(struct sg_launch){f, {gx, gy, gz}, {bx, by, bz}, shared, p, extra, false}, s, per_thread)
#define LAUNCH_COOPERATIVE(per_thread) \
	launch(&(struct sg_launch){f, {gx, gy, gz}, {bx, by, bz}, shared, p, NULL, true}, s, per_thread)

CU_API CUresult cuLaunchKernel(LAUNCH_PARAMS, void **extra)
{
	return LAUNCH(false);
}

CU_API CUresult cuLaunchKernel_ptsz(LAUNCH_PARAMS, void **extra)
{
	return LAUNCH(true);
}

CU_API CUresult cuLaunchCooperativeKernel(LAUNCH_PARAMS)
{
	return LAUNCH_COOPERATIVE(false);
}

CU_API CUresult cuLaunchCooperativeKernel_ptsz(LAUNCH_PARAMS)
{
	return LAUNCH_COOPERATIVE(true);
}

static CUresult launch_ex(const CUlaunchConfig *config, CUfunction function, void **params, void **extra, bool per_thread)
{
	if (!config || (config->numAttrs && !config->attrs))
		return CUDA_ERROR_INVALID_VALUE;
	struct sg_launch request = {
		.function = function,
		.grid = {config->gridDimX, config->gridDimY, config->gridDimZ},
		.block = {config->blockDimX, config->blockDimY, config->blockDimZ},
		.shared = config->sharedMemBytes, .params = params, .extra = extra,
	};
	for (unsigned i = 0; i < config->numAttrs; i++) {
		if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
			return CUDA_ERROR_NOT_SUPPORTED;
		if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
			request.cooperative = config->attrs[i].value.cooperative != 0;
	}
	return launch(&request, config->hStream, per_thread);
}

CU_API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
	return launch_ex(config, function, params, extra, false);
}

CU_API CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
	return launch_ex(config, function, params, extra, true);
}
