/* Modules and functions: a function's attributes and parameter layout come with its handle, so that launches and
 * questions about it need no trip.
 */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

/* `path` NULL: what is at `data`. */
static CUresult load(CUmodule *module, const void *data, const char *path, unsigned count, const CUjit_option *options, void **values)
{
    struct kp_image image;
    struct kp_jit jit;
    CUresult rc = module == NULL ? CUDA_ERROR_INVALID_VALUE : kp_image_open(&image, data, path, &jit, count, options, values);

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_enter()) == CUDA_SUCCESS)
        rc = kp_image_load(KP_OP_module_load, kp_object_new(KP_MODULE), &image, &jit, (void **)module);
    kp_image_drop(&image);
    return rc;
}

CUresult kp_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values)
{
    return load(module, image, NULL, count, options, values);
}

CUresult kp_cuModuleLoadData(CUmodule *module, const void *image)
{
    return load(module, image, NULL, 0, NULL, NULL);
}

CUresult kp_cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin)
{
    return load(module, fatCubin, NULL, 0, NULL, NULL);
}

CUresult kp_cuModuleLoad(CUmodule *module, const char *fname)
{
    return fname == NULL ? CUDA_ERROR_INVALID_VALUE : load(module, NULL, fname, 0, NULL, NULL);
}

static uint32_t param_bytes(const struct kp_function_info *info)
{
    uint32_t end = 0;

    for (uint32_t i = 0; i < info->params; i++)
        if (info->param[i].offset + info->param[i].size > end)
            end = info->param[i].offset + info->param[i].size;
    return end;
}

/* Trusts the worker no further than it must: a layout that does not fit is refused. */
static bool info_fits(const struct kp_function_info *info, size_t got)
{
    if (got < offsetof(struct kp_function_info, param) || info->params > KP_PARAMS_MAX ||
        got < offsetof(struct kp_function_info, param) + info->params * sizeof info->param[0])
        return false;
    for (uint32_t i = 0; i < info->params; i++)
        if (info->param[i].offset > KP_PARAM_BYTES_MAX || info->param[i].size > KP_PARAM_BYTES_MAX - info->param[i].offset)
            return false;
    return true;
}

/* Where the new handle stands among the numbers of the three ops that fetch a function. */
_Static_assert((int)KP_FUNCTION_GET_HANDLE == 1 && (int)KP_KERNEL_GET_HANDLE == 1 && (int)KP_KERNEL_FUNCTION_HANDLE == 1, "handle");

CUresult kp_function_fetch(uint16_t op, enum kp_kind kind, uint64_t *in, unsigned count, uint64_t parent, const char *name, void **out)
{
    struct kp_function *function;
    struct kp_handle *entry;
    size_t name_bytes = name != NULL ? strnlen(name, KP_TEXT_MAX) + 1 : KP_TEXT_MAX + 1;
    bool sends_name = op != KP_OP_kernel_function;
    CUresult rc;

    if (name_bytes > KP_TEXT_MAX)
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    if ((function = calloc(1, sizeof *function + name_bytes)) == NULL ||
        (in[1] = kp_handles_new(&kp_shim.handles, kind, NULL, parent)) == 0) {
        free(function);
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    struct kp_answer answer = {.bytes = &function->info, .room = sizeof function->info};
    memcpy(function->name, name, name_bytes);
    if (kind == KP_KERNEL || op == KP_OP_kernel_function)
        function->library = kind == KP_KERNEL ? parent : in[KP_KERNEL_FUNCTION_LIBRARY];
    if (op == KP_OP_kernel_function)
        kp_handles_get(&kp_shim.handles, in[1], kind)->other = function->library;
    if (op == KP_OP_function_get)
        function->module = parent;
    function->epoch = kp_shim.link.epoch;
    rc = kp_ask(op, in, count, sends_name ? name : NULL, sends_name ? (uint32_t)name_bytes : 0, &answer);
    pthread_mutex_lock(&kp_shim.tx);
    entry = kp_handles_get(&kp_shim.handles, in[1], kind);
    if (rc == CUDA_SUCCESS && (entry == NULL || !info_fits(&function->info, answer.got)))
        rc = CUDA_ERROR_UNKNOWN;
    if (rc == CUDA_SUCCESS) {
        function->param_bytes = param_bytes(&function->info);
        entry->value = function;
        *out = (void *)(uintptr_t)in[1];
        function = NULL;
    } else {
        kp_object_drop(in[1]);
    }
    free(function);
    return kp_leave(rc);
}

CUresult kp_cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name)
{
    uint64_t in[KP_FUNCTION_GET_IN];
    CUresult rc = hfunc == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_object_number(KP_MODULE, hmod, &in[KP_FUNCTION_GET_MODULE])) != CUDA_SUCCESS)
        return kp_leave(rc);
    return kp_function_fetch(KP_OP_function_get, KP_FUNCTION, in, KP_FUNCTION_GET_IN, in[KP_FUNCTION_GET_MODULE], name, (void **)hfunc);
}

