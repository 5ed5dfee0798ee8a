/* What a program may ask before it has a device: function addresses, versions, names of errors. All from tables. */
#include "shim.h"

#include <string.h>

enum { FOUND = 0, NO_SYMBOL = 1, VERSION_TOO_LOW = 2 }; /* CUdriverProcAddressQueryResult */
enum { FLAG_LEGACY = 1, FLAG_PER_THREAD = 2 };

CUresult kp_cuDriverGetVersion(int *driverVersion)
{
    if (driverVersion == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *driverVersion = KP_DRIVER_VERSION; /* before cuInit nobody knows the server's */
    if (atomic_load(&kp_shim.ready) && kp_shim.device.driver_version < KP_DRIVER_VERSION)
        *driverVersion = kp_shim.device.driver_version;
    return CUDA_SUCCESS;
}

/* First row of `name` in a sorted table, or `count`. */
static unsigned first_row(const struct kp_proc *procs, unsigned count, const char *name)
{
    unsigned low = 0, high = count;

    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (strcmp(procs[middle].name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && strcmp(procs[low].name, name) == 0 ? low : count;
}

/* The newest form of `name` that `version` has, in its per-thread form where that is wanted and there is one. */
static void *supported(const char *name, int version, bool per_thread, int *status)
{
    void *best = NULL, *best_per_thread = NULL;
    unsigned row = first_row(kp_procs, kp_proc_count, name);

    if (row == kp_proc_count) {
        *status = NO_SYMBOL;
        return NULL;
    }
    for (; row < kp_proc_count && strcmp(kp_procs[row].name, name) == 0; row++) {
        if (kp_procs[row].version > version)
            continue;
        if (kp_procs[row].per_thread)
            best_per_thread = kp_procs[row].function;
        else
            best = kp_procs[row].function;
    }
    *status = best != NULL || (per_thread && best_per_thread != NULL) ? FOUND : VERSION_TOO_LOW;
    return per_thread && best_per_thread != NULL ? best_per_thread : best;
}

CUresult kp_cuGetProcAddress_v2(const char *symbol, void **pfn, int version, cuuint64_t flags,
                                CUdriverProcAddressQueryResult *symbolStatus)
{
    int status = NO_SYMBOL;
    unsigned row;

    if (symbol == NULL || pfn == NULL || (flags & ~(cuuint64_t)(FLAG_LEGACY | FLAG_PER_THREAD)) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    *pfn = supported(symbol, version, (flags & FLAG_PER_THREAD) != 0, &status);
    if (*pfn == NULL && (row = first_row(kp_unsupported_procs, kp_unsupported_proc_count, symbol)) < kp_unsupported_proc_count) {
        *pfn = kp_unsupported_procs[row].function; /* never NULL for a name that CUDA has: PyTorch would call it */
        status = FOUND;
    }
    if (symbolStatus != NULL)
        *symbolStatus = status;
    if (*pfn == NULL && symbol[0] != 0)
        kp_log("asked for %s (version %d): there is none", symbol, version);
    return *pfn == NULL && symbolStatus == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

CUresult kp_cuGetProcAddress(const char *symbol, void **pfn, int version, cuuint64_t flags)
{
    return kp_cuGetProcAddress_v2(symbol, pfn, version, flags, NULL);
}

CUresult kp_cuGetExportTable(const void **table, const CUuuid *id)
{
    if (table == NULL || id == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *table = NULL; /* private interfaces are NVIDIA's; what needs them is told so */
    return CUDA_ERROR_NOT_FOUND;
}

CUresult kp_cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    if (mode == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = 1; /* eager */
    return CUDA_SUCCESS;
}

static const struct kp_error *error_of(CUresult code)
{
    for (unsigned i = 0; i < kp_error_count; i++)
        if (kp_errors[i].code == code)
            return &kp_errors[i];
    return NULL;
}

CUresult kp_cuGetErrorName(CUresult error, const char **pStr)
{
    const struct kp_error *found = error_of(error);

    if (pStr == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *pStr = found != NULL ? found->name : NULL;
    return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult kp_cuGetErrorString(CUresult error, const char **pStr)
{
    const struct kp_error *found = error_of(error);

    if (pStr == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *pStr = found != NULL ? found->words : NULL;
    return found != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* A profiler runs on the card's host; what the program says of it is of no consequence here. */
CUresult kp_cuProfilerStart(void)
{
    return atomic_load(&kp_shim.ready) ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult kp_cuProfilerStop(void)
{
    return kp_cuProfilerStart();
}
