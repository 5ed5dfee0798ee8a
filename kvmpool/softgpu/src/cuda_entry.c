/* How a program finds the API: cuGetProcAddress and the export tables (there are none). */
#include "cuda_core.h"
#include "cuda_symbols.h"

#include <string.h>

#define FLAG_LEGACY 1u
#define FLAG_PER_THREAD 2u

enum { FOUND = 0, NOT_FOUND = 1, TOO_NEW = 2 };

static unsigned first_of(const char *name)
{
	unsigned low = 0, high = sg_symbol_count;

	while (low < high) {
		unsigned middle = (low + high) / 2;
		if (strcmp(sg_symbols[middle].name, name) < 0)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

/* The newest form that is no newer than `version`; the per-thread one if asked for and there is one. */
static int look_up(const char *name, int version, bool per_thread, void **out)
{
	const struct sg_symbol *best = NULL;
	bool known = false;

	for (unsigned i = first_of(name); i < sg_symbol_count && !strcmp(sg_symbols[i].name, name); i++) {
		const struct sg_symbol *symbol = &sg_symbols[i];
		known = true;
		if (symbol->version > version || (symbol->per_thread && !per_thread))
			continue;
		if (!best || symbol->version > best->version || symbol->per_thread)
			best = symbol;
	}
	*out = best ? best->address : NULL;
	return best ? FOUND : known ? TOO_NEW : NOT_FOUND;
}

CU_API CUresult cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
	if (!name || !out || flags & ~(uint64_t)(FLAG_LEGACY | FLAG_PER_THREAD))
		return CUDA_ERROR_INVALID_VALUE;
	int found = look_up(name, version, flags & FLAG_PER_THREAD, out);
	if (status)
		*status = found;
	return found == FOUND || status ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CU_API CUresult cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
	return cuGetProcAddress_v2(name, out, version, flags, NULL);
}

CU_API CUresult cuGetExportTable(const void **out, const CUuuid *id)
{
	if (!out || !id)
		return CUDA_ERROR_INVALID_VALUE;
	*out = NULL;
	return CUDA_ERROR_NOT_FOUND; /* NVIDIA's private interfaces: programs of the driver API do without */
}

CU_API CUresult cuProfilerStart(void)
{
	SG_ENTER(context);
	(void)context;
	return CUDA_SUCCESS;
}

CU_API CUresult cuProfilerStop(void)
{
	SG_ENTER(context);
	(void)context;
	return CUDA_SUCCESS;
}
