/* Memory that the guest manages itself: physical allocations, and mappings of them at addresses that its shim has reserved.
 *
 * The claim is charged for a physical allocation, not for its mappings. The driver reserves addresses mapping by mapping, as for
 * any allocation (session_memory.c), whose pages these share: neither can be where the other is.
 */
#include "session_memory.h"

#include <errno.h>
#include <stdlib.h>

static bool whole_pages(uint64_t bytes)
{
    return bytes > 0 && bytes % KP_VA_PAGE == 0;
}

int kp_do_physical_create(struct kp_server *s, struct kp_work *w)
{
    uint64_t number = w->in[KP_PHYSICAL_CREATE_HANDLE], bytes = w->in[KP_PHYSICAL_CREATE_BYTES];
    CUmemAllocationProp property = {.type = 1 /* pinned */, .location = {.type = 1 /* device */, .id = s->device}};
    struct kp_physical *physical;
    int rc = kp_may_adopt(s, number, KP_PHYSICAL);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (!whole_pages(bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > s->session->memory_bytes || (physical = calloc(1, sizeof *physical)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    physical->bytes = bytes;
    pthread_mutex_lock(&s->memory_lock);
    if ((rc = kp_memory_have(s, bytes)) == CUDA_SUCCESS) {
        if ((rc = s->driver.cuMemCreate(&physical->memory, bytes, &property, 0)) == CUDA_SUCCESS)
            s->mapped += bytes;
        else
            kp_account_release(s->session->account, s->session->slot, bytes);
    }
    pthread_mutex_unlock(&s->memory_lock);
    if (rc == CUDA_SUCCESS)
        rc = kp_adopt_under(s, number, KP_PHYSICAL, physical, 0, 0);
    else
        free(physical);
    return rc;
}

int kp_do_physical_release(struct kp_server *s, struct kp_work *w)
{
    struct kp_physical *physical;
    void *object;
    CUresult rc = kp_resolve(s, w->in[KP_PHYSICAL_RELEASE_HANDLE], KP_PHYSICAL, &object);

    if (rc != CUDA_SUCCESS)
        return rc;
    physical = object;
    if (physical->maps > 0) /* the shim keeps it until the last mapping is gone */
        return CUDA_ERROR_INVALID_VALUE;
    kp_forget(s, w->in[KP_PHYSICAL_RELEASE_HANDLE]);
    pthread_mutex_lock(&s->memory_lock);
    rc = s->driver.cuMemRelease(physical->memory);
    kp_account_release(s->session->account, s->session->slot, physical->bytes);
    s->mapped -= physical->bytes;
    pthread_mutex_unlock(&s->memory_lock);
    free(physical);
    return rc;
}

/* With the lock held. */
static CUresult map(struct kp_server *s, uint64_t va, uint64_t bytes, struct kp_physical *physical)
{
    const struct kp_driver *d = &s->driver;
    struct kp_mapping *mapping;
    CUdeviceptr at = 0;
    CUresult rc;

    if (!kp_memory_is_free(s, va, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if ((mapping = calloc(1, sizeof *mapping)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *mapping = (struct kp_mapping){.va = va, .bytes = bytes, .physical = physical};
    if ((rc = d->cuMemAddressReserve(&at, bytes, KP_VA_PAGE, va, 0)) != CUDA_SUCCESS)
        goto out;
    if (at != va)
        rc = CUDA_ERROR_OUT_OF_MEMORY; /* taken: the driver chose another */
    if (rc == CUDA_SUCCESS)
        rc = d->cuMemMap(va, bytes, 0, physical->memory, 0);
    if (rc != CUDA_SUCCESS) {
        d->cuMemAddressFree(at, bytes);
        goto out;
    }
    physical->maps++;
    kp_mapping_enter(s, mapping);
    return CUDA_SUCCESS;
out:
    free(mapping);
    return rc;
}

int kp_do_vmm_map(struct kp_server *s, struct kp_work *w)
{
    uint64_t va = w->in[KP_VMM_MAP_VA], bytes = w->in[KP_VMM_MAP_BYTES];
    struct kp_physical *physical;
    void *object;
    int rc = kp_resolve(s, w->in[KP_VMM_MAP_PHYSICAL], KP_PHYSICAL, &object);

    if (rc != CUDA_SUCCESS)
        return rc;
    physical = object;
    if (!whole_pages(bytes) || va % KP_VA_PAGE != 0 || bytes > physical->bytes || !kp_memory_in_window(s, va, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&s->memory_lock);
    rc = map(s, va, bytes, physical);
    pthread_mutex_unlock(&s->memory_lock);
    return rc;
}

/* With the lock held: the range is whole mappings of the guest's, without a gap. */
static bool is_mapped(struct kp_server *s, uint64_t va, uint64_t bytes)
{
    if (!whole_pages(bytes) || va % KP_VA_PAGE != 0 || !kp_memory_in_window(s, va, bytes))
        return false;
    for (uint64_t at = va; at < va + bytes;) {
        const struct kp_mapping *mapping = *kp_page_of(s, at);
        if (mapping == NULL || mapping->physical == NULL || mapping->va != at || mapping->bytes > va + bytes - at)
            return false;
        at += mapping->bytes;
    }
    return true;
}

static CUresult unmap(struct kp_server *s, struct kp_mapping *mapping)
{
    CUresult rc = s->driver.cuMemUnmap(mapping->va, mapping->bytes), also;

    also = s->driver.cuMemAddressFree(mapping->va, mapping->bytes);
    mapping->physical->maps--;
    kp_mapping_leave(s, mapping);
    return rc != CUDA_SUCCESS ? rc : also;
}

int kp_do_vmm_unmap(struct kp_server *s, struct kp_work *w)
{
    uint64_t va = w->in[KP_VMM_UNMAP_VA], bytes = w->in[KP_VMM_UNMAP_BYTES], here;
    CUresult rc = CUDA_SUCCESS;

    pthread_mutex_lock(&s->memory_lock);
    if (!is_mapped(s, va, bytes))
        rc = CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = va; rc == CUDA_SUCCESS && at < va + bytes; at += here) {
        here = (*kp_page_of(s, at))->bytes;
        rc = unmap(s, *kp_page_of(s, at));
    }
    pthread_mutex_unlock(&s->memory_lock);
    return rc;
}

int kp_do_vmm_access(struct kp_server *s, struct kp_work *w)
{
    uint64_t va = w->in[KP_VMM_ACCESS_VA], bytes = w->in[KP_VMM_ACCESS_BYTES];
    CUmemAccessDesc access = {.location = {.type = 1 /* device */, .id = s->device}, .flags = (int)w->in[KP_VMM_ACCESS_FLAGS]};
    CUresult rc = CUDA_SUCCESS;

    pthread_mutex_lock(&s->memory_lock);
    if (!is_mapped(s, va, bytes) || (access.flags != 0 && access.flags != 1 && access.flags != 3))
        rc = CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = va; rc == CUDA_SUCCESS && at < va + bytes; at += (*kp_page_of(s, at))->bytes)
        rc = s->driver.cuMemSetAccess(at, (*kp_page_of(s, at))->bytes, &access, 1);
    pthread_mutex_unlock(&s->memory_lock);
    return rc;
}
