/* Pools of stream-ordered allocation, between shim_pool.c, which has the blocks, and shim_pools.c, which has the pools' calls. */
#ifndef KVMPOOL_SHIM_POOL_H
#define KVMPOOL_SHIM_POOL_H

#include "shim.h"

#define KP_POOL_ATTRIBUTES 9 /* 1..8 */

/* cuda.h's CUmemPool_attribute. */
enum {
    POOL_FOLLOW_EVENTS = 1,
    POOL_OPPORTUNISTIC,
    POOL_INTERNAL,
    POOL_THRESHOLD,
    POOL_RESERVED_CURRENT,
    POOL_RESERVED_HIGH,
    POOL_USED_CURRENT,
    POOL_USED_HIGH
};

struct kp_pool {
    uint64_t number;
    bool destroyed; /* by the program; the last of its blocks takes it along */
    uint64_t most;  /* bytes, 0: as much as there is */
    uint64_t attribute[KP_POOL_ATTRIBUTES];
};

/* With `tx` held. */
struct kp_pool *kp_pool_of(uint64_t number);
uint64_t kp_pool_of_device(void); /* behind kp_pool_enter */
bool kp_pool_trim(struct kp_pool *pool, bool all, uint64_t keep); /* false: there was nothing to give; NULL: of all pools */

/* Enters the device, as kp_enter_device; its default pool is there then. */
CUresult kp_pool_enter(void);

#endif
