/* The part of the CUDA driver API that the sample programs use: our own declarations, found in libcuda.so.1 at run time,
 * as a program does that must start on a machine without a driver. Include it in one file a program.
 */
#ifndef KVMPOOL_SAMPLE_DRIVER_H
#define KVMPOOL_SAMPLE_DRIVER_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st *CUcontext;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct {
    unsigned char bytes[16];
} CUuuid;

/* name, symbol, parameters */
#define DRIVER_FUNCTIONS(F)                                                                                              \
    F(cuInit, "cuInit", (unsigned))                                                                                      \
    F(cuDriverGetVersion, "cuDriverGetVersion", (int *))                                                                 \
    F(cuDeviceGetCount, "cuDeviceGetCount", (int *))                                                                     \
    F(cuDeviceGet, "cuDeviceGet", (CUdevice *, int))                                                                     \
    F(cuDeviceGetName, "cuDeviceGetName", (char *, int, CUdevice))                                                       \
    F(cuDeviceGetUuid, "cuDeviceGetUuid", (CUuuid *, CUdevice))                                                          \
    F(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId", (char *, int, CUdevice))                                               \
    F(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t *, CUdevice))                                                     \
    F(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *, int, CUdevice))                                              \
    F(cuGetErrorName, "cuGetErrorName", (CUresult, const char **))                                                       \
    F(cuCtxCreate, "cuCtxCreate_v2", (CUcontext *, unsigned, CUdevice))                                                  \
    F(cuCtxDestroy, "cuCtxDestroy_v2", (CUcontext))                                                                      \
    F(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                                      \
    F(cuModuleLoadDataEx, "cuModuleLoadDataEx", (CUmodule *, const void *, unsigned, int *, void **))                    \
    F(cuModuleGetFunction, "cuModuleGetFunction", (CUfunction *, CUmodule, const char *))                                \
    F(cuModuleUnload, "cuModuleUnload", (CUmodule))                                                                      \
    F(cuMemGetInfo, "cuMemGetInfo_v2", (size_t *, size_t *))                                                             \
    F(cuMemAlloc, "cuMemAlloc_v2", (CUdeviceptr *, size_t))                                                              \
    F(cuMemFree, "cuMemFree_v2", (CUdeviceptr))                                                                          \
    F(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (CUdeviceptr, const void *, size_t))                                              \
    F(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void *, CUdeviceptr, size_t))                                                    \
    F(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr, const void *, size_t, CUstream))                          \
    F(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *, CUdeviceptr, size_t, CUstream))                                \
    F(cuMemsetD32Async, "cuMemsetD32Async", (CUdeviceptr, unsigned, size_t, CUstream))                                   \
    F(cuStreamCreate, "cuStreamCreate", (CUstream *, unsigned))                                                          \
    F(cuStreamSynchronize, "cuStreamSynchronize", (CUstream))                                                            \
    F(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream))                                                                 \
    F(cuEventCreate, "cuEventCreate", (CUevent *, unsigned))                                                             \
    F(cuEventRecord, "cuEventRecord", (CUevent, CUstream))                                                               \
    F(cuEventSynchronize, "cuEventSynchronize", (CUevent))                                                               \
    F(cuEventElapsedTime, "cuEventElapsedTime", (float *, CUevent, CUevent))                                             \
    F(cuEventDestroy, "cuEventDestroy_v2", (CUevent))                                                                    \
    F(cuLaunchKernel, "cuLaunchKernel",                                                                                  \
      (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **))

#define DECLARE(name, symbol, parameters) static CUresult(*name) parameters __attribute__((unused));
DRIVER_FUNCTIONS(DECLARE)
#undef DECLARE

/* Finds the driver, or ends the program with 2 and one line. */
static inline void load_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);

    if (library == NULL) {
        fprintf(stderr, "%s. Next: put the guest's libcuda.so.1 where the loader looks\n", dlerror());
        exit(2);
    }
#define FIND(name, symbol, parameters)                                                                                   \
    if ((*(void **)&name = dlsym(library, symbol)) == NULL) {                                                            \
        fprintf(stderr, "libcuda.so.1 has no %s\n", symbol);                                                             \
        exit(2);                                                                                                         \
    }
    DRIVER_FUNCTIONS(FIND)
#undef FIND
}

static inline const char *error_name(CUresult code)
{
    const char *name = NULL;

    return cuGetErrorName(code, &name) == 0 && name != NULL ? name : "unknown error";
}

/* Returns the call's CUresult from the function it stands in, saying which call it was. */
#define TRY(call)                                                                                                        \
    do {                                                                                                                 \
        CUresult try_result = (call);                                                                                    \
        if (try_result != 0) {                                                                                           \
            fprintf(stderr, "%s: %s (%d)\n", #call, error_name(try_result), try_result);                                 \
            return try_result;                                                                                           \
        }                                                                                                                \
    } while (0)

/* The text of `kernels.ptx`: named by KVMPOOL_KERNELS, else beside the program. NULL where it cannot be read. */
static inline char *read_kernels(const char *program)
{
    const char *named = getenv("KVMPOOL_KERNELS"), *slash = strrchr(program, '/');
    char path[4096];
    FILE *file;
    char *text = NULL;
    long bytes;

    if (named != NULL)
        snprintf(path, sizeof path, "%s", named);
    else
        snprintf(path, sizeof path, "%.*skernels.ptx", slash != NULL ? (int)(slash - program + 1) : 0, program);
    if ((file = fopen(path, "rb")) == NULL || fseek(file, 0, SEEK_END) != 0 || (bytes = ftell(file)) < 0) {
        fprintf(stderr, "%s: cannot be read. Next: set KVMPOOL_KERNELS\n", path);
        return NULL;
    }
    rewind(file);
    if ((text = calloc(1, (size_t)bytes + 1)) != NULL && fread(text, 1, (size_t)bytes, file) != (size_t)bytes) {
        free(text);
        text = NULL;
    }
    fclose(file);
    return text;
}

/* A module from kernels.ptx; where it does not compile, the compiler's words are printed. */
static inline CUresult load_kernels(const char *program, CUmodule *module)
{
    char log[4096] = "";
    int options[2] = {5, 6}; /* error log and its size */
    void *values[2] = {log, (void *)(uintptr_t)sizeof log};
    char *text = read_kernels(program);
    CUresult rc = text != NULL ? cuModuleLoadDataEx(module, text, 2, options, values) : 301;

    if (rc != 0)
        fprintf(stderr, "cuModuleLoadDataEx: %s (%d) %s\n", error_name(rc), rc, log);
    free(text);
    return rc;
}

#endif
