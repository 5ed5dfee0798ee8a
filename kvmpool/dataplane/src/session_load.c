/* Loads the driver: whatever libcuda.so.1 the loader finds, NVIDIA's or softgpu's. */
#define _GNU_SOURCE
#include "session_state.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static CUresult missing(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

int kp_driver_load(struct kp_server *s, char *text, size_t room)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CUresult rc;

    if (library == NULL) {
        snprintf(text, room, "the host has no libcuda.so.1. Next: install the card's driver");
        return -ENODEV;
    }
    for (unsigned i = 0; i < kp_driver_symbol_count; i++) {
        void *found = dlsym(library, kp_driver_symbols[i].name);
        CUresult (*function)(void) = missing; /* an older driver: that call is not supported */
        memcpy((char *)&s->driver + kp_driver_symbols[i].offset, found != NULL ? &found : (void *)&function, sizeof found);
    }
    if ((rc = s->driver.cuInit(0)) != CUDA_SUCCESS || (rc = s->driver.cuDeviceGet(&s->device, 0)) != CUDA_SUCCESS) {
        snprintf(text, room, "the card does not answer (CUDA error %d). Next: kvmpool card list", rc);
        return -ENODEV;
    }
    return 0;
}

int kp_do_device_info(struct kp_server *s, struct kp_work *w)
{
    struct kp_device_info *info = calloc(1, sizeof *info);
    CUresult rc;

    if (info == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    w->give = info;
    if ((rc = s->driver.cuDriverGetVersion(&info->driver_version)) != CUDA_SUCCESS)
        return rc;
    if ((rc = s->driver.cuDeviceGetName(info->name, (int)sizeof info->name, s->device)) != CUDA_SUCCESS)
        return rc;
    for (int i = 1; i < KP_ATTRIBUTES; i++)
        info->known[i] = s->driver.cuDeviceGetAttribute(&info->value[i], i, s->device) == CUDA_SUCCESS;
    w->give_bytes = sizeof *info;
    return CUDA_SUCCESS;
}
