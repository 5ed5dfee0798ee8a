/* What a context can be asked and told, and the primary contexts. */
#include "cuda_core.h"

#include <stdlib.h>

#define LIMITS 8

static CUresult context_or_current(CUcontext given, struct sg_context **out)
{
	SG_TRY(sg_ready());
	*out = given ? given : sg_current();
	return sg_live(SG_CONTEXT, *out) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CU_API CUresult cuCtxGetDevice_v2(CUdevice *out, CUcontext given)
{
	struct sg_context *context;

	SG_TRY(context_or_current(given, &context));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = (CUdevice)(context->device - sg_process.devices);
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxGetDevice(CUdevice *out)
{
	return cuCtxGetDevice_v2(out, NULL);
}

CU_API CUresult cuCtxGetApiVersion(CUcontext given, unsigned *out)
{
	struct sg_context *context;

	SG_TRY(context_or_current(given, &context));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = context->api_version;
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxGetId(CUcontext given, unsigned long long *out)
{
	struct sg_context *context;

	SG_TRY(context_or_current(given, &context));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = context->id;
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxGetFlags(unsigned *out)
{
	SG_ENTER(context);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = context->flags;
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxSetFlags(unsigned flags)
{
	SG_ENTER(context);
	if (flags & ~0xffu)
		return CUDA_ERROR_INVALID_VALUE;
	context->flags = flags;
	return CUDA_SUCCESS;
}

static CUresult synchronize(struct sg_context *context)
{
	pthread_mutex_lock(&sg_lock);
	CUresult rc = sg_capture_forbids_context(context);
	pthread_mutex_unlock(&sg_lock);
	if (rc)
		return rc;
	rc = sg_wait_context(context);
	sg_pools_synchronised();
	return rc;
}

CU_API CUresult cuCtxSynchronize(void)
{
	SG_ENTER(context);
	return synchronize(context);
}

CU_API CUresult cuCtxSynchronize_v2(CUcontext given)
{
	struct sg_context *context;

	SG_TRY(context_or_current(given, &context));
	SG_TRY(sg_context_status(context));
	return synchronize(context);
}

CU_API CUresult cuCtxGetLimit(size_t *out, unsigned limit)
{
	SG_ENTER(context);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (limit >= LIMITS)
		return CUDA_ERROR_UNSUPPORTED_LIMIT;
	*out = context->limits[limit];
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxSetLimit(unsigned limit, size_t value)
{
	SG_ENTER(context);
	if (limit >= LIMITS)
		return CUDA_ERROR_UNSUPPORTED_LIMIT;
	size_t before = context->limits[limit];
	if (limit == SG_LIMIT_PRINTF || limit == SG_LIMIT_HEAP) {
		if (value > before && sg_memory_add(&context->device->map, value - before))
			return CUDA_ERROR_OUT_OF_MEMORY;
		if (value < before)
			sg_memory_sub(&context->device->map, before - value);
	}
	context->limits[limit] = value; /* kept, without further effect: threads have the stack they need */
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxGetCacheConfig(int *out)
{
	SG_ENTER(context);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = context->cache_config;
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxSetCacheConfig(int config)
{
	SG_ENTER(context);
	if (config < 0 || config > 3)
		return CUDA_ERROR_INVALID_VALUE;
	context->cache_config = config;
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxGetSharedMemConfig(int *out)
{
	SG_ENTER(context);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = context->shared_config;
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxSetSharedMemConfig(int config)
{
	SG_ENTER(context);
	if (config < 0 || config > 2)
		return CUDA_ERROR_INVALID_VALUE;
	context->shared_config = config;
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	SG_ENTER(context);
	(void)context;
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return CUDA_SUCCESS;
}

CU_API CUresult cuCtxResetPersistingL2Cache(void)
{
	SG_ENTER(context);
	(void)context;
	return CUDA_SUCCESS;
}

/* ---- primary contexts ---- */

static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;

CU_API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice ordinal)
{
	struct sg_device *device;
	CUresult rc = CUDA_SUCCESS;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&primary_lock);
	if (!device->primary)
		rc = sg_context_new(device, device->primary_flags, true, &device->primary);
	if (!rc) {
		device->primary_refs++;
		*out = device->primary;
	}
	pthread_mutex_unlock(&primary_lock);
	return rc;
}

static void end_primary(struct sg_device *device)
{
	struct sg_context *context = device->primary;

	device->primary = NULL;
	device->primary_refs = 0;
	if (context)
		sg_context_end(context);
}

CU_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal)
{
	struct sg_device *device;
	CUresult rc = CUDA_SUCCESS;

	SG_TRY(sg_device_of(ordinal, &device));
	pthread_mutex_lock(&primary_lock);
	if (!device->primary_refs)
		rc = CUDA_ERROR_INVALID_CONTEXT;
	else if (--device->primary_refs == 0)
		end_primary(device);
	pthread_mutex_unlock(&primary_lock);
	return rc;
}

CU_API CUresult cuDevicePrimaryCtxReset_v2(CUdevice ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	pthread_mutex_lock(&primary_lock);
	end_primary(device);
	pthread_mutex_unlock(&primary_lock);
	return CUDA_SUCCESS;
}

CU_API CUresult cuDevicePrimaryCtxGetState(CUdevice ordinal, unsigned *flags, int *active)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!flags || !active)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&primary_lock);
	*flags = device->primary ? device->primary->flags : device->primary_flags;
	*active = device->primary != NULL;
	pthread_mutex_unlock(&primary_lock);
	return CUDA_SUCCESS;
}

CU_API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice ordinal, unsigned flags)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (flags & ~0xffu)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&primary_lock);
	device->primary_flags = flags;
	if (device->primary)
		device->primary->flags = flags;
	pthread_mutex_unlock(&primary_lock);
	return CUDA_SUCCESS;
}

CU_API CUresult cuDevicePrimaryCtxRelease(CUdevice ordinal)
{
	return cuDevicePrimaryCtxRelease_v2(ordinal);
}

CU_API CUresult cuDevicePrimaryCtxReset(CUdevice ordinal)
{
	return cuDevicePrimaryCtxReset_v2(ordinal);
}

CU_API CUresult cuDevicePrimaryCtxSetFlags(CUdevice ordinal, unsigned flags)
{
	return cuDevicePrimaryCtxSetFlags_v2(ordinal, flags);
}
