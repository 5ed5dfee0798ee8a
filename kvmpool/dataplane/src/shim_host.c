/* Page-locked host memory: plain memory of the guest, remembered, because no card in another machine can map it. */
#include "shim.h"

#include <stdlib.h>

#define ALIGNMENT 4096

struct region {
    char *start;
    size_t bytes;
    unsigned flags;
    bool ours; /* allocated here, not registered */
    struct region *next;
};

static struct region *regions;

static struct region *region_of(const void *address)
{
    struct region *region = regions;

    while (region != NULL && ((const char *)address < region->start || (const char *)address >= region->start + region->bytes))
        region = region->next;
    return region;
}

bool kp_host_find(const void *address, void **start, size_t *bytes)
{
    struct region *region = region_of(address);

    if (region != NULL && start != NULL)
        *start = region->start;
    if (region != NULL && bytes != NULL)
        *bytes = region->bytes;
    return region != NULL;
}

static CUresult add(void *start, size_t bytes, unsigned flags, bool ours)
{
    struct region *region = calloc(1, sizeof *region);

    if (region == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *region = (struct region){start, bytes, flags, ours, regions};
    regions = region;
    return CUDA_SUCCESS;
}

/* Forgets the region that starts there; false where there is none of that sort. */
static bool drop(void *start, bool ours)
{
    struct region **at = &regions, *region;

    while (*at != NULL && ((*at)->start != start || (*at)->ours != ours))
        at = &(*at)->next;
    if ((region = *at) == NULL)
        return false;
    *at = region->next;
    free(region);
    return true;
}

CUresult kp_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int flags)
{
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (pp == NULL || bytesize == 0 || (flags & ~7u) != 0)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if ((flags & 2u) != 0) { /* DEVICEMAP: CAN_MAP_HOST_MEMORY says 0 */
        kp_leave(rc);
        return kp_unsupported("cuMemHostAlloc of mapped memory");
    }
    if (posix_memalign(pp, ALIGNMENT, bytesize) != 0)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    if ((rc = add(*pp, bytesize, flags, true)) != CUDA_SUCCESS)
        free(*pp);
    return kp_leave(rc);
}

CUresult kp_cuMemAllocHost_v2(void **pp, size_t bytesize)
{
    return kp_cuMemHostAlloc(pp, bytesize, 0);
}

CUresult kp_cuMemFreeHost(void *p)
{
    CUresult rc = kp_cuCtxSynchronize(); /* as CUDA: work that uses it is over */

    if (rc != CUDA_SUCCESS && rc != CUDA_ERROR_DEVICE_UNAVAILABLE)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    bool found = drop(p, true);
    kp_leave(rc);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    free(p);
    return CUDA_SUCCESS;
}

CUresult kp_cuMemHostGetFlags(unsigned int *pFlags, void *p)
{
    struct region *region;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (pFlags == NULL || (region = region_of(p)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    *pFlags = region->flags;
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int flags)
{
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (p == NULL || bytesize == 0)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if (region_of(p) != NULL)
        return kp_leave(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    return kp_leave(add(p, bytesize, flags, false));
}

CUresult kp_cuMemHostUnregister(void *p)
{
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    return kp_leave(drop(p, false) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}
