/* Virtual memory management by the program: it reserves addresses of the window, makes physical memory and maps it there.
 *
 * Addresses are the shim's own to give, so reserving them needs no trip; what is mapped where is known here too, and the worker
 * checks it once more. A physical allocation goes when nobody holds its handle and nothing maps it, as CUDA has it: only then
 * is the worker told.
 */
#include "shim.h"

#include <stdlib.h>

struct physical {
    uint64_t number, bytes;
    uint32_t epoch, holders, maps; /* holders: handles that were given out and not released */
};

struct map {
    CUdeviceptr at;
    uint64_t bytes;
    struct physical *physical;
    int access;
    struct map *next; /* by address */
};

static struct map *maps; /* guarded by `tx` */

static struct map *map_at(CUdeviceptr address)
{
    struct map *map = maps;

    while (map != NULL && address - map->at >= map->bytes) /* wraps where it lies before */
        map = map->next;
    return map;
}

bool kp_vmm_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes)
{
    const struct map *map = map_at(address);

    if (map == NULL || map->access == 0)
        return false;
    *start = map->at;
    *bytes = map->bytes;
    return true;
}

static bool whole_pages(uint64_t bytes)
{
    return bytes > 0 && bytes % KP_VA_PAGE == 0;
}

static struct physical *physical_of(CUmemGenericAllocationHandle handle)
{
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, handle, KP_PHYSICAL);

    return entry != NULL ? entry->value : NULL;
}

static CUresult check_properties(const CUmemAllocationProp *prop)
{
    if (prop == NULL || prop->type != 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->location.type != 1 || prop->requestedHandleTypes != 0 || prop->allocFlags.compressionType != 0)
        return kp_unsupported("cuMemCreate of the host's memory, with a shareable handle or compressed");
    return prop->location.id == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult kp_cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option)
{
    CUresult rc = check_properties(prop);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (granularity == NULL || option < 0 || option > 1)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = KP_VA_PAGE;
    return CUDA_SUCCESS;
}

/* The address that is wished for is a hint, and not taken. */
CUresult kp_cuMemAddressReserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags)
{
    CUdeviceptr at;
    CUresult rc;

    if (ptr == NULL || !whole_pages(size) || flags != 0 || (alignment & (alignment - 1)) != 0 || addr % KP_VA_PAGE != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (size > KP_VA_WINDOW || alignment > KP_VA_WINDOW)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if ((rc = kp_enter_device()) != CUDA_SUCCESS)
        return rc;
    if ((at = kp_space_reserve(size, alignment)) == 0)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *ptr = at;
    return kp_leave(CUDA_SUCCESS);
}

/* Anything mapped between `at` and its end? */
static bool is_empty(CUdeviceptr at, uint64_t bytes)
{
    for (const struct map *map = maps; map != NULL; map = map->next)
        if (map->at < at + bytes && at < map->at + map->bytes)
            return false;
    return true;
}

CUresult kp_cuMemAddressFree(CUdeviceptr ptr, size_t size)
{
    CUresult rc = kp_enter_device();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (size == 0 || size > KP_VA_WINDOW || !is_empty(ptr, size) || !kp_space_unreserve(ptr, size))
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    return kp_leave(CUDA_SUCCESS);
}

/* With `tx` held. Its number, which the worker is to be told, once nothing needs it; else 0. */
static uint64_t put_physical(struct physical *physical)
{
    uint64_t number = 0;

    if (physical->holders > 0 || physical->maps > 0)
        return 0;
    if (physical->epoch == kp_shim.link.epoch && !atomic_load(&kp_shim.link.lost))
        number = physical->number;
    kp_handles_drop(&kp_shim.handles, physical->number);
    free(physical);
    return number;
}

CUresult kp_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags)
{
    struct physical *physical;
    struct kp_answer answer = {0};
    uint64_t in[KP_PHYSICAL_CREATE_IN], number = 0;
    CUresult rc = check_properties(prop);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (handle == NULL || !whole_pages(size) || flags != 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (int turn = 0; turn < 2; turn++) {
        if ((rc = kp_enter_any()) != CUDA_SUCCESS)
            return rc;
        if ((physical = calloc(1, sizeof *physical)) == NULL || (number = kp_handles_new(&kp_shim.handles, KP_PHYSICAL, physical, 0)) == 0) {
            free(physical);
            return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
        }
        *physical = (struct physical){.number = number, .bytes = size, .epoch = kp_shim.link.epoch, .holders = 1};
        in[KP_PHYSICAL_CREATE_HANDLE] = number;
        in[KP_PHYSICAL_CREATE_BYTES] = size;
        if ((rc = kp_ask(KP_OP_physical_create, in, KP_PHYSICAL_CREATE_IN, NULL, 0, &answer)) == CUDA_SUCCESS)
            break;
        pthread_mutex_lock(&kp_shim.tx);
        kp_handles_drop(&kp_shim.handles, number);
        kp_leave(rc);
        free(physical);
        if (rc != CUDA_ERROR_OUT_OF_MEMORY || !kp_pools_give())
            return rc;
    }
    if (rc == CUDA_SUCCESS)
        *handle = number;
    return rc;
}

CUresult kp_cuMemRelease(CUmemGenericAllocationHandle handle)
{
    struct physical *physical;
    uint64_t number;
    CUresult rc = kp_enter_any();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((physical = physical_of(handle)) == NULL || physical->holders == 0)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    physical->holders--;
    if ((number = put_physical(physical)) == 0)
        return kp_leave(CUDA_SUCCESS);
    return kp_send(KP_OP_physical_release, &number, KP_PHYSICAL_RELEASE_IN, NULL, 0);
}

static void enter_map(struct map *map)
{
    struct map **at = &maps;

    while (*at != NULL && (*at)->at < map->at)
        at = &(*at)->next;
    map->next = *at;
    *at = map;
}

static void leave_map(struct map *map)
{
    struct map **at = &maps;
    uint64_t number;

    while (*at != map)
        at = &(*at)->next;
    *at = map->next;
    map->physical->maps--;
    if ((number = put_physical(map->physical)) != 0)
        kp_link_put(KP_OP_physical_release, 0, kp_shim.link.seq++, &number, KP_PHYSICAL_RELEASE_IN, NULL, 0);
    free(map);
}

CUresult kp_cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    struct physical *physical;
    struct map *map;
    struct kp_answer answer = {0};
    uint64_t in[KP_VMM_MAP_IN] = {[KP_VMM_MAP_VA] = ptr, [KP_VMM_MAP_BYTES] = size, [KP_VMM_MAP_PHYSICAL] = handle};
    CUresult rc = kp_enter_any();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((physical = physical_of(handle)) == NULL || physical->holders == 0 || !whole_pages(size) || ptr % KP_VA_PAGE != 0 || offset != 0 ||
        flags != 0 || size > physical->bytes || !kp_space_reserved(ptr, size) || !is_empty(ptr, size))
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if (physical->epoch != kp_shim.link.epoch)
        return kp_leave(CUDA_ERROR_DEVICE_UNAVAILABLE);
    if ((map = malloc(sizeof *map)) == NULL)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    *map = (struct map){.at = ptr, .bytes = size, .physical = physical};
    physical->maps++;
    enter_map(map);
    if ((rc = kp_ask(KP_OP_vmm_map, in, KP_VMM_MAP_IN, NULL, 0, &answer)) != CUDA_SUCCESS) {
        pthread_mutex_lock(&kp_shim.tx);
        leave_map(map);
        kp_leave(rc);
    }
    return rc;
}

