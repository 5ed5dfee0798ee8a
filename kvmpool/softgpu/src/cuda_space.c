/* Which addresses are what: two sorted tables of disjoint ranges, one of usable memory and one of reserved address space. */
#include "cuda_core.h"

#include <stdlib.h>
#include <string.h>

struct table {
	struct sg_range *ranges;
	size_t count, room;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct table usable, reserved;
static uint64_t next_id;

static struct table *table_of(enum sg_range_kind kind)
{
	return kind == SG_RANGE_RESERVED ? &reserved : &usable;
}

/* The number of ranges that begin at or before `address`. */
static size_t upto(const struct table *table, uint64_t address)
{
	size_t low = 0, high = table->count;

	while (low < high) {
		size_t middle = (low + high) / 2;
		if (table->ranges[middle].start <= address)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static struct sg_range *holding(const struct table *table, uint64_t address)
{
	size_t at = upto(table, address);

	if (!at || address - table->ranges[at - 1].start >= table->ranges[at - 1].size)
		return NULL;
	return &table->ranges[at - 1];
}

CUresult sg_range_add(const struct sg_range *range)
{
	struct table *table = table_of(range->kind);
	CUresult rc = CUDA_ERROR_OUT_OF_MEMORY;

	pthread_mutex_lock(&lock);
	if (table->count == table->room) {
		size_t room = table->room ? table->room * 2 : 64;
		struct sg_range *grown = realloc(table->ranges, room * sizeof(*grown));
		if (!grown)
			goto out;
		table->ranges = grown;
		table->room = room;
	}
	size_t at = upto(table, range->start);
	memmove(&table->ranges[at + 1], &table->ranges[at], (table->count - at) * sizeof(*range));
	table->ranges[at] = *range;
	table->ranges[at].id = ++next_id;
	table->count++;
	rc = CUDA_SUCCESS;
out:
	pthread_mutex_unlock(&lock);
	return rc;
}

bool sg_range_find(uint64_t address, struct sg_range *out)
{
	pthread_mutex_lock(&lock);
	const struct sg_range *found = holding(&usable, address);
	if (!found)
		found = holding(&reserved, address);
	if (found)
		*out = *found;
	pthread_mutex_unlock(&lock);
	return found != NULL;
}

/* With the lock held. */
static struct sg_range *exactly(enum sg_range_kind kind, uint64_t start)
{
	struct sg_range *found = holding(table_of(kind), start);

	return found && found->start == start && found->kind == kind ? found : NULL;
}

bool sg_range_at(uint64_t start, enum sg_range_kind kind, struct sg_range *out)
{
	pthread_mutex_lock(&lock);
	const struct sg_range *found = exactly(kind, start);
	if (found)
		*out = *found;
	pthread_mutex_unlock(&lock);
	return found != NULL;
}

/* With the lock held. */
static void take(struct table *table, struct sg_range *range, struct sg_range *out)
{
	size_t at = (size_t)(range - table->ranges);

	*out = *range;
	memmove(range, range + 1, (table->count - at - 1) * sizeof(*range));
	table->count--;
}

bool sg_range_remove(uint64_t start, enum sg_range_kind kind, struct sg_range *out)
{
	pthread_mutex_lock(&lock);
	struct sg_range *found = exactly(kind, start);
	if (found)
		take(table_of(kind), found, out);
	pthread_mutex_unlock(&lock);
	return found != NULL;
}

bool sg_range_take_of(const struct sg_context *context, struct sg_range *out)
{
	bool found = false;

	pthread_mutex_lock(&lock);
	for (size_t i = usable.count; i-- > 0 && !found;) {
		found = usable.ranges[i].context == context;
		if (found)
			take(&usable, &usable.ranges[i], out);
	}
	pthread_mutex_unlock(&lock);
	return found;
}

bool sg_range_overlaps(uint64_t start, uint64_t size, enum sg_range_kind kind)
{
	const struct table *table = table_of(kind);

	pthread_mutex_lock(&lock);
	size_t after = upto(table, start);
	bool overlaps = holding(table, start) || (after < table->count && table->ranges[after].start - start < size);
	pthread_mutex_unlock(&lock);
	return overlaps;
}

/* All of [address, address + size) in adjoining ranges whose kind is in `kinds`; a VMM mapping must be accessible. */
static bool covered(uint64_t address, uint64_t size, unsigned kinds)
{
	if (address + size < address)
		return false;
	pthread_mutex_lock(&lock);
	bool good = true;
	for (uint64_t at = address; good;) {
		const struct sg_range *range = holding(&usable, at);
		good = range && (kinds >> range->kind & 1) && !(range->kind == SG_RANGE_MAPPED && !range->flags);
		if (!good || address + size <= range->start + range->size)
			break;
		at = range->start + range->size;
	}
	pthread_mutex_unlock(&lock);
	return good;
}

bool sg_device_readable(uint64_t address, uint64_t size)
{
	return covered(address, size,
		       1u << SG_RANGE_DEVICE | 1u << SG_RANGE_MODULE | 1u << SG_RANGE_MAPPED | 1u << SG_RANGE_HOST | 1u << SG_RANGE_REGISTERED);
}

bool sg_host_pinned(const void *address, uint64_t size)
{
	return covered((uintptr_t)address, size, 1u << SG_RANGE_HOST | 1u << SG_RANGE_REGISTERED);
}
