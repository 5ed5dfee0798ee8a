/* What a card is: name, uuid, PCI, generation, fixed modes. */
#include "nvml_core.h"

#include <stdio.h>
#include <string.h>

#define BRAND_NVIDIA 14
#define ARCHITECTURE_HOPPER 9
#define CORES_PER_SM 128
#define BUS_PCIE 2
#define PCIE_GENERATION 5
#define PCIE_WIDTH 16
#define PCIE_SPEED_MBPS 32000
#define CPU_WORD_BITS 64

struct pci_info {
	char bus_id_legacy[16];
	unsigned domain, bus, device, ids, subsystem;
	char bus_id[32];
};

struct attributes {
	unsigned multiprocessors, copy_engines, decoders, encoders, jpegs, ofas, gpu_slices, compute_slices;
	unsigned long long memory_mib;
};

NV_API nvmlReturn_t nvmlDeviceGetIndex(void *handle, unsigned *out)
{
	NV_ENTER(handle, out);
	*out = nv_index(device);
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetMinorNumber(void *handle, unsigned *out)
{
	NV_ENTER(handle, out);
	*out = card->index;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetName(void *handle, char *out, unsigned size)
{
	NV_ENTER(handle, out);
	return nv_text(out, size, card->model);
}

NV_API nvmlReturn_t nvmlDeviceGetUUID(void *handle, char *out, unsigned size)
{
	NV_ENTER(handle, out);
	return nv_text(out, size, card->uuid);
}

NV_API nvmlReturn_t nvmlDeviceGetSerial(void *handle, char *out, unsigned size)
{
	NV_ENTER(handle, out);
	return nv_text(out, size, card->serial);
}

NV_API nvmlReturn_t nvmlDeviceGetVbiosVersion(void *handle, char *out, unsigned size)
{
	NV_ENTER(handle, out);
	return nv_text(out, size, "96.00.74.00.01");
}

NV_API nvmlReturn_t nvmlDeviceGetBoardPartNumber(void *handle, char *out, unsigned size)
{
	NV_ENTER(handle, out);
	return nv_text(out, size, "SOFT-GPU-000");
}

NV_API nvmlReturn_t nvmlDeviceGetBoardId(void *handle, unsigned *out)
{
	NV_ENTER(handle, out);
	*out = card->pci_bus << 8;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *out)
{
	NV_ENTER(handle, out);
	memset(out, 0, sizeof(*out));
	snprintf(out->bus_id_legacy, sizeof(out->bus_id_legacy), "%04X:%02X:%02X.0", card->pci_domain & 0xffff, card->pci_bus & 0xff,
		 card->pci_device & 0xff);
	snprintf(out->bus_id, sizeof(out->bus_id), "%08X:%02X:%02X.0", card->pci_domain, card->pci_bus & 0xff, card->pci_device & 0xff);
	out->domain = card->pci_domain;
	out->bus = card->pci_bus;
	out->device = card->pci_device;
	out->ids = card->pci_ids;
	out->subsystem = card->pci_subsystem;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(void *handle, struct pci_info *out)
{
	return nvmlDeviceGetPciInfo_v3(handle, out);
}

NV_API nvmlReturn_t nvmlDeviceGetPciInfo(void *handle, struct pci_info *out)
{
	return nvmlDeviceGetPciInfo_v3(handle, out);
}

NV_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
	NV_ENTER(handle, major && minor);
	*major = (int)card->compute_major;
	*minor = (int)card->compute_minor;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetAttributes_v2(void *handle, struct attributes *out)
{
	(void)out;
	NV_ENTER(handle, true);
	return NVML_ERROR_NOT_SUPPORTED; /* of MIG devices only */
}

NV_API nvmlReturn_t nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
	(void)current;
	(void)pending;
	NV_ENTER(handle, true);
	return NVML_ERROR_NOT_SUPPORTED;
}

NV_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **out)
{
	(void)index;
	NV_ENTER(handle, out);
	return NVML_ERROR_NOT_FOUND;
}

NV_API nvmlReturn_t nvmlDeviceGetCpuAffinity(void *handle, unsigned words, unsigned long *out)
{
	NV_ENTER(handle, out && words);
	memset(out, 0, words * sizeof(*out));
	for (unsigned i = 0; i < words; i++)
		out[i] = ~0ul; /* all: the card has no place */
	return NVML_SUCCESS;
}

/* Calls that say one number. */
#define NUMBER(name, type, value) \
	NV_API nvmlReturn_t name(void *handle, type *out) \
	{ \
		NV_ENTER(handle, out); \
		*out = (value); \
		return NVML_SUCCESS; \
	}

NUMBER(nvmlDeviceGetBrand, unsigned, BRAND_NVIDIA)
NUMBER(nvmlDeviceGetArchitecture, unsigned, ARCHITECTURE_HOPPER)
NUMBER(nvmlDeviceGetNumGpuCores, unsigned, card->sm_count * CORES_PER_SM)
NUMBER(nvmlDeviceGetMemoryBusWidth, unsigned, card->bus_width_bits)
NUMBER(nvmlDeviceGetBusType, unsigned, BUS_PCIE)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, 1)
NUMBER(nvmlDeviceGetComputeMode, unsigned, 0)
NUMBER(nvmlDeviceGetDisplayMode, unsigned, 0)
NUMBER(nvmlDeviceGetDisplayActive, unsigned, 0)
NUMBER(nvmlDeviceGetMultiGpuBoard, unsigned, 0)
NUMBER(nvmlDeviceIsMigDeviceHandle, unsigned, 0)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, unsigned, 0)
NUMBER(nvmlDeviceGetVirtualizationMode, unsigned, 0)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, PCIE_GENERATION)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, PCIE_GENERATION)
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, PCIE_GENERATION)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, PCIE_WIDTH)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, PCIE_WIDTH)
NUMBER(nvmlDeviceGetPcieSpeed, unsigned, PCIE_SPEED_MBPS)
NUMBER(nvmlDeviceGetNumFans, unsigned, 0)
NUMBER(nvmlDeviceGetIrqNum, unsigned, 16 + card->index)
NUMBER(nvmlDeviceGetModuleId, unsigned, card->index)

NV_API nvmlReturn_t nvmlDeviceGetNumaNodeId(void *handle, unsigned *out)
{
	NV_ENTER(handle, out);
	if (card->numa_node < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	*out = (unsigned)card->numa_node;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetEccMode(void *handle, unsigned *current, unsigned *pending)
{
	NV_ENTER(handle, current && pending);
	*current = *pending = 1;
	return NVML_SUCCESS;
}