struct kp_function *kp_kernel_of(CUkernel kernel)
{
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, (uint64_t)(uintptr_t)kernel, KP_KERNEL);
    struct kp_function *function = entry != NULL ? entry->value : NULL;

    return function != NULL && function->epoch == kp_shim.link.epoch ? function : NULL;
}

struct kp_function *kp_function_of(CUfunction f)
{
    struct kp_handle *entry = kp_handles_get(&kp_shim.handles, (uint64_t)(uintptr_t)f, KP_FUNCTION);

    return entry != NULL ? entry->value : kp_kernel_of((CUkernel)f); /* a kernel may stand for a function */
}

/* Takes `tx` where it returns 0. */
static CUresult enter_function(CUfunction f, const void *must, struct kp_function **out)
{
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((*out = kp_function_of(f)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_HANDLE);
    return must == NULL ? kp_leave(CUDA_ERROR_INVALID_VALUE) : CUDA_SUCCESS;
}

CUresult kp_cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc)
{
    struct kp_function *function;
    CUresult rc = enter_function(hfunc, pi, &function);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (attrib < 0 || attrib >= KP_FUNCTION_ATTRIBUTES || !function->info.known[attrib])
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    *pi = function->info.value[attrib];
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_function_change(uint16_t op, const uint64_t *in, unsigned count, CUfunction f)
{
    struct kp_function_info info;
    struct kp_function *function;
    struct kp_answer answer = {.bytes = &info, .room = sizeof info};
    CUresult rc = kp_ask(op, in, count, NULL, 0, &answer);

    pthread_mutex_lock(&kp_shim.tx);
    if (rc == CUDA_SUCCESS && info_fits(&info, answer.got) && (function = kp_function_of(f)) != NULL) {
        memcpy(function->info.value, info.value, sizeof info.value); /* the layout stays */
        memcpy(function->info.known, info.known, sizeof info.known);
        memset(function->occupancy, 0, sizeof function->occupancy);
    }
    return kp_leave(rc);
}

CUresult kp_cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value)
{
    struct kp_function *function;
    uint64_t in[KP_FUNCTION_SET_IN] = {(uint64_t)(uintptr_t)hfunc, (uint64_t)(int64_t)attrib, (uint64_t)(int64_t)value};
    CUresult rc = enter_function(hfunc, in, &function);

    return rc == CUDA_SUCCESS ? kp_function_change(KP_OP_function_set, in, KP_FUNCTION_SET_IN, hfunc) : rc;
}

CUresult kp_cuFuncGetModule(CUmodule *hmod, CUfunction hfunc)
{
    struct kp_function *function;
    CUlibrary library;
    CUresult rc = enter_function(hfunc, hmod, &function);

    if (rc != CUDA_SUCCESS)
        return rc;
    *hmod = (CUmodule)(uintptr_t)function->module;
    library = (CUlibrary)(uintptr_t)function->library;
    kp_leave(CUDA_SUCCESS);
    return library != NULL ? kp_cuLibraryGetModule(hmod, library) : CUDA_SUCCESS;
}

CUresult kp_cuFuncGetName(const char **name, CUfunction hfunc)
{
    struct kp_function *function;
    CUresult rc = enter_function(hfunc, name, &function);

    if (rc != CUDA_SUCCESS)
        return rc;
    *name = function->name;
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_function_param(const struct kp_function *function, size_t index, size_t *offset, size_t *size)
{
    if (!function->info.layout_known)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (index >= function->info.params)
        return CUDA_ERROR_INVALID_VALUE;
    *offset = function->info.param[index].offset;
    if (size != NULL)
        *size = function->info.param[index].size;
    return CUDA_SUCCESS;
}

CUresult kp_cuFuncGetParamInfo(CUfunction func, size_t index, size_t *offset, size_t *size)
{
    struct kp_function *function;
    CUresult rc = enter_function(func, offset, &function);

    return rc == CUDA_SUCCESS ? kp_leave(kp_function_param(function, index, offset, size)) : rc;
}

CUresult kp_cuFuncGetParamCount(CUfunction func, size_t *count)
{
    struct kp_function *function;
    CUresult rc = enter_function(func, count, &function);

    if (rc != CUDA_SUCCESS)
        return rc;
    *count = function->info.params;
    return kp_leave(function->info.layout_known ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED);
}

/* A function is loaded with its module (cuModuleGetLoadingMode says eager). */
CUresult kp_cuFuncLoad(CUfunction func)
{
    struct kp_function *function;
    CUresult rc = enter_function(func, &function, &function);

    return rc == CUDA_SUCCESS ? kp_leave(rc) : rc;
}

CUresult kp_cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction func)
{
    struct kp_function *function;
    CUresult rc = enter_function(func, state, &function);

    if (rc != CUDA_SUCCESS)
        return rc;
    *state = 1;
    return kp_leave(CUDA_SUCCESS);
}

/* PyCUDA still calls it; only the launches before CUDA 4 (cuLaunch, not supported) would read it. */
CUresult kp_cuFuncSetBlockShape(CUfunction func, int x, int y, int z)
{
    struct kp_function *function;
    CUresult rc = enter_function(func, &function, &function);

    if (rc != CUDA_SUCCESS)
        return rc;
    return kp_leave(x < 1 || y < 1 || z < 1 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
}
