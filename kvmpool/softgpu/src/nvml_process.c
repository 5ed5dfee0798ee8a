/* Which processes use a card, with their memory and their share of its time. */
#include "nvml_core.h"

#include <string.h>

struct sample { unsigned pid; unsigned long long timestamp_us; unsigned sm, memory, encoder, decoder; };

/* The living. */
static nvmlReturn_t list(void *handle, unsigned *count, void *out, bool v1)
{
	unsigned found = 0;

	NV_ENTER(handle, count);
	for (int i = 0; i < SG_SLOTS; i++) {
		if (!sg_slot_alive(&device->map, i))
			continue;
		if (found < *count && out)
			nvml_process_put(out, found, v1, card->slots[i].pid, card->slots[i].memory_bytes);
		found++;
	}
	return nvml_process_end(count, out, found);
}

static nvmlReturn_t none(void *handle, unsigned *count)
{
	NV_ENTER(handle, count);
	*count = 0;
	return NVML_SUCCESS;
}

NVML_PROCESS_LISTS(NV_API)

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
