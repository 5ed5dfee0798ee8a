/* Page-locked host memory: a block of the window that the session has mapped too; without a window, or beyond its room, plain
 * memory of the guest, because no card in another machine can map it. */
#include "shim.h"

#include <stdlib.h>

#define ALIGNMENT 4096

struct region {
    char *start;
    size_t bytes;
    unsigned flags;
    bool ours; /* allocated here, not registered */
    unsigned char *window; /* that it is in, NULL: plain memory; the window of a lost worker stays mapped for it */
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

bool kp_host_shared(const void *address, size_t bytes, uint64_t *offset)
{
    const unsigned char *at = address, *base = kp_shim.link.window.base;
    struct region *region = base != NULL ? region_of(address) : NULL;

    if (region == NULL || region->window != base || bytes > region->bytes - (size_t)((const char *)at - region->start) || kp_thread() == NULL)
        return false;
    *offset = (uint64_t)(at - base) - KP_ARENA_AT;
    return true;
}

static bool in_use(const unsigned char *window)
{
    struct region *region = regions;

    while (region != NULL && region->window != window)
        region = region->next;
    return region != NULL;
}

void kp_host_leave(struct kp_window *window)
{
    if (window->base != NULL && in_use(window->base))
        window->base = NULL;
    kp_window_close(window);
}

/* The first region of the arena that the bytes from `offset` on would touch. */
static struct region *in_the_way(const unsigned char *base, size_t offset, size_t bytes)
{
    const char *start = (const char *)base + KP_ARENA_AT + offset;
    struct region *region = regions;

    while (region != NULL && (region->window != base || region->start >= start + bytes || region->start + region->bytes <= start))
        region = region->next;
    return region;
}

/* A block of the arena, NULL: no room. Next-fit: what was freed lately may still be looked at. */
static void *take_shared(size_t bytes)
{
    static size_t next;
    unsigned char *base = kp_shim.link.window.base;

    for (int turn = 0; base != NULL && bytes <= KP_ARENA_BYTES && turn < 2; turn++) {
        size_t at = turn == 0 ? next : 0;
        struct region *other = NULL;
        while (at <= KP_ARENA_BYTES - bytes && (other = in_the_way(base, at, bytes)) != NULL) {
            at = (size_t)(other->start + other->bytes - (char *)base) - KP_ARENA_AT;
            at = (at + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
        }
        if (at > KP_ARENA_BYTES - bytes)
            continue;
        next = (at + bytes + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
        return base + KP_ARENA_AT + at;
    }
    return NULL;
}

void kp_copy_begin(void)
{
    struct kp_thread *thread = kp_thread();

    if (thread != NULL)
        thread->unsettled = false;
}

CUresult kp_copy_end(CUresult result, CUstream stream)
{
    struct kp_thread *thread = kp_thread();

    if (result != CUDA_SUCCESS || thread == NULL || !thread->unsettled)
        return result;
    thread->unsettled = false;
    return kp_cuStreamSynchronize(stream);
}

static CUresult add(void *start, size_t bytes, unsigned flags, bool ours, unsigned char *window)
{
    struct region *region = calloc(1, sizeof *region);

    if (region == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *region = (struct region){start, bytes, flags, ours, window, regions};
    regions = region;
    return CUDA_SUCCESS;
}

/* Forgets the region that starts there; false where there is none of that sort. */
static bool drop(void *start, bool ours, unsigned char **window)
{
    struct region **at = &regions, *region;

    while (*at != NULL && ((*at)->start != start || (*at)->ours != ours))
        at = &(*at)->next;
    if ((region = *at) == NULL)
        return false;
    *at = region->next;
    *window = region->window;
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
    bool shared = (*pp = take_shared(bytesize)) != NULL;
    if (!shared && posix_memalign(pp, ALIGNMENT, bytesize) != 0)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    rc = add(*pp, bytesize, flags, true, shared ? kp_shim.link.window.base : NULL);
    if (rc != CUDA_SUCCESS && !shared)
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
    unsigned char *window = NULL;
    pthread_mutex_lock(&kp_shim.tx);
    bool found = drop(p, true, &window);
    if (window != NULL && window != kp_shim.link.window.base && !in_use(window))
        kp_window_close(&(struct kp_window){window}); /* the last of a lost worker's */
    kp_leave(rc);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    if (window == NULL)
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
    return kp_leave(add(p, bytesize, flags, false, NULL));
}

CUresult kp_cuMemHostUnregister(void *p)
{
    unsigned char *window;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    return kp_leave(drop(p, false, &window) ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}
