/* Device memory at the addresses the guest chose, counted against the claim before the card is asked.
 *
 * A mapping is one or more pages of the window with one physical allocation behind it. Small allocations share a mapping
 * of one page; it goes when the last of them is freed. The guest is not trusted: an address that is not where an
 * allocation may be is an error of that call.
 */
#include "session_state.h"

#include <stdlib.h>
#include <string.h>

#define BLOCK 512u /* the unit of the shim's allocator: allocations begin at multiples of it */
#define BLOCKS ((unsigned)(KP_VA_PAGE / BLOCK))

struct kp_mapping {
    uint64_t va, bytes;
    CUmemGenericAllocationHandle memory;
    uint64_t home_number;
    uint32_t allocations;
    struct kp_mapping *next, **link; /* all of the session's; what points at this one */
    uint64_t starts[BLOCKS / 64]; /* blocks of the first page where an allocation begins */
};

static struct kp_mapping **page_of(struct kp_server *s, uint64_t va)
{
    return &s->pages[(va - s->va_base) / KP_VA_PAGE];
}

static CUresult map(struct kp_server *s, struct kp_mapping *mapping)
{
    const struct kp_driver *d = &s->driver;
    CUmemLocation here = {.type = 1 /* device */, .id = s->device};
    CUmemAllocationProp property = {.type = 1 /* pinned */, .location = here};
    CUmemAccessDesc access = {.location = here, .flags = 3 /* read, write */};
    CUdeviceptr at = 0;
    CUresult rc = d->cuMemAddressReserve(&at, mapping->bytes, KP_VA_PAGE, mapping->va, 0);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (at != mapping->va) { /* taken: the driver chose another, which is of no use */
        d->cuMemAddressFree(at, mapping->bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if ((rc = d->cuMemCreate(&mapping->memory, mapping->bytes, &property, 0)) != CUDA_SUCCESS)
        goto address;
    if ((rc = d->cuMemMap(at, mapping->bytes, 0, mapping->memory, 0)) != CUDA_SUCCESS)
        goto memory;
    if ((rc = d->cuMemSetAccess(at, mapping->bytes, &access, 1)) == CUDA_SUCCESS)
        return CUDA_SUCCESS;
    d->cuMemUnmap(at, mapping->bytes);
memory:
    d->cuMemRelease(mapping->memory);
address:
    d->cuMemAddressFree(at, mapping->bytes);
    return rc;
}

/* Charges, maps and enters `bytes` (whole pages) at `va`. */
static CUresult new_mapping(struct kp_server *s, uint64_t va, uint64_t bytes, uint64_t home_number, struct kp_mapping **out)
{
    struct kp_mapping *mapping = calloc(1, sizeof *mapping);
    CUresult rc;

    if (mapping == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *mapping = (struct kp_mapping){.va = va, .bytes = bytes, .home_number = home_number};
    if (kp_account_charge(s->session->account, s->session->slot, bytes) != 0) {
        free(mapping);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if ((rc = map(s, mapping)) != CUDA_SUCCESS) {
        kp_account_release(s->session->account, s->session->slot, bytes);
        free(mapping);
        return rc;
    }
    for (uint64_t at = va; at < va + bytes; at += KP_VA_PAGE)
        *page_of(s, at) = mapping;
    mapping->next = s->mappings;
    mapping->link = &s->mappings;
    if (mapping->next != NULL)
        mapping->next->link = &mapping->next;
    s->mappings = mapping;
    *out = mapping;
    return CUDA_SUCCESS;
}

static CUresult end_mapping(struct kp_server *s, struct kp_mapping *mapping)
{
    const struct kp_driver *d = &s->driver;
    CUresult rc = d->cuMemUnmap(mapping->va, mapping->bytes), also;

    also = d->cuMemRelease(mapping->memory);
    rc = rc != CUDA_SUCCESS ? rc : also;
    also = d->cuMemAddressFree(mapping->va, mapping->bytes);
    rc = rc != CUDA_SUCCESS ? rc : also;
    kp_account_release(s->session->account, s->session->slot, mapping->bytes);
    for (uint64_t at = mapping->va; at < mapping->va + mapping->bytes; at += KP_VA_PAGE)
        *page_of(s, at) = NULL;
    *mapping->link = mapping->next;
    if (mapping->next != NULL)
        mapping->next->link = mapping->link;
    free(mapping);
    return rc;
}

static bool in_window(const struct kp_server *s, uint64_t va, uint64_t bytes)
{
    return va >= s->va_base && bytes > 0 && bytes <= KP_VA_WINDOW && va - s->va_base <= KP_VA_WINDOW - bytes;
}

bool kp_memory_holds(struct kp_server *s, uint64_t va, uint64_t bytes)
{
    if (bytes > s->session->memory_bytes)
        return false;
    if (!in_window(s, va, 1))
        return true; /* a module's variable: the driver knows */
    while (bytes > 0) {
        struct kp_mapping *mapping = in_window(s, va, 1) ? *page_of(s, va) : NULL;
        if (mapping == NULL)
            return false;
        uint64_t here = mapping->va + mapping->bytes - va;
        va += here;
        bytes -= here < bytes ? here : bytes;
    }
    return true;
}

int kp_do_alloc(struct kp_server *s, struct kp_work *w)
{
    uint64_t va = w->in[KP_ALLOC_VA], bytes = w->in[KP_ALLOC_BYTES];
    uint64_t first = va / KP_VA_PAGE * KP_VA_PAGE, end;
    unsigned block = (unsigned)((va - first) / BLOCK);
    struct kp_mapping *mapping;
    CUresult rc;

    if (!in_window(s, va, bytes) || va % BLOCK != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > s->session->memory_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    end = (va + bytes + KP_VA_PAGE - 1) / KP_VA_PAGE * KP_VA_PAGE;
    mapping = *page_of(s, first);
    for (uint64_t at = first; at < end; at += KP_VA_PAGE)
        if (*page_of(s, at) != mapping)
            return CUDA_ERROR_INVALID_VALUE;
    if (mapping != NULL && (mapping->va != first || mapping->bytes != KP_VA_PAGE || mapping->starts[block / 64] >> block % 64 & 1))
        return CUDA_ERROR_INVALID_VALUE;
    if (mapping == NULL && (rc = new_mapping(s, first, end - first, w->home_number, &mapping)) != CUDA_SUCCESS)
        return rc;
    mapping->starts[block / 64] |= 1ull << block % 64;
    mapping->allocations++;
    return CUDA_SUCCESS;
}

int kp_do_free(struct kp_server *s, struct kp_work *w)
{
    uint64_t va = w->in[KP_FREE_VA];
    unsigned block = (unsigned)(va % KP_VA_PAGE / BLOCK);
    struct kp_mapping *mapping = in_window(s, va, 1) ? *page_of(s, va) : NULL;
    CUresult rc;

    if (mapping == NULL || va % BLOCK != 0 || va / KP_VA_PAGE != mapping->va / KP_VA_PAGE ||
        (mapping->starts[block / 64] >> block % 64 & 1) == 0)
        return CUDA_ERROR_INVALID_VALUE;
    rc = s->driver.cuCtxSynchronize(); /* as cuMemFree: work that uses it is over */
    mapping->starts[block / 64] &= ~(1ull << block % 64);
    if (--mapping->allocations == 0) {
        CUresult ended = end_mapping(s, mapping);
        rc = rc != CUDA_SUCCESS ? rc : ended;
    }
    return rc;
}

void kp_memory_drop(struct kp_server *s, uint64_t home_number)
{
    struct kp_mapping *mapping = s->mappings, *next;

    for (; mapping != NULL; mapping = next) {
        next = mapping->next;
        if (mapping->home_number == home_number)
            end_mapping(s, mapping);
    }
}

int kp_do_cuMemGetInfo_v2(struct kp_server *s, struct kp_work *w)
{
    uint64_t used = kp_account_used(s->session->account);

    w->out[0] = used < s->session->memory_bytes ? s->session->memory_bytes - used : 0;
    w->out[1] = s->session->memory_bytes;
    return CUDA_SUCCESS;
}
