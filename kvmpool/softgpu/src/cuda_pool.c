/* Stream-ordered allocation: pools whose blocks come back in the order of the stream they were freed in.
 *
 * A freed block is had again by its own stream at once, by others once the free's turn has come. What a pool holds beyond its
 * threshold goes back to the card when the program synchronises.
 */
#include "cuda_pool.h"

#include <stdlib.h>

#define ALIGNMENT 512ull
#define MAX_ALLOCATION (1ull << 46)

struct block {
	CUdeviceptr at;
	uint64_t bytes, used; /* used 0: it is free */
	struct sg_context *context;
	struct sg_pool *pool;
	struct sg_stream *stream; /* that it was freed in; only compared */
	uint64_t stream_id;
	uint64_t turn;            /* grows with each free: an older one's turn says nothing */
	bool passed;              /* the free's turn has come */
	struct block *next;
};

pthread_mutex_t sg_pool_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *blocks; /* all of them, newest first */
static uint64_t turns;

static void count(struct sg_pool *pool, int current, uint64_t more, uint64_t less)
{
	uint64_t *value = &pool->attribute[current], *high = &pool->attribute[current + 1];

	*value += more - less;
	if (*value > *high)
		*high = *value;
}

static struct block **place_of(CUdeviceptr at)
{
	struct block **place = &blocks;

	while (*place && (*place)->at != at)
		place = &(*place)->next;
	return place;
}

static void forget(struct block **place)
{
	struct block *block = *place;
	struct sg_pool *pool = block->pool;

	count(pool, POOL_USED_CURRENT, 0, block->used);
	count(pool, POOL_RESERVED_CURRENT, 0, block->bytes);
	*place = block->next;
	if (pool->destroyed && !pool->attribute[POOL_RESERVED_CURRENT])
		free(pool);
	free(block);
}

/* Oldest first, only those whose turn has come. */
void sg_pool_trim(struct sg_pool *pool, bool by_threshold, uint64_t keep)
{
	for (;;) {
		struct block **oldest = NULL;
		for (struct block **at = &blocks; *at; at = &(*at)->next) {
			struct block *each = *at;
			if (each->used || !each->passed || (pool && each->pool != pool))
				continue;
			if (each->pool->attribute[POOL_RESERVED_CURRENT] > (by_threshold ? each->pool->attribute[POOL_THRESHOLD] : keep))
				oldest = at;
		}
		if (!oldest)
			return;
		sg_memory_give((*oldest)->at);
		forget(oldest);
	}
}

void sg_pools_synchronised(void)
{
	pthread_mutex_lock(&sg_pool_lock);
	sg_pool_trim(NULL, true, 0);
	pthread_mutex_unlock(&sg_pool_lock);
}

void sg_pools_end(struct sg_context *context)
{
	pthread_mutex_lock(&sg_pool_lock);
	for (struct block **at = &blocks; *at;)
		if ((*at)->context == context)
			forget(at); /* its memory goes with the context */
		else
			at = &(*at)->next;
	pthread_mutex_unlock(&sg_pool_lock);
}

bool sg_pools_forget(CUdeviceptr at)
{
	bool good = true;

	pthread_mutex_lock(&sg_pool_lock);
	struct block **place = place_of(at);
	if (*place && !(*place)->used)
		good = false;
	else if (*place)
		forget(place);
	pthread_mutex_unlock(&sg_pool_lock);
	return good;
}

/* With the lock held: the best free block, of at most twice the size. */
static struct block *find_block(const struct sg_pool *pool, uint64_t bytes, const struct sg_context *context, const struct sg_stream *stream)
{
	struct block *best = NULL;

	for (struct block *each = blocks; each; each = each->next) {
		if (each->used || each->pool != pool || each->context != context || each->bytes < bytes || each->bytes > 2 * bytes)
			continue;
		bool own = each->stream == stream && each->stream_id == stream->id;
		if ((own || each->passed) && (!best || each->bytes < best->bytes))
			best = each;
	}
	return best;
}

