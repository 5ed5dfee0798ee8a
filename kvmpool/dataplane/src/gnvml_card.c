/* What the card is and does: name, PCI, memory, utilization. */
#include "gnvml.h"

#include <stdio.h>
#include <string.h>

#define MEMORY_V2 (40u | 2u << 24)
#define BRAND_NVIDIA 14

struct memory {
    unsigned long long total, free, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};
struct utilization {
    unsigned gpu, memory;
};
struct pci_info {
    char bus_id_legacy[16];
    unsigned domain, bus, device, ids, subsystem;
    char bus_id[32];
};
_Static_assert(sizeof(struct memory_v2) == 40 && sizeof(struct pci_info) == 68, "NVML's ABI");

GN_API nvmlReturn_t nvmlDeviceGetName(void *handle, char *out, unsigned size)
{
    GN_ENTER(handle, out != NULL, GN_IDENTITY_AGE_NS);
    return gn_text(out, size, card.now.name);
}

/* The ids stay 0: which board serves the claim is the host's matter. */
GN_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(void *handle, struct pci_info *out)
{
    GN_ENTER(handle, out != NULL, GN_IDENTITY_AGE_NS);
    memset(out, 0, sizeof *out);
    if (sscanf(card.about.pci, "%x:%x:%x", &out->domain, &out->bus, &out->device) != 3)
        return NVML_ERROR_NOT_SUPPORTED;
    snprintf(out->bus_id_legacy, sizeof out->bus_id_legacy, "%04X:%02X:%02X.0", out->domain & 0xffff, out->bus & 0xff,
             out->device & 0xff);
    snprintf(out->bus_id, sizeof out->bus_id, "%08X:%02X:%02X.0", out->domain, out->bus & 0xff, out->device & 0xff);
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(void *handle, struct pci_info *out)
{
    return nvmlDeviceGetPciInfo_v3(handle, out);
}

GN_API nvmlReturn_t nvmlDeviceGetPciInfo(void *handle, struct pci_info *out)
{
    return nvmlDeviceGetPciInfo_v3(handle, out);
}

GN_API nvmlReturn_t nvmlDeviceGetMemoryInfo(void *handle, struct memory *out)
{
    GN_ENTER(handle, out != NULL, 0);
    out->total = card.about.memory_bytes;
    out->used = card.now.memory_used < out->total ? card.now.memory_used : out->total; /* a charge that is about to be refused */
    out->free = out->total - out->used;
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *out)
{
    struct memory memory;

    GN_TRY(gn_ready());
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (out->version != MEMORY_V2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    GN_TRY(nvmlDeviceGetMemoryInfo(handle, &memory));
    *out = (struct memory_v2){.version = MEMORY_V2, .total = memory.total, .free = memory.free, .used = memory.used};
    return NVML_SUCCESS;
}

/* Of the claim: 100 is the whole card's time. Of its memory's time nothing is known. */
GN_API nvmlReturn_t nvmlDeviceGetUtilizationRates(void *handle, struct utilization *out)
{
    unsigned percent = 0;

    GN_TRY(gn_ready());
    if (!gn_is_card(handle) || out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    GN_TRY(gn_utilization(&percent));
    *out = (struct utilization){.gpu = percent};
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    GN_ENTER(handle, major != NULL && minor != NULL, GN_IDENTITY_AGE_NS);
    *major = card.now.major;
    *minor = card.now.minor;
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlDeviceGetCpuAffinity(void *handle, unsigned words, unsigned long *out)
{
    GN_ENTER(handle, out != NULL && words > 0, GN_IDENTITY_AGE_NS);
    for (unsigned i = 0; i < words; i++)
        out[i] = ~0ul; /* all: in the guest the card has no place */
    return NVML_SUCCESS;
}

/* nvml.h's numbers: Kepler 2 to Volta 5, Turing 6, Ampere 7, Ada 8, Hopper 9, Blackwell 10; newer ones are not known. */
static unsigned architecture(int major, int minor)
{
    switch (major) {
    case 3: return 2;
    case 5: return 3;
    case 6: return 4;
    case 7: return minor < 5 ? 5 : 6;
    case 8: return minor < 9 ? 7 : 8;
    case 9: return 9;
    case 10: case 11: case 12: return 10;
    default: return UINT32_MAX;
    }
}

#define NUMBER(name, value) \
    GN_API nvmlReturn_t name(void *handle, unsigned *out) \
    { \
        GN_ENTER(handle, out != NULL, GN_IDENTITY_AGE_NS); \
        *out = (value); \
        return NVML_SUCCESS; \
    }

NUMBER(nvmlDeviceGetIndex, 0)
NUMBER(nvmlDeviceGetMinorNumber, 0)
NUMBER(nvmlDeviceGetBrand, BRAND_NVIDIA)
NUMBER(nvmlDeviceGetArchitecture, architecture(card.now.major, card.now.minor))
NUMBER(nvmlDeviceGetComputeMode, 0)
NUMBER(nvmlDeviceGetDisplayMode, 0)
NUMBER(nvmlDeviceGetDisplayActive, 0)
NUMBER(nvmlDeviceGetMultiGpuBoard, 0)
NUMBER(nvmlDeviceIsMigDeviceHandle, 0)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, 0)
