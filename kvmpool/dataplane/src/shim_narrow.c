/* Forms from before CUDA 3.2, whose sizes have 32 bits: what is larger is the largest of those. */
#include "shim.h"

static unsigned int narrow(size_t bytes)
{
    return bytes < UINT32_MAX ? (unsigned int)bytes : UINT32_MAX;
}

CUresult kp_cuDeviceTotalMem(unsigned int *bytes, CUdevice dev)
{
    size_t wide = 0;
    CUresult rc = kp_cuDeviceTotalMem_v2(bytes != NULL ? &wide : NULL, dev);

    if (rc == CUDA_SUCCESS)
        *bytes = narrow(wide);
    return rc;
}

CUresult kp_cuMemGetInfo(unsigned int *free_bytes, unsigned int *total)
{
    size_t wide_free = 0, wide_total = 0;
    CUresult rc = kp_cuMemGetInfo_v2(free_bytes != NULL ? &wide_free : NULL, total != NULL ? &wide_total : NULL);

    if (rc == CUDA_SUCCESS) {
        *free_bytes = narrow(wide_free);
        *total = narrow(wide_total);
    }
    return rc;
}

CUresult kp_cuMemAllocHost(void **pp, unsigned int bytesize)
{
    return kp_cuMemAllocHost_v2(pp, bytesize);
}