/* Whether the range is whole mappings without a gap. */
static bool is_mapped(CUdeviceptr ptr, size_t size)
{
    if (!whole_pages(size) || size > KP_VA_WINDOW)
        return false;
    for (CUdeviceptr at = ptr; at < ptr + size;) {
        const struct map *map = map_at(at);
        if (map == NULL || map->at != at || map->bytes > ptr + size - at)
            return false;
        at += map->bytes;
    }
    return true;
}

CUresult kp_cuMemUnmap(CUdeviceptr ptr, size_t size)
{
    struct kp_answer answer = {0};
    uint64_t in[KP_VMM_UNMAP_IN] = {[KP_VMM_UNMAP_VA] = ptr, [KP_VMM_UNMAP_BYTES] = size};
    CUresult rc = kp_enter_any();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (!is_mapped(ptr, size))
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    bool there = map_at(ptr)->physical->epoch == kp_shim.link.epoch; /* else it went with its worker */
    rc = there ? kp_ask(KP_OP_vmm_unmap, in, KP_VMM_UNMAP_IN, NULL, 0, &answer) : kp_leave(CUDA_SUCCESS);
    if (rc != CUDA_SUCCESS && rc != CUDA_ERROR_DEVICE_UNAVAILABLE)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    for (struct map *map; is_mapped(ptr, size) && (map = map_at(ptr)) != NULL;) {
        CUdeviceptr end = ptr + size;
        ptr = map->at + map->bytes;
        size = (size_t)(end - ptr);
        leave_map(map);
    }
    return kp_leave(rc);
}

CUresult kp_cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    struct kp_answer answer = {0};
    uint64_t in[KP_VMM_ACCESS_IN] = {[KP_VMM_ACCESS_VA] = ptr, [KP_VMM_ACCESS_BYTES] = size};
    CUresult rc;

    if (desc == NULL || count == 0 || size == 0)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (desc[i].location.type != 1 || desc[i].location.id != 0)
            return CUDA_ERROR_INVALID_DEVICE;
    if ((rc = kp_enter_any()) != CUDA_SUCCESS)
        return rc;
    int flags = desc[count - 1].flags; /* of one device the last word counts */
    if (!is_mapped(ptr, size) || (flags != 0 && flags != 1 && flags != 3))
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if (map_at(ptr)->physical->epoch != kp_shim.link.epoch)
        return kp_leave(CUDA_ERROR_DEVICE_UNAVAILABLE);
    in[KP_VMM_ACCESS_FLAGS] = (uint64_t)flags;
    if ((rc = kp_ask(KP_OP_vmm_access, in, KP_VMM_ACCESS_IN, NULL, 0, &answer)) != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    for (struct map *map = maps; map != NULL; map = map->next)
        if (map->at >= ptr && map->at - ptr < size)
            map->access = flags;
    return kp_leave(rc);
}

CUresult kp_cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr ptr)
{
    const struct map *map;
    CUresult rc = flags == NULL || location == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter_device();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (location->type != 1 || location->id != 0 || (map = map_at(ptr)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    *flags = (unsigned long long)map->access;
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    CUresult rc = prop == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter_device();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (physical_of(handle) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    *prop = (CUmemAllocationProp){.type = 1, .location = {.type = 1}};
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *addr)
{
    const struct map *map;
    CUresult rc = handle == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter_device();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((map = map_at((CUdeviceptr)(uintptr_t)addr)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    map->physical->holders++;
    *handle = map->physical->number;
    return kp_leave(CUDA_SUCCESS);
}