static CUresult grow(struct sg_pool *pool, uint64_t bytes, struct sg_context *context, CUdeviceptr *at)
{
	struct block *block;

	if (pool->most && bytes > pool->most - pool->attribute[POOL_RESERVED_CURRENT])
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult rc = sg_memory_take(context, bytes, at);
	if (rc == CUDA_ERROR_OUT_OF_MEMORY) {
		sg_pool_trim(NULL, false, 0);
		rc = sg_memory_take(context, bytes, at);
	}
	if (rc)
		return rc;
	block = calloc(1, sizeof(*block));
	if (!block) {
		sg_memory_give(*at);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*block = (struct block){.at = *at, .bytes = bytes, .used = bytes, .context = context, .pool = pool, .next = blocks};
	blocks = block;
	count(pool, POOL_RESERVED_CURRENT, bytes, 0);
	count(pool, POOL_USED_CURRENT, bytes, 0);
	return CUDA_SUCCESS;
}

static CUresult allocate(CUdeviceptr *out, size_t bytes, struct sg_pool *pool, CUstream handle, bool per_thread)
{
	struct sg_stream *stream;
	struct sg_pool **current, *usual;

	SG_ENTER(context);
	SG_TRY(sg_pool_of_device((CUdevice)(context->device - sg_process.devices), &current, &usual));
	if (!out || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	if (!pool)
		pool = *current;
	if (!sg_live(SG_POOL, pool))
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	SG_TRY(sg_capture_refuses(stream));
	if (bytes > MAX_ALLOCATION)
		return CUDA_ERROR_OUT_OF_MEMORY;
	uint64_t whole = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
	CUresult rc = CUDA_SUCCESS;
	pthread_mutex_lock(&sg_pool_lock);
	struct block *block = find_block(pool, whole, context, stream);
	if (block) {
		block->used = whole;
		count(pool, POOL_USED_CURRENT, whole, 0);
		*out = block->at;
	} else {
		rc = grow(pool, whole, context, out);
	}
	pthread_mutex_unlock(&sg_pool_lock);
	return rc;
}

struct free_op {
	struct sg_op op;
	CUdeviceptr at;
	uint64_t turn;
};

static void run_free(struct sg_op *op, CUresult status)
{
	const struct free_op *freed = (struct free_op *)op;

	(void)status;
	pthread_mutex_lock(&sg_pool_lock);
	struct block *block = *place_of(freed->at);
	if (block && !block->used && block->turn == freed->turn)
		block->passed = true;
	pthread_mutex_unlock(&sg_pool_lock);
}

static CUresult mark_free(CUdeviceptr at, struct sg_stream *stream, uint64_t *turn)
{
	CUresult rc = CUDA_SUCCESS;

	pthread_mutex_lock(&sg_pool_lock);
	struct block *block = *place_of(at);
	if (!block->used) {
		rc = CUDA_ERROR_INVALID_VALUE;
	} else {
		count(block->pool, POOL_USED_CURRENT, 0, block->used);
		block->used = 0;
		block->passed = false;
		block->stream = stream;
		block->stream_id = stream->id;
		*turn = block->turn = ++turns;
	}
	pthread_mutex_unlock(&sg_pool_lock);
	return rc;
}

static CUresult free_in_stream(CUdeviceptr at, CUstream handle, bool per_thread)
{
	struct sg_stream *stream;
	struct free_op *op;

	SG_ENTER(context);
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	SG_TRY(sg_capture_refuses(stream));
	if (!at)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&sg_pool_lock);
	bool ours = *place_of(at) != NULL;
	pthread_mutex_unlock(&sg_pool_lock);
	if (!ours)
		return cuMemFree_v2(at);
	op = sg_op_new(sizeof(*op), run_free);
	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult rc = mark_free(at, stream, &op->turn);
	if (rc) {
		sg_op_free(&op->op);
		return rc;
	}
	op->at = at;
	op->op.always = true;
	return sg_submit(stream, &op->op);
}

#define PAIR(name, impl, params, ...) \
	CU_API CUresult name params { return impl(__VA_ARGS__, false); } \
	CU_API CUresult name##_ptsz params { return impl(__VA_ARGS__, true); }

static CUresult allocate_from(CUdeviceptr *out, size_t bytes, struct sg_pool *pool, CUstream stream, bool per_thread)
{
	return pool ? allocate(out, bytes, pool, stream, per_thread) : CUDA_ERROR_INVALID_VALUE;
}

PAIR(cuMemAllocAsync, allocate, (CUdeviceptr *out, size_t bytes, CUstream s), out, bytes, NULL, s)
PAIR(cuMemAllocFromPoolAsync, allocate_from, (CUdeviceptr *out, size_t bytes, struct sg_pool *p, CUstream s), out, bytes, p, s)
PAIR(cuMemFreeAsync, free_in_stream, (CUdeviceptr at, CUstream s), at, s)
