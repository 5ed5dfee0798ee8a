/* Which processes of the guest use the card, with their memory. */
#include "gnvml.h"

#include <stddef.h>

#define NO_INSTANCE 0xffffffffu

struct process {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};
struct process_v1 {
    unsigned pid;
    unsigned long long memory;
};
_Static_assert(sizeof(struct process) == 24 && sizeof(struct process_v1) == 16, "NVML's ABI");

static nvmlReturn_t list(void *handle, unsigned *count, void *out, bool instances)
{
    GN_ENTER(handle, count != NULL, 0);
    for (unsigned i = 0; i < card.now.processes && i < *count && out != NULL; i++) {
        const struct kp_figure_process *from = &card.now.process[i];
        if (instances)
            ((struct process *)out)[i] = (struct process){from->pid, from->memory_bytes, NO_INSTANCE, NO_INSTANCE};
        else
            ((struct process_v1 *)out)[i] = (struct process_v1){from->pid, from->memory_bytes};
    }
    bool fits = card.now.processes <= *count && (out != NULL || card.now.processes == 0);
    *count = card.now.processes;
    return fits ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

GN_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *out)
{
    return list(handle, count, out, true);
}

GN_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, void *out)
{
    return list(handle, count, out, true);
}

GN_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *out)
{
    return list(handle, count, out, false);
}

static nvmlReturn_t none(void *handle, unsigned *count)
{
    GN_ENTER(handle, count != NULL, GN_IDENTITY_AGE_NS);
    *count = 0;
    return NVML_SUCCESS;
}

#define NONE(name) \
    GN_API nvmlReturn_t name(void *handle, unsigned *count, void *out) \
    { \
        (void)out; \
        return none(handle, count); \
    }

NONE(nvmlDeviceGetGraphicsRunningProcesses)
NONE(nvmlDeviceGetGraphicsRunningProcesses_v2)
NONE(nvmlDeviceGetGraphicsRunningProcesses_v3)
NONE(nvmlDeviceGetMPSComputeRunningProcesses)
NONE(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NONE(nvmlDeviceGetMPSComputeRunningProcesses_v3)
