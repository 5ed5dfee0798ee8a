/* Libraries and their kernels: the worker's driver has them; a kernel's attributes and layout come with its handle. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

/* A library's handle remembers the connection it was loaded over: on another, its number means nothing. */
static CUresult library_number(CUlibrary library, uint64_t *number)
{
    struct kp_handle *entry;

    *number = (uint64_t)(uintptr_t)library;
    entry = kp_handles_get(&kp_shim.handles, *number, KP_LIBRARY);
    return entry != NULL && (uintptr_t)entry->value == kp_shim.link.epoch ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* `path` NULL: what is at `data`. Library options say where hosts' and cards' memory for it is; the worker's driver decides
 * that here. */
static CUresult load(CUlibrary *library, const void *data, const char *path, unsigned count, const CUjit_option *options, void **values)
{
    struct kp_image image;
    struct kp_jit jit;
    CUresult rc = library == NULL ? CUDA_ERROR_INVALID_VALUE : kp_image_open(&image, data, path, &jit, count, options, values);

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = kp_enter_any()) == CUDA_SUCCESS) {
        uint64_t handle = kp_handles_new(&kp_shim.handles, KP_LIBRARY, (void *)(uintptr_t)kp_shim.link.epoch, 0);
        rc = kp_image_load(KP_OP_library_load, handle, &image, &jit, (void **)library);
    }
    kp_image_drop(&image);
    return rc;
}

CUresult kp_cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values, unsigned int count,
                              CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions)
{
    (void)libraryOptions;
    (void)libraryOptionValues;
    (void)numLibraryOptions;
    return load(library, code, NULL, count, options, values);
}

CUresult kp_cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *options, void **values, unsigned int count,
                                  CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions)
{
    (void)libraryOptions;
    (void)libraryOptionValues;
    (void)numLibraryOptions;
    return fileName == NULL ? CUDA_ERROR_INVALID_VALUE : load(library, NULL, fileName, count, options, values);
}

CUresult kp_cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name)
{
    uint64_t in[KP_KERNEL_GET_IN], parent;
    CUresult rc = pKernel == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter_any();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = library_number(library, &parent)) != CUDA_SUCCESS)
        return kp_leave(rc);
    in[KP_KERNEL_GET_LIBRARY] = parent;
    return kp_function_fetch(KP_OP_kernel_get, KP_KERNEL, in, KP_KERNEL_GET_IN, parent, name, (void **)pKernel);
}

CUresult kp_cuLibraryGetModule(CUmodule *pMod, CUlibrary library)
{
    struct kp_answer answer = {0};
    struct kp_handle *entry;
    uint64_t in[KP_LIBRARY_MODULE_IN];
    CUresult rc = pMod == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((rc = library_number(library, &in[KP_LIBRARY_MODULE_LIBRARY])) != CUDA_SUCCESS)
        return kp_leave(rc);
    if ((*pMod = (CUmodule)(uintptr_t)kp_handles_find(&kp_shim.handles, KP_MODULE, kp_current(), in[KP_LIBRARY_MODULE_LIBRARY])) != NULL)
        return kp_leave(CUDA_SUCCESS);
    if ((in[KP_LIBRARY_MODULE_HANDLE] = kp_object_new(KP_MODULE)) == 0)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    entry = kp_handles_get(&kp_shim.handles, in[KP_LIBRARY_MODULE_HANDLE], KP_MODULE);
    entry->other = in[KP_LIBRARY_MODULE_LIBRARY];
    rc = kp_ask(KP_OP_library_module, in, KP_LIBRARY_MODULE_IN, NULL, 0, &answer);
    if (rc == CUDA_SUCCESS)
        *pMod = (CUmodule)(uintptr_t)in[KP_LIBRARY_MODULE_HANDLE];
    else
        kp_object_lose(in[KP_LIBRARY_MODULE_HANDLE]);
    return rc;
}

