/* Device addresses: the shim chooses them, in a window of its own, so that a pointer can outlive its card.
 *
 * The window is cut into pages of 2 MiB, the unit of a mapping. An allocation of half a page or more has its own pages,
 * with an unmapped one behind them (an overrun faults); smaller ones share slabs of one page, cut into blocks. Pages are
 * given out next-fit, so an address comes back late. Nothing here touches the memory; that is the worker's.
 */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

#define PAGES ((uint32_t)(KP_VA_WINDOW / KP_VA_PAGE))
#define BLOCK 512u /* CUDA aligns to 256; its own allocator to 512 */
#define BLOCKS ((uint32_t)(KP_VA_PAGE / BLOCK))
#define SMALL (KP_VA_PAGE / 2)

struct span {
    uint32_t page, pages; /* without the guard */
    uint32_t blocks_used; /* of a slab */
    bool slab;
    bool reserved; /* for the program to map (shim_vmm.c): none of its bytes is an allocation */
    uint64_t context;
    size_t bytes; /* of an allocation with its own pages */
    struct span *next;
    uint16_t run[];  /* of a slab: at a block that starts an allocation, how many blocks it has; else 0 */
};

struct slab_bytes { /* behind a slab's runs: what was asked for, at the starting block */
    uint32_t bytes[BLOCKS];
};

static struct span *span_of[PAGES];
static struct span *spans;
static uint32_t cursor;

static struct slab_bytes *bytes_of(struct span *slab)
{
    return (struct slab_bytes *)(void *)(slab->run + BLOCKS);
}

/* First page of `pages` + 1 free ones, a multiple of `align`, or PAGES. */
static uint32_t find_pages(uint32_t pages, uint32_t align)
{
    uint32_t free_run = 0;

    for (uint64_t step = 0; step < 2ull * PAGES; step++) {
        uint32_t page = (uint32_t)((cursor + step) % PAGES);
        if (page == 0)
            free_run = 0; /* a run does not wrap */
        free_run = span_of[page] == NULL ? free_run + 1 : 0;
        if (free_run > pages && (page - pages) % align == 0)
            return page - pages;
    }
    return PAGES;
}

static struct span *make_span(uint32_t pages, uint32_t align, bool slab, uint64_t context)
{
    size_t extra = slab ? BLOCKS * sizeof(uint16_t) + sizeof(struct slab_bytes) : 0;
    struct span *span;
    uint32_t page = pages < PAGES ? find_pages(pages, align) : PAGES;

    if (page == PAGES || (span = calloc(1, sizeof *span + extra)) == NULL)
        return NULL;
    *span = (struct span){.page = page, .pages = pages, .slab = slab, .context = context, .next = spans};
    spans = span;
    for (uint32_t i = 0; i <= pages; i++) /* the guard too: it is taken, though nothing is there */
        span_of[page + i] = span;
    cursor = (page + pages + 1) % PAGES;
    return span;
}

static void end_span(struct span *span)
{
    struct span **at = &spans;

    while (*at != span)
        at = &(*at)->next;
    *at = span->next;
    for (uint32_t i = 0; i <= span->pages; i++)
        span_of[span->page + i] = NULL;
    free(span);
}

static CUdeviceptr address_of(const struct span *span, uint32_t block)
{
    return KP_VA_BASE + span->page * KP_VA_PAGE + (CUdeviceptr)block * BLOCK;
}

/* First of `blocks` free blocks in a row, or BLOCKS. */
static uint32_t find_blocks(const struct span *slab, uint32_t blocks)
{
    uint32_t block = 0, free_run = 0;

    while (block < BLOCKS) {
        if (slab->run[block] != 0) {
            block += slab->run[block];
            free_run = 0;
            continue;
        }
        block++;
        if (++free_run == blocks)
            return block - blocks;
    }
    return BLOCKS;
}

static CUdeviceptr take_small(size_t bytes, uint64_t context)
{
    uint32_t blocks = (uint32_t)((bytes + BLOCK - 1) / BLOCK), block = BLOCKS;
    struct span *slab;

    for (slab = spans; slab != NULL; slab = slab->next)
        if (slab->slab && slab->context == context && BLOCKS - slab->blocks_used >= blocks &&
            (block = find_blocks(slab, blocks)) < BLOCKS)
            break;
    if (slab == NULL) {
        slab = make_span(1, 1, true, context);
        block = 0;
    }
    if (slab == NULL)
        return 0;
    slab->run[block] = (uint16_t)blocks;
    slab->blocks_used += blocks;
    bytes_of(slab)->bytes[block] = (uint32_t)bytes;
    return address_of(slab, block);
}

