/* Libraries and kernels; functions and modules that come of them die with their context and with their library. */
#include "session_state.h"

#include <stdlib.h>
#include <string.h>

int kp_do_library_module(struct kp_server *s, struct kp_work *w)
{
    CUmodule module = NULL;
    void *library;
    int rc = kp_resolve(s, w->in[KP_LIBRARY_MODULE_LIBRARY], KP_LIBRARY, &library);

    if (rc == CUDA_SUCCESS)
        rc = kp_have_library(s, w->home, w->in[KP_LIBRARY_MODULE_LIBRARY]);
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuLibraryGetModule(&module, library);
    if (rc == CUDA_SUCCESS)
        rc = kp_adopt_under(s, w->in[KP_LIBRARY_MODULE_HANDLE], KP_MODULE, module, w->home_number, w->in[KP_LIBRARY_MODULE_LIBRARY]);
    return rc;
}

int kp_do_kernel_get(struct kp_server *s, struct kp_work *w)
{
    CUkernel kernel = NULL;
    void *library;
    int rc = kp_resolve(s, w->in[KP_KERNEL_GET_LIBRARY], KP_LIBRARY, &library);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuLibraryGetKernel(&kernel, library, (const char *)w->tail);
    if (rc == CUDA_SUCCESS)
        rc = kp_give_kernel(s, w, kernel);
    if (rc == CUDA_SUCCESS)
        rc = kp_adopt_under(s, w->in[KP_KERNEL_GET_HANDLE], KP_KERNEL, kernel, w->in[KP_KERNEL_GET_LIBRARY], 0);
    return rc;
}

int kp_do_kernel_set(struct kp_server *s, struct kp_work *w)
{
    void *kernel;
    int rc = kp_resolve(s, w->in[KP_KERNEL_SET_KERNEL], KP_KERNEL, &kernel);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuKernelSetAttribute((int)w->in[KP_KERNEL_SET_ATTRIBUTE], (int)w->in[KP_KERNEL_SET_VALUE], kernel, s->device);
    return rc == CUDA_SUCCESS ? kp_give_kernel(s, w, kernel) : rc;
}

int kp_do_kernel_function(struct kp_server *s, struct kp_work *w)
{
    CUfunction function = NULL;
    void *kernel;
    int rc = kp_resolve(s, w->in[KP_KERNEL_FUNCTION_KERNEL], KP_KERNEL, &kernel);

    if (rc == CUDA_SUCCESS && kp_parent_of(s, w->in[KP_KERNEL_FUNCTION_KERNEL], KP_KERNEL) != w->in[KP_KERNEL_FUNCTION_LIBRARY])
        rc = CUDA_ERROR_INVALID_VALUE; /* under another library it would outlive the driver's */
    if (rc == CUDA_SUCCESS)
        rc = kp_have_library(s, w->home, w->in[KP_KERNEL_FUNCTION_LIBRARY]);
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuKernelGetFunction(&function, kernel);
    if (rc == CUDA_SUCCESS)
        rc = kp_give_function(s, w, function);
    if (rc == CUDA_SUCCESS)
        rc = kp_adopt_under(s, w->in[KP_KERNEL_FUNCTION_HANDLE], KP_FUNCTION, function, w->home_number, w->in[KP_KERNEL_FUNCTION_LIBRARY]);
    return rc;
}

/* One name more; false where it does not fit into a reply. */
static bool add_name(struct kp_work *w, const char *name)
{
    size_t bytes = strnlen(name, KP_TEXT_MAX) + 1;

    if (bytes > KP_TEXT_MAX || w->give_bytes + bytes > KP_NAMES_BYTES_MAX)
        return false;
    memcpy((char *)w->give + w->give_bytes, name, bytes);
    w->give_bytes += (uint32_t)bytes;
    return true;
}

int kp_do_names(struct kp_server *s, struct kp_work *w)
{
    bool library = kp_handle_kind(w->in[KP_NAMES_OF]) == KP_LIBRARY;
    unsigned count = w->in[KP_NAMES_COUNT] < KP_NAMES_MAX ? (unsigned)w->in[KP_NAMES_COUNT] : KP_NAMES_MAX;
    void **handles = calloc(count + 1, sizeof *handles), *of;
    const char *name = "";
    int rc = kp_resolve(s, w->in[KP_NAMES_OF], library ? KP_LIBRARY : KP_MODULE, &of);

    if (handles == NULL || (w->give = malloc(KP_NAMES_BYTES_MAX)) == NULL)
        rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (rc == CUDA_SUCCESS)
        rc = library ? s->driver.cuLibraryEnumerateKernels((CUkernel *)handles, count, of)
                     : s->driver.cuModuleEnumerateFunctions((CUfunction *)handles, count, of);
    for (unsigned i = 0; rc == CUDA_SUCCESS && i < count && handles[i] != NULL; i++) {
        rc = library ? s->driver.cuKernelGetName(&name, handles[i]) : s->driver.cuFuncGetName(&name, handles[i]);
        if (rc == CUDA_SUCCESS && !add_name(w, name))
            rc = CUDA_ERROR_OUT_OF_MEMORY;
    }
    free(handles);
    return rc;
}
