/* Libraries: code loaded once for the process; each context that uses it gets its own instance, a module, when it first does. */
#include "cuda_library.h"

#include <stdlib.h>
#include <string.h>

#define MAX_KERNEL_NAME 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* taken before sg_lock */
static struct sg_library *libraries;

/* This context's instance, made now if need be. With the lock held. */
static CUresult instance(struct sg_library *library, struct sg_context *context, struct sg_module **out)
{
	pthread_mutex_lock(&sg_lock);
	struct sg_module *module = context->modules;
	while (module && module->library != library)
		module = module->next;
	pthread_mutex_unlock(&sg_lock);
	*out = module;
	if (module)
		return CUDA_SUCCESS;
	SG_TRY(sg_module_load(context, library->ptx, library->size, NULL, 0, out));
	(*out)->library = library;
	return CUDA_SUCCESS;
}

static CUresult locked_instance(struct sg_library *library, struct sg_context *context, struct sg_module **out)
{
	pthread_mutex_lock(&lock);
	CUresult rc = instance(library, context, out);
	pthread_mutex_unlock(&lock);
	return rc;
}

CUresult sg_function_of(struct sg_context *context, const void *handle, struct sg_function **out)
{
	struct sg_module *module;

	if (sg_live(SG_FUNCTION, handle)) {
		*out = (struct sg_function *)handle;
		return CUDA_SUCCESS;
	}
	if (!sg_live(SG_KERNEL, handle))
		return CUDA_ERROR_INVALID_HANDLE;
	const struct sg_kernel *kernel = handle;
	SG_TRY(locked_instance(kernel->library, context, &module));
	SG_TRY(sg_module_function(module, kernel->name, out));
	if (kernel->max_dynamic_shared >= 0)
		(*out)->max_dynamic_shared = kernel->max_dynamic_shared;
	return CUDA_SUCCESS;
}

void sg_libraries_forget(struct sg_context *context)
{
	pthread_mutex_lock(&lock);
	for (struct sg_library *library = libraries; library; library = library->next)
		if (library->probe && library->probe->context == context)
			library->probe = NULL;
	pthread_mutex_unlock(&lock);
}

CU_API CUresult cuLibraryLoadData(CUlibrary *out, const void *image, int *jit_options, void **jit_values, unsigned jit_count, int *options,
				  void **values, unsigned count)
{
	char *ptx;
	size_t size;

	SG_TRY(sg_ready());
	(void)jit_options;
	(void)jit_values;
	(void)jit_count;
	(void)options;
	(void)values;
	(void)count;
	if (!out || !image)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_is_linked(image) ? sg_copy_linked(image, &ptx, &size) : kp_image_to_ptx(image, 0, &ptx, &size, NULL, 0));
	struct sg_library *library = calloc(1, sizeof(*library));
	if (!library) {
		free(ptx);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	library->ptx = ptx;
	library->size = size;
	struct sg_context *context = sg_current();
	pthread_mutex_lock(&lock);
	CUresult rc = context ? instance(library, context, &library->probe) : CUDA_SUCCESS;
	if (!rc) {
		library->next = libraries;
		libraries = library;
	}
	pthread_mutex_unlock(&lock);
	if (rc) {
		free(ptx);
		free(library);
		return rc;
	}
	sg_live_add(SG_LIBRARY, library);
	*out = library;
	return CUDA_SUCCESS;
}

CU_API CUresult cuLibraryLoadFromFile(CUlibrary *out, const char *path, int *jit_options, void **jit_values, unsigned jit_count, int *options,
				      void **values, unsigned count)
{
	char *data;
	size_t size;

	SG_TRY(sg_ready());
	SG_TRY(sg_read_file(path, &data, &size));
	CUresult rc = cuLibraryLoadData(out, data, jit_options, jit_values, jit_count, options, values, count);
	free(data);
	return rc;
}

/* Unload the instances in one context. */
static void end_instances(struct sg_library *library, struct sg_context *context)
{
	for (struct sg_module *module = context->modules, *next; module; module = next) {
		next = module->next;
		if (module->library != library)
			continue;
		sg_wait_context(context);
		sg_module_unlink(module);
		sg_module_end(module);
	}
}

CU_API CUresult cuLibraryUnload(CUlibrary library)
{
	SG_TRY(sg_ready());
	if (!sg_live(SG_LIBRARY, library))
		return CUDA_ERROR_INVALID_HANDLE;
	struct sg_context *current = sg_current();
	pthread_mutex_lock(&lock);
	sg_live_remove(library);
	struct sg_library **at = &libraries;
	while (*at != library)
		at = &(*at)->next;
	*at = library->next;
	if (library->probe)
		end_instances(library, library->probe->context);
	if (current)
		end_instances(library, current);
	while (library->kernels) {
		struct sg_kernel *kernel = library->kernels;
		library->kernels = kernel->next;
		sg_live_remove(kernel);
		free(kernel->name);
		free(kernel);
	}
	pthread_mutex_unlock(&lock);
	free(library->ptx);
	free(library);
	return CUDA_SUCCESS;
}

