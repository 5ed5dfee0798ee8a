/* The guest's NVML: the claim as one card, for nvitop, gpustat, pynvml. What its files share.
 *
 * Its numbers are the worker's (struct kp_figures), asked over a connection of its own that makes no calls. It is a guest in
 * somebody's process: it never prints, takes no signal, survives fork. What belongs to the physical card (temperature, power,
 * clocks, errors) is NOT_SUPPORTED: a claim has none.
 */
#ifndef KVMPOOL_GNVML_H
#define KVMPOOL_GNVML_H

#include <stdbool.h>
#include <stdint.h>

#include "../../softgpu/src/nvml_abi.h"
#include "frame.h"

#define GN_API __attribute__((visibility("default")))

/* The claim's card, as it was asked last. */
struct gn_card {
    struct kp_welcome about; /* constant over rebinds but for the memory, which may be configured anew */
    struct kp_figures now;
};

/* gnvml_link.c. Any thread; these wait for the worker, for seconds where it does not answer. */
nvmlReturn_t gn_open(void);
nvmlReturn_t gn_close(void);
nvmlReturn_t gn_ready(void);
nvmlReturn_t gn_look(struct gn_card *card, uint64_t max_age_ns); /* 15 while nobody serves the claim */
nvmlReturn_t gn_utilization(unsigned *percent); /* of the time since the last look, which is 100 ms ago or more */
uint64_t gn_now_ns(void);

/* gnvml_library.c */
bool gn_is_card(const void *handle);
void *gn_handle(void);
nvmlReturn_t gn_text(char *to, unsigned size, const char *text); /* 7 where the buffer is too short */

#define GN_IDENTITY_AGE_NS 100000000u /* tools ask for thirty constants at once: one trip */

#define GN_TRY(call) \
    do { \
        nvmlReturn_t gn_try = (call); \
        if (gn_try != NVML_SUCCESS) \
            return gn_try; \
    } while (0)

/* Begins a call about the card: declares `card`; what is wrong goes to the caller. */
#define GN_ENTER(handle, valid, max_age_ns) \
    struct gn_card card; \
    GN_TRY(gn_ready()); \
    if (!gn_is_card(handle) || !(valid)) \
        return NVML_ERROR_INVALID_ARGUMENT; \
    GN_TRY(gn_look(&card, max_age_ns))

#endif