CUdeviceptr kp_space_take(size_t bytes, uint64_t context)
{
    struct span *span;

    if (bytes == 0 || bytes > KP_VA_WINDOW)
        return 0;
    if (bytes < SMALL)
        return take_small(bytes, context);
    span = make_span((uint32_t)((bytes + KP_VA_PAGE - 1) / KP_VA_PAGE), 1, false, context);
    if (span == NULL)
        return 0;
    span->bytes = bytes;
    return address_of(span, 0);
}

static struct span *span_at(CUdeviceptr address)
{
    if (address < KP_VA_BASE || address - KP_VA_BASE >= KP_VA_WINDOW)
        return NULL;
    return span_of[(address - KP_VA_BASE) / KP_VA_PAGE];
}

bool kp_space_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes)
{
    struct span *span = span_at(address);
    uint32_t block;

    if (span == NULL)
        return kp_global_find(address, start, bytes, NULL);
    if (span->reserved)
        return kp_vmm_find(address, start, bytes);
    *start = address_of(span, 0);
    *bytes = span->bytes;
    if (span->slab) {
        block = (uint32_t)((address - *start) / BLOCK);
        if (block >= BLOCKS) /* its guard */
            return false;
        uint32_t asked = block;
        while (block > 0 && span->run[block] == 0)
            block--;
        if (span->run[block] == 0 || asked >= block + span->run[block])
            return false;
        *start = address_of(span, block);
        *bytes = bytes_of(span)->bytes[block];
    }
    return address - *start < *bytes;
}

uint64_t kp_space_context(CUdeviceptr address)
{
    struct span *span = span_at(address);
    uint64_t context;
    CUdeviceptr start;
    size_t bytes;

    if (span != NULL)
        return span->context;
    return kp_global_find(address, &start, &bytes, &context) ? context : 0;
}

bool kp_space_give(CUdeviceptr address)
{
    struct span *span = span_at(address);
    CUdeviceptr start;
    size_t bytes;

    if (span == NULL || span->reserved || !kp_space_find(address, &start, &bytes) || start != address)
        return false;
    if (span->slab) {
        uint32_t block = (uint32_t)((address - address_of(span, 0)) / BLOCK);
        span->blocks_used -= span->run[block];
        span->run[block] = 0;
        if (span->blocks_used > 0)
            return true;
    }
    end_span(span);
    return true;
}

void kp_space_drop(uint64_t context)
{
    struct span *span = spans, *next;

    for (; span != NULL; span = next) {
        next = span->next;
        if (!span->reserved && span->context == context)
            end_span(span);
    }
}

void kp_space_resize(CUdeviceptr address, size_t bytes)
{
    struct span *span = span_at(address);

    if (span->slab)
        bytes_of(span)->bytes[(address - address_of(span, 0)) / BLOCK] = (uint32_t)bytes;
    else
        span->bytes = bytes;
}

CUdeviceptr kp_space_reserve(size_t bytes, size_t alignment)
{
    uint32_t align = alignment > KP_VA_PAGE ? (uint32_t)(alignment / KP_VA_PAGE) : 1;
    struct span *span = make_span((uint32_t)(bytes / KP_VA_PAGE), align, false, 0);

    if (span == NULL)
        return 0;
    span->reserved = true;
    span->bytes = bytes;
    return address_of(span, 0);
}

bool kp_space_reserved(CUdeviceptr address, size_t bytes)
{
    struct span *span = span_at(address);
    CUdeviceptr offset = span != NULL ? address - address_of(span, 0) : 0;

    return span != NULL && span->reserved && offset <= span->bytes && bytes <= span->bytes - offset;
}

bool kp_space_unreserve(CUdeviceptr address, size_t bytes)
{
    struct span *span = span_at(address);

    if (span == NULL || !span->reserved || address != address_of(span, 0) || bytes != span->bytes)
        return false;
    end_span(span);
    return true;
}
