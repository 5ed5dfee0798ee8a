/* Device memory at the addresses the guest chose, counted against the claim before the card is asked.
 *
 * A mapping is one or more pages of the window with one physical allocation behind it. Small allocations share a mapping
 * of one page; it goes when the last of them is freed. The guest is not trusted: an address that is not where an
 * allocation may be is an error of that call.
 *
 * A free must wait until work that uses the memory is over (cuMemFree promises it), and the reader must not. So a freed
 * block is only marked, and the reaper, a thread, waits and takes it away; an allocation that needs the same page, or the
 * claim's last bytes, waits for the reaper.
 */
#include "session_memory.h"

#include <stdlib.h>

static bool marked(const uint64_t *bits, unsigned block)
{
    return (bits[block / 64] >> block % 64 & 1) != 0;
}

static void mark(uint64_t *bits, unsigned block, bool on)
{
    uint64_t bit = 1ull << block % 64;

    bits[block / 64] = on ? bits[block / 64] | bit : bits[block / 64] & ~bit;
}

struct kp_mapping **kp_page_of(struct kp_server *s, uint64_t va)
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

void kp_mapping_enter(struct kp_server *s, struct kp_mapping *mapping)
{
    for (uint64_t at = mapping->va; at < mapping->va + mapping->bytes; at += KP_VA_PAGE)
        *kp_page_of(s, at) = mapping;
    mapping->next = s->mappings;
    mapping->link = &s->mappings;
    if (mapping->next != NULL)
        mapping->next->link = &mapping->next;
    s->mappings = mapping;
}

int kp_memory_charge(struct kp_server *s, uint64_t bytes)
{
    int rc = kp_account_charge(s->session->account, s->session->slot, bytes);

    if (rc != 0 && s->reaping > 0) {
        while (s->reaping > 0)
            pthread_cond_wait(&s->reaped, &s->memory_lock);
        rc = kp_account_charge(s->session->account, s->session->slot, bytes);
    }
    return rc;
}

