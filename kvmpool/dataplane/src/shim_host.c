/* Page-locked host memory: a block of the window that the session has mapped too; without a window, or beyond its room, plain
 * memory of the guest, because no card in another machine can map it. Either way the worker is asked first: it counts. */
#include "shim.h"

#include <stdlib.h>

#define ALIGNMENT 4096

struct region {
    char *start;
    size_t bytes;
    unsigned flags;
    bool ours; /* allocated here, not registered */
    struct kp_window window; /* that it is in, without base: plain memory; a lost worker's stays mapped for it */
    uint32_t epoch; /* of the connection whose worker has counted it */
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

    if (region == NULL || region->window.base != base || bytes > region->bytes - (size_t)((const char *)at - region->start) || kp_thread() == NULL)
        return false;
    *offset = (uint64_t)(at - base) - KP_ARENA_AT;
    return true;
}

static bool in_use(const unsigned char *window)
{
    struct region *region = regions;

    while (region != NULL && region->window.base != window)
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

    while (region != NULL && (region->window.base != base || region->start >= start + bytes || region->start + region->bytes <= start))
        region = region->next;
    return region;
}

static size_t next; /* in the arena: where the search for a block begins */

/* A block of the arena, NULL: no room. Next-fit: what was freed lately may still be looked at. */
static void *take_shared(size_t bytes)
{
    unsigned char *base = kp_shim.link.window.base;
    size_t arena = kp_shim.link.window.arena;

    for (int turn = 0; base != NULL && bytes <= arena && turn < 2; turn++) {
        size_t at = turn == 0 ? next : 0;
        struct region *other = NULL;
        while (at <= arena - bytes && (other = in_the_way(base, at, bytes)) != NULL) {
            at = (size_t)(other->start + other->bytes - (char *)base) - KP_ARENA_AT;
            at = (at + ALIGNMENT - 1) & ~(size_t)(ALIGNMENT - 1);
        }
        if (at > arena - bytes)
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

static uint64_t offset_of(const struct region *region)
{
    const unsigned char *base = region->window.base;

    return base != NULL ? (uint64_t)((unsigned char *)region->start - base) - KP_ARENA_AT : KP_PINNED_PLAIN;
}

/* With `tx` held: the region that starts there, taken out of the list; NULL where there is none of that sort. */
static struct region *drop(const void *start, bool ours)
{
    struct region **at = &regions, *region;

    while (*at != NULL && ((*at)->start != start || (*at)->ours != ours))
        at = &(*at)->next;
    if ((region = *at) != NULL)
        *at = region->next;
    return region;
}

/* Enters the region and asks the worker for it, with `tx` held, which it gives back. */
static CUresult add(const struct region *wanted)
{
    struct region *region = malloc(sizeof *region);
    uint64_t in[KP_PINNED_TAKE_IN];
    struct kp_answer answer = {0};
    CUresult rc;

    if (region == NULL)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *region = *wanted;
    region->epoch = kp_shim.link.epoch;
    region->next = regions;
    regions = region; /* before the question: nobody else takes the same block meanwhile */
    in[KP_PINNED_TAKE_OFFSET] = offset_of(region);
    in[KP_PINNED_TAKE_BYTES] = region->bytes;
    if ((rc = kp_ask(KP_OP_pinned_take, in, KP_PINNED_TAKE_IN, NULL, 0, &answer)) == CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    free(drop(wanted->start, wanted->ours));
    if (wanted->window.base != NULL && wanted->window.base == kp_shim.link.window.base)
        next = offset_of(wanted); /* as before, so that blocks stay close together: whole chunks of the arena are counted */
    return kp_leave(rc);
}

/* Tells the worker, where it is still the one that counts the region, and forgets it; with `tx` held. */
static void give_back(struct region *region)
{
    uint64_t in[KP_PINNED_GIVE_IN] = {[KP_PINNED_GIVE_OFFSET] = offset_of(region), [KP_PINNED_GIVE_BYTES] = region->bytes};

    if (region->epoch == kp_shim.link.epoch && !atomic_load(&kp_shim.link.lost))
        kp_link_put(KP_OP_pinned_give, 0, kp_shim.link.seq++, in, KP_PINNED_GIVE_IN, NULL, 0);
    free(region);
}

CUresult kp_cuMemHostAlloc(void **pp, size_t bytesize, unsigned int flags)
{
    struct region region = {.bytes = bytesize, .flags = flags, .ours = true};
    CUresult rc = kp_capture_unsafe();

    if (rc != CUDA_SUCCESS || (rc = kp_enter()) != CUDA_SUCCESS)
        return rc;
    if (pp == NULL || bytesize == 0 || (flags & ~7u) != 0)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if ((flags & 2u) != 0) { /* DEVICEMAP: CAN_MAP_HOST_MEMORY says 0 */
        kp_leave(rc);
        return kp_unsupported("cuMemHostAlloc of mapped memory");
    }
    void *start = take_shared(bytesize);
    if (start != NULL)
        region.window = kp_shim.link.window;
    else if (posix_memalign(&start, ALIGNMENT, bytesize) != 0)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    region.start = start;
    if ((rc = add(&region)) == CUDA_SUCCESS)
        *pp = start;
    else if (region.window.base == NULL)
        free(start);
    return rc;
}

CUresult kp_cuMemAllocHost_v2(void **pp, size_t bytesize)
{
    return kp_cuMemHostAlloc(pp, bytesize, 0);
}

CUresult kp_cuMemFreeHost(void *p)
{
    CUresult rc = kp_cuCtxSynchronize(); /* as CUDA: work that uses it is over */
    struct region *region;
    struct kp_window window;

    if (rc != CUDA_SUCCESS && rc != CUDA_ERROR_DEVICE_UNAVAILABLE)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    if ((region = drop(p, true)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    window = region->window;
    give_back(region);
    bool plain = window.base == NULL;
    if (!plain && window.base != kp_shim.link.window.base && !in_use(window.base))
        kp_window_close(&window); /* the last of a lost worker's */
    kp_leave(rc);
    if (plain)
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
    return add(&(struct region){.start = p, .bytes = bytesize, .flags = flags});
}

CUresult kp_cuMemHostUnregister(void *p)
{
    struct region *region;
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((region = drop(p, false)) == NULL)
        return kp_leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    give_back(region);
    return kp_leave(CUDA_SUCCESS);
}
