/* Event sets: a process registers for a card's XIDs and waits for them. Each set sees every event after its registration. */
#include "nvml_core.h"

#include <stdlib.h>
#include <time.h>

#define TYPES (SG_EVENT_XID | SG_EVENT_DBE | 1ull)
#define POLL_NS 5000000
#define NO_INSTANCE 0xffffffffu

struct event_data {
	void *device;
	unsigned long long type, data;
	unsigned gpu_instance, compute_instance;
};

struct event_set {
	struct event_set *next; /* of all that live */
	struct {
		struct nv_device *device;
		unsigned long long types;
		uint64_t seen; /* sequence number of the last event looked at */
	} cards[SG_MAX_CARDS];
	unsigned count;
};

_Static_assert(sizeof(struct event_data) == 32, "NVML's ABI");

static struct event_set *sets;

/* With nv_lock held. */
static bool alive(const struct event_set *set)
{
	const struct event_set *at = sets;

	while (at && at != set)
		at = at->next;
	return at != NULL;
}

NV_API nvmlReturn_t nvmlEventSetCreate(struct event_set **out)
{
	NV_TRY(nv_ready());
	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	struct event_set *set = calloc(1, sizeof(*set));
	if (!set)
		return NVML_ERROR_MEMORY;
	pthread_mutex_lock(&nv_lock);
	set->next = sets;
	sets = set;
	pthread_mutex_unlock(&nv_lock);
	*out = set;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlEventSetFree(struct event_set *set)
{
	NV_TRY(nv_ready());
	pthread_mutex_lock(&nv_lock);
	struct event_set **at = &sets;
	while (*at && *at != set)
		at = &(*at)->next;
	bool found = *at != NULL;
	if (found)
		*at = set->next;
	pthread_mutex_unlock(&nv_lock);
	if (!found)
		return NVML_ERROR_INVALID_ARGUMENT;
	free(set);
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(void *handle, unsigned long long *out)
{
	NV_ENTER(handle, out);
	*out = TYPES;
	return NVML_SUCCESS;
}

NV_API nvmlReturn_t nvmlDeviceRegisterEvents(void *handle, unsigned long long types, struct event_set *set)
{
	nvmlReturn_t rc = NVML_ERROR_INVALID_ARGUMENT;

	NV_ENTER(handle, set);
	if (types & ~TYPES)
		return NVML_ERROR_NOT_SUPPORTED;
	pthread_mutex_lock(&nv_lock);
	if (!alive(set))
		goto out;
	unsigned i = 0;
	while (i < set->count && set->cards[i].device != device)
		i++;
	if (i == set->count) {
		set->cards[set->count].seen = __atomic_load_n(&card->event_seq, __ATOMIC_SEQ_CST);
		set->cards[set->count++].device = device;
	}
	set->cards[i].types |= types;
	rc = NVML_SUCCESS;
out:
	pthread_mutex_unlock(&nv_lock);
	return rc;
}

/* The next event of one card that the set wants; events that the ring lost are skipped. With nv_lock held. */
static bool next_of(struct event_set *set, unsigned i, struct event_data *out)
{
	const struct sg_card *card = set->cards[i].device->map.card;
	uint64_t newest = __atomic_load_n(&card->event_seq, __ATOMIC_SEQ_CST);

	if (newest > set->cards[i].seen + SG_EVENTS)
		set->cards[i].seen = newest - SG_EVENTS;
	while (set->cards[i].seen < newest) {
		const struct sg_event *event = &card->events[set->cards[i].seen++ % SG_EVENTS];
		unsigned long long type = event->type, data = event->data;
		if (__atomic_load_n(&event->seq, __ATOMIC_SEQ_CST) != set->cards[i].seen || !(type & set->cards[i].types))
			continue;
		*out = (struct event_data){set->cards[i].device, type, data, NO_INSTANCE, NO_INSTANCE};
		return true;
	}
	return false;
}

static bool next(struct event_set *set, struct event_data *out)
{
	for (unsigned i = 0; i < set->count; i++)
		if (next_of(set, i, out))
			return true;
	return false;
}

NV_API nvmlReturn_t nvmlEventSetWait_v2(struct event_set *set, struct event_data *out, unsigned timeout_ms)
{
	uint64_t deadline_ns = nv_now_ns() + (uint64_t)timeout_ms * 1000000u;

	if (!out)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (;;) {
		NV_TRY(nv_ready());
		pthread_mutex_lock(&nv_lock);
		bool valid = alive(set);
		bool found = valid && next(set, out);
		pthread_mutex_unlock(&nv_lock);
		if (!valid)
			return NVML_ERROR_INVALID_ARGUMENT;
		if (found)
			return NVML_SUCCESS;
		uint64_t now_ns = nv_now_ns();
		if (now_ns >= deadline_ns)
			return NVML_ERROR_TIMEOUT;
		uint64_t left_ns = deadline_ns - now_ns;
		nanosleep(&(struct timespec){.tv_nsec = (long)(left_ns < POLL_NS ? left_ns : POLL_NS)}, NULL);
	}
}

NV_API nvmlReturn_t nvmlEventSetWait(struct event_set *set, struct event_data *out, unsigned timeout_ms)
{
	return nvmlEventSetWait_v2(set, out, timeout_ms);
}
