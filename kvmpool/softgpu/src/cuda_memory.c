/* Device and page-locked host memory: allocation with guard pages, accounting on the card, what a pointer is.
 *
 * A device address is a host address. An allocation ends (to 512 bytes, CUDA's own alignment) at a page that nobody may
 * touch, and another such page lies before it, so that a kernel that runs over its end faults instead of corrupting.
 */
#include "cuda_core.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGNMENT 512ull
#define PITCH_ALIGNMENT 512ull
#define PAGE 4096ull
#define MAX_ALLOCATION (1ull << 46)
#define HOST_ALLOC_FLAGS 7u
#define HOST_REGISTER_FLAGS 15u

static uint64_t round_up(uint64_t value, uint64_t to)
{
	return (value + to - 1) / to * to;
}

/* Map `size` bytes between guard pages and fill in where. */
static CUresult map_guarded(uint64_t size, struct sg_range *range)
{
	uint64_t inner = round_up(size, PAGE);
	char *outer = mmap(NULL, inner + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (outer == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	if (mprotect(outer + PAGE, inner, PROT_READ | PROT_WRITE)) {
		munmap(outer, inner + 2 * PAGE);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	range->outer_start = (uintptr_t)outer;
	range->outer_size = inner + 2 * PAGE;
	range->start = (uintptr_t)outer + PAGE + inner - size;
	range->size = size;
	return CUDA_SUCCESS;
}

void sg_range_release(const struct sg_range *range)
{
	if (range->outer_size)
		munmap((void *)(uintptr_t)range->outer_start, range->outer_size);
	if (range->kind == SG_RANGE_DEVICE)
		sg_memory_sub(&range->device->map, range->size);
}

void sg_memory_end(struct sg_context *context)
{
	struct sg_range range;

	while (sg_range_take_of(context, &range))
		sg_range_release(&range);
}

static CUresult allocate(struct sg_context *context, uint64_t bytes, CUdeviceptr *out)
{
	uint64_t size = round_up(bytes, ALIGNMENT);
	struct sg_range range = {.kind = SG_RANGE_DEVICE, .context = context, .device = context->device};

	if (sg_memory_add(&context->device->map, size))
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult rc = map_guarded(size, &range);
	if (rc) {
		sg_memory_sub(&context->device->map, size);
		return rc;
	}
	madvise((void *)(uintptr_t)range.outer_start, range.outer_size, MADV_DONTFORK); /* a child has no card */
	rc = sg_range_add(&range);
	if (rc)
		sg_range_release(&range);
	else
		*out = range.start;
	return rc;
}

CUresult sg_memory_take(struct sg_context *context, uint64_t bytes, CUdeviceptr *out)
{
	return allocate(context, bytes, out);
}

void sg_memory_give(CUdeviceptr address)
{
	struct sg_range range;

	if (sg_range_remove(address, SG_RANGE_DEVICE, &range))
		sg_range_release(&range);
}

CU_API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t bytes)
{
	SG_ENTER(context);
	SG_TRY(sg_capture_unsafe());
	if (!out || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	return bytes > MAX_ALLOCATION ? CUDA_ERROR_OUT_OF_MEMORY : allocate(context, bytes, out);
}

CU_API CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned element)
{
	SG_ENTER(context);
	SG_TRY(sg_capture_unsafe());
	if (!out || !pitch || !width || !height || (element != 4 && element != 8 && element != 16))
		return CUDA_ERROR_INVALID_VALUE;
	if (width > MAX_ALLOCATION || height > MAX_ALLOCATION / round_up(width, PITCH_ALIGNMENT))
		return CUDA_ERROR_OUT_OF_MEMORY;
	*pitch = round_up(width, PITCH_ALIGNMENT);
	return allocate(context, *pitch * height, out);
}

CU_API CUresult cuMemFree_v2(CUdeviceptr address)
{
	struct sg_range range;

	SG_ENTER(context);
	if (!address)
		return CUDA_SUCCESS;
	SG_TRY(sg_capture_unsafe());
	if (!sg_range_at(address, SG_RANGE_DEVICE, &range))
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_pools_forget(address))
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_wait_context(range.context)); /* as the driver: work that may use it ends first */
	if (!sg_range_remove(address, SG_RANGE_DEVICE, &range))
		return CUDA_ERROR_INVALID_VALUE; /* another thread freed it meanwhile */
	(void)context;
	sg_range_release(&range);
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
	SG_ENTER(context);
	if (!free_bytes || !total_bytes)
		return CUDA_ERROR_INVALID_VALUE;
	uint64_t used = sg_usage(&context->device->map).memory_bytes;
	*total_bytes = context->device->map.card->memory_bytes;
	*free_bytes = used < *total_bytes ? *total_bytes - used : 0;
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
	struct sg_range range;

	SG_ENTER(context);
	(void)context;
	if (!sg_range_find(address, &range) || range.kind == SG_RANGE_REGISTERED)
		return CUDA_ERROR_NOT_FOUND;
	if (base)
		*base = range.start;
	if (size)
		*size = range.size;
	return CUDA_SUCCESS;
}

