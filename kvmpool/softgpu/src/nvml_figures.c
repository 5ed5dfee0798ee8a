/* What a card does now: memory, utilization, clocks, power, temperature, errors, field values. */
#include "nvml_core.h"

#include <string.h>
#include <time.h>

#define SAMPLE_NS 100000000ull
#define MEMORY_V2 (40u | 2u << 24)
#define TEMPERATURE_V1 (12u | 1u << 24)
#define IDLE_MW 70000u
#define IDLE_C 32u
#define BUSY_C 36u /* more, at full load */
#define CLOCKS 4   /* graphics, SM, memory, video */
#define IDLE_SM_MHZ 345u
#define VALUE_UNSIGNED 1
#define VALUE_UNSIGNED_LONG_LONG 3

struct memory { unsigned long long total, free, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
struct utilization { unsigned gpu, memory; };
struct temperature { unsigned version; int sensor, temperature; };
struct field {
	unsigned id, scope;
	long long timestamp_us, latency_us;
	int type;
	nvmlReturn_t result;
	union { unsigned u; unsigned long long ull; double d; } value;
};

_Static_assert(sizeof(struct memory_v2) == 40 && sizeof(struct field) == 40, "NVML's ABI");

NV_API nvmlReturn_t nvmlDeviceGetMemoryInfo(void *handle, struct memory *out)
{
	NV_ENTER(handle, out);
	out->total = card->memory_bytes;
	out->used = sg_usage(&device->map).memory_bytes;
	out->free = out->used < out->total ? out->total - out->used : 0;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *out)
{
	struct memory memory;

	NV_ENTER(handle, out);
	if (out->version != MEMORY_V2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	NV_TRY(nvmlDeviceGetMemoryInfo(handle, &memory));
	out->total = memory.total;
	out->free = memory.free;
	out->used = memory.used;
	out->reserved = 0;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(void *handle, struct memory *out)
{
	NV_ENTER(handle, out);
	out->total = out->free = 128ull << 30;
	out->used = 0;
	return NVML_SUCCESS;
}

unsigned nv_utilization(struct nv_device *device)
{
	uint64_t now_ns = nv_now_ns();
	uint64_t busy_ns = __atomic_load_n(&device->map.card->busy_ns, __ATOMIC_RELAXED);

	pthread_mutex_lock(&nv_lock);
	if (!device->sample_ns) {
		device->sample_ns = now_ns;
		device->sample_busy_ns = busy_ns;
	} else if (now_ns - device->sample_ns >= SAMPLE_NS) {
		uint64_t percent = (busy_ns - device->sample_busy_ns) * 100 / (now_ns - device->sample_ns);
		device->utilization = percent > 100 ? 100 : (unsigned)percent;
		device->sample_ns = now_ns;
		device->sample_busy_ns = busy_ns;
	}
	unsigned percent = device->utilization;
	pthread_mutex_unlock(&nv_lock);
	return percent;
}

NV_API nvmlReturn_t nvmlDeviceGetUtilizationRates(void *handle, struct utilization *out)
{
	NV_ENTER(handle, out);
	out->gpu = nv_utilization(device);
	out->memory = out->gpu / 2;
	return NVML_SUCCESS;
}

static nvmlReturn_t no_codec(void *handle, unsigned *utilization, unsigned *period_us)
{
	NV_ENTER(handle, utilization && period_us);
	*utilization = 0;
	*period_us = 167000;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetEncoderUtilization(void *handle, unsigned *utilization, unsigned *period_us)
{
	return no_codec(handle, utilization, period_us);
}

NV_API nvmlReturn_t nvmlDeviceGetDecoderUtilization(void *handle, unsigned *utilization, unsigned *period_us)
{
	return no_codec(handle, utilization, period_us);
}

static unsigned celsius(struct nv_device *device)
{
	return IDLE_C + BUSY_C * nv_utilization(device) / 100;
}

NV_API nvmlReturn_t nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *out)
{
	NV_ENTER(handle, out);
	if (sensor)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = celsius(device);
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetTemperatureV(void *handle, struct temperature *out)
{
	NV_ENTER(handle, out);
	if (out->version != TEMPERATURE_V1)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	out->temperature = (int)celsius(device);
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(void *handle, unsigned kind, unsigned *out)
{
	static const unsigned thresholds[] = {92, 89, 95, 87}; /* shutdown, slowdown, memory, GPU maximum */

	NV_ENTER(handle, out);
	if (kind >= sizeof(thresholds) / sizeof(*thresholds))
		return NVML_ERROR_NOT_SUPPORTED;
	*out = thresholds[kind];
	return NVML_SUCCESS;
}

static unsigned milliwatts(struct nv_device *device)
{
	unsigned limit = device->map.card->power_limit_mw;

	return IDLE_MW + (limit > IDLE_MW ? (limit - IDLE_MW) / 100 * nv_utilization(device) : 0);
}

#define NUMBER(name, type, result) \
	NV_API nvmlReturn_t name(void *handle, type *out) \
	{ \
		NV_ENTER(handle, out); \
		*out = (result); \
		return NVML_SUCCESS; \
	}

NUMBER(nvmlDeviceGetPowerUsage, unsigned, milliwatts(device))
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, card->power_limit_mw)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, card->power_limit_mw)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, card->power_limit_mw)
NUMBER(nvmlDeviceGetPowerManagementMode, unsigned, 1)
NUMBER(nvmlDeviceGetPerformanceState, unsigned, 0)
NUMBER(nvmlDeviceGetPowerState, unsigned, 0)
NUMBER(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, nv_utilization(device) ? 0 : 1)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, nv_utilization(device) ? 0 : 1)
NUMBER(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, 1)
NUMBER(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, 1)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, 0)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, unsigned long long,
       __atomic_load_n(&card->busy_ns, __ATOMIC_RELAXED) / 1000000 * (card->power_limit_mw / 1000) / 1000)

