/* Stream-ordered allocation: pools of memory that was freed in a stream and may be had again without a trip.
 *
 * A pool is a list of blocks, each an allocation of its own (shim_space.c, charged as any). A block freed in a stream is had
 * again in the same stream at once, because what uses it comes behind the free; in another stream behind an event that is
 * recorded in the first. What a pool holds beyond its threshold goes back when the program synchronises, and all that pools
 * hold where the claim has no more. The worker knows no pools.
 */
#include "shim_pool.h"

#include <stdlib.h>

#define BLOCK 512u
#define BUCKETS 4096u

struct block {
    CUdeviceptr at;
    uint64_t bytes; /* that were mapped for it */
    uint64_t used;  /* of them, 0: it is free */
    uint64_t context, stream; /* that it was freed in */
    struct kp_pool *pool;
    struct block *next, *next_free;
};

static struct block *blocks[BUCKETS]; /* by address; all of this is guarded by `tx` */
static struct block *unused;          /* newest first */

static struct block **place_of(CUdeviceptr at)
{
    struct block **place = &blocks[at / BLOCK % BUCKETS];

    while (*place != NULL && (*place)->at != at)
        place = &(*place)->next;
    return place;
}

struct kp_pool *kp_pool_of(uint64_t number)
{
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, number, KP_POOL);

    return entry != NULL ? entry->value : NULL;
}

static void count(struct kp_pool *pool, unsigned current, uint64_t more, uint64_t less)
{
    uint64_t *value = &pool->attribute[current], *high = &pool->attribute[current + 1];

    *value += more - less;
    if (*value > *high)
        *high = *value;
}

static void take_off_list(const struct block *block)
{
    struct block **at = &unused;

    while (*at != NULL && *at != block)
        at = &(*at)->next_free;
    if (*at == NULL)
        return;
    *at = block->next_free;
    atomic_fetch_sub(&kp_shim.pooled, 1);
}

/* The pool has the block no more; what lies there is somebody else's matter. */
static void forget(struct block *block)
{
    struct kp_pool *pool = block->pool;

    if (block->used == 0)
        take_off_list(block);
    else
        count(pool, POOL_USED_CURRENT, 0, block->used);
    count(pool, POOL_RESERVED_CURRENT, 0, block->bytes);
    *place_of(block->at) = block->next;
    if (pool->destroyed && pool->attribute[POOL_RESERVED_CURRENT] == 0)
        free(pool);
    free(block);
}

/* Gives the memory of a free block back to the claim; the worker waits for the streams. */
static void release(struct block *block)
{
    struct kp_context *context = kp_context_of(block->context);
    uint64_t in[KP_FREE_IN] = {[KP_FREE_VA] = block->at};

    kp_space_give(block->at);
    if (context != NULL && context->epoch == kp_shim.link.epoch && !atomic_load(&kp_shim.link.lost)) { /* else it went with its worker */
        if (kp_shim.link.context != block->context)
            kp_link_put(KP_OP_CONTEXT, 0, kp_shim.link.seq++, &block->context, 1, NULL, 0);
        kp_shim.link.context = block->context;
        kp_link_put(KP_OP_free, 0, kp_shim.link.seq++, in, KP_FREE_IN, NULL, 0);
    }
    forget(block);
}

/* Oldest first: what was freed lately is wanted again soonest. `pool` NULL: of all. */
bool kp_pool_trim(struct kp_pool *pool, bool all, uint64_t keep)
{
    bool gave = false;

    for (;;) {
        struct block *oldest = NULL;
        for (struct block *each = unused; each != NULL; each = each->next_free)
            if ((pool == NULL || each->pool == pool) &&
                (all || each->pool->attribute[POOL_RESERVED_CURRENT] > (pool != NULL ? keep : each->pool->attribute[POOL_THRESHOLD])))
                oldest = each;
        if (oldest == NULL)
            return gave;
        release(oldest);
        gave = true;
    }
}

bool kp_pools_give(void)
{
    bool gave;

    pthread_mutex_lock(&kp_shim.tx);
    gave = kp_pool_trim(NULL, true, 0);
    kp_leave(CUDA_SUCCESS);
    return gave;
}

void kp_pools_synchronised(void)
{
    if (atomic_load(&kp_shim.pooled) == 0)
        return;
    pthread_mutex_lock(&kp_shim.tx);
    kp_pool_trim(NULL, false, 0);
    kp_leave(CUDA_SUCCESS);
}

void kp_pools_drop(uint64_t context)
{
    struct block *next;

    for (unsigned i = 0; i < BUCKETS; i++)
        for (struct block *block = blocks[i]; block != NULL; block = next) {
            next = block->next;
            if (block->context == context)
                forget(block);
        }
}

bool kp_pools_forget(CUdeviceptr at)
{
    struct block *block = *place_of(at);

    if (block == NULL)
        return true;
    if (block->used == 0)
        return false;
    forget(block);
    return true;
}

/* ---- what the program asks for ---- */

/* The best free block: of at least `bytes` and at most twice as many, of the stream where there is one. */
static struct block *find_block(const struct kp_pool *pool, uint64_t bytes, uint64_t context, uint64_t stream)
{
    struct block *best = NULL;

    for (struct block *each = unused; each != NULL; each = each->next_free) {
        if (each->pool != pool || each->context != context || each->bytes < bytes || each->bytes > 2 * bytes)
            continue;
        if (each->stream != stream && (pool->attribute[POOL_INTERNAL] == 0 || (each->stream != 0 && kp_handles_get(&kp_shim.handles, each->stream, KP_STREAM) == NULL)))
            continue; /* a stream that is gone cannot be waited for here: its blocks wait for the next trim */
        if (best == NULL || (each->stream == stream) > (best->stream == stream) ||
            ((each->stream == stream) == (best->stream == stream) && each->bytes < best->bytes))
            best = each;
    }
    return best;
}

