/* Which processes use a card, with their memory and their share of its time. */
#include "nvml_core.h"

#include <string.h>

#define NO_INSTANCE 0xffffffffu

struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };
struct process_v1 { unsigned pid; unsigned long long memory; };
struct sample { unsigned pid; unsigned long long timestamp_us; unsigned sm, memory, encoder, decoder; };

/* Copy out the living as a v1 or v2 record each. */
static nvmlReturn_t list(void *handle, unsigned *count, void *out, bool instances)
{
	unsigned found = 0;

	NV_ENTER(handle, count);
	for (int i = 0; i < SG_SLOTS; i++) {
		if (!sg_slot_alive(&device->map, i))
			continue;
		const struct sg_slot *slot = &card->slots[i];
		if (found < *count && out && instances)
			((struct process *)out)[found] = (struct process){slot->pid, slot->memory_bytes, NO_INSTANCE, NO_INSTANCE};
		else if (found < *count && out)
			((struct process_v1 *)out)[found] = (struct process_v1){slot->pid, slot->memory_bytes};
		found++;
	}
	bool fits = found <= *count && (out || !found);
	*count = found;
	return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

NV_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *out)
{
	return list(handle, count, out, true);
}

NV_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, void *out)
{
	return list(handle, count, out, true);
}

NV_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *out)
{
	return list(handle, count, out, false);
}

static nvmlReturn_t none(void *handle, unsigned *count)
{
	NV_ENTER(handle, count);
	*count = 0;
	return NVML_SUCCESS;
}

#define NONE(name) \
	NV_API nvmlReturn_t name(void *handle, unsigned *count, void *out) \
	{ \
		(void)out; \
		return none(handle, count); \
	}

NONE(nvmlDeviceGetGraphicsRunningProcesses)
NONE(nvmlDeviceGetGraphicsRunningProcesses_v2)
NONE(nvmlDeviceGetGraphicsRunningProcesses_v3)
NONE(nvmlDeviceGetMPSComputeRunningProcesses)
NONE(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NONE(nvmlDeviceGetMPSComputeRunningProcesses_v3)

static unsigned living(const struct nv_device *device)
{
	unsigned count = 0;

	for (int i = 0; i < SG_SLOTS; i++)
		count += sg_slot_alive(&device->map, i);
	return count;
}

/* Shares since the last call of this process for this card; `since` is not needed for that. */
NV_API nvmlReturn_t nvmlDeviceGetProcessUtilization(void *handle, struct sample *out, unsigned *count, unsigned long long since)
{
	unsigned filled = 0;

	(void)since;
	NV_ENTER(handle, count);
	unsigned need = living(device);
	if (!need)
		return NVML_ERROR_NOT_FOUND;
	if (!out || *count < need) {
		*count = need;
		return NVML_ERROR_INSUFFICIENT_SIZE;
	}
	uint64_t now_ns = nv_now_ns();
	pthread_mutex_lock(&nv_lock);
	uint64_t span_ns = now_ns - device->slots_ns;
	for (int i = 0; i < SG_SLOTS && filled < *count; i++) {
		uint64_t busy_ns = __atomic_load_n(&card->slots[i].busy_ns, __ATOMIC_RELAXED);
		uint64_t before_ns = device->slot_busy_ns[i];
		device->slot_busy_ns[i] = busy_ns;
		if (!sg_slot_alive(&device->map, i))
			continue;
		uint64_t percent = device->slots_ns && busy_ns > before_ns ? (busy_ns - before_ns) * 100 / span_ns : 0;
		out[filled++] = (struct sample){.pid = card->slots[i].pid, .timestamp_us = now_ns / 1000, .sm = percent > 100 ? 100 : (unsigned)percent};
	}
	device->slots_ns = now_ns;
	pthread_mutex_unlock(&nv_lock);
	*count = filled;
	return NVML_SUCCESS;
}