/* The function of a kernel in the current context, the same at each call. */
CUresult kp_cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel)
{
    struct kp_function *of;
    uint64_t in[KP_KERNEL_FUNCTION_IN] = {[KP_KERNEL_FUNCTION_KERNEL] = (uint64_t)(uintptr_t)kernel};
    char name[KP_TEXT_MAX];
    CUresult rc = pFunc == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((of = kp_kernel_of(kernel)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_HANDLE);
    if (of->in_context == kp_current() && kp_handles_get(&kp_shim.handles, of->as_function, KP_FUNCTION) != NULL) {
        *pFunc = (CUfunction)(uintptr_t)of->as_function;
        return kp_leave(CUDA_SUCCESS);
    }
    in[KP_KERNEL_FUNCTION_LIBRARY] = of->library;
    strcpy(name, of->name); /* it fits: it was fetched by a name of that length */
    rc = kp_function_fetch(KP_OP_kernel_function, KP_FUNCTION, in, KP_KERNEL_FUNCTION_IN, kp_current(), name, (void **)pFunc);
    pthread_mutex_lock(&kp_shim.tx);
    if (rc == CUDA_SUCCESS && (of = kp_kernel_of(kernel)) != NULL) {
        of->in_context = kp_current();
        of->as_function = (uint64_t)(uintptr_t)*pFunc;
    }
    return kp_leave(rc);
}

/* Takes `tx` where it returns 0. */
static CUresult enter_kernel(CUkernel kernel, const void *must, struct kp_function **out)
{
    CUresult rc = kp_enter_any();

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((*out = kp_kernel_of(kernel)) == NULL)
        return kp_leave(CUDA_ERROR_INVALID_HANDLE);
    return must == NULL ? kp_leave(CUDA_ERROR_INVALID_VALUE) : CUDA_SUCCESS;
}

CUresult kp_cuKernelGetLibrary(CUlibrary *pLib, CUkernel kernel)
{
    struct kp_function *of;
    CUresult rc = enter_kernel(kernel, pLib, &of);

    if (rc != CUDA_SUCCESS)
        return rc;
    *pLib = (CUlibrary)(uintptr_t)of->library;
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuKernelGetName(const char **name, CUkernel hfunc)
{
    struct kp_function *of;
    CUresult rc = enter_kernel(hfunc, name, &of);

    if (rc != CUDA_SUCCESS)
        return rc;
    *name = of->name;
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev)
{
    struct kp_function *of;
    CUresult rc = dev != 0 ? CUDA_ERROR_INVALID_DEVICE : enter_kernel(kernel, pi, &of);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (attrib < 0 || attrib >= KP_FUNCTION_ATTRIBUTES || !of->info.known[attrib])
        return kp_leave(CUDA_ERROR_INVALID_VALUE);
    *pi = of->info.value[attrib];
    return kp_leave(CUDA_SUCCESS);
}

CUresult kp_cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev)
{
    struct kp_function *of;
    uint64_t in[KP_KERNEL_SET_IN] = {(uint64_t)(uintptr_t)kernel, (uint64_t)(int64_t)attrib, (uint64_t)(int64_t)val};
    CUresult rc = dev != 0 ? CUDA_ERROR_INVALID_DEVICE : enter_kernel(kernel, in, &of);

    return rc == CUDA_SUCCESS ? kp_function_change(KP_OP_kernel_set, in, KP_KERNEL_SET_IN, (CUfunction)kernel) : rc;
}

CUresult kp_cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size)
{
    struct kp_function *of;
    CUresult rc = enter_kernel(kernel, offset, &of);

    return rc == CUDA_SUCCESS ? kp_leave(kp_function_param(of, index, offset, size)) : rc;
}

CUresult kp_cuKernelGetParamCount(CUkernel kernel, size_t *count)
{
    struct kp_function *of;
    CUresult rc = enter_kernel(kernel, count, &of);

    if (rc != CUDA_SUCCESS)
        return rc;
    *count = of->info.params;
    return kp_leave(of->info.layout_known ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED);
}

static CUresult get_kernel(void **kernel, const void *library, const char *name)
{
    return kp_cuLibraryGetKernel((CUkernel *)kernel, (CUlibrary)(uintptr_t)library, name);
}

static CUresult get_function(void **function, const void *module, const char *name)
{
    return kp_cuModuleGetFunction((CUfunction *)function, (CUmodule)(uintptr_t)module, name);
}

/* Gets the first `count` kernels of a library or module, `number`, by the names that the worker gives for them; `tx` is held,
 * and given back. */
static CUresult get_each(void **to, unsigned count, const void *of, uint64_t number,
                         CUresult (*get)(void **to, const void *of, const char *name))
{
    struct kp_answer answer = {.room = KP_BODY_MAX};
    uint64_t in[KP_NAMES_IN] = {[KP_NAMES_OF] = number, [KP_NAMES_COUNT] = count};
    char *names = calloc(1, KP_BODY_MAX + 1);
    CUresult rc;

    if ((answer.bytes = names) == NULL)
        return kp_leave(CUDA_ERROR_OUT_OF_MEMORY);
    rc = kp_ask(KP_OP_names, in, KP_NAMES_IN, NULL, 0, &answer);
    for (size_t i = 0, at = 0; i < count && rc == CUDA_SUCCESS && at < answer.got; i++) {
        rc = get(&to[i], of, names + at);
        at += strlen(names + at) + 1;
    }
    free(names);
    return rc;
}

CUresult kp_cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int count, CUlibrary lib)
{
    uint64_t number;
    CUresult rc = kernels == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter_any();

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = library_number(lib, &number);
    return rc == CUDA_SUCCESS ? get_each((void **)kernels, count, lib, number, get_kernel) : kp_leave(rc);
}

CUresult kp_cuModuleEnumerateFunctions(CUfunction *functions, unsigned int count, CUmodule mod)
{
    uint64_t number;
    CUresult rc = functions == NULL ? CUDA_ERROR_INVALID_VALUE : kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = kp_object_number(KP_MODULE, mod, &number);
    return rc == CUDA_SUCCESS ? get_each((void **)functions, count, mod, number, get_function) : kp_leave(rc);
}
