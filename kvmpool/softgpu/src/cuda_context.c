/* Contexts: their birth and end, each thread's stack of current ones, and what makes one unusable. */
#include "cuda_core.h"

#include <stdlib.h>
#include <string.h>

#define CUDA_ERROR_CONTEXT_IS_DESTROYED 709
#define CONTEXT_FLAGS 0xffu

struct current {
	struct sg_context *context;
	uint64_t id; /* an address may be reused: the id is not */
};

static _Thread_local struct current stack[SG_CONTEXT_STACK];
static _Thread_local unsigned depth;
static uint64_t next_id;

struct sg_context *sg_current(void)
{
	if (!depth)
		return NULL;
	const struct current *top = &stack[depth - 1];
	return sg_live(SG_CONTEXT, top->context) && top->context->id == top->id ? top->context : NULL;
}

static CUresult push(struct sg_context *context)
{
	if (depth == SG_CONTEXT_STACK)
		return CUDA_ERROR_OUT_OF_MEMORY;
	stack[depth++] = (struct current){context, context->id};
	return CUDA_SUCCESS;
}

CUresult sg_enter(struct sg_context **out)
{
	SG_TRY(sg_ready());
	*out = sg_current();
	if (!*out)
		return depth && stack[depth - 1].context ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
	return sg_context_status(*out);
}

void sg_context_kill(struct sg_context *context, CUresult error)
{
	CUresult none = CUDA_SUCCESS;

	__atomic_compare_exchange_n(&context->error, &none, error, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
	pthread_mutex_lock(&sg_lock);
	pthread_cond_broadcast(&sg_progress_made);
	pthread_mutex_unlock(&sg_lock);
}

CUresult sg_context_status(struct sg_context *context)
{
	CUresult error = __atomic_load_n(&context->error, __ATOMIC_SEQ_CST);
	const struct sg_card *card = context->device->map.card;

	if (error || __atomic_load_n(&card->fatal_serial, __ATOMIC_SEQ_CST) == context->fatal_serial)
		return error;
	sg_context_kill(context, (CUresult)__atomic_load_n(&card->fatal_error, __ATOMIC_SEQ_CST));
	return __atomic_load_n(&context->error, __ATOMIC_SEQ_CST);
}

static CUresult card_refuses(const struct sg_card *card)
{
	if (__atomic_load_n(&card->lost, __ATOMIC_SEQ_CST))
		return CUDA_ERROR_UNKNOWN;
	return __atomic_load_n(&card->ecc, __ATOMIC_SEQ_CST) ? CUDA_ERROR_ECC_UNCORRECTABLE : CUDA_SUCCESS;
}

static void set_defaults(struct sg_context *context)
{
	context->limits[0] = 1024;             /* stack of a thread */
	context->limits[SG_LIMIT_PRINTF] = 1 << 20;         /* printf buffer */
	context->limits[SG_LIMIT_HEAP] = 8 << 20;         /* malloc heap */
	context->limits[4] = 2048;             /* pending launches */
	context->limits[5] = 64;               /* L2 fetch granularity */
}

/* Take this process's slot with its first context on the card, give it back with the last. */
static CUresult count_context(struct sg_device *device, int change)
{
	pthread_mutex_lock(&sg_lock);
	CUresult rc = CUDA_SUCCESS;
	if (!device->contexts && sg_slot_take(&device->map))
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	else
		device->contexts = (unsigned)((int)device->contexts + change);
	struct sg_slot *slot = sg_slot_mine(&device->map);
	if (slot)
		slot->contexts = device->contexts;
	if (!device->contexts)
		sg_slot_drop(&device->map);
	pthread_mutex_unlock(&sg_lock);
	return rc;
}

uint64_t sg_context_bytes(const struct sg_context *context)
{
	return context->limits[SG_LIMIT_PRINTF] + context->limits[SG_LIMIT_HEAP];
}

CUresult sg_context_new(struct sg_device *device, unsigned flags, bool primary, struct sg_context **out)
{
	SG_TRY(card_refuses(device->map.card));
	struct sg_context *context = calloc(1, sizeof(*context));
	if (!context)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult rc = count_context(device, 1);
	if (rc) {
		free(context);
		return rc;
	}
	context->device = device;
	context->flags = flags;
	context->primary = primary;
	context->api_version = 3020;
	context->id = __atomic_add_fetch(&next_id, 1, __ATOMIC_SEQ_CST);
	context->fatal_serial = __atomic_load_n(&device->map.card->fatal_serial, __ATOMIC_SEQ_CST);
	context->attached = 1;
	set_defaults(context);
	if (sg_memory_add(&device->map, sg_context_bytes(context)))
		rc = CUDA_ERROR_OUT_OF_MEMORY;
	else if ((rc = sg_stream_new(context, 0, 0, true, &context->null_stream)))
		sg_memory_sub(&device->map, sg_context_bytes(context));
	if (rc) {
		count_context(device, -1);
		free(context);
		return rc;
	}
	sg_live_add(SG_CONTEXT, context);
	sg_watch_start();
	*out = context;
	return CUDA_SUCCESS;
}

void sg_context_end(struct sg_context *context)
{
	struct sg_device *device = context->device;

	sg_wait_context(context);
	sg_live_remove(context);
	sg_context_kill(context, CUDA_ERROR_CONTEXT_IS_DESTROYED); /* work that is not done, because the card failed, stops */
	sg_streams_end(context);
	sg_events_end(context);
	sg_libraries_forget(context);
	sg_modules_end(context);
	sg_pools_end(context);
	sg_memory_end(context);
	sg_memory_sub(&device->map, sg_context_bytes(context));
	count_context(device, -1);
	free(context);
}

/* ---- the API ---- */

static CUresult create(CUcontext *out, unsigned flags, CUdevice ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!out || flags & ~CONTEXT_FLAGS)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_context_new(device, flags, false, out));
	return push(*out);
}

