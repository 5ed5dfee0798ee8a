/* Modules: a compiled unit, its kernels by name, its own instance of the variables. */
#include "module.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define KP_PAGE 4096u
#define KP_BINARY_VERSION 90
#define KP_MAX_LINKED 64

/* Memory for the variables, between two pages that nothing may touch. */
static int make_memory(struct kp_module *module)
{
	const size_t bytes = module->unit->memory_bytes;
	const size_t usable = (bytes + KP_PAGE - 1) / KP_PAGE * KP_PAGE;

	module->memory_bytes = bytes;
	if (!bytes)
		return 0;
	uint8_t *base = mmap(NULL, usable + 2 * KP_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (base == MAP_FAILED)
		return KP_OUT_OF_MEMORY;
	module->mapped_bytes = usable + 2 * KP_PAGE;
	module->memory = base + KP_PAGE;
	if (mprotect(module->memory, usable, PROT_READ | PROT_WRITE))
		return KP_OUT_OF_MEMORY;
	module->unit->init(module->memory);
	return 0;
}

static int open_unit(struct kp_module *module, const char *path, struct kp_log *log)
{
	module->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!module->library) {
		kp_log(log, "cannot load the compiled kernel: %s", dlerror());
		return KP_JIT_COMPILER_NOT_FOUND;
	}
	module->unit = dlsym(module->library, "kp_unit");
	if (!module->unit || module->unit->abi != KP_ABI) {
		kp_log(log, "this libcuda.so.1 and the rt.h beside translate.py are of different versions. Next: build kvmpool again");
		return KP_JIT_COMPILER_NOT_FOUND;
	}
	module->functions = calloc(module->unit->kernel_count + 1, sizeof(*module->functions));
	if (!module->functions)
		return KP_OUT_OF_MEMORY;
	for (uint32_t i = 0; i < module->unit->kernel_count; i++)
		module->functions[i] = (struct kp_function){module, &module->unit->kernels[i]};
	return make_memory(module);
}

int kp_module_link(const void *const *images, const size_t *lens, size_t count, struct kp_module **out, char *log_text,
		   size_t log_len)
{
	struct kp_log log = {log_text, log_text ? log_len : 0, 0};
	char *texts[KP_MAX_LINKED] = {0};
	size_t sizes[KP_MAX_LINKED] = {0};
	char path[KP_PATH];
	int error = 0;

	if (log.size)
		log_text[0] = 0;
	if (!count || count > KP_MAX_LINKED || !out)
		return KP_INVALID_VALUE;
	*out = NULL;
	struct kp_module *module = calloc(1, sizeof(*module));

	if (!module)
		return KP_OUT_OF_MEMORY;
	for (size_t i = 0; i < count && !error; i++)
		error = kp_find_ptx(images[i], lens ? lens[i] : 0, &texts[i], &sizes[i], &log);
	if (!error)
		error = kp_build((const char *const *)texts, sizes, count, path, &log);
	if (!error)
		error = open_unit(module, path, &log);
	for (size_t i = 0; i < count; i++)
		free(texts[i]);
	if (error)
		kp_module_unload(module);
	else
		*out = module;
	return error;
}

int kp_module_load(const void *image, size_t len, struct kp_module **out, char *log, size_t log_len)
{
	return kp_module_link(&image, &len, 1, out, log, log_len);
}

int kp_image_to_ptx(const void *image, size_t len, char **ptx, size_t *ptx_len, char *log_text, size_t log_len)
{
	struct kp_log log = {log_text, log_text ? log_len : 0, 0};

	if (log.size)
		log_text[0] = 0;
	return kp_find_ptx(image, len, ptx, ptx_len, &log);
}

void kp_module_unload(struct kp_module *module)
{
	if (!module)
		return;
	if (module->mapped_bytes)
		munmap(module->memory - KP_PAGE, module->mapped_bytes);
	free(module->functions);
	if (module->library)
		dlclose(module->library);
	free(module);
}

int kp_module_function(struct kp_module *module, const char *name, struct kp_function **out)
{
	for (uint32_t i = 0; i < module->unit->kernel_count; i++) {
		if (strcmp(module->functions[i].info->name, name) == 0) {
			*out = &module->functions[i];
			return 0;
		}
	}
	return KP_NOT_FOUND;
}

size_t kp_module_function_count(const struct kp_module *module)
{
	return module->unit->kernel_count;
}

struct kp_function *kp_module_function_at(struct kp_module *module, size_t index)
{
	return index < module->unit->kernel_count ? &module->functions[index] : NULL;
}

int kp_module_global(struct kp_module *module, const char *name, void **address, size_t *size)
{
	for (uint32_t i = 0; i < module->unit->variable_count; i++) {
		const struct kp_variable_info *variable = &module->unit->variables[i];

		if (strcmp(variable->name, name) == 0) {
			if (address)
				*address = module->memory + variable->offset;
			if (size)
				*size = variable->size;
			return 0;
		}
	}
	return KP_NOT_FOUND;
}

void kp_module_memory(const struct kp_module *module, void **address, size_t *size)
{
	*address = module->memory;
	*size = module->memory_bytes;
}

void kp_function_attributes(const struct kp_function *function, struct kp_function_attributes *out)
{
	const struct kp_kernel_info *info = function->info;

	*out = (struct kp_function_attributes){
		.name = info->name,
		.max_threads_per_block = info->max_threads && info->max_threads < KP_MAX_THREADS_PER_BLOCK
						 ? info->max_threads
						 : KP_MAX_THREADS_PER_BLOCK,
		.shared_bytes = info->shared_bytes,
		.const_bytes = (uint32_t)function->module->unit->const_bytes,
		.local_bytes = info->local_bytes,
		.num_regs = info->registers,
		.ptx_version = function->module->unit->target,
		.binary_version = KP_BINARY_VERSION,
		.param_count = info->param_count,
		.param_bytes = info->param_bytes,
		.uses_barriers = !info->block,
	};
}

struct kp_module *kp_function_module(const struct kp_function *function)
{
	return function->module;
}

int kp_function_param(const struct kp_function *function, size_t index, size_t *offset, size_t *size)
{
	if (index >= function->info->param_count)
		return KP_INVALID_VALUE;
	if (offset)
		*offset = function->info->params[index].offset;
	if (size)
		*size = function->info->params[index].size;
	return 0;
}
