/* Devices: what a card says of itself. Numbers are those of compute capability 9.0 (CUDA programming guide, table of
 * compute capabilities; an H100's own answers); what softgpu cannot do is answered 0. */
#include "cuda_core.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#define ATTRIBUTE_MAX 161

/* By number of the attribute; those not here are 0: not supported. Some depend on the card (card_attribute). */
static const int fixed[ATTRIBUTE_MAX + 1] = {
	[1] = 1024, [2] = 1024, [3] = 1024, [4] = 64,              /* threads a block, its dimensions */
	[5] = 2147483647, [6] = 65535, [7] = 65535,                /* grid */
	[8] = 48 * 1024, [9] = 64 * 1024, [10] = 32,               /* shared a block, constants, warp */
	[11] = 2147483647, [12] = 65536,                           /* pitch, registers a block */
	[14] = 512, [15] = 1,                                      /* texture alignment, overlap */
	[30] = 512, [31] = 1, [32] = 1,                            /* surface alignment, concurrent kernels, ECC */
	[38] = 50 << 20, [39] = 2048, [40] = 3, [41] = 1,          /* L2, threads an SM, copy engines, unified addressing */
	[51] = 32, [78] = 1, [79] = 1, [80] = 1,                   /* texture pitch; priorities, L1 global, local */
	[81] = 228 * 1024, [82] = 65536,                           /* shared and registers an SM */
	[87] = 2, [90] = 1, [95] = 1,                              /* double to single, preemption, cooperative launch */
	[97] = 227 * 1024, [99] = 1, [102] = 1,                    /* shared opt-in, host register, VMM */
	[106] = 32, [111] = 1024, [115] = 1, [126] = 4,                      /* blocks an SM, reserved shared, sync domains */
	[131] = -1, [134] = -1,                                    /* NUMA ids: none */
};

static int card_attribute(const struct sg_card *card, int attribute)
{
	switch (attribute) {
	case 13:
		return (int)card->clock_khz;
	case 16:
		return (int)card->sm_count;
	case 33:
		return (int)card->pci_bus;
	case 34:
		return (int)card->pci_device;
	case 36:
		return (int)card->memory_clock_khz;
	case 37:
		return (int)card->bus_width_bits;
	case 50:
		return (int)card->pci_domain;
	case 75:
		return (int)card->compute_major;
	case 76:
		return (int)card->compute_minor;
	case 134:
		return card->numa_node;
	case 139:
		return (int)card->pci_ids;
	case 140:
		return (int)card->pci_subsystem;
	default:
		return fixed[attribute];
	}
}

CU_API CUresult cuDeviceGetAttribute(int *out, int attribute, CUdevice ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!out || attribute < 1 || attribute > ATTRIBUTE_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	*out = card_attribute(device->map.card, attribute);
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGetCount(int *out)
{
	SG_TRY(sg_ready());
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = sg_process.device_count;
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGet(CUdevice *out, int ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = ordinal;
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGetName(char *name, int size, CUdevice ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!name || size < 1)
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(name, (size_t)size, "%s", device->map.card->model);
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(out->bytes, device->map.card->uuid_raw, sizeof(out->bytes));
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGetUuid(CUuuid *out, CUdevice ordinal)
{
	return cuDeviceGetUuid_v2(out, ordinal);
}

CU_API CUresult cuDeviceTotalMem_v2(size_t *out, CUdevice ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = device->map.card->memory_bytes;
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!major || !minor)
		return CUDA_ERROR_INVALID_VALUE;
	*major = (int)device->map.card->compute_major;
	*minor = (int)device->map.card->compute_minor;
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGetProperties(CUdevprop *out, CUdevice ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = (CUdevprop){fixed[1], {fixed[2], fixed[3], fixed[4]}, {fixed[5], fixed[6], fixed[7]}, fixed[8], fixed[9], fixed[10], fixed[11],
			   fixed[12], (int)device->map.card->clock_khz, fixed[14]};
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGetPCIBusId(char *out, int size, CUdevice ordinal)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	if (!out || size < 13)
		return CUDA_ERROR_INVALID_VALUE;
	const struct sg_card *card = device->map.card;
	snprintf(out, (size_t)size, "%04X:%02X:%02X.0", card->pci_domain, card->pci_bus, card->pci_device);
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGetByPCIBusId(CUdevice *out, const char *text)
{
	char address[32];

	SG_TRY(sg_ready());
	if (!out || !text)
		return CUDA_ERROR_INVALID_VALUE;
	for (int i = 0; i < sg_process.device_count; i++) {
		CUresult rc = cuDeviceGetPCIBusId(address, sizeof(address), i);
		size_t len = strlen(text); /* the domain and the function may be left out */
		for (const char *at = address; !rc; at = address + 5) {
			if (!strncasecmp(at, text, len) && (!at[len] || at[len] == '.')) {
				*out = i;
				return CUDA_SUCCESS;
			}
			if (at != address)
				break;
		}
	}
	return CUDA_ERROR_INVALID_VALUE;
}

CU_API CUresult cuDeviceCanAccessPeer(int *out, CUdevice ordinal, CUdevice peer)
{
	struct sg_device *device;

	SG_TRY(sg_device_of(ordinal, &device));
	SG_TRY(sg_device_of(peer, &device));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = 0;
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGetExecAffinitySupport(int *out, int type, CUdevice ordinal)
{
	struct sg_device *device;

	(void)type;
	SG_TRY(sg_device_of(ordinal, &device));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = 0;
	return CUDA_SUCCESS;
}

CU_API CUresult cuDriverGetVersion(int *out)
{
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = SG_DRIVER_VERSION;
	return CUDA_SUCCESS;
}