CU_API CUresult cuCtxCreate_v2(CUcontext *out, unsigned flags, CUdevice device)
{
	return create(out, flags, device);
}

CU_API CUresult cuCtxCreate(CUcontext *out, unsigned flags, CUdevice device)
{
	return create(out, flags, device);
}

CU_API CUresult cuCtxCreate_v3(CUcontext *out, const void *affinity, int count, unsigned flags, CUdevice device)
{
	return affinity || count ? CUDA_ERROR_NOT_SUPPORTED : create(out, flags, device);
}

/* `params`: an execution affinity or a shared client, neither supported; NULL or all zero asks for none. */
CU_API CUresult cuCtxCreate_v4(CUcontext *out, const void *params, unsigned flags, CUdevice device)
{
	static const struct { const void *affinity; int count; const void *cig; } none;

	if (params && memcmp(params, &none, sizeof(none)))
		return CUDA_ERROR_NOT_SUPPORTED;
	return create(out, flags, device);
}

CU_API CUresult cuCtxDestroy_v2(CUcontext context)
{
	SG_TRY(sg_ready());
	if (!sg_live(SG_CONTEXT, context) || context->primary)
		return CUDA_ERROR_INVALID_CONTEXT;
	CUresult status = sg_wait_context(context);
	if (sg_current() == context)
		depth--;
	sg_context_end(context);
	return status;
}

CU_API CUresult cuCtxDestroy(CUcontext context)
{
	return cuCtxDestroy_v2(context);
}

CU_API CUresult cuCtxPushCurrent_v2(CUcontext context)
{
	SG_TRY(sg_ready());
	return sg_live(SG_CONTEXT, context) ? push(context) : CUDA_ERROR_INVALID_CONTEXT;
}

CU_API CUresult cuCtxPushCurrent(CUcontext context)
{
	return cuCtxPushCurrent_v2(context);
}

CU_API CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
	SG_TRY(sg_ready());
	if (!depth)
		return CUDA_ERROR_INVALID_CONTEXT;
	if (out)
		*out = sg_current();
	depth--;
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxPopCurrent(CUcontext *out)
{
	return cuCtxPopCurrent_v2(out);
}

CU_API CUresult cuCtxSetCurrent(CUcontext context)
{
	SG_TRY(sg_ready());
	if (context && !sg_live(SG_CONTEXT, context))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth)
		depth--;
	return context ? push(context) : CUDA_SUCCESS;
}

CU_API CUresult cuCtxGetCurrent(CUcontext *out)
{
	SG_TRY(sg_ready());
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = sg_current();
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxAttach(CUcontext *out, unsigned flags)
{
	SG_ENTER(context);
	if (!out || flags)
		return CUDA_ERROR_INVALID_VALUE;
	context->attached++;
	*out = context;
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxDetach(CUcontext context)
{
	SG_TRY(sg_ready());
	if (!sg_live(SG_CONTEXT, context) || context != sg_current())
		return CUDA_ERROR_INVALID_CONTEXT;
	return --context->attached ? CUDA_SUCCESS : cuCtxDestroy_v2(context);
}
