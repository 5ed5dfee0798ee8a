/* Occupancy: how many blocks of a kernel fit on a multiprocessor, from the limits of compute capability 9.0. */
#include "cuda_core.h"

#define THREADS 2048
#define BLOCKS 32
#define WARP 32
#define REGISTERS 65536
#define REGISTER_UNIT 256 /* a warp's registers are given out in these */
#define SHARED (228 * 1024)
#define SHARED_RESERVED 1024 /* a block */
#define SHARED_UNIT 128
#define MAX_BLOCK_SIZE 1024

static int at_most(int limit, uint64_t value)
{
	return value < (uint64_t)limit ? (int)value : limit;
}

int sg_blocks_on_processor(const struct sg_function *function, int block_size, size_t dynamic_shared)
{
	uint64_t warps = ((uint64_t)block_size + WARP - 1) / WARP;
	uint64_t registers = ((uint64_t)function->attributes.num_regs * WARP + REGISTER_UNIT - 1) / REGISTER_UNIT * REGISTER_UNIT;
	uint64_t shared = function->attributes.shared_bytes + dynamic_shared + SHARED_RESERVED;
	int blocks = at_most(BLOCKS, THREADS / WARP / warps);

	shared = (shared + SHARED_UNIT - 1) / SHARED_UNIT * SHARED_UNIT;
	if (registers)
		blocks = at_most(blocks, REGISTERS / registers / warps);
	return at_most(blocks, SHARED / shared);
}

CU_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, CUfunction handle, int block_size, size_t dynamic_shared,
								     unsigned flags)
{
	struct sg_function *function;

	SG_ENTER(context);
	SG_TRY(sg_function_of(context, handle, &function));
	if (!out || block_size < 1 || flags > 1)
		return CUDA_ERROR_INVALID_VALUE;
	*out = block_size > (int)function->attributes.max_threads_per_block ? 0 : sg_blocks_on_processor(function, block_size, dynamic_shared);
	return CUDA_SUCCESS;
}

CU_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, CUfunction handle, int block_size, size_t dynamic_shared)
{
	return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, handle, block_size, dynamic_shared, 0);
}

CU_API CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction handle, CUoccupancyB2DSize shared_for,
							  size_t shared, int limit, unsigned flags)
{
	struct sg_function *function;
	int best_threads = 0;

	SG_ENTER(context);
	SG_TRY(sg_function_of(context, handle, &function));
	if (!grid || !block || flags > 1)
		return CUDA_ERROR_INVALID_VALUE;
	int most = at_most(MAX_BLOCK_SIZE, function->attributes.max_threads_per_block);
	if (limit > 0 && limit < most)
		most = limit;
	*grid = *block = 0;
	for (int size = (most + WARP - 1) / WARP * WARP; size > 0; size -= WARP) {
		int threads = size < most ? size : most;
		int blocks = sg_blocks_on_processor(function, threads, shared_for ? shared_for(threads) : shared);
		if (blocks * threads <= best_threads)
			continue;
		best_threads = blocks * threads;
		*block = threads;
		*grid = blocks * (int)context->device->map.card->sm_count;
	}
	return *block ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_API CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction function, CUoccupancyB2DSize shared_for, size_t shared,
						 int limit)
{
	return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, function, shared_for, shared, limit, 0);
}

CU_API CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *out, CUfunction handle, int blocks, int block_size)
{
	struct sg_function *function;

	SG_ENTER(context);
	SG_TRY(sg_function_of(context, handle, &function));
	if (!out || blocks < 1 || block_size < 1)
		return CUDA_ERROR_INVALID_VALUE;
	uint64_t each = SHARED / (uint64_t)blocks / SHARED_UNIT * SHARED_UNIT;
	uint64_t taken = function->attributes.shared_bytes + SHARED_RESERVED;
	*out = each > taken ? each - taken : 0;
	return CUDA_SUCCESS;
}
