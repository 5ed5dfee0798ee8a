/* NVML as a library: initialisation, versions, how the card is found, the texts of errors. */
#define _GNU_SOURCE
#include "gnvml.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#define CUDA_VERSION_MAX 13000 /* what the shim implements */
#define UUID_CHARACTERS 41     /* "GPU-", 36 and the end */

static const char the_card; /* its address is the handle */

bool gn_is_card(const void *handle)
{
    return handle == &the_card;
}

void *gn_handle(void)
{
    return (void *)(uintptr_t)&the_card;
}

nvmlReturn_t gn_text(char *to, unsigned size, const char *text)
{
    if (to == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(to, text);
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return gn_open();
}

GN_API nvmlReturn_t nvmlInit_v2(void)
{
    return gn_open();
}

GN_API nvmlReturn_t nvmlInit(void)
{
    return gn_open();
}

GN_API nvmlReturn_t nvmlShutdown(void)
{
    return gn_close();
}

GN_API nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    struct gn_card card;

    GN_TRY(gn_look(&card, GN_IDENTITY_AGE_NS));
    if (card.now.driver[0] == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    return gn_text(out, size, card.now.driver);
}

GN_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
    struct gn_card card;
    char text[8 + sizeof card.now.driver];

    GN_TRY(gn_look(&card, GN_IDENTITY_AGE_NS));
    snprintf(text, sizeof text, "%d.%s", CUDA_VERSION_MAX / 1000, card.now.driver[0] != 0 ? card.now.driver : "0");
    return gn_text(out, size, text);
}

GN_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *out)
{
    struct gn_card card;

    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    GN_TRY(gn_look(&card, GN_IDENTITY_AGE_NS));
    *out = card.now.cuda_version < CUDA_VERSION_MAX ? card.now.cuda_version : CUDA_VERSION_MAX;
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *out)
{
    return nvmlSystemGetCudaDriverVersion_v2(out);
}

GN_API nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size)
{
    char path[64], name[256] = "";

    GN_TRY(gn_ready());
    if (out == NULL || size == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return NVML_ERROR_NOT_FOUND;
    size_t got = fread(name, 1, sizeof name - 1, file); /* up to the first NUL: argv[0] */
    fclose(file);
    if (got == 0)
        return NVML_ERROR_NOT_FOUND;
    snprintf(out, size, "%s", name);
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *out)
{
    GN_TRY(gn_ready());
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *out = 1;
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlDeviceGetCount(unsigned *out)
{
    return nvmlDeviceGetCount_v2(out);
}

/* A lost card answers 15 here too, as NVIDIA's does. */
static nvmlReturn_t give(void **out)
{
    struct gn_card card;

    GN_TRY(gn_look(&card, GN_IDENTITY_AGE_NS));
    *out = gn_handle();
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out)
{
    GN_TRY(gn_ready());
    return out == NULL || index != 0 ? NVML_ERROR_INVALID_ARGUMENT : give(out);
}

GN_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, void **out)
{
    return nvmlDeviceGetHandleByIndex_v2(index, out);
}

GN_API nvmlReturn_t nvmlDeviceGetUUID(void *handle, char *out, unsigned size)
{
    char text[UUID_CHARACTERS] = "GPU-";
    size_t at = 4;

    GN_ENTER(handle, out != NULL, GN_IDENTITY_AGE_NS);
    for (unsigned i = 0; i < sizeof card.about.uuid; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            text[at++] = '-';
        at += (size_t)snprintf(text + at, sizeof text - at, "%02x", card.about.uuid[i]);
    }
    return gn_text(out, size, text);
}

GN_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, void **out)
{
    char own[UUID_CHARACTERS];

    GN_TRY(gn_ready());
    if (uuid == NULL || out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    GN_TRY(nvmlDeviceGetUUID(gn_handle(), own, sizeof own));
    return strcasecmp(uuid, own) == 0 ? give(out) : NVML_ERROR_NOT_FOUND;
}

/* "0000:41:00.0", "00000000:41:00.0", "41:00.0", function optional. */
static bool read_address(const char *text, unsigned address[3])
{
    address[0] = 0;
    return sscanf(text, "%x:%x:%x", &address[0], &address[1], &address[2]) == 3 ||
           (address[0] = 0, sscanf(text, "%x:%x", &address[1], &address[2]) == 2);
}

GN_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **out)
{
    unsigned asked[3], own[3];
    struct gn_card card;

    GN_TRY(gn_ready());
    if (text == NULL || out == NULL || !read_address(text, asked))
        return NVML_ERROR_INVALID_ARGUMENT;
    GN_TRY(gn_look(&card, GN_IDENTITY_AGE_NS));
    if (!read_address(card.about.pci, own) || memcmp(asked, own, sizeof own) != 0)
        return NVML_ERROR_NOT_FOUND;
    return give(out);
}

GN_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *text, void **out)
{
    return nvmlDeviceGetHandleByPciBusId_v2(text, out);
}

GN_API nvmlReturn_t nvmlUnitGetCount(unsigned *out)
{
    GN_TRY(gn_ready());
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    *out = 0;
    return NVML_SUCCESS;
}

GN_API const char *nvmlErrorString(nvmlReturn_t code)
{
    switch (code) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "RM has detected an NVML/RM version mismatch";
    case NVML_ERROR_MEMORY: return "Insufficient Memory";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error"; /* no other is ever returned here */
    }
}
