/* Which processes of the guest use the card, with their memory. */
#include "gnvml.h"

#include <stddef.h>

static nvmlReturn_t list(void *handle, unsigned *count, void *out, bool v1)
{
    GN_ENTER(handle, count != NULL, 0);
    for (unsigned i = 0; i < card.now.processes && i < *count && out != NULL; i++)
        nvml_process_put(out, i, v1, card.now.process[i].pid, card.now.process[i].memory_bytes);
    return nvml_process_end(count, out, card.now.processes);
}

static nvmlReturn_t none(void *handle, unsigned *count)
{
    GN_ENTER(handle, count != NULL, GN_IDENTITY_AGE_NS);
    *count = 0;
    return NVML_SUCCESS;
}

NVML_PROCESS_LISTS(GN_API)
