/* Launches: checked here against what is known of the device and the function, packed, and not waited for. */
#include "shim.h"

#include <string.h>

static CUresult check_shape(const struct kp_launch *launch, const struct kp_function *function)
{
    const int32_t *device = kp_shim.device.value, *attribute = function->info.value;
    uint64_t threads = 1;

    for (int i = 0; i < 3; i++) {
        if (launch->grid[i] == 0 || launch->grid[i] > (unsigned)device[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X + i])
            return CUDA_ERROR_INVALID_VALUE;
        if (launch->block[i] == 0 || launch->block[i] > (unsigned)device[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X + i])
            return CUDA_ERROR_INVALID_VALUE;
        threads *= launch->block[i];
    }
    if (threads > (uint64_t)device[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK])
        return CUDA_ERROR_INVALID_VALUE;
    if (function->info.known[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] &&
        threads > (uint64_t)attribute[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK])
        return CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES;
    if (function->info.known[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] &&
        launch->shared > (unsigned)attribute[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES])
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

/* The `extra` form: a list of (key, value) that ends with END; needs a buffer and its size. */
static CUresult read_extra(void **extra, const void **buffer, uint32_t *bytes)
{
    size_t size = 0;

    *buffer = NULL;
    for (; *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER)
            *buffer = extra[1];
        else if (extra[0] == CU_LAUNCH_PARAM_BUFFER_SIZE)
            size = *(size_t *)extra[1];
        else
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (size > KP_PARAM_BYTES_MAX || (size > 0 && *buffer == NULL))
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = (uint32_t)size;
    return CUDA_SUCCESS;
}

static CUresult pack(const struct kp_function *function, void **params, unsigned char *buffer)
{
    const struct kp_function_info *info = &function->info;

    if (!info->layout_known)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (params == NULL && info->params > 0)
        return CUDA_ERROR_INVALID_VALUE;
    memset(buffer, 0, function->param_bytes);
    for (uint32_t i = 0; i < info->params; i++) {
        if (params[i] == NULL)
            return CUDA_ERROR_INVALID_VALUE;
        memcpy(buffer + info->param[i].offset, params[i], info->param[i].size);
    }
    return CUDA_SUCCESS;
}

/* All blocks of a cooperative launch must fit on the device at once. */
static CUresult check_cooperative(CUfunction f, const struct kp_launch *launch)
{
    uint64_t blocks = (uint64_t)launch->grid[0] * launch->grid[1] * launch->grid[2];
    uint64_t threads = (uint64_t)launch->block[0] * launch->block[1] * launch->block[2];
    int fit = 0;
    CUresult rc;

    if (threads == 0 || threads > (uint64_t)kp_shim.device.value[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK])
        return CUDA_ERROR_INVALID_VALUE;
    rc = kp_cuOccupancyMaxActiveBlocksPerMultiprocessor(&fit, f, (int)threads, launch->shared);
    if (rc != CUDA_SUCCESS)
        return rc;
    return blocks <= (uint64_t)fit * (unsigned)kp_shim.device.value[CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT]
               ? CUDA_SUCCESS
               : CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
}

CUresult kp_launch_pack(CUfunction f, const struct kp_launch *launch, void **params, void **extra, const void **buffer, uint32_t *bytes)
{
    struct kp_function *function = kp_function_of(f);
    CUresult rc;

    if (function == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    if ((rc = check_shape(launch, function)) != CUDA_SUCCESS)
        return rc;
    *buffer = kp_shim.params;
    *bytes = function->param_bytes;
    return extra != NULL ? read_extra(extra, buffer, bytes) : pack(function, params, kp_shim.params);
}

static CUresult run(CUfunction f, const struct kp_launch *launch, void **params, void **extra)
{
    uint64_t in[KP_LAUNCH_IN] = {(uint64_t)(uintptr_t)f};
    const void *buffer;
    uint32_t bytes;
    CUresult rc;

    if (params != NULL && extra != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (launch->cooperative && (rc = check_cooperative(f, launch)) != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_enter()) != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_launch_pack(f, launch, params, extra, &buffer, &bytes)) == CUDA_SUCCESS)
        rc = kp_stream_number(launch->stream, &in[KP_LAUNCH_STREAM]);
    if (rc != CUDA_SUCCESS)
        return kp_leave(rc);
    for (int i = 0; i < 3; i++) {
        in[KP_LAUNCH_GRID_X + i] = launch->grid[i];
        in[KP_LAUNCH_BLOCK_X + i] = launch->block[i];
    }
    in[KP_LAUNCH_SHARED] = launch->shared;
    in[KP_LAUNCH_COOPERATIVE] = launch->cooperative;
    return kp_send(KP_OP_launch, in, KP_LAUNCH_IN, buffer, bytes);
}

CUresult kp_cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                           unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                           unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
{
    struct kp_launch launch = {
        {gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes, hStream, false,
    };

    return run(f, &launch, kernelParams, extra);
}

CUresult kp_cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                      unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                      unsigned int sharedMemBytes, CUstream hStream, void **kernelParams)
{
    struct kp_launch launch = {
        {gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ}, sharedMemBytes, hStream, true,
    };

    return run(f, &launch, kernelParams, NULL);
}

static CUresult launch_ex(const CUlaunchConfig *config, CUfunction f, void **params, void **extra, CUstream stream)
{
    struct kp_launch launch;
    bool cooperative = false;

    if (config == NULL || (config->numAttrs > 0 && config->attrs == NULL))
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < config->numAttrs; i++) { /* hints may be dropped; what changes the result may not */
        int id = config->attrs[i].id;
        if (id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            memcpy(&cooperative, config->attrs[i].value, 1); /* an int, 0 or 1 */
        else if (id != 0 /* ignore */ && id != 1 /* access policy window */ && id != 8 /* priority */)
            return kp_unsupported("cuLaunchKernelEx with attributes");
    }
    launch = (struct kp_launch){
        {config->gridDimX, config->gridDimY, config->gridDimZ},
        {config->blockDimX, config->blockDimY, config->blockDimZ},
        config->sharedMemBytes,
        stream,
        cooperative,
    };
    return run(f, &launch, params, extra);
}

CUresult kp_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
    return launch_ex(config, f, kernelParams, extra, config != NULL ? config->hStream : NULL);
}

CUresult kp_cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
{
    return launch_ex(config, f, params, extra, config != NULL ? kp_per_thread(config->hStream) : NULL);
}
