/* Modules: code loaded into one context, its kernels and variables. */
#include "cuda_core.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_FILE_BYTES (256l << 20)
#define LOG_BYTES 4096
#define JIT_INFO_LOG_BUFFER 3
#define JIT_INFO_LOG_BYTES 4
#define JIT_ERROR_LOG_BUFFER 5
#define JIT_ERROR_LOG_BYTES 6

/* Charge the module's variables to the card and make them known as device memory. */
static CUresult account(struct sg_module *module)
{
	struct sg_context *context = module->context;
	void *at;
	size_t size;

	kp_module_memory(module->engine, &at, &size);
	if (!size)
		return CUDA_SUCCESS;
	if (sg_memory_add(&context->device->map, size))
		return CUDA_ERROR_OUT_OF_MEMORY;
	module->memory_bytes = size;
	struct sg_range range = {.start = (uintptr_t)at, .size = size, .kind = SG_RANGE_MODULE, .context = context, .device = context->device};
	return sg_range_add(&range);
}

static CUresult adopt(struct sg_context *context, struct kp_module *engine, struct sg_module **out)
{
	struct sg_module *module = calloc(1, sizeof(*module));

	if (!module) {
		kp_module_unload(engine);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	module->context = context;
	module->engine = engine;
	CUresult rc = account(module);
	if (rc) {
		sg_module_end(module);
		return rc;
	}
	pthread_mutex_lock(&sg_lock);
	module->next = context->modules;
	context->modules = module;
	pthread_mutex_unlock(&sg_lock);
	sg_live_add(SG_MODULE, module);
	*out = module;
	return CUDA_SUCCESS;
}

CUresult sg_module_load(struct sg_context *context, const void *image, size_t size, char *log, size_t log_size, struct sg_module **out)
{
	struct kp_module *engine;

	SG_TRY(sg_is_linked(image) ? sg_load_linked(image, &engine, log, log_size) : kp_module_load(image, size, &engine, log, log_size));
	return adopt(context, engine, out);
}

void sg_module_unlink(struct sg_module *module)
{
	pthread_mutex_lock(&sg_lock);
	struct sg_module **at = &module->context->modules;
	while (*at && *at != module)
		at = &(*at)->next;
	if (*at)
		*at = module->next;
	pthread_mutex_unlock(&sg_lock);
}

void sg_module_end(struct sg_module *module)
{
	struct sg_range range;
	void *at;
	size_t size;

	sg_live_remove(module);
	while (module->functions) {
		struct sg_function *function = module->functions;
		module->functions = function->next;
		sg_live_remove(function);
		free(function);
	}
	kp_module_memory(module->engine, &at, &size);
	if (size)
		sg_range_remove((uintptr_t)at, SG_RANGE_MODULE, &range);
	sg_memory_sub(&module->context->device->map, module->memory_bytes);
	kp_module_unload(module->engine);
	free(module);
}

void sg_modules_end(struct sg_context *context)
{
	while (context->modules) {
		struct sg_module *module = context->modules;
		context->modules = module->next;
		sg_module_end(module);
	}
}

CUresult sg_module_function(struct sg_module *module, const char *name, struct sg_function **out)
{
	struct kp_function *kernel;
	CUresult rc = kp_module_function(module->engine, name, &kernel);

	if (rc)
		return rc;
	pthread_mutex_lock(&sg_lock);
	struct sg_function *function = module->functions;
	while (function && function->kernel != kernel)
		function = function->next;
	if (!function && (function = calloc(1, sizeof(*function)))) {
		function->module = module;
		function->kernel = kernel;
		function->carveout = -1;
		kp_function_attributes(kernel, &function->attributes);
		function->max_dynamic_shared = 48 * 1024 - (int)function->attributes.shared_bytes;
		if (function->max_dynamic_shared < 0)
			function->max_dynamic_shared = 0;
		function->next = module->functions;
		module->functions = function;
		sg_live_add(SG_FUNCTION, function);
	}
	pthread_mutex_unlock(&sg_lock);
	*out = function;
	return function ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- the API ---- */

/* Put the engine's log where the JIT options of the caller want it. */
static void give_log(unsigned count, const int *options, void **values, const char *log, bool failed)
{
	int wanted = failed ? JIT_ERROR_LOG_BUFFER : JIT_INFO_LOG_BUFFER;
	char *buffer = NULL;
	void **size = NULL;

	for (unsigned i = 0; options && values && i < count; i++) {
		if (options[i] == wanted)
			buffer = values[i];
		else if (options[i] == wanted + 1)
			size = &values[i];
	}
	size_t room = size ? (size_t)(unsigned)(uintptr_t)*size : 0;
	if (buffer && room)
		snprintf(buffer, room, "%s", log);
	if (size)
		*size = (void *)(uintptr_t)(strlen(log) + 1 < room ? strlen(log) + 1 : room);
}

CU_API CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned count, int *options, void **values)
{
	char log[LOG_BYTES] = "";

	SG_ENTER(context);
	if (!out || !image)
		return CUDA_ERROR_INVALID_VALUE;
	CUresult rc = sg_module_load(context, image, 0, log, sizeof(log), out);
	give_log(count, options, values, log, rc != CUDA_SUCCESS);
	return rc;
}

CU_API CUresult cuModuleLoadData(CUmodule *out, const void *image)
{
	return cuModuleLoadDataEx(out, image, 0, NULL, NULL);
}

CU_API CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image)
{
	return cuModuleLoadDataEx(out, image, 0, NULL, NULL);
}

