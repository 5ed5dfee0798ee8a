/* Virtual memory management: address space reserved at a chosen place, physical memory created apart and mapped into it.
 *
 * Physical memory is a memfd. Reserved but unmapped addresses are PROT_NONE, so a kernel that touches them faults.
 */
#include "cuda_core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULARITY (2ull << 20)
#define MAX_BYTES (1ull << 46)
#define ACCESS_READ 1
#define ACCESS_READWRITE 3

struct physical {
	struct sg_device *device;
	uint64_t size;
	int fd;
	unsigned refs; /* the handle's and one a mapping; guarded by vmm_lock */
	unsigned holders; /* handles that were given out and not released */
	CUmemAllocationProp properties;
};

static pthread_mutex_t vmm_lock = PTHREAD_MUTEX_INITIALIZER;

static CUresult check_properties(const CUmemAllocationProp *properties, struct sg_device **device)
{
	SG_TRY(sg_ready());
	if (!properties || properties->type != 1)
		return CUDA_ERROR_INVALID_VALUE;
	if (properties->location.type != 1 || properties->requestedHandleTypes || properties->allocFlags.compressionType)
		return CUDA_ERROR_NOT_SUPPORTED; /* memory of the host, shareable handles, compression */
	return sg_device_of(properties->location.id, device);
}

CU_API CUresult cuMemGetAllocationGranularity(size_t *out, const CUmemAllocationProp *properties, int option)
{
	struct sg_device *device;

	SG_TRY(check_properties(properties, &device));
	if (!out || option < 0 || option > 1)
		return CUDA_ERROR_INVALID_VALUE;
	*out = GRANULARITY;
	return CUDA_SUCCESS;
}

/* Reserve `size` bytes at `hint` exactly, or anywhere at `alignment`. */
static void *reserve(uint64_t size, uint64_t alignment, uint64_t hint)
{
	const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

	if (hint) {
		void *at = mmap((void *)(uintptr_t)hint, size, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
		if (at == (void *)(uintptr_t)hint)
			return at;
		if (at != MAP_FAILED)
			munmap(at, size); /* a kernel before 4.17 takes the flag for a mere hint */
	}
	char *outer = mmap(NULL, size + alignment, PROT_NONE, flags, -1, 0);
	if (outer == MAP_FAILED)
		return NULL;
	char *at = (char *)(((uintptr_t)outer + alignment - 1) & ~(alignment - 1));
	if (at > outer)
		munmap(outer, (size_t)(at - outer));
	char *end = outer + size + alignment;
	if (end > at + size)
		munmap(at + size, (size_t)(end - (at + size)));
	return at;
}

CU_API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags)
{
	SG_TRY(sg_ready());
	if (!alignment)
		alignment = GRANULARITY;
	if (!out || !size || size % GRANULARITY || flags || alignment & (alignment - 1) || hint % GRANULARITY || hint % alignment)
		return CUDA_ERROR_INVALID_VALUE;
	if (alignment < GRANULARITY)
		alignment = GRANULARITY;
	if (size > MAX_BYTES || alignment > MAX_BYTES)
		return CUDA_ERROR_OUT_OF_MEMORY;
	void *at = reserve(size, alignment, hint);
	if (!at)
		return CUDA_ERROR_OUT_OF_MEMORY;
	madvise(at, size, MADV_DONTFORK);
	struct sg_range range = {.start = (uintptr_t)at, .size = size, .kind = SG_RANGE_RESERVED, .outer_start = (uintptr_t)at,
				 .outer_size = size, .device = &sg_process.devices[0]};
	CUresult rc = sg_range_add(&range);
	if (rc)
		munmap(at, size);
	else
		*out = range.start;
	return rc;
}

CU_API CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
	struct sg_range range;

	SG_TRY(sg_ready());
	if (!sg_range_at(address, SG_RANGE_RESERVED, &range) || range.size != size || sg_range_overlaps(address, size, SG_RANGE_MAPPED))
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_range_remove(address, SG_RANGE_RESERVED, &range))
		return CUDA_ERROR_INVALID_VALUE;
	sg_range_release(&range);
	return CUDA_SUCCESS;
}

/* With vmm_lock held: one holder less. */
static void put_physical(struct physical *physical)
{
	if (--physical->refs)
		return;
	close(physical->fd);
	sg_memory_sub(&physical->device->map, physical->size);
	free(physical);
}

/* Memory of a card is charged to the process's slot on it, which a context holds. */
static bool has_slot(struct sg_device *device)
{
	return sg_slot_mine(&device->map) != NULL;
}

