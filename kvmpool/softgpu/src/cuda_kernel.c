/* Kernels of libraries: what they can be asked and told without a context, and their function in one. */
#include "cuda_library.h"

CU_API CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel)
{
	SG_ENTER(context);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	return sg_live(SG_KERNEL, kernel) ? sg_function_of(context, kernel, out) : CUDA_ERROR_INVALID_HANDLE;
}

CU_API CUresult cuKernelGetLibrary(CUlibrary *out, CUkernel kernel)
{
	SG_TRY(sg_ready());
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_KERNEL, kernel))
		return CUDA_ERROR_INVALID_HANDLE;
	*out = kernel->library;
	return CUDA_SUCCESS;
}

CU_API CUresult cuKernelGetName(const char **out, CUkernel kernel)
{
	SG_TRY(sg_ready());
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_KERNEL, kernel))
		return CUDA_ERROR_INVALID_HANDLE;
	*out = kernel->name;
	return CUDA_SUCCESS;
}

CU_API CUresult cuKernelGetAttribute(int *out, int attribute, CUkernel kernel, CUdevice ordinal)
{
	struct sg_device *device;
	struct sg_function *function;

	SG_TRY(sg_device_of(ordinal, &device));
	SG_TRY(sg_kernel_function(kernel, &function));
	if (attribute == SG_MAX_DYNAMIC_SHARED && kernel->max_dynamic_shared >= 0 && out) {
		*out = kernel->max_dynamic_shared;
		return CUDA_SUCCESS;
	}
	return sg_function_attribute(out, attribute, function);
}

CU_API CUresult cuKernelSetAttribute(int attribute, int value, CUkernel kernel, CUdevice ordinal)
{
	struct sg_device *device;
	struct sg_function *function;

	SG_TRY(sg_device_of(ordinal, &device));
	SG_TRY(sg_kernel_function(kernel, &function));
	SG_TRY(sg_function_set_attribute(function, attribute, value));
	if (attribute == SG_MAX_DYNAMIC_SHARED)
		kernel->max_dynamic_shared = value;
	return CUDA_SUCCESS;
}

CU_API CUresult cuKernelSetCacheConfig(CUkernel kernel, int config, CUdevice ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!sg_live(SG_KERNEL, kernel))
		return CUDA_ERROR_INVALID_HANDLE;
	return config < 0 || config > 3 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CU_API CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size)
{
	struct sg_function *function;
	size_t unused;

	SG_TRY(sg_kernel_function(kernel, &function));
	if (!offset)
		return CUDA_ERROR_INVALID_VALUE;
	return kp_function_param(function->kernel, index, offset, size ? size : &unused);
}

CU_API CUresult cuKernelGetParamCount(CUkernel kernel, size_t *out)
{
	struct sg_function *function;

	SG_TRY(sg_kernel_function(kernel, &function));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = function->attributes.param_count;
	return CUDA_SUCCESS;
}
