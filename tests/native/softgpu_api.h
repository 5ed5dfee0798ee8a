/* The driver API's functions that the cases call, as pointers found in a library at run time. */
#ifndef SOFTGPU_API_H
#define SOFTGPU_API_H

#include "cuda_api.h"

#define DIMS unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned

#define API(F) \
    F(cuInit, (unsigned)) F(cuDriverGetVersion, (int *)) F(cuGetErrorName, (CUresult, const char **)) \
    F(cuGetProcAddress_v2, (const char *, void **, int, uint64_t, int *)) \
    F(cuDeviceGet, (CUdevice *, int)) F(cuDeviceGetCount, (int *)) F(cuDeviceGetName, (char *, int, CUdevice)) \
    F(cuDeviceGetUuid_v2, (CUuuid *, CUdevice)) F(cuDeviceTotalMem_v2, (size_t *, CUdevice)) \
    F(cuDeviceGetPCIBusId, (char *, int, CUdevice)) F(cuDeviceGetAttribute, (int *, int, CUdevice)) \
    F(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice)) F(cuDevicePrimaryCtxRelease_v2, (CUdevice)) \
    F(cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *)) \
    F(cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice)) F(cuCtxDestroy_v2, (CUcontext)) F(cuCtxSetCurrent, (CUcontext)) \
    F(cuCtxPopCurrent_v2, (CUcontext *)) F(cuCtxGetDevice, (CUdevice *)) F(cuCtxSynchronize, (void)) \
    F(cuModuleLoadData, (CUmodule *, const void *)) F(cuModuleUnload, (CUmodule)) \
    F(cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
    F(cuModuleGetGlobal_v2, (CUdeviceptr *, size_t *, CUmodule, const char *)) \
    F(cuLibraryLoadData, (CUlibrary *, const void *, int *, void **, unsigned, int *, void **, unsigned)) \
    F(cuLibraryUnload, (CUlibrary)) F(cuLibraryGetKernel, (CUkernel *, CUlibrary, const char *)) \
    F(cuLibraryGetKernelCount, (unsigned *, CUlibrary)) F(cuLibraryGetGlobal, (CUdeviceptr *, size_t *, CUlibrary, const char *)) \
    F(cuKernelGetParamInfo, (CUkernel, size_t, size_t *, size_t *)) \
    F(cuLinkCreate_v2, (unsigned, int *, void **, CUlinkState *)) \
    F(cuLinkAddData_v2, (CUlinkState, int, void *, size_t, const char *, unsigned, int *, void **)) \
    F(cuLinkComplete, (CUlinkState, void **, size_t *)) F(cuLinkDestroy, (CUlinkState)) \
    F(cuFuncSetAttribute, (CUfunction, int, int)) \
    F(cuLaunchKernel, (CUfunction, DIMS, CUstream, void **, void **)) \
    F(cuLaunchKernelEx, (const CUlaunchConfig *, CUfunction, void **, void **)) \
    F(cuLaunchHostFunc, (CUstream, CUhostFn, void *)) \
    F(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, CUfunction, int, size_t)) \
    F(cuOccupancyMaxPotentialBlockSize, (int *, int *, CUfunction, CUoccupancyB2DSize, size_t, int)) \
    F(cuMemAlloc_v2, (CUdeviceptr *, size_t)) F(cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned)) \
    F(cuMemFree_v2, (CUdeviceptr)) F(cuMemGetInfo_v2, (size_t *, size_t *)) \
    F(cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr)) F(cuMemHostAlloc, (void **, size_t, unsigned)) \
    F(cuMemFreeHost, (void *)) F(cuMemHostRegister_v2, (void *, size_t, unsigned)) F(cuMemHostUnregister, (void *)) \
    F(cuPointerGetAttribute, (void *, int, CUdeviceptr)) \
    F(cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t)) F(cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t)) \
    F(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream)) \
    F(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream)) F(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *)) \
    F(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *, CUstream)) F(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *)) \
    F(cuMemsetD8_v2, (CUdeviceptr, unsigned char, size_t)) F(cuMemsetD32_v2, (CUdeviceptr, unsigned, size_t)) \
    F(cuMemsetD32Async_ptsz, (CUdeviceptr, unsigned, size_t, CUstream)) \
    F(cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream)) \
    F(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
    F(cuMemsetD2D8_v2, (CUdeviceptr, size_t, unsigned char, size_t, size_t)) \
    F(cuMemsetD2D32_v2, (CUdeviceptr, size_t, unsigned, size_t, size_t)) \
    F(cuMemGetAllocationGranularity, (size_t *, const CUmemAllocationProp *, int)) \
    F(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)) \
    F(cuMemAddressFree, (CUdeviceptr, size_t)) \
    F(cuMemCreate, (CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long)) \
    F(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)) \
    F(cuMemSetAccess, (CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)) F(cuMemUnmap, (CUdeviceptr, size_t)) \
    F(cuMemRelease, (CUmemGenericAllocationHandle)) \
    F(cuStreamCreate, (CUstream *, unsigned)) F(cuStreamDestroy_v2, (CUstream)) F(cuStreamQuery, (CUstream)) \
    F(cuStreamQuery_ptsz, (CUstream)) F(cuStreamSynchronize, (CUstream)) F(cuStreamSynchronize_ptsz, (CUstream)) \
    F(cuStreamWaitEvent, (CUstream, CUevent, unsigned)) \
    F(cuEventCreate, (CUevent *, unsigned)) F(cuEventDestroy_v2, (CUevent)) F(cuEventRecord, (CUevent, CUstream)) \
    F(cuEventQuery, (CUevent)) F(cuEventSynchronize, (CUevent)) F(cuEventElapsedTime, (float *, CUevent, CUevent))

#define DECLARE(name, params) CUresult (*name) params;
static struct {
    API(DECLARE)
} api;

static void bind_api(void *(*find)(const char *))
{
#define BIND(name, params) api.name = (CUresult(*) params)find(#name);
    API(BIND)
}

#endif
