/* How large a kernel's blocks may be: the worker's driver knows; the program's callback is asked here. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

/* Programs ask the same before each launch. The answers of a function are kept, the oldest making room. */
CUresult kp_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction func, int size, size_t shared, unsigned int flags)
{
    struct kp_occupancy *kept, new = {.size = size, .flags = flags, .shared = shared};
    struct kp_answer answer = {.bytes = &new.blocks, .room = sizeof new.blocks};
    uint64_t in[KP_OCCUPANCY_IN] = {(uint64_t)(uintptr_t)func, (uint64_t)(int64_t)size, shared, flags};
    struct kp_function *function;
    CUresult rc = blocks == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((function = kp_function_of(func)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_HANDLE);
    for (unsigned i = 0; i < KP_OCCUPANCIES; i++) {
        kept = &function->occupancy[i];
        if (kept->size == size && kept->shared == shared && kept->flags == flags && size > 0) {
            *blocks = kept->blocks;
            return kp_leave(CUDA_SUCCESS);
        }
    }
    rc = kp_ask(KP_OP_occupancy, in, KP_OCCUPANCY_IN, NULL, 0, &answer);
    if (rc == CUDA_SUCCESS && answer.got != sizeof new.blocks)
        rc = CUDA_ERROR_UNKNOWN;
    pthread_mutex_lock(&kp_shim.tx);
    if (rc == CUDA_SUCCESS && (function = kp_function_of(func)) != NULL)
        function->occupancy[function->occupancies++ % KP_OCCUPANCIES] = new;
    if (rc == CUDA_SUCCESS)
        *blocks = new.blocks;
    return kp_leave(rc);
}

CUresult kp_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction func, int size, size_t shared)
{
    return kp_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, func, size, shared, 0);
}

/* What the callback says of each block size up to the device's largest, because it cannot be called from the worker. */
static CUresult ask_callback(CUoccupancyB2DSize callback, uint32_t **table, uint32_t *count)
{
    int most = kp_shim.device.value[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK];

    *table = NULL;
    *count = 0;
    if (callback == NULL)
        return CUDA_SUCCESS;
    if (most < 1 || most > KP_BLOCK_SIZES_MAX || (*table = calloc((size_t)most, sizeof **table)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (*count = 0; *count < (uint32_t)most; ++*count) {
        size_t bytes = callback((int)*count + 1);
        (*table)[*count] = bytes < UINT32_MAX ? (uint32_t)bytes : UINT32_MAX;
    }
    return CUDA_SUCCESS;
}

CUresult kp_cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction func, CUoccupancyB2DSize callback, size_t shared,
                                                      int limit, unsigned int flags)
{
    int32_t result[2] = {0, 0};
    struct kp_answer answer = {.bytes = result, .room = sizeof result};
    uint64_t in[KP_BLOCK_SIZE_IN] = {[KP_BLOCK_SIZE_SHARED] = shared, [KP_BLOCK_SIZE_LIMIT] = (uint64_t)(int64_t)limit,
                                     [KP_BLOCK_SIZE_FLAGS] = flags};
    uint32_t *table = NULL, count = 0;
    CUresult rc;

    if (grid == NULL || block == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = ask_callback(callback, &table, &count)) != CUDA_SUCCESS || (rc = kp_enter()) != CUDA_SUCCESS)
        goto out;
    if ((rc = kp_object_number(KP_FUNCTION, func, &in[KP_BLOCK_SIZE_FUNCTION])) != CUDA_SUCCESS) {
        kp_leave(rc);
        goto out;
    }
    rc = kp_ask(KP_OP_block_size, in, KP_BLOCK_SIZE_IN, table, count * (uint32_t)sizeof *table, &answer);
    if (rc == CUDA_SUCCESS && answer.got == sizeof result) {
        *grid = result[0];
        *block = result[1];
    }
out:
    free(table);
    return rc;
}

CUresult kp_cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction func, CUoccupancyB2DSize callback, size_t shared, int limit)
{
    return kp_cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, func, callback, shared, limit, 0);
}