/* ---- page-locked host memory ---- */

CU_API CUresult cuMemHostAlloc(void **out, size_t bytes, unsigned flags)
{
	struct sg_range range = {.kind = SG_RANGE_HOST, .flags = flags};

	SG_ENTER(context);
	SG_TRY(sg_capture_unsafe());
	if (!out || !bytes || flags & ~HOST_ALLOC_FLAGS)
		return CUDA_ERROR_INVALID_VALUE;
	if (bytes > MAX_ALLOCATION)
		return CUDA_ERROR_OUT_OF_MEMORY;
	range.context = context;
	range.device = context->device;
	range.outer_size = range.size = round_up(bytes, PAGE);
	void *at = mmap(NULL, range.size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (at == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	range.outer_start = range.start = (uintptr_t)at;
	range.size = bytes;
	CUresult rc = sg_range_add(&range);
	if (rc)
		munmap(at, range.outer_size);
	else
		*out = at;
	return rc;
}

CU_API CUresult cuMemAllocHost_v2(void **out, size_t bytes)
{
	return cuMemHostAlloc(out, bytes, 0);
}

CU_API CUresult cuMemFreeHost(void *address)
{
	struct sg_range range;

	SG_ENTER(context);
	(void)context;
	if (!sg_range_at((uintptr_t)address, SG_RANGE_HOST, &range))
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_wait_context(range.context));
	if (!sg_range_remove((uintptr_t)address, SG_RANGE_HOST, &range))
		return CUDA_ERROR_INVALID_VALUE;
	sg_range_release(&range);
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags)
{
	struct sg_range range = {.kind = SG_RANGE_REGISTERED, .flags = flags, .start = (uintptr_t)address, .size = bytes};

	SG_ENTER(context);
	if (!address || !bytes || flags & ~HOST_REGISTER_FLAGS || range.start + bytes < range.start)
		return CUDA_ERROR_INVALID_VALUE;
	if (sg_range_overlaps(range.start, bytes, SG_RANGE_REGISTERED))
		return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	range.context = context;
	range.device = context->device;
	return sg_range_add(&range);
}

CU_API CUresult cuMemHostUnregister(void *address)
{
	struct sg_range range;

	SG_ENTER(context);
	(void)context;
	if (!sg_range_at((uintptr_t)address, SG_RANGE_REGISTERED, &range))
		return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
	SG_TRY(sg_wait_context(range.context));
	return sg_range_remove((uintptr_t)address, SG_RANGE_REGISTERED, &range) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

CU_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *address, unsigned flags)
{
	SG_ENTER(context);
	(void)context;
	if (!out || flags || !sg_host_pinned(address, 1))
		return CUDA_ERROR_INVALID_VALUE;
	*out = (uintptr_t)address;
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemHostGetFlags(unsigned *out, void *address)
{
	struct sg_range range;

	SG_ENTER(context);
	(void)context;
	if (!out || !sg_range_find((uintptr_t)address, &range) || range.kind != SG_RANGE_HOST)
		return CUDA_ERROR_INVALID_VALUE;
	*out = range.flags;
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemAllocHost(void **out, size_t bytes)
{
	return cuMemHostAlloc(out, bytes, 0);
}

CU_API CUresult cuMemHostRegister(void *address, size_t bytes, unsigned flags)
{
	return cuMemHostRegister_v2(address, bytes, flags);
}
