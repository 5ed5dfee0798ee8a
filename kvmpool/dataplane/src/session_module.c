/* Modules, functions and launches. */
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* The question for attribute or parameter `i` of a function or kernel; its answer in value, or offset and size. */
static CUresult attribute_of(struct kp_server *s, void *object, bool kernel, int i, int32_t *value)
{
    return kernel ? s->driver.cuKernelGetAttribute(value, i, object, s->device) : s->driver.cuFuncGetAttribute(value, i, object);
}

static CUresult param_of(struct kp_server *s, void *object, bool kernel, size_t i, size_t *offset, size_t *size)
{
    return kernel ? s->driver.cuKernelGetParamInfo(object, i, offset, size) : s->driver.cuFuncGetParamInfo(object, i, offset, size);
}

/* The reply's bytes: attributes, and the layout up to its last parameter. */
static CUresult give_info(struct kp_server *s, struct kp_work *w, void *object, bool kernel)
{
    struct kp_function_info *info = calloc(1, sizeof *info);
    size_t offset, size;
    CUresult rc = CUDA_SUCCESS;

    if ((w->give = info) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (int i = 0; i < KP_FUNCTION_ATTRIBUTES; i++)
        info->known[i] = attribute_of(s, object, kernel, i, &info->value[i]) == CUDA_SUCCESS;
    while (info->params < KP_PARAMS_MAX) {
        if ((rc = param_of(s, object, kernel, info->params, &offset, &size)) != CUDA_SUCCESS)
            break;
        info->param[info->params++] = (struct kp_param){(uint32_t)offset, (uint32_t)size};
    }
    info->layout_known = rc == CUDA_SUCCESS || rc == CUDA_ERROR_INVALID_VALUE; /* its answer behind the last one */
    w->give_bytes = (uint32_t)(offsetof(struct kp_function_info, param) + info->params * sizeof info->param[0]);
    return CUDA_SUCCESS;
}

CUresult kp_give_function(struct kp_server *s, struct kp_work *w, CUfunction function)
{
    return give_info(s, w, function, false);
}

CUresult kp_give_kernel(struct kp_server *s, struct kp_work *w, CUkernel kernel)
{
    return give_info(s, w, kernel, true);
}

int kp_do_function_get(struct kp_server *s, struct kp_work *w)
{
    CUfunction function = NULL;
    void *module;
    int rc = kp_resolve(s, w->in[KP_FUNCTION_GET_MODULE], KP_MODULE, &module);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuModuleGetFunction(&function, module, (const char *)w->tail);
    if (rc == CUDA_SUCCESS)
        rc = kp_give_function(s, w, function);
    if (rc == CUDA_SUCCESS)
        rc = kp_adopt_under(s, w->in[KP_FUNCTION_GET_HANDLE], KP_FUNCTION, function, w->in[KP_FUNCTION_GET_MODULE], 0);
    return rc;
}

int kp_do_function_set(struct kp_server *s, struct kp_work *w)
{
    void *function;
    int rc = kp_resolve(s, w->in[KP_FUNCTION_SET_FUNCTION], KP_FUNCTION, &function);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuFuncSetAttribute(function, (int)w->in[KP_FUNCTION_SET_ATTRIBUTE], (int)w->in[KP_FUNCTION_SET_VALUE]);
    return rc == CUDA_SUCCESS ? kp_give_function(s, w, function) : rc;
}

/* cuLaunchCooperativeKernel takes no packed parameters. */
static CUresult launch_cooperative(struct kp_server *s, struct kp_work *w, CUfunction function, CUstream stream, void **extra)
{
    const uint64_t *in = w->in;
    CUlaunchAttribute attribute = {.id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE, .value = {1}};
    CUlaunchConfig config = {
        (unsigned)in[KP_LAUNCH_GRID_X],  (unsigned)in[KP_LAUNCH_GRID_Y],  (unsigned)in[KP_LAUNCH_GRID_Z],
        (unsigned)in[KP_LAUNCH_BLOCK_X], (unsigned)in[KP_LAUNCH_BLOCK_Y], (unsigned)in[KP_LAUNCH_BLOCK_Z],
        (unsigned)in[KP_LAUNCH_SHARED],  stream,                          &attribute,
        1,
    };

    return s->driver.cuLaunchKernelEx(&config, function, NULL, extra);
}

/* A launch is waited for under KVMPOOL_SYNC=1: then what it does wrong is its own answer. And while something is captured. */
static CUresult launch(struct kp_server *s, struct kp_work *w, CUfunction function, CUstream stream, void **extra)
{
    const uint64_t *in = w->in;
    CUresult rc;

    if (in[KP_LAUNCH_COOPERATIVE] != 0)
        rc = launch_cooperative(s, w, function, stream, extra);
    else
        rc = s->driver.cuLaunchKernel(function, (unsigned)in[KP_LAUNCH_GRID_X], (unsigned)in[KP_LAUNCH_GRID_Y],
                                      (unsigned)in[KP_LAUNCH_GRID_Z], (unsigned)in[KP_LAUNCH_BLOCK_X],
                                      (unsigned)in[KP_LAUNCH_BLOCK_Y], (unsigned)in[KP_LAUNCH_BLOCK_Z],
                                      (unsigned)in[KP_LAUNCH_SHARED], stream, NULL, extra);
    return rc == CUDA_SUCCESS && w->wanted && !kp_capturing(s, stream) ? s->driver.cuStreamSynchronize(stream) : rc;
}

int kp_do_launch(struct kp_server *s, struct kp_work *w)
{
    const uint64_t *in = w->in;
    size_t bytes = w->tail_bytes;
    void *extra[] = {
        CU_LAUNCH_PARAM_BUFFER_POINTER, (void *)(uintptr_t)w->tail, CU_LAUNCH_PARAM_BUFFER_SIZE, &bytes, CU_LAUNCH_PARAM_END,
    };
    void *function, *stream;
    int rc = kp_resolve(s, in[KP_LAUNCH_FUNCTION], KP_FUNCTION, &function);

    if (rc == CUDA_SUCCESS)
        rc = kp_resolve(s, in[KP_LAUNCH_STREAM], KP_STREAM, &stream);
    if (rc == CUDA_SUCCESS && kp_handle_kind(in[KP_LAUNCH_FUNCTION]) == KP_KERNEL) /* its library may not be in this context yet */
        rc = kp_have_library(s, w->home, kp_parent_of(s, in[KP_LAUNCH_FUNCTION], KP_KERNEL));
    if (rc != CUDA_SUCCESS)
        return rc;
    return launch(s, w, function, stream, bytes > 0 ? extra : NULL);
}

/* What the program's callback answered, while the driver asks for it. */
static __thread const struct {
    const unsigned char *bytes;
    uint32_t count;
} *asked;

static size_t shared_of(int block)
{
    uint32_t answer = 0;

    if (block >= 1 && (uint32_t)block <= asked->count)
        memcpy(&answer, asked->bytes + ((uint32_t)block - 1) * sizeof answer, sizeof answer);
    return answer;
}

int kp_do_block_size(struct kp_server *s, struct kp_work *w)
{
    const uint64_t *in = w->in;
    int32_t *give = calloc(2, sizeof *give);
    void *function;
    int rc = kp_resolve(s, in[KP_BLOCK_SIZE_FUNCTION], KP_FUNCTION, &function);

    if (w->tail_bytes % sizeof(uint32_t) != 0 || w->tail_bytes / sizeof(uint32_t) > KP_BLOCK_SIZES_MAX) {
        free(give);
        return -EPROTO;
    }
    if ((w->give = give) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    __typeof__(*asked) answers = {w->tail, w->tail_bytes / (uint32_t)sizeof(uint32_t)};
    asked = &answers;
    w->give_bytes = 2 * sizeof *give;
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuOccupancyMaxPotentialBlockSizeWithFlags(&give[0], &give[1], function, answers.count > 0 ? shared_of : NULL,
                                                                 in[KP_BLOCK_SIZE_SHARED], (int)in[KP_BLOCK_SIZE_LIMIT],
                                                                 (unsigned)in[KP_BLOCK_SIZE_FLAGS]);
    asked = NULL;
    return rc;
}

int kp_do_occupancy(struct kp_server *s, struct kp_work *w)
{
    const uint64_t *in = w->in;
    int32_t *give = calloc(1, sizeof *give);
    void *function;
    int rc = kp_resolve(s, in[KP_OCCUPANCY_FUNCTION], KP_FUNCTION, &function);

    if ((w->give = give) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    w->give_bytes = sizeof *give;
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(give, function, (int)in[KP_OCCUPANCY_BLOCK],
                                                                            in[KP_OCCUPANCY_SHARED], (unsigned)in[KP_OCCUPANCY_FLAGS]);
    return rc;
}
