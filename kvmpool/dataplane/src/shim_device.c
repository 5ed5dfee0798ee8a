/* The device: one, with the claim's uuid, address and memory, whichever card is behind it. Answered without a trip. */
#include "shim.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

CUresult kp_cuInit(unsigned int flags)
{
    return flags != 0 ? CUDA_ERROR_INVALID_VALUE : kp_start();
}

static CUresult check(CUdevice device, const void *out)
{
    if (atomic_load(&kp_shim.forked) || !atomic_load(&kp_shim.ready))
        return CUDA_ERROR_NOT_INITIALIZED;
    if (out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return device == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult kp_cuDeviceGetCount(int *count)
{
    CUresult rc = check(0, count);

    if (rc == CUDA_SUCCESS)
        *count = 1;
    return rc;
}

CUresult kp_cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult rc = check(ordinal, device);

    if (rc == CUDA_SUCCESS)
        *device = 0;
    return rc;
}

/* What the worker said of the claim: a later worker says it again, while others read. */
static struct kp_welcome welcome(void)
{
    struct kp_welcome copy;

    pthread_mutex_lock(&kp_shim.tx);
    copy = kp_shim.welcome;
    pthread_mutex_unlock(&kp_shim.tx);
    return copy;
}

static CUresult give_text(char *to, int room, const char *text)
{
    if (room <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(to, (size_t)room, "%s", text);
    return CUDA_SUCCESS;
}

CUresult kp_cuDeviceGetName(char *name, int len, CUdevice dev)
{
    CUresult rc = check(dev, name);

    return rc == CUDA_SUCCESS ? give_text(name, len, kp_shim.device.name) : rc;
}

CUresult kp_cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice dev)
{
    CUresult rc = check(dev, uuid);

    if (rc == CUDA_SUCCESS)
        memcpy(uuid->bytes, welcome().uuid, sizeof uuid->bytes);
    return rc;
}

CUresult kp_cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
    CUresult rc = check(dev, bytes);

    if (rc == CUDA_SUCCESS)
        *bytes = welcome().memory_bytes;
    return rc;
}

CUresult kp_cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
    CUresult rc = check(dev, pi);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (attrib < 1 || attrib >= KP_ATTRIBUTES || !kp_shim.device.known[attrib])
        return CUDA_ERROR_INVALID_VALUE;
    *pi = kp_shim.device.value[attrib];
    return CUDA_SUCCESS;
}

CUresult kp_cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)
{
    CUresult rc = check(dev, minor);

    if (rc != CUDA_SUCCESS || major == NULL)
        return rc != CUDA_SUCCESS ? rc : CUDA_ERROR_INVALID_VALUE;
    *major = kp_shim.device.value[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR];
    *minor = kp_shim.device.value[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR];
    return CUDA_SUCCESS;
}

CUresult kp_cuDeviceGetProperties(CUdevprop *prop, CUdevice dev)
{
    const int32_t *value = kp_shim.device.value;
    CUresult rc = check(dev, prop);

    if (rc != CUDA_SUCCESS)
        return rc;
    *prop = (CUdevprop){
        .maxThreadsPerBlock = value[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK],
        .sharedMemPerBlock = value[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK],
        .totalConstantMemory = value[CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY],
        .SIMDWidth = value[CU_DEVICE_ATTRIBUTE_WARP_SIZE],
        .memPitch = value[CU_DEVICE_ATTRIBUTE_MAX_PITCH],
        .regsPerBlock = value[CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK],
        .clockRate = value[CU_DEVICE_ATTRIBUTE_CLOCK_RATE],
        .textureAlign = value[CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT],
    };
    memcpy(prop->maxThreadsDim, &value[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X], sizeof prop->maxThreadsDim);
    memcpy(prop->maxGridSize, &value[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X], sizeof prop->maxGridSize);
    return CUDA_SUCCESS;
}

CUresult kp_cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev)
{
    CUresult rc = check(dev, pciBusId);

    return rc == CUDA_SUCCESS ? give_text(pciBusId, len, welcome().pci) : rc;
}

/* Any of CUDA's three spellings: domain:bus:device.function, domain:bus:device, bus:device.function. */
CUresult kp_cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId)
{
    unsigned mine[3] = {0}, asked[3] = {0};
    CUresult rc = check(0, dev);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (pciBusId == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    sscanf(welcome().pci, "%x:%x:%x", &mine[0], &mine[1], &mine[2]);
    if (sscanf(pciBusId, "%x:%x:%x", &asked[0], &asked[1], &asked[2]) != 3) {
        asked[0] = 0;
        if (sscanf(pciBusId, "%x:%x", &asked[1], &asked[2]) != 2)
            return CUDA_ERROR_INVALID_VALUE;
    }
    if (memcmp(mine, asked, sizeof mine) != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    *dev = 0;
    return CUDA_SUCCESS;
}

CUresult kp_cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev)
{
    CUresult rc = check(dev, canAccessPeer);

    if (rc == CUDA_SUCCESS && (peerDev != 0 || dev != 0))
        rc = CUDA_ERROR_INVALID_DEVICE;
    if (rc == CUDA_SUCCESS)
        *canAccessPeer = 0;
    return rc;
}

CUresult kp_cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attrib, CUdevice src, CUdevice dst)
{
    CUresult rc = check(src, value);

    if (rc == CUDA_SUCCESS && (dst != 0 || src == dst)) /* a card is no peer of itself */
        rc = CUDA_ERROR_INVALID_DEVICE;
    (void)attrib;
    return rc;
}
