/* What of NVML's ABI both of our libnvidia-ml share: the card's (softgpu) and the guest's (dataplane). */
#ifndef KVMPOOL_NVML_ABI_H
#define KVMPOOL_NVML_ABI_H

typedef int nvmlReturn_t;
enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999,
};

/* A process that uses a card, in the first form of the lists and in the later ones. */
struct nvml_process_v1 {
    unsigned pid;
    unsigned long long memory;
};
struct nvml_process {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};
_Static_assert(sizeof(struct nvml_process_v1) == 16 && sizeof(struct nvml_process) == 24, "NVML's ABI");

#define NVML_NO_INSTANCE 0xffffffffu

/* Entry `index` of a list, in the form that its caller's symbol has. */
static inline void nvml_process_put(void *list, unsigned index, int v1, unsigned pid, unsigned long long memory)
{
    if (v1)
        ((struct nvml_process_v1 *)list)[index] = (struct nvml_process_v1){pid, memory};
    else
        ((struct nvml_process *)list)[index] = (struct nvml_process){pid, memory, NVML_NO_INSTANCE, NVML_NO_INSTANCE};
}

/* How a list of `found` ends that the caller had `*count` places for. */
static inline nvmlReturn_t nvml_process_end(unsigned *count, const void *list, unsigned found)
{
    int fits = found <= *count && (list != (void *)0 || found == 0);

    *count = found;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

/* Every list of processes, by `list(handle, count, out, v1)`, or `none(handle, count)` where it is always empty. */
#define NVML_PROCESS_LIST(api, name, call) \
    api nvmlReturn_t name(void *handle, unsigned *count, void *out) \
    { \
        (void)out; \
        return call; \
    }
#define NVML_PROCESS_LISTS(api) \
    NVML_PROCESS_LIST(api, nvmlDeviceGetComputeRunningProcesses_v3, list(handle, count, out, 0)) \
    NVML_PROCESS_LIST(api, nvmlDeviceGetComputeRunningProcesses_v2, list(handle, count, out, 0)) \
    NVML_PROCESS_LIST(api, nvmlDeviceGetComputeRunningProcesses, list(handle, count, out, 1)) \
    NVML_PROCESS_LIST(api, nvmlDeviceGetGraphicsRunningProcesses, none(handle, count)) \
    NVML_PROCESS_LIST(api, nvmlDeviceGetGraphicsRunningProcesses_v2, none(handle, count)) \
    NVML_PROCESS_LIST(api, nvmlDeviceGetGraphicsRunningProcesses_v3, none(handle, count)) \
    NVML_PROCESS_LIST(api, nvmlDeviceGetMPSComputeRunningProcesses, none(handle, count)) \
    NVML_PROCESS_LIST(api, nvmlDeviceGetMPSComputeRunningProcesses_v2, none(handle, count)) \
    NVML_PROCESS_LIST(api, nvmlDeviceGetMPSComputeRunningProcesses_v3, none(handle, count))

#endif