/* An instance to look names up in: any will do. With the lock held. */
static CUresult looked_up_in(struct sg_library *library, struct sg_module **out)
{
	struct sg_context *context = sg_current();

	if (library->probe) {
		*out = library->probe;
		return CUDA_SUCCESS;
	}
	if (!context)
		return CUDA_ERROR_INVALID_CONTEXT;
	SG_TRY(instance(library, context, &library->probe));
	*out = library->probe;
	return CUDA_SUCCESS;
}

/* With the lock held. */
static CUresult kernel_named(struct sg_library *library, const char *name, struct sg_kernel **out)
{
	struct sg_module *module;
	struct kp_function *found;

	for (struct sg_kernel *kernel = library->kernels; kernel; kernel = kernel->next) {
		if (!strcmp(kernel->name, name)) {
			*out = kernel;
			return CUDA_SUCCESS;
		}
	}
	SG_TRY(looked_up_in(library, &module));
	SG_TRY(kp_module_function(module->engine, name, &found));
	struct sg_kernel *kernel = calloc(1, sizeof(*kernel));
	if (!kernel || !(kernel->name = strdup(name))) {
		free(kernel);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	kernel->library = library;
	kernel->max_dynamic_shared = -1;
	kernel->next = library->kernels;
	library->kernels = kernel;
	sg_live_add(SG_KERNEL, kernel);
	*out = kernel;
	return CUDA_SUCCESS;
}

CU_API CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary library, const char *name)
{
	SG_TRY(sg_ready());
	if (!out || !name || strnlen(name, MAX_KERNEL_NAME) == MAX_KERNEL_NAME)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_LIBRARY, library))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&lock);
	CUresult rc = kernel_named(library, name, out);
	pthread_mutex_unlock(&lock);
	return rc;
}

CU_API CUresult cuLibraryGetKernelCount(unsigned *out, CUlibrary library)
{
	struct sg_module *module;

	SG_TRY(sg_ready());
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_LIBRARY, library))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&lock);
	CUresult rc = looked_up_in(library, &module);
	if (!rc)
		*out = (unsigned)kp_module_function_count(module->engine);
	pthread_mutex_unlock(&lock);
	return rc;
}

CU_API CUresult cuLibraryEnumerateKernels(CUkernel *out, unsigned count, CUlibrary library)
{
	struct kp_function_attributes attributes;
	struct sg_module *module;

	SG_TRY(sg_ready());
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_LIBRARY, library))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&lock);
	CUresult rc = looked_up_in(library, &module);
	for (unsigned i = 0; !rc && i < count && i < kp_module_function_count(module->engine); i++) {
		kp_function_attributes(kp_module_function_at(module->engine, i), &attributes);
		rc = kernel_named(library, attributes.name, &out[i]);
	}
	pthread_mutex_unlock(&lock);
	return rc;
}

CU_API CUresult cuLibraryGetModule(CUmodule *out, CUlibrary library)
{
	SG_ENTER(context);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	return sg_live(SG_LIBRARY, library) ? locked_instance(library, context, out) : CUDA_ERROR_INVALID_HANDLE;
}

CU_API CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name)
{
	struct sg_module *module;
	void *at;
	size_t size;

	SG_ENTER(context);
	if (!name || (!address && !bytes))
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_LIBRARY, library))
		return CUDA_ERROR_INVALID_HANDLE;
	SG_TRY(locked_instance(library, context, &module));
	SG_TRY(kp_module_global(module->engine, name, &at, &size));
	if (address)
		*address = (uintptr_t)at;
	if (bytes)
		*bytes = size;
	return CUDA_SUCCESS;
}

CU_API CUresult cuLibraryGetManaged(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name)
{
	(void)address;
	(void)bytes;
	(void)name;
	SG_TRY(sg_ready());
	return sg_live(SG_LIBRARY, library) ? CUDA_ERROR_NOT_FOUND : CUDA_ERROR_INVALID_HANDLE; /* no managed memory here */
}

CUresult sg_kernel_function(CUkernel kernel, struct sg_function **out)
{
	struct sg_module *module;

	SG_TRY(sg_ready());
	if (!sg_live(SG_KERNEL, kernel))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&lock);
	CUresult rc = looked_up_in(kernel->library, &module);
	if (!rc)
		rc = sg_module_function(module, kernel->name, out);
	pthread_mutex_unlock(&lock);
	return rc;
}