CUresult kp_memory_have(struct kp_server *s, uint64_t bytes)
{
    kp_own_look_sometimes(s);
    if (kp_memory_charge(s, bytes) == 0)
        return CUDA_SUCCESS;
    kp_own_look(s); /* what was unloaded since may have made room */
    return kp_memory_charge(s, bytes) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Charges, maps and enters `bytes` (whole pages) at `va`. */
static CUresult new_mapping(struct kp_server *s, uint64_t va, uint64_t bytes, uint64_t home_number, struct kp_mapping **out)
{
    struct kp_mapping *mapping = calloc(1, sizeof *mapping);
    CUresult rc = CUDA_ERROR_OUT_OF_MEMORY;

    if (mapping == NULL)
        return rc;
    *mapping = (struct kp_mapping){.va = va, .bytes = bytes, .home_number = home_number};
    if (kp_memory_have(s, bytes) != CUDA_SUCCESS)
        goto out;
    if ((rc = map(s, mapping)) != CUDA_SUCCESS) {
        kp_account_release(s->session->account, s->session->slot, bytes);
        goto out;
    }
    s->mapped += bytes;
    kp_mapping_enter(s, mapping);
    *out = mapping;
    return CUDA_SUCCESS;
out:
    free(mapping);
    return rc;
}

void kp_mapping_leave(struct kp_server *s, struct kp_mapping *mapping)
{
    for (uint64_t at = mapping->va; at < mapping->va + mapping->bytes; at += KP_VA_PAGE)
        *kp_page_of(s, at) = NULL;
    *mapping->link = mapping->next;
    if (mapping->next != NULL)
        mapping->next->link = mapping->link;
    free(mapping);
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
    s->mapped -= mapping->bytes;
    kp_mapping_leave(s, mapping);
    return rc;
}

bool kp_memory_in_window(const struct kp_server *s, uint64_t va, uint64_t bytes)
{
    return va >= s->va_base && bytes > 0 && bytes <= KP_VA_WINDOW && va - s->va_base <= KP_VA_WINDOW - bytes;
}

static bool holds(struct kp_server *s, uint64_t va, uint64_t bytes)
{
    while (bytes > 0) {
        struct kp_mapping *mapping = kp_memory_in_window(s, va, 1) ? *kp_page_of(s, va) : NULL;
        if (mapping == NULL)
            return false;
        uint64_t here = mapping->va + mapping->bytes - va;
        va += here;
        bytes -= here < bytes ? here : bytes;
    }
    return true;
}

bool kp_memory_holds(struct kp_server *s, uint64_t va, uint64_t bytes)
{
    bool held = bytes <= s->session->memory_bytes;

    if (held && kp_memory_in_window(s, va, 1)) { /* elsewhere are modules' variables: the driver knows them */
        pthread_mutex_lock(&s->memory_lock);
        held = holds(s, va, bytes);
        pthread_mutex_unlock(&s->memory_lock);
    }
    return held;
}

/* With the lock held: no page of the range has an allocation that the reaper is about to take away. */
static void wait_for_reaper(struct kp_server *s, uint64_t first, uint64_t end)
{
    for (uint64_t at = first; at < end; at += KP_VA_PAGE)
        while (*kp_page_of(s, at) != NULL && (*kp_page_of(s, at))->freed > 0)
            pthread_cond_wait(&s->reaped, &s->memory_lock);
}

bool kp_memory_is_free(struct kp_server *s, uint64_t va, uint64_t bytes)
{
    wait_for_reaper(s, va, va + bytes);
    for (uint64_t at = va; at < va + bytes; at += KP_VA_PAGE)
        if (*kp_page_of(s, at) != NULL)
            return false;
    return true;
}

static CUresult allocate(struct kp_server *s, uint64_t va, uint64_t bytes, uint64_t home_number)
{
    uint64_t first = va / KP_VA_PAGE * KP_VA_PAGE, end = (va + bytes + KP_VA_PAGE - 1) / KP_VA_PAGE * KP_VA_PAGE;
    unsigned block = (unsigned)((va - first) / KP_BLOCK);
    struct kp_mapping *mapping;
    CUresult rc;

    wait_for_reaper(s, first, end);
    mapping = *kp_page_of(s, first);
    for (uint64_t at = first; at < end; at += KP_VA_PAGE)
        if (*kp_page_of(s, at) != mapping)
            return CUDA_ERROR_INVALID_VALUE;
    if (mapping != NULL && (mapping->physical != NULL || mapping->va != first || mapping->bytes != KP_VA_PAGE || marked(mapping->starts, block)))
        return CUDA_ERROR_INVALID_VALUE;
    if (mapping == NULL && (rc = new_mapping(s, first, end - first, home_number, &mapping)) != CUDA_SUCCESS)
        return rc;
    mark(mapping->starts, block, true);
    mapping->allocations++;
    return CUDA_SUCCESS;
}

int kp_do_alloc(struct kp_server *s, struct kp_work *w)
{
    uint64_t va = w->in[KP_ALLOC_VA], bytes = w->in[KP_ALLOC_BYTES];
    CUresult rc;

    if (!kp_memory_in_window(s, va, bytes) || va % KP_BLOCK != 0)
        return CUDA_ERROR_INVALID_VALUE;
    if (bytes > s->session->memory_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&s->memory_lock);
    rc = allocate(s, va, bytes, w->home_number);
    pthread_mutex_unlock(&s->memory_lock);
    return rc;
}

/* With the lock held: the mapping in which a living allocation begins at `va`, or NULL. */
static struct kp_mapping *allocation_at(struct kp_server *s, uint64_t va)
{
    struct kp_mapping *mapping = kp_memory_in_window(s, va, 1) ? *kp_page_of(s, va) : NULL;
    unsigned block = (unsigned)(va % KP_VA_PAGE / KP_BLOCK);

    if (mapping == NULL || va % KP_BLOCK != 0 || va / KP_VA_PAGE != mapping->va / KP_VA_PAGE)
        return NULL;
    return marked(mapping->starts, block) && !marked(mapping->dying, block) ? mapping : NULL;
}

int kp_do_free(struct kp_server *s, struct kp_work *w)
{
    struct kp_mapping *mapping;
    struct kp_grave *grave = malloc(sizeof *grave);
    uint64_t va = w->in[KP_FREE_VA];

    if (grave == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *grave = (struct kp_grave){.va = va, .home = w->home};
    pthread_mutex_lock(&s->memory_lock);
    if ((mapping = allocation_at(s, va)) != NULL) {
        mark(mapping->dying, (unsigned)(va % KP_VA_PAGE / KP_BLOCK), true);
        if (++mapping->freed == mapping->allocations)
            s->reaping_bytes += mapping->bytes;
        s->reaping++;
    }
    pthread_mutex_unlock(&s->memory_lock);
    if (mapping == NULL) {
        free(grave);
        return CUDA_ERROR_INVALID_VALUE;
    }
    return kp_bury(s, grave, w->wanted);
}

CUresult kp_memory_reap(struct kp_server *s, uint64_t va, CUresult waited, struct kp_home *note)
{
    unsigned block = (unsigned)(va % KP_VA_PAGE / KP_BLOCK);
    struct kp_mapping *mapping;
    CUresult rc = CUDA_SUCCESS;

    pthread_mutex_lock(&s->memory_lock);
    mapping = *kp_page_of(s, va);
    if (mapping->freed == mapping->allocations)
        s->reaping_bytes -= mapping->bytes;
    mark(mapping->starts, block, false);
    mark(mapping->dying, block, false);
    mapping->freed--;
    if (--mapping->allocations == 0)
        rc = end_mapping(s, mapping);
    else if (mapping->freed == mapping->allocations)
        s->reaping_bytes += mapping->bytes;
    rc = waited != CUDA_SUCCESS ? waited : rc;
    if (note != NULL) /* before anybody goes on who waits for the reaper: the end of a context takes its errors with it */
        kp_note(s, note, rc);
    s->reaping--;
    pthread_cond_broadcast(&s->reaped);
    pthread_mutex_unlock(&s->memory_lock);
    return rc;
}

void kp_memory_drop(struct kp_server *s, uint64_t home_number)
{
    struct kp_mapping *mapping, *next;

    pthread_mutex_lock(&s->memory_lock);
    while (s->reaping > 0)
        pthread_cond_wait(&s->reaped, &s->memory_lock);
    for (mapping = s->mappings; mapping != NULL; mapping = next) {
        next = mapping->next;
        if (mapping->physical == NULL && mapping->home_number == home_number)
            end_mapping(s, mapping);
    }
    pthread_mutex_unlock(&s->memory_lock);
}

/* What is freed counts as free, though the reaper may still wait for a kernel that uses it. */
int kp_do_cuMemGetInfo_v2(struct kp_server *s, struct kp_work *w)
{
    uint64_t used;

    pthread_mutex_lock(&s->memory_lock); /* first: what the reaper gives back meanwhile would be taken off twice, or not at all */
    kp_own_look(s);
    used = kp_account_used(s->session->account);
    used -= used < s->reaping_bytes ? used : s->reaping_bytes;
    pthread_mutex_unlock(&s->memory_lock);
    w->out[0] = used < s->session->memory_bytes ? s->session->memory_bytes - used : 0;
    w->out[1] = s->session->memory_bytes;
    return CUDA_SUCCESS;
}