CU_API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *properties, unsigned long long flags)
{
	struct sg_device *device;

	SG_TRY(check_properties(properties, &device));
	if (!out || !size || size % GRANULARITY || flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (!has_slot(device))
		return CUDA_ERROR_INVALID_CONTEXT;
	struct physical *physical = calloc(1, sizeof(*physical));
	if (!physical || sg_memory_add(&device->map, size)) {
		free(physical);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*physical = (struct physical){.device = device, .size = size, .refs = 1, .holders = 1, .properties = *properties};
	physical->fd = memfd_create("softgpu", MFD_CLOEXEC);
	if (physical->fd < 0 || ftruncate(physical->fd, (off_t)size)) {
		if (physical->fd >= 0)
			close(physical->fd);
		sg_memory_sub(&device->map, size);
		free(physical);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	sg_live_add(SG_PHYSICAL, physical);
	*out = (uintptr_t)physical;
	return CUDA_SUCCESS;
}

static struct physical *physical_of(CUmemGenericAllocationHandle handle)
{
	struct physical *physical = (struct physical *)(uintptr_t)handle;

	return sg_live(SG_PHYSICAL, physical) ? physical : NULL;
}

CU_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
	SG_TRY(sg_ready());
	struct physical *physical = physical_of(handle);
	if (!physical)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vmm_lock);
	if (!--physical->holders) {
		sg_live_remove(physical);
		put_physical(physical);
	}
	pthread_mutex_unlock(&vmm_lock);
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
	struct sg_range space;

	SG_TRY(sg_ready());
	struct physical *physical = physical_of(handle);
	if (!physical || !size || size % GRANULARITY || address % GRANULARITY || offset || flags || size > physical->size)
		return CUDA_ERROR_INVALID_VALUE;
	if (sg_range_overlaps(address, size, SG_RANGE_MAPPED) || !sg_range_find(address, &space) || space.kind != SG_RANGE_RESERVED ||
	    address - space.start + size > space.size)
		return CUDA_ERROR_INVALID_VALUE;
	void *at = (void *)(uintptr_t)address;
	if (mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->fd, 0) == MAP_FAILED)
		return CUDA_ERROR_OUT_OF_MEMORY;
	madvise(at, size, MADV_DONTFORK);
	struct sg_range range = {.start = address, .size = size, .kind = SG_RANGE_MAPPED, .device = physical->device, .physical = physical};
	CUresult rc = sg_range_add(&range);
	if (rc)
		return rc;
	pthread_mutex_lock(&vmm_lock);
	physical->refs++;
	pthread_mutex_unlock(&vmm_lock);
	return CUDA_SUCCESS;
}

static CUresult set_access(const struct sg_range *mapped, const CUmemAccessDesc *access)
{
	if (access->location.type != 1 || access->location.id < 0 || access->location.id >= sg_process.device_count)
		return CUDA_ERROR_INVALID_DEVICE;
	int protection = access->flags == ACCESS_READWRITE ? PROT_READ | PROT_WRITE : access->flags == ACCESS_READ ? PROT_READ : PROT_NONE;
	if (mprotect((void *)(uintptr_t)mapped->start, mapped->size, protection))
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct sg_range changed;
	if (!sg_range_remove(mapped->start, SG_RANGE_MAPPED, &changed))
		return CUDA_ERROR_INVALID_VALUE;
	changed.flags = (unsigned)access->flags;
	return sg_range_add(&changed);
}

CU_API CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count)
{
	struct sg_range range;

	SG_TRY(sg_ready());
	if (!access || !count || !size)
		return CUDA_ERROR_INVALID_VALUE;
	for (uint64_t at = address; at < address + size; at = range.start + range.size)
		if (!sg_range_at(at, SG_RANGE_MAPPED, &range) || range.start + range.size > address + size)
			return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count; i++) {
		for (uint64_t at = address; at < address + size; at = range.start + range.size) {
			if (!sg_range_at(at, SG_RANGE_MAPPED, &range))
				return CUDA_ERROR_INVALID_VALUE;
			SG_TRY(set_access(&range, &access[i]));
		}
	}
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address)
{
	struct sg_range range;

	SG_TRY(sg_ready());
	if (!flags || !location || !sg_range_find(address, &range) || range.kind != SG_RANGE_MAPPED)
		return CUDA_ERROR_INVALID_VALUE;
	*flags = range.flags;
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
	struct sg_range range;
	struct sg_context *context = sg_current();

	SG_TRY(sg_ready());
	for (uint64_t at = address; at < address + size; at = range.start + range.size)
		if (!sg_range_at(at, SG_RANGE_MAPPED, &range) || range.start + range.size > address + size)
			return CUDA_ERROR_INVALID_VALUE;
	if (context)
		sg_wait_context(context); /* work in flight may still use it */
	for (uint64_t at = address; at < address + size; at = range.start + range.size) {
		if (!sg_range_remove(at, SG_RANGE_MAPPED, &range))
			return CUDA_ERROR_INVALID_VALUE;
		mmap((void *)(uintptr_t)at, range.size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
		madvise((void *)(uintptr_t)at, range.size, MADV_DONTFORK);
		pthread_mutex_lock(&vmm_lock);
		put_physical(range.physical);
		pthread_mutex_unlock(&vmm_lock);
	}
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *out, CUmemGenericAllocationHandle handle)
{
	SG_TRY(sg_ready());
	const struct physical *physical = physical_of(handle);
	if (!out || !physical)
		return CUDA_ERROR_INVALID_VALUE;
	*out = physical->properties;
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
	struct sg_range range;

	SG_TRY(sg_ready());
	if (!out || !sg_range_find((uintptr_t)address, &range) || range.kind != SG_RANGE_MAPPED)
		return CUDA_ERROR_INVALID_VALUE;
	struct physical *physical = range.physical;
	pthread_mutex_lock(&vmm_lock);
	if (!physical->holders++) {
		physical->refs++;
		sg_live_add(SG_PHYSICAL, physical);
	}
	pthread_mutex_unlock(&vmm_lock);
	*out = (uintptr_t)physical;
	return CUDA_SUCCESS;
}