/* Read a whole file into malloc memory, NUL-ended. */
CUresult sg_read_file(const char *path, char **data, size_t *size)
{
	FILE *file = path ? fopen(path, "rbe") : NULL;
	CUresult rc = CUDA_ERROR_INVALID_VALUE;

	if (!file)
		return path ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
	if (fseek(file, 0, SEEK_END) || ftell(file) <= 0 || ftell(file) > MAX_FILE_BYTES)
		goto out;
	*size = (size_t)ftell(file);
	rewind(file);
	*data = calloc(1, *size + 1);
	rc = CUDA_ERROR_OUT_OF_MEMORY;
	if (!*data)
		goto out;
	rc = fread(*data, 1, *size, file) == *size ? CUDA_SUCCESS : CUDA_ERROR_FILE_NOT_FOUND;
	if (rc)
		free(*data);
out:
	fclose(file);
	return rc;
}

CU_API CUresult cuModuleLoad(CUmodule *out, const char *path)
{
	char *data;
	size_t size;

	SG_ENTER(context);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_read_file(path, &data, &size));
	CUresult rc = sg_module_load(context, data, size, NULL, 0, out);
	free(data);
	return rc;
}

CU_API CUresult cuModuleUnload(CUmodule module)
{
	SG_ENTER(context);
	(void)context;
	if (!sg_live(SG_MODULE, module) || module->library)
		return CUDA_ERROR_INVALID_HANDLE;
	SG_TRY(sg_wait_context(module->context));
	sg_module_unlink(module);
	sg_module_end(module);
	return CUDA_SUCCESS;
}

CU_API CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name)
{
	SG_ENTER(context);
	(void)context;
	if (!out || !name || !*name)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_MODULE, module))
		return CUDA_ERROR_INVALID_HANDLE;
	return sg_module_function(module, name, out);
}

CU_API CUresult cuModuleGetFunctionCount(unsigned *out, CUmodule module)
{
	SG_ENTER(context);
	(void)context;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_MODULE, module))
		return CUDA_ERROR_INVALID_HANDLE;
	*out = (unsigned)kp_module_function_count(module->engine);
	return CUDA_SUCCESS;
}

CU_API CUresult cuModuleEnumerateFunctions(CUfunction *out, unsigned count, CUmodule module)
{
	struct kp_function_attributes attributes;

	SG_ENTER(context);
	(void)context;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_MODULE, module))
		return CUDA_ERROR_INVALID_HANDLE;
	for (unsigned i = 0; i < count && i < kp_module_function_count(module->engine); i++) {
		kp_function_attributes(kp_module_function_at(module->engine, i), &attributes);
		SG_TRY(sg_module_function(module, attributes.name, &out[i]));
	}
	return CUDA_SUCCESS;
}

CU_API CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name)
{
	void *at;
	size_t size;

	SG_ENTER(context);
	(void)context;
	if (!name || (!address && !bytes))
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_MODULE, module))
		return CUDA_ERROR_INVALID_HANDLE;
	SG_TRY(kp_module_global(module->engine, name, &at, &size));
	if (address)
		*address = (uintptr_t)at;
	if (bytes)
		*bytes = size;
	return CUDA_SUCCESS;
}

CU_API CUresult cuModuleGetLoadingMode(int *out)
{
	SG_TRY(sg_ready());
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = 2; /* lazy: kernels are compiled when first launched */
	return CUDA_SUCCESS;
}
