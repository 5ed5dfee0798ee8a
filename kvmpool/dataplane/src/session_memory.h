/* What the session maps at addresses of the window: shared by session_memory.c and session_vmm.c. All with memory_lock held. */
#ifndef KVMPOOL_SESSION_MEMORY_H
#define KVMPOOL_SESSION_MEMORY_H

#include "session_state.h"

#define KP_BLOCK 512u /* the unit of the shim's allocator: allocations begin at multiples of it */
#define KP_BLOCKS ((unsigned)(KP_VA_PAGE / KP_BLOCK))

/* Memory of the guest's own, wherever it maps it. */
struct kp_physical {
    CUmemGenericAllocationHandle memory;
    uint64_t bytes;
    uint32_t maps;
};

struct kp_mapping {
    uint64_t va, bytes;
    CUmemGenericAllocationHandle memory;
    struct kp_physical *physical; /* the guest's own, and nothing of what follows; NULL: memory is the mapping's */
    uint64_t home_number;
    uint32_t allocations, freed;     /* freed: of those, how many the reaper has yet to take away */
    struct kp_mapping *next, **link; /* all of the session's; what points at this one */
    uint64_t starts[KP_BLOCKS / 64]; /* blocks of the first page where an allocation begins */
    uint64_t dying[KP_BLOCKS / 64];  /* of those: freed */
};

struct kp_mapping **kp_page_of(struct kp_server *s, uint64_t va);
bool kp_memory_in_window(const struct kp_server *s, uint64_t va, uint64_t bytes);
bool kp_memory_is_free(struct kp_server *s, uint64_t va, uint64_t bytes); /* waits for the reaper */
CUresult kp_memory_have(struct kp_server *s, uint64_t bytes);             /* charges, or OUT_OF_MEMORY */
void kp_mapping_enter(struct kp_server *s, struct kp_mapping *mapping);
void kp_mapping_leave(struct kp_server *s, struct kp_mapping *mapping); /* frees it */

#endif