static void put(uint16_t op, const uint64_t *in, unsigned numbers)
{
    kp_link_put(op, 0, kp_shim.link.seq++, in, numbers, NULL, 0);
}

/* What `stream` does from now on comes behind what `before` has been told so far. */
static CUresult order(uint64_t stream, uint64_t before)
{
    uint64_t event = kp_object_new(KP_EVENT);

    if (event == 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    put(KP_OP_cuEventCreate, (uint64_t[]){event, 2 /* no timing */}, 2);
    put(KP_OP_cuEventRecord, (uint64_t[]){event, before}, 2);
    put(KP_OP_cuStreamWaitEvent, (uint64_t[]){stream, event, 0}, 3);
    put(KP_OP_cuEventDestroy_v2, &event, 1);
    kp_object_drop(event);
    return CUDA_SUCCESS;
}

static bool reuse(struct kp_pool *pool, uint64_t bytes, uint64_t stream, CUdeviceptr *at)
{
    struct block *block = find_block(pool, bytes, kp_current(), stream);

    if (block == NULL || (block->stream != stream && order(stream, block->stream) != CUDA_SUCCESS))
        return false;
    take_off_list(block);
    block->used = bytes;
    count(pool, POOL_USED_CURRENT, bytes, 0);
    kp_space_resize(block->at, bytes);
    *at = block->at;
    return true;
}

/* With `tx` held, which it gives back. */
static CUresult grow(uint64_t number, uint64_t bytes, CUdeviceptr *at)
{
    struct kp_pool *pool = kp_pool_of(number);
    struct block *block;
    CUresult rc;

    if (pool->most != 0 && bytes > pool->most - pool->attribute[POOL_RESERVED_CURRENT])
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    kp_leave(CUDA_SUCCESS);
    if ((block = calloc(1, sizeof *block)) == NULL || (rc = kp_cuMemAlloc_v2(at, bytes)) != CUDA_SUCCESS) {
        free(block);
        return block == NULL ? CUDA_ERROR_OUT_OF_MEMORY : rc;
    }
    pthread_mutex_lock(&kp_shim.tx);
    if ((pool = kp_pool_of(number)) == NULL) { /* destroyed meanwhile */
        free(block);
        kp_leave(CUDA_SUCCESS);
        kp_cuMemFree_v2(*at);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *block = (struct block){.at = *at, .bytes = bytes, .used = bytes, .context = kp_current(), .pool = pool};
    *place_of(*at) = block;
    count(pool, POOL_RESERVED_CURRENT, bytes, 0);
    count(pool, POOL_USED_CURRENT, bytes, 0);
    return kp_leave(CUDA_SUCCESS);
}

/* With the device entered; a pool of 0 is the device's. */
static CUresult allocate(CUdeviceptr *dptr, size_t bytes, uint64_t number, CUstream hStream)
{
    uint64_t stream, whole = (bytes + BLOCK - 1) / BLOCK * BLOCK;
    CUdeviceptr at = 0;
    CUresult rc;

    if (dptr == NULL || bytes == 0)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = kp_pool_enter()) != CUDA_SUCCESS)
        return rc;
    kp_leave(CUDA_SUCCESS);
    if ((rc = kp_enter()) != CUDA_SUCCESS)
        return rc;
    if (number == 0)
        number = kp_pool_of_device();
    if (kp_pool_of(number) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if ((rc = kp_stream_number(hStream, &stream)) != CUDA_SUCCESS)
        return kp_leave(rc);
    if (whole < bytes)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    rc = reuse(kp_pool_of(number), whole, stream, &at) ? kp_leave(CUDA_SUCCESS) : grow(number, whole, &at);
    if (rc == CUDA_SUCCESS)
        *dptr = at;
    return rc;
}

CUresult kp_cuMemAllocAsync(CUdeviceptr *dptr, size_t bytesize, CUstream hStream)
{
    CUresult rc = kp_capture_refuses(hStream, "cuMemAllocAsync in a captured stream");

    return rc != CUDA_SUCCESS ? rc : allocate(dptr, bytesize, 0, hStream);
}

CUresult kp_cuMemAllocFromPoolAsync(CUdeviceptr *dptr, size_t bytesize, CUmemoryPool pool, CUstream hStream)
{
    CUresult rc = kp_capture_refuses(hStream, "cuMemAllocFromPoolAsync in a captured stream");

    if (rc != CUDA_SUCCESS)
        return rc;
    return pool == NULL ? CUDA_ERROR_INVALID_VALUE : allocate(dptr, bytesize, (uint64_t)(uintptr_t)pool, hStream);
}

/* Of memory that no pool has: as cuMemFree, which waits for more than the stream. */
CUresult kp_cuMemFreeAsync(CUdeviceptr dptr, CUstream hStream)
{
    struct block *block;
    uint64_t stream;
    CUresult rc = kp_capture_refuses(hStream, "cuMemFreeAsync in a captured stream");

    if (rc != CUDA_SUCCESS || (rc = kp_enter()) != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_stream_number(hStream, &stream)) != CUDA_SUCCESS)
        return kp_leave(rc);
    if (dptr == 0)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if ((block = *place_of(dptr)) == NULL) {
        kp_leave(CUDA_SUCCESS);
        return kp_cuMemFree_v2(dptr);
    }
    if (block->used == 0)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    count(block->pool, POOL_USED_CURRENT, 0, block->used);
    block->used = 0;
    block->stream = stream;
    block->next_free = unused;
    unused = block;
    atomic_fetch_add(&kp_shim.pooled, 1);
    if (block->pool->destroyed)
        release(block);
    return kp_leave(CUDA_SUCCESS);
}
