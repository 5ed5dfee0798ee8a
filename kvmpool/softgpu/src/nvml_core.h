/* What the parts of softgpu's libnvidia-ml share: its types, in our own words, and how a call begins.
 *
 * NVML only reads: it takes no process slot and changes no figure of a card.
 */
#ifndef KVMPOOL_SOFTGPU_NVML_CORE_H
#define KVMPOOL_SOFTGPU_NVML_CORE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "nvml_abi.h"
#include "state.h"

#define NV_API __attribute__((visibility("default")))

struct nv_device {
	struct sg_map map;
	/* the figures of the last utilization sample, guarded by nv_lock */
	uint64_t sample_ns, sample_busy_ns;
	uint64_t slot_busy_ns[SG_SLOTS], slots_ns;
	unsigned utilization;
};

extern pthread_mutex_t nv_lock;

uint64_t nv_now_ns(void);

/* The device of a handle: 0, 1 (not initialised), 2 (no such handle) or 15 (lost). */
nvmlReturn_t nv_device(const void *handle, struct nv_device **out);
nvmlReturn_t nv_ready(void);
unsigned nv_index(const struct nv_device *device);

/* NVML's form of returning text: 7 when the buffer is too short. */
nvmlReturn_t nv_text(char *to, unsigned size, const char *text);

/* Percent of the time since the last look that kernels ran; a look less than 100 ms after the last repeats it. */
unsigned nv_utilization(struct nv_device *device);

#define NV_TRY(call) \
	do { \
		nvmlReturn_t nv_try = (call); \
		if (nv_try) \
			return nv_try; \
	} while (0)

/* Begin a call about a device: `device` and `card` are declared, errors go to the caller; so does a NULL `out`. */
#define NV_ENTER(handle, out) \
	struct nv_device *device; \
	NV_TRY(nv_device(handle, &device)); \
	const struct sg_card *card = device->map.card; \
	(void)card; \
	if (!(out)) \
		return NVML_ERROR_INVALID_ARGUMENT

#endif
