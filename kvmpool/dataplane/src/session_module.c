/* Modules, functions and launches. */
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int take_image(struct kp_server *s, struct kp_work *w, unsigned char *image, uint64_t bytes)
{
    uint64_t got = 0;
    uint32_t length;
    int rc = 0;

    while (rc == 0 && got < bytes) {
        if ((rc = kp_take_bulk_frame(s, w->seq, bytes - got, &length)) == 0)
            rc = kp_take(s, image + got, length);
        got += rc == 0 ? length : 0;
    }
    return rc;
}

int kp_do_module_load(struct kp_server *s, struct kp_work *w)
{
    uint64_t bytes = w->in[KP_MODULE_LOAD_BYTES];
    CUjit_option options[2] = {CU_JIT_ERROR_LOG_BUFFER, CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES};
    void *values[2] = {NULL, (void *)(uintptr_t)KP_LOG_MAX};
    unsigned char *image;
    CUmodule module = NULL;
    int rc;

    if (bytes == 0 || bytes > KP_IMAGE_MAX)
        return -EPROTO;
    if ((image = calloc(1, bytes + 1)) == NULL) { /* text gets an end, whatever the guest sent */
        rc = kp_drain_bulk(s, w->seq, bytes);
        return rc != 0 ? rc : CUDA_ERROR_OUT_OF_MEMORY;
    }
    if ((rc = take_image(s, w, image, bytes)) != 0)
        goto out;
    values[0] = w->give = calloc(1, KP_LOG_MAX);
    rc = s->driver.cuModuleLoadDataEx(&module, image, w->give != NULL ? 2 : 0, options, values);
    if (rc == CUDA_SUCCESS)
        rc = kp_adopt(s, w, w->in[KP_MODULE_LOAD_HANDLE], KP_MODULE, module);
    else if (w->give != NULL)
        w->give_bytes = (uint32_t)strnlen(w->give, KP_LOG_MAX);
out:
    free(image);
    return rc;
}

static void read_attributes(struct kp_server *s, CUfunction function, struct kp_function_info *info)
{
    for (int i = 0; i < KP_FUNCTION_ATTRIBUTES; i++)
        info->known[i] = s->driver.cuFuncGetAttribute(&info->value[i], i, function) == CUDA_SUCCESS;
}

/* The reply's bytes: attributes, and the layout up to its last parameter. */
static CUresult give_info(struct kp_server *s, struct kp_work *w, CUfunction function)
{
    struct kp_function_info *info = calloc(1, sizeof *info);
    size_t offset, size;
    CUresult rc = CUDA_SUCCESS;

    if ((w->give = info) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    read_attributes(s, function, info);
    while (info->params < KP_PARAMS_MAX) {
        rc = s->driver.cuFuncGetParamInfo(function, info->params, &offset, &size);
        if (rc != CUDA_SUCCESS)
            break;
        info->param[info->params++] = (struct kp_param){(uint32_t)offset, (uint32_t)size};
    }
    info->layout_known = rc == CUDA_SUCCESS || rc == CUDA_ERROR_INVALID_VALUE; /* its answer behind the last one */
    w->give_bytes = (uint32_t)(offsetof(struct kp_function_info, param) + info->params * sizeof info->param[0]);
    return CUDA_SUCCESS;
}

int kp_do_function_get(struct kp_server *s, struct kp_work *w)
{
    CUfunction function = NULL;
    void *module;
    int rc = kp_resolve(s, w->in[KP_FUNCTION_GET_MODULE], KP_MODULE, &module);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuModuleGetFunction(&function, module, (const char *)w->tail);
    if (rc == CUDA_SUCCESS)
        rc = give_info(s, w, function);
    if (rc == CUDA_SUCCESS)
        rc = kp_adopt(s, w, w->in[KP_FUNCTION_GET_HANDLE], KP_FUNCTION, function);
    return rc;
}

int kp_do_function_set(struct kp_server *s, struct kp_work *w)
{
    void *function;
    int rc = kp_resolve(s, w->in[KP_FUNCTION_SET_FUNCTION], KP_FUNCTION, &function);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuFuncSetAttribute(function, (int)w->in[KP_FUNCTION_SET_ATTRIBUTE], (int)w->in[KP_FUNCTION_SET_VALUE]);
    return rc == CUDA_SUCCESS ? give_info(s, w, function) : rc;
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
    if (rc != CUDA_SUCCESS)
        return rc;
    return s->driver.cuLaunchKernel(function, (unsigned)in[KP_LAUNCH_GRID_X], (unsigned)in[KP_LAUNCH_GRID_Y],
                                    (unsigned)in[KP_LAUNCH_GRID_Z], (unsigned)in[KP_LAUNCH_BLOCK_X],
                                    (unsigned)in[KP_LAUNCH_BLOCK_Y], (unsigned)in[KP_LAUNCH_BLOCK_Z],
                                    (unsigned)in[KP_LAUNCH_SHARED], stream, NULL, bytes > 0 ? extra : NULL);
}
