/* The process's side of softgpu's libcuda: cuInit, the list of cards it may see, live handles, fork. */
#include "cuda_core.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define LIVE_MIN 256

struct sg_process sg_process;
pthread_mutex_t sg_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t sg_progress_made = PTHREAD_COND_INITIALIZER;

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- live handles: open addressing, linear probing; a removed one leaves a tombstone until the table is rebuilt ---- */

struct live {
	const void *object; /* NULL: free */
	enum sg_kind kind;  /* 0 with an object: a tombstone */
};

static struct {
	pthread_mutex_t lock;
	struct live *table;
	size_t size, used; /* used counts tombstones */
} live = {.lock = PTHREAD_MUTEX_INITIALIZER};

static size_t live_slot(const struct live *table, size_t size, const void *object)
{
	size_t at = (((uintptr_t)object >> 4) * 0x9e3779b97f4a7c15ull >> 20) & (size - 1);

	while (table[at].object && table[at].object != object)
		at = (at + 1) & (size - 1);
	return at;
}

static void live_grow(void)
{
	size_t alive = 0;

	for (size_t i = 0; i < live.size; i++)
		alive += live.table[i].kind != 0;
	size_t size = LIVE_MIN;
	while (size < alive * 4)
		size *= 2;
	struct live *table = calloc(size, sizeof(*table));
	if (!table)
		abort(); /* a few hundred bytes: the process is past help */
	for (size_t i = 0; i < live.size; i++)
		if (live.table[i].kind)
			table[live_slot(table, size, live.table[i].object)] = live.table[i];
	free(live.table);
	live.table = table;
	live.size = size;
	live.used = alive;
}

void sg_live_add(enum sg_kind kind, const void *object)
{
	pthread_mutex_lock(&live.lock);
	if (live.used * 2 >= live.size)
		live_grow();
	struct live *at = &live.table[live_slot(live.table, live.size, object)];
	live.used += at->object == NULL;
	*at = (struct live){object, kind};
	pthread_mutex_unlock(&live.lock);
}

void sg_live_remove(const void *object)
{
	pthread_mutex_lock(&live.lock);
	if (live.size)
		live.table[live_slot(live.table, live.size, object)].kind = 0;
	pthread_mutex_unlock(&live.lock);
}

bool sg_live(enum sg_kind kind, const void *object)
{
	bool found = false;

	if (!object)
		return false;
	pthread_mutex_lock(&live.lock);
	if (live.size) {
		const struct live *at = &live.table[live_slot(live.table, live.size, object)];
		found = at->object == object && at->kind == kind;
	}
	pthread_mutex_unlock(&live.lock);
	return found;
}

/* ---- the cards this process sees ---- */

/* Does one word of CUDA_VISIBLE_DEVICES name this card? An index counts all cards; a uuid may be cut short. */
static bool word_names(const char *word, size_t len, int position, const struct sg_card *card)
{
	char *end;

	if (len > 3 && !strncasecmp(word, "GPU", 3))
		return !strncasecmp(word, card->uuid, len);
	long index = strtol(word, &end, 10);
	return len > 0 && end == word + len && index == position;
}

/* Fill `order` with positions into `maps`; as the driver, the first word that names nothing ends the list. */
static int visible_cards(const struct sg_map *maps, int count, int order[SG_MAX_CARDS])
{
	const char *list = getenv("CUDA_VISIBLE_DEVICES");
	int chosen = 0;

	if (!list) {
		for (int i = 0; i < count; i++)
			order[i] = i;
		return count;
	}
	while (chosen < SG_MAX_CARDS) {
		list += strspn(list, " ");
		size_t len = strcspn(list, ", ");
		int i = 0;
		while (i < count && !word_names(list, len, i, maps[i].card))
			i++;
		if (i == count)
			break;
		for (int j = 0; j < chosen; j++)
			if (order[j] == i)
				return 0; /* named twice: the driver shows none */
		order[chosen++] = i;
		list += len;
		list += strspn(list, " ");
		if (*list != ',')
			break;
		list++;
	}
	return chosen;
}

static CUresult find_devices(void)
{
	struct sg_map maps[SG_MAX_CARDS];
	int order[SG_MAX_CARDS];
	bool wanted[SG_MAX_CARDS] = {false};
	int count = sg_open_all(maps);
	int chosen = visible_cards(maps, count, order);

	for (int i = 0; i < chosen; i++) {
		if (__atomic_load_n(&maps[order[i]].card->lost, __ATOMIC_SEQ_CST))
			continue;
		wanted[order[i]] = true;
		sg_process.devices[sg_process.device_count++] = (struct sg_device){.map = maps[order[i]]};
	}
	for (int i = 0; i < count; i++)
		if (!wanted[i])
			sg_close(&maps[i]);
	return sg_process.device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

static void forked_child(void)
{
	if (!sg_process.initialised)
		return;
	sg_process.forked = true;
	for (int i = 0; i < sg_process.device_count; i++)
		sg_slot_forget(&sg_process.devices[i].map);
}

CU_API CUresult cuInit(unsigned flags)
{
	static bool fork_handler;
	CUresult rc = CUDA_SUCCESS;

	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (sg_process.forked)
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&init_lock);
	if (!sg_process.initialised) {
		rc = find_devices();
		if (!rc && !fork_handler) {
			pthread_atfork(NULL, NULL, forked_child);
			fork_handler = true;
		}
		__atomic_store_n(&sg_process.initialised, !rc, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&init_lock);
	return rc;
}

CUresult sg_ready(void)
{
	if (sg_process.forked || !__atomic_load_n(&sg_process.initialised, __ATOMIC_ACQUIRE))
		return CUDA_ERROR_NOT_INITIALIZED;
	return CUDA_SUCCESS;
}

CUresult sg_device_of(CUdevice ordinal, struct sg_device **out)
{
	SG_TRY(sg_ready());
	if (ordinal < 0 || ordinal >= sg_process.device_count)
		return CUDA_ERROR_INVALID_DEVICE;
	*out = &sg_process.devices[ordinal];
	return CUDA_SUCCESS;
}

uint64_t sg_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}
