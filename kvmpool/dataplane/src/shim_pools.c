/* The pools that a program makes, asks and sets; what is in them is shim_pool.c's. */
#include "shim_pool.h"

#include <stdlib.h>

static uint64_t default_pool, device_pool; /* guarded by `tx` */

uint64_t kp_pool_of_device(void)
{
    return device_pool;
}

static CUresult make_pool(uint64_t most, uint64_t *number)
{
    struct kp_pool *pool = calloc(1, sizeof *pool);

    if (pool == NULL || (*number = kp_handles_new(&kp_shim.handles, KP_POOL, pool, 0)) == 0) {
        free(pool);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pool->number = *number;
    pool->most = most;
    pool->attribute[POOL_FOLLOW_EVENTS] = pool->attribute[POOL_OPPORTUNISTIC] = pool->attribute[POOL_INTERNAL] = 1;
    return CUDA_SUCCESS;
}

/* Enters the device; the pool it allocates from is there then. */
CUresult kp_pool_enter(void)
{
    CUresult rc = kp_enter_device();

    if (rc == CUDA_SUCCESS && default_pool == 0 && (rc = make_pool(0, &default_pool)) != CUDA_SUCCESS)
        return kp_leave(rc);
    if (rc == CUDA_SUCCESS && device_pool == 0)
        device_pool = default_pool;
    return rc;
}

CUresult kp_cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *poolProps)
{
    uint64_t number = 0;
    CUresult rc;

    if (pool == NULL || poolProps == NULL || poolProps->allocType != 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (poolProps->handleTypes != 0 || poolProps->location.type != 1)
        return kp_unsupported("cuMemPoolCreate of memory that is shared, or the host's");
    if (poolProps->location.id != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if ((rc = kp_pool_enter()) != CUDA_SUCCESS)
        return rc;
    if ((rc = make_pool(poolProps->maxSize, &number)) == CUDA_SUCCESS)
        *pool = (CUmemoryPool)(uintptr_t)number;
    return kp_leave(rc);
}

static CUresult enter_pool(CUmemoryPool handle, struct kp_pool **pool)
{
    CUresult rc = kp_pool_enter();

    if (rc == CUDA_SUCCESS && (*pool = kp_pool_of((uint64_t)(uintptr_t)handle)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    return rc;
}

/* What is allocated from it stays until it is freed. */
CUresult kp_cuMemPoolDestroy(CUmemoryPool handle)
{
    struct kp_pool *pool;
    CUresult rc = enter_pool(handle, &pool);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (pool->number == default_pool)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if (pool->number == device_pool)
        device_pool = default_pool;
    kp_pool_trim(pool, true, 0);
    kp_handles_drop(&kp_shim.handles, pool->number);
    pool->destroyed = true;
    if (pool->attribute[POOL_RESERVED_CURRENT] == 0)
        free(pool);
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuMemPoolTrimTo(CUmemoryPool handle, size_t minBytesToKeep)
{
    struct kp_pool *pool;
    CUresult rc = enter_pool(handle, &pool);

    if (rc == CUDA_SUCCESS)
        kp_pool_trim(pool, false, minBytesToKeep);
    return rc == CUDA_SUCCESS ? kp_leave(rc) : rc;
}

CUresult kp_cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attr, void *value)
{
    struct kp_pool *pool;
    CUresult rc = value == NULL || attr < 1 || attr >= KP_POOL_ATTRIBUTES ? CUDA_ERROR_INVALID_VALUE : enter_pool(handle, &pool);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (attr <= POOL_INTERNAL)
        pool->attribute[attr] = *(int *)value != 0;
    else if (attr == POOL_THRESHOLD)
        pool->attribute[attr] = *(cuuint64_t *)value;
    else if ((attr == POOL_RESERVED_HIGH || attr == POOL_USED_HIGH) && *(cuuint64_t *)value == 0)
        pool->attribute[attr] = pool->attribute[attr - 1];
    else
        rc = CUDA_ERROR_INVALID_VALUE;
    return kp_leave(rc);
}

CUresult kp_cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attr, void *value)
{
    struct kp_pool *pool;
    CUresult rc = value == NULL || attr < 1 || attr >= KP_POOL_ATTRIBUTES ? CUDA_ERROR_INVALID_VALUE : enter_pool(handle, &pool);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (attr <= POOL_INTERNAL)
        *(int *)value = (int)pool->attribute[attr];
    else
        *(cuuint64_t *)value = pool->attribute[attr];
    return kp_leave(CUDA_SUCCESS);
}

/* The only device has access for good. */
CUresult kp_cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *map, size_t count)
{
    struct kp_pool *pool;
    CUresult rc = map == NULL && count > 0 ? CUDA_ERROR_INVALID_VALUE : enter_pool(handle, &pool);

    if (rc != CUDA_SUCCESS)
        return rc;
    for (size_t i = 0; i < count && rc == CUDA_SUCCESS; i++) {
        if (map[i].location.type != 1 || map[i].location.id != 0)
            rc = CUDA_ERROR_INVALID_DEVICE;
        else if (map[i].flags != 3)
            rc = CUDA_ERROR_INVALID_VALUE;
    }
    return kp_leave(rc);
}

CUresult kp_cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool handle, CUmemLocation *location)
{
    struct kp_pool *pool;
    CUresult rc = flags == NULL || location == NULL ? CUDA_ERROR_INVALID_VALUE : enter_pool(handle, &pool);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (location->type != 1 || location->id != 0)
        return kp_leave(CUDA_ERROR_INVALID_DEVICE);
    *flags = 3;
    return kp_leave(CUDA_SUCCESS);
}

static CUresult tell_pool(CUmemoryPool *pool_out, CUdevice dev, const uint64_t *number)
{
    CUresult rc = pool_out == NULL ? CUDA_ERROR_INVALID_VALUE : dev != 0 ? CUDA_ERROR_INVALID_DEVICE : kp_pool_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    *pool_out = (CUmemoryPool)(uintptr_t)*number;
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuDeviceGetDefaultMemPool(CUmemoryPool *pool_out, CUdevice dev)
{
    return tell_pool(pool_out, dev, &default_pool);
}

CUresult kp_cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice dev)
{
    return tell_pool(pool, dev, &device_pool);
}

CUresult kp_cuDeviceSetMemPool(CUdevice dev, CUmemoryPool handle)
{
    struct kp_pool *pool;
    CUresult rc = dev != 0 ? CUDA_ERROR_INVALID_DEVICE : enter_pool(handle, &pool);

    if (rc != CUDA_SUCCESS)
        return rc;
    device_pool = pool->number;
    return kp_leave(CUDA_SUCCESS);
}
