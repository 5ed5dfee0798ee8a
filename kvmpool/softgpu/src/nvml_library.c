/* NVML as a library: initialisation, versions, how a device is found, the texts of errors. */
#include "nvml_core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>
#include <unistd.h>

#define CUDA_VERSION 13000
#define NVML_VERSION "13.580.65.06"
#define DRIVER_VERSION "580.65.06"

static struct nv_device devices[SG_MAX_CARDS];
static int device_count;
static unsigned users;
pthread_mutex_t nv_lock = PTHREAD_MUTEX_INITIALIZER;

uint64_t nv_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

nvmlReturn_t nv_ready(void)
{
	return __atomic_load_n(&users, __ATOMIC_ACQUIRE) ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t nv_device(const void *handle, struct nv_device **out)
{
	uintptr_t offset = (uintptr_t)handle - (uintptr_t)devices;

	NV_TRY(nv_ready());
	if (offset >= (size_t)device_count * sizeof(*devices) || offset % sizeof(*devices))
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = &devices[offset / sizeof(*devices)];
	return __atomic_load_n(&(*out)->map.card->lost, __ATOMIC_SEQ_CST) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

unsigned nv_index(const struct nv_device *device)
{
	return (unsigned)(device - devices);
}

nvmlReturn_t nv_text(char *to, unsigned size, const char *text)
{
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(text) >= size)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(to, text);
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
	struct sg_map maps[SG_MAX_CARDS];
	char path[4096];

	(void)flags;
	pthread_mutex_lock(&nv_lock);
	if (!users) {
		int length = snprintf(path, sizeof(path), "%s/cards", sg_root());
		if (length >= (int)sizeof(path) || access(path, R_OK)) {
			pthread_mutex_unlock(&nv_lock);
			return NVML_ERROR_DRIVER_NOT_LOADED;
		}
		device_count = sg_open_all(maps);
		for (int i = 0; i < device_count; i++)
			devices[i] = (struct nv_device){.map = maps[i]};
	}
	__atomic_add_fetch(&users, 1, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&nv_lock);
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

NV_API nvmlReturn_t nvmlInit(void)
{
	return nvmlInitWithFlags(0);
}

NV_API nvmlReturn_t nvmlShutdown(void)
{
	nvmlReturn_t rc = NVML_SUCCESS;

	pthread_mutex_lock(&nv_lock);
	if (!users) {
		rc = NVML_ERROR_UNINITIALIZED;
	} else if (__atomic_sub_fetch(&users, 1, __ATOMIC_RELEASE) == 0) {
		for (int i = 0; i < device_count; i++)
			sg_close(&devices[i].map);
		device_count = 0;
	}
	pthread_mutex_unlock(&nv_lock);
	return rc;
}

NV_API nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned size)
{
	NV_TRY(nv_ready());
	return nv_text(out, size, device_count ? devices[0].map.card->driver_version : DRIVER_VERSION);
}

NV_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
	return nv_text(out, size, NVML_VERSION);
}

NV_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *out)
{
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = CUDA_VERSION;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *out)
{
	return nvmlSystemGetCudaDriverVersion_v2(out);
}

NV_API nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size)
{
	char path[64], name[256] = "";

	NV_TRY(nv_ready());
	if (!out || !size)
		return NVML_ERROR_INVALID_ARGUMENT;
	snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
	FILE *file = fopen(path, "re");
	if (!file)
		return NVML_ERROR_NOT_FOUND;
	size_t got = fread(name, 1, sizeof(name) - 1, file); /* up to the first NUL: argv[0] */
	fclose(file);
	if (!got)
		return NVML_ERROR_NOT_FOUND;
	snprintf(out, size, "%s", name);
	return NVML_SUCCESS;
}

/* ---- finding devices ---- */

NV_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *out)
{
	NV_TRY(nv_ready());
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = (unsigned)device_count;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetCount(unsigned *out)
{
	return nvmlDeviceGetCount_v2(out);
}

/* A lost card is found, and answers 15. */
static nvmlReturn_t give(int index, void **out)
{
	struct nv_device *device;
	nvmlReturn_t rc = nv_device(&devices[index], &device);

	if (!rc)
		*out = device;
	return rc;
}

NV_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out)
{
	NV_TRY(nv_ready());
	if (!out || index >= (unsigned)device_count)
		return NVML_ERROR_INVALID_ARGUMENT;
	return give((int)index, out);
}

NV_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, void **out)
{
	return nvmlDeviceGetHandleByIndex_v2(index, out);
}

NV_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, void **out)
{
	NV_TRY(nv_ready());
	if (!uuid || !out)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (int i = 0; i < device_count; i++)
		if (!strcasecmp(uuid, devices[i].map.card->uuid))
			return give(i, out);
	return NVML_ERROR_NOT_FOUND;
}

NV_API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, void **out)
{
	NV_TRY(nv_ready());
	if (!serial || !out)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (int i = 0; i < device_count; i++)
		if (!strcmp(serial, devices[i].map.card->serial))
			return give(i, out);
	return NVML_ERROR_NOT_FOUND;
}

/* "0000:41:00.0", "00000000:41:00.0", "41:00.0", function optional. */
NV_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **out)
{
	unsigned domain = 0, bus, slot;

	NV_TRY(nv_ready());
	if (!text || !out)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3) {
		domain = 0;
		if (sscanf(text, "%x:%x", &bus, &slot) != 2)
			return NVML_ERROR_INVALID_ARGUMENT;
	}
	for (int i = 0; i < device_count; i++) {
		const struct sg_card *card = devices[i].map.card;
		if (card->pci_domain == domain && card->pci_bus == bus && card->pci_device == slot)
			return give(i, out);
	}
	return NVML_ERROR_NOT_FOUND;
}

NV_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *text, void **out)
{
	return nvmlDeviceGetHandleByPciBusId_v2(text, out);
}

NV_API nvmlReturn_t nvmlUnitGetCount(unsigned *out)
{
	NV_TRY(nv_ready());
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = 0;
	return NVML_SUCCESS;
}

NV_API const char *nvmlErrorString(nvmlReturn_t code)
{
	static const char *const texts[] = {
		"Success", "Uninitialized", "Invalid Argument", "Not Supported", "Insufficient Permissions", "Already Initialized",
		"Not Found", "Insufficient Size", "Insufficient External Power", "Driver Not Loaded", "Timeout", "Interrupt Request Issue",
		"NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM", "GPU is lost", "GPU requires reset",
		"The operating system has blocked the request", "RM has detected an NVML/RM version mismatch", "In use by another client",
		"Insufficient Memory", "No data", "The requested vgpu operation is not available on target device",
		"Insufficient Resources", "Frequency Not Supported", "Argument version mismatch", "Deprecated", "Not Ready", "GPU Not Found",
		"Invalid State",
	};

	return code >= 0 && code < (int)(sizeof(texts) / sizeof(*texts)) ? texts[code] : "Unknown Error";
}
