/* The pools that a program makes, asks and sets; what is in them is cuda_pool.c's. */
#include "cuda_pool.h"

#include <stdlib.h>

static struct sg_pool *default_pools[SG_MAX_CARDS], *current_pools[SG_MAX_CARDS];

static struct sg_pool *make_pool(struct sg_device *device, uint64_t most)
{
	struct sg_pool *pool = calloc(1, sizeof(*pool));

	if (!pool)
		return NULL;
	pool->device = device;
	pool->most = most;
	pool->attribute[POOL_FOLLOW_EVENTS] = pool->attribute[POOL_OPPORTUNISTIC] = pool->attribute[POOL_INTERNAL] = 1;
	sg_live_add(SG_POOL, pool);
	return pool;
}

CUresult sg_pool_of_device(CUdevice ordinal, struct sg_pool ***current, struct sg_pool **usual)
{
	struct sg_device *device;
	CUresult rc = sg_device_of(ordinal, &device);

	if (rc)
		return rc;
	pthread_mutex_lock(&sg_pool_lock);
	if (!default_pools[ordinal])
		default_pools[ordinal] = current_pools[ordinal] = make_pool(device, 0);
	rc = default_pools[ordinal] ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
	*current = &current_pools[ordinal];
	*usual = default_pools[ordinal];
	pthread_mutex_unlock(&sg_pool_lock);
	return rc;
}

CU_API CUresult cuMemPoolCreate(struct sg_pool **out, const CUmemPoolProps *properties)
{
	struct sg_device *device;

	if (!out || !properties || properties->allocType != 1)
		return CUDA_ERROR_INVALID_VALUE;
	if (properties->handleTypes || properties->location.type != 1)
		return CUDA_ERROR_NOT_SUPPORTED;
	SG_TRY(sg_device_of(properties->location.id, &device));
	struct sg_pool *pool = make_pool(device, properties->maxSize);
	if (!pool)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*out = pool;
	return CUDA_SUCCESS;
}

static CUresult check(const struct sg_pool *pool)
{
	SG_TRY(sg_ready());
	return sg_live(SG_POOL, pool) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_API CUresult cuMemPoolDestroy(struct sg_pool *pool)
{
	SG_TRY(check(pool));
	size_t card = (size_t)(pool->device - sg_process.devices);
	if (pool == default_pools[card])
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sg_pool_lock);
	if (current_pools[card] == pool)
		current_pools[card] = default_pools[card];
	sg_pool_trim(pool, false, 0);
	sg_live_remove(pool);
	pool->destroyed = true;
	pool->attribute[POOL_THRESHOLD] = 0; /* what is freed from now on is not kept */
	if (!pool->attribute[POOL_RESERVED_CURRENT])
		free(pool);
	pthread_mutex_unlock(&sg_pool_lock);
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemPoolTrimTo(struct sg_pool *pool, size_t keep)
{
	SG_TRY(check(pool));
	pthread_mutex_lock(&sg_pool_lock);
	sg_pool_trim(pool, false, keep);
	pthread_mutex_unlock(&sg_pool_lock);
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemPoolSetAttribute(struct sg_pool *pool, int attribute, void *value)
{
	CUresult rc = CUDA_SUCCESS;

	SG_TRY(check(pool));
	if (!value || attribute < 1 || attribute >= POOL_ATTRIBUTES)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sg_pool_lock);
	if (attribute <= POOL_INTERNAL)
		pool->attribute[attribute] = *(int *)value != 0;
	else if (attribute == POOL_THRESHOLD)
		pool->attribute[attribute] = *(uint64_t *)value;
	else if ((attribute == POOL_RESERVED_HIGH || attribute == POOL_USED_HIGH) && !*(uint64_t *)value)
		pool->attribute[attribute] = pool->attribute[attribute - 1];
	else
		rc = CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&sg_pool_lock);
	return rc;
}

CU_API CUresult cuMemPoolGetAttribute(struct sg_pool *pool, int attribute, void *value)
{
	SG_TRY(check(pool));
	if (!value || attribute < 1 || attribute >= POOL_ATTRIBUTES)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sg_pool_lock);
	if (attribute <= POOL_INTERNAL)
		*(int *)value = (int)pool->attribute[attribute];
	else
		*(uint64_t *)value = pool->attribute[attribute];
	pthread_mutex_unlock(&sg_pool_lock);
	return CUDA_SUCCESS;
}

/* A card has access to its own pools for good, and to no other's. */
CU_API CUresult cuMemPoolSetAccess(struct sg_pool *pool, const CUmemAccessDesc *access, size_t number)
{
	SG_TRY(check(pool));
	if (!access && number)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < number; i++) {
		if (access[i].location.type != 1 || access[i].location.id != (int)(pool->device - sg_process.devices))
			return CUDA_ERROR_INVALID_DEVICE;
		if (access[i].flags != 3)
			return CUDA_ERROR_INVALID_VALUE;
	}
	return CUDA_SUCCESS;
}

CU_API CUresult cuMemPoolGetAccess(int *flags, struct sg_pool *pool, const CUmemLocation *location)
{
	SG_TRY(check(pool));
	if (!flags || !location)
		return CUDA_ERROR_INVALID_VALUE;
	if (location->type != 1 || location->id < 0 || location->id >= sg_process.device_count)
		return CUDA_ERROR_INVALID_DEVICE;
	*flags = location->id == (int)(pool->device - sg_process.devices) ? 3 : 0;
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGetDefaultMemPool(struct sg_pool **out, CUdevice ordinal)
{
	struct sg_pool **current, *usual;

	SG_TRY(sg_pool_of_device(ordinal, &current, &usual));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = usual;
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceGetMemPool(struct sg_pool **out, CUdevice ordinal)
{
	struct sg_pool **current, *usual;

	SG_TRY(sg_pool_of_device(ordinal, &current, &usual));
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = *current;
	return CUDA_SUCCESS;
}

CU_API CUresult cuDeviceSetMemPool(CUdevice ordinal, struct sg_pool *pool)
{
	struct sg_pool **current, *usual;

	SG_TRY(sg_pool_of_device(ordinal, &current, &usual));
	SG_TRY(check(pool));
	if (pool->device != &sg_process.devices[ordinal])
		return CUDA_ERROR_INVALID_VALUE;
	*current = pool;
	return CUDA_SUCCESS;
}
