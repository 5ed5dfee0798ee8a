/* What a pointer is: cuPointerGetAttribute and its plural. */
#include "cuda_core.h"

enum attribute {
	CONTEXT = 1, MEMORY_TYPE, DEVICE_POINTER, HOST_POINTER, P2P_TOKENS, SYNC_MEMOPS, BUFFER_ID, IS_MANAGED, DEVICE_ORDINAL,
	IS_LEGACY_IPC_CAPABLE, RANGE_START_ADDR, RANGE_SIZE, MAPPED, ALLOWED_HANDLE_TYPES, IS_GPU_DIRECT_RDMA_CAPABLE,
	ACCESS_FLAGS, MEMPOOL_HANDLE, MAPPING_SIZE, MAPPING_BASE_ADDR, MEMORY_BLOCK_ID, LAST = MEMORY_BLOCK_ID,
};

static bool on_host(const struct sg_range *range)
{
	return range->kind == SG_RANGE_HOST || range->kind == SG_RANGE_REGISTERED;
}

static CUresult tell_number(int attribute, const struct sg_range *range, void *out)
{
	switch (attribute) {
	case MEMORY_TYPE:
		*(unsigned *)out = on_host(range) ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
		return CUDA_SUCCESS;
	case DEVICE_ORDINAL:
		*(int *)out = (int)(range->device - sg_process.devices);
		return CUDA_SUCCESS;
	case MAPPED:
		*(unsigned char *)out = range->kind != SG_RANGE_RESERVED;
		return CUDA_SUCCESS;
	case SYNC_MEMOPS:
	case IS_MANAGED:
	case IS_LEGACY_IPC_CAPABLE:
	case IS_GPU_DIRECT_RDMA_CAPABLE:
		*(unsigned char *)out = 0;
		return CUDA_SUCCESS;
	case ACCESS_FLAGS:
		*(unsigned *)out = 3;
		return CUDA_SUCCESS;
	case BUFFER_ID:
	case MEMORY_BLOCK_ID:
		*(uint64_t *)out = range->id;
		return CUDA_SUCCESS;
	case ALLOWED_HANDLE_TYPES:
	case MEMPOOL_HANDLE:
		*(uint64_t *)out = 0;
		return CUDA_SUCCESS;
	case RANGE_SIZE:
	case MAPPING_SIZE:
		*(size_t *)out = range->size;
		return CUDA_SUCCESS;
	default:
		return attribute > LAST || attribute < 1 ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NOT_SUPPORTED;
	}
}

static CUresult tell(int attribute, CUdeviceptr address, const struct sg_range *range, void *out)
{
	switch (attribute) {
	case CONTEXT:
		*(CUcontext *)out = range->context;
		return CUDA_SUCCESS;
	case DEVICE_POINTER:
		*(CUdeviceptr *)out = address;
		return CUDA_SUCCESS;
	case HOST_POINTER:
		if (!on_host(range))
			return CUDA_ERROR_INVALID_VALUE;
		*(void **)out = (void *)(uintptr_t)address;
		return CUDA_SUCCESS;
	case RANGE_START_ADDR:
	case MAPPING_BASE_ADDR:
		*(CUdeviceptr *)out = range->start;
		return CUDA_SUCCESS;
	default:
		return tell_number(attribute, range, out);
	}
}

CU_API CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr address)
{
	struct sg_range range;

	SG_TRY(sg_ready());
	if (!out || !sg_range_find(address, &range))
		return CUDA_ERROR_INVALID_VALUE;
	return tell(attribute, address, &range, out);
}

/* What is asked of an unknown pointer: zeros, not an error. */
static void tell_nothing(int attribute, void *out)
{
	switch (attribute) {
	case MEMORY_TYPE:
	case ACCESS_FLAGS:
		*(unsigned *)out = 0;
		break;
	case DEVICE_ORDINAL:
		*(int *)out = -2;
		break;
	case SYNC_MEMOPS:
	case IS_MANAGED:
	case IS_LEGACY_IPC_CAPABLE:
	case MAPPED:
	case IS_GPU_DIRECT_RDMA_CAPABLE:
		*(unsigned char *)out = 0;
		break;
	case P2P_TOKENS:
		break;
	default:
		*(uint64_t *)out = 0;
	}
}

CU_API CUresult cuPointerGetAttributes(unsigned count, int *attributes, void **out, CUdeviceptr address)
{
	struct sg_range range;

	SG_TRY(sg_ready());
	if (!attributes || !out || !count)
		return CUDA_ERROR_INVALID_VALUE;
	bool known = sg_range_find(address, &range);
	for (unsigned i = 0; i < count; i++) {
		if (attributes[i] < 1 || attributes[i] > LAST || !out[i])
			return CUDA_ERROR_INVALID_VALUE;
		if (!known || tell(attributes[i], address, &range, out[i]))
			tell_nothing(attributes[i], out[i]);
	}
	return CUDA_SUCCESS;
}
