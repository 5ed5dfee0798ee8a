/* Pools of stream-ordered allocation, between cuda_pool.c, which has the blocks, and cuda_pools.c, which has the pools' calls. */
#ifndef KVMPOOL_SOFTGPU_CUDA_POOL_H
#define KVMPOOL_SOFTGPU_CUDA_POOL_H

#include "cuda_core.h"

enum { POOL_FOLLOW_EVENTS = 1, POOL_OPPORTUNISTIC, POOL_INTERNAL, POOL_THRESHOLD, POOL_RESERVED_CURRENT, POOL_RESERVED_HIGH, POOL_USED_CURRENT, POOL_USED_HIGH, POOL_ATTRIBUTES };

struct sg_pool {
	struct sg_device *device;
	bool destroyed; /* by the program; the last of its blocks takes it along */
	uint64_t most;  /* bytes, 0: no limit */
	uint64_t attribute[POOL_ATTRIBUTES];
};

extern pthread_mutex_t sg_pool_lock; /* guards blocks and attributes */

/* With the lock held: gives back what is above `keep`, or above each pool's threshold. `pool` NULL: of all. */
void sg_pool_trim(struct sg_pool *pool, bool by_threshold, uint64_t keep);
/* The pool that a device allocates from, and its default one. */
CUresult sg_pool_of_device(CUdevice ordinal, struct sg_pool ***current, struct sg_pool **usual);

#endif
