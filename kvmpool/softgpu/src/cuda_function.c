/* What a kernel can be asked and told in one context: attributes, parameters, its module and name. */
#include "cuda_core.h"

#define MAX_SHARED_OPT_IN (227 * 1024)
#define ATTRIBUTES 16

CUresult sg_function_attribute(int *out, int attribute, const struct sg_function *function)
{
	const struct kp_function_attributes *known = &function->attributes;
	const int values[ATTRIBUTES] = {
		(int)known->max_threads_per_block, (int)known->shared_bytes, (int)known->const_bytes, (int)known->local_bytes,
		(int)known->num_regs, (int)known->ptx_version, (int)known->binary_version, 0 /* cache mode */,
		function->max_dynamic_shared, function->carveout, 0, 0, 0, 0, 0, 0, /* clusters: none needed */
	};

	if (!out || attribute < 0 || attribute >= ATTRIBUTES)
		return CUDA_ERROR_INVALID_VALUE;
	*out = values[attribute];
	return CUDA_SUCCESS;
}

CUresult sg_function_set_attribute(struct sg_function *function, int attribute, int value)
{
	switch (attribute) {
	case SG_MAX_DYNAMIC_SHARED:
		if (value < 0 || value > MAX_SHARED_OPT_IN - (int)function->attributes.shared_bytes)
			return CUDA_ERROR_INVALID_VALUE;
		function->max_dynamic_shared = value;
		return CUDA_SUCCESS;
	case 9: /* preferred carveout: a percentage or -1 */
		if (value < -1 || value > 100)
			return CUDA_ERROR_INVALID_VALUE;
		function->carveout = value;
		return CUDA_SUCCESS;
	default:
		return attribute >= 10 && attribute < ATTRIBUTES ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
	}
}

/* The function a handle means in the current context. */
#define FUNCTION_ENTER(function, handle) \
	struct sg_context *context; \
	struct sg_function *function; \
	SG_TRY(sg_enter(&context)); \
	SG_TRY(sg_function_of(context, handle, &function))

CU_API CUresult cuFuncGetAttribute(int *out, int attribute, CUfunction handle)
{
	FUNCTION_ENTER(function, handle);
	return sg_function_attribute(out, attribute, function);
}

CU_API CUresult cuFuncSetAttribute(CUfunction handle, int attribute, int value)
{
	FUNCTION_ENTER(function, handle);
	return sg_function_set_attribute(function, attribute, value);
}

CU_API CUresult cuFuncSetCacheConfig(CUfunction handle, int config)
{
	FUNCTION_ENTER(function, handle);
	(void)function;
	return config < 0 || config > 3 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CU_API CUresult cuFuncSetSharedMemConfig(CUfunction handle, int config)
{
	FUNCTION_ENTER(function, handle);
	(void)function;
	return config < 0 || config > 2 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CU_API CUresult cuFuncSetBlockShape(CUfunction handle, int x, int y, int z)
{
	FUNCTION_ENTER(function, handle);
	(void)function; /* PyCUDA still calls it; only the launches before CUDA 4 (cuLaunch, not supported) would read it */
	return x < 1 || y < 1 || z < 1 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CU_API CUresult cuFuncGetModule(CUmodule *out, CUfunction handle)
{
	FUNCTION_ENTER(function, handle);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = function->module;
	return CUDA_SUCCESS;
}

CU_API CUresult cuFuncGetName(const char **out, CUfunction handle)
{
	FUNCTION_ENTER(function, handle);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = function->attributes.name;
	return CUDA_SUCCESS;
}

CU_API CUresult cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size)
{
	size_t unused;

	FUNCTION_ENTER(function, handle);
	if (!offset)
		return CUDA_ERROR_INVALID_VALUE;
	return kp_function_param(function->kernel, index, offset, size ? size : &unused);
}

CU_API CUresult cuFuncGetParamCount(CUfunction handle, size_t *out)
{
	FUNCTION_ENTER(function, handle);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = function->attributes.param_count;
	return CUDA_SUCCESS;
}

CU_API CUresult cuFuncIsLoaded(int *out, CUfunction handle)
{
	FUNCTION_ENTER(function, handle);
	(void)function;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = 1;
	return CUDA_SUCCESS;
}

CU_API CUresult cuFuncLoad(CUfunction handle)
{
	FUNCTION_ENTER(function, handle);
	(void)function;
	return CUDA_SUCCESS;
}