NV_API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *least, unsigned *most)
{
	NV_ENTER(handle, least && most);
	*least = card->power_limit_mw / 3;
	*most = card->power_limit_mw;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetMaxClockInfo(void *handle, unsigned clock, unsigned *out)
{
	NV_ENTER(handle, out);
	if (clock >= CLOCKS)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = (clock == 2 ? card->memory_clock_khz : card->clock_khz) / 1000;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetClockInfo(void *handle, unsigned clock, unsigned *out)
{
	NV_TRY(nvmlDeviceGetMaxClockInfo(handle, clock, out));
	NV_ENTER(handle, out);
	if (clock != 2 && !nv_utilization(device))
		*out = IDLE_SM_MHZ;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetPcieThroughput(void *handle, unsigned counter, unsigned *out)
{
	NV_ENTER(handle, out);
	if (counter > 1)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = 0;
	return NVML_SUCCESS;
}

/* ---- errors ---- */

static unsigned long long ecc_errors(const struct sg_card *card, unsigned kind)
{
	return kind ? __atomic_load_n(&card->ecc_uncorrected, __ATOMIC_RELAXED) : __atomic_load_n(&card->ecc_corrected, __ATOMIC_RELAXED);
}

NV_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(void *handle, unsigned kind, unsigned counter, unsigned long long *out)
{
	NV_ENTER(handle, out);
	if (kind > 1 || counter > 1)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = ecc_errors(card, kind);
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(void *handle, unsigned kind, unsigned counter, unsigned location, unsigned long long *out)
{
	NV_ENTER(handle, out);
	if (kind > 1 || counter > 1)
		return NVML_ERROR_INVALID_ARGUMENT;
	*out = location == 2 ? ecc_errors(card, kind) : 0; /* all of it in device memory */
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
	NV_ENTER(handle, corrected && uncorrected && pending && failed);
	*corrected = 0;
	*uncorrected = (unsigned)ecc_errors(card, 1);
	*pending = card->recovery_action == 1 && card->ecc;
	*failed = card->last_xid == 64;
	return NVML_SUCCESS;
}

static void read_field(struct nv_device *device, struct field *field)
{
	const struct sg_card *card = device->map.card;

	field->type = VALUE_UNSIGNED;
	field->result = NVML_SUCCESS;
	switch (field->id) {
	case 3: case 5: case 11: case 22: /* single bit: volatile, aggregate, in device memory */
	case 4: case 6: case 12: case 23: /* double bit */
		field->type = VALUE_UNSIGNED_LONG_LONG;
		field->value.ull = ecc_errors(card, field->id == 4 || field->id == 6 || field->id == 12 || field->id == 23);
		break;
	case 185: case 186:
		field->value.u = milliwatts(device);
		break;
	case 188: case 189: case 190: case 192:
		field->value.u = card->power_limit_mw;
		break;
	case 226: /* reset required */
		field->value.u = card->recovery_action == 1;
		break;
	case 227: /* drain and reset recommended */
		field->value.u = card->recovery_action == 4;
		break;
	case 230:
		field->value.u = __atomic_load_n(&card->recovery_action, __ATOMIC_SEQ_CST);
		break;
	default:
		field->result = NVML_ERROR_NOT_SUPPORTED;
	}
}

NV_API nvmlReturn_t nvmlDeviceGetFieldValues(void *handle, int count, struct field *fields)
{
	struct timespec now;

	NV_ENTER(handle, fields && count > 0);
	clock_gettime(CLOCK_REALTIME, &now);
	for (int i = 0; i < count; i++) {
		fields[i].timestamp_us = now.tv_sec * 1000000ll + now.tv_nsec / 1000;
		fields[i].latency_us = 0;
		read_field(device, &fields[i]);
	}
	return NVML_SUCCESS;
}
