/* Variables of modules: their addresses are the driver's, not of the shim's window, so unified calls cannot tell them from the
 * program's own memory by their value alone. The shim keeps those that the program was told, and takes their pages in this process,
 * so that no memory of the program's comes to lie there. Where some does already, the variable is not kept: a copy that names its
 * direction finds it all the same.
 *
 * Nothing is forgotten when a module goes: an address that was the card's is never the program's.
 */
#include "shim.h"

#include <stdatomic.h>
#include <sys/mman.h>

#define GLOBALS 1024u
#define PAGE 4096ull
#define BYTES_MAX (2ull << 30) /* CUDA has none that is larger */

static struct global {
    CUdeviceptr at;
    size_t bytes;
    uint64_t context;
} globals[GLOBALS];
static atomic_uint count; /* one is complete before it is counted, and never changes */

static CUdeviceptr pages_begin(CUdeviceptr at)
{
    return at & ~(PAGE - 1);
}

static CUdeviceptr pages_end(const struct global *global)
{
    return pages_begin(global->at + global->bytes + PAGE - 1);
}

static bool holds(const struct global *global, CUdeviceptr address)
{
    return address >= global->at && address - global->at < global->bytes;
}

/* The page behind the last that is taken from this one on; the page itself where it is free. */
static CUdeviceptr taken_to(CUdeviceptr page)
{
    for (unsigned i = 0; i < count; i++)
        if (pages_begin(globals[i].at) <= page && page < pages_end(&globals[i]))
            return taken_to(pages_end(&globals[i]));
    return page;
}

/* Others may have its first pages; what else it has must be free. */
static bool take_pages(const struct global *global)
{
    CUdeviceptr begin = taken_to(pages_begin(global->at)), end = pages_end(global);
    void *wanted = (void *)(uintptr_t)begin, *got;

    for (unsigned i = 0; i < count; i++) /* or its last */
        if (begin < pages_begin(globals[i].at) && pages_begin(globals[i].at) < end)
            end = pages_begin(globals[i].at);
    if (begin >= end)
        return true;
    got = mmap(wanted, end - begin, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (got != MAP_FAILED && got != wanted) /* a kernel that takes the address for a hint */
        munmap(got, end - begin);
    return got == wanted;
}

void kp_global_keep(CUdeviceptr at, size_t bytes)
{
    const struct global global = {at, bytes, kp_current()};
    CUdeviceptr start;
    size_t known;

    if (at == 0 || bytes == 0 || bytes > BYTES_MAX || at > KP_VA_MAX - bytes)
        return;
    pthread_mutex_lock(&kp_shim.tx);
    if (kp_global_find(at, &start, &known, NULL) && start == at && known == bytes) {
        pthread_mutex_unlock(&kp_shim.tx);
        return;
    }
    if (count == GLOBALS || !take_pages(&global)) {
        kp_log("the variable of %zu bytes at %#llx is not known to calls with unified addresses", bytes, at);
    } else {
        globals[count] = global;
        count++;
    }
    pthread_mutex_unlock(&kp_shim.tx);
}

/* The newest counts: after an unload another may lie there. */
bool kp_global_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes, uint64_t *context)
{
    for (unsigned i = count; i > 0; i--) {
        const struct global *global = &globals[i - 1];
        if (!holds(global, address))
            continue;
        *start = global->at;
        *bytes = global->bytes;
        if (context != NULL)
            *context = global->context;
        return true;
    }
    return false;
}
