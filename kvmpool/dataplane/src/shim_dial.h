/* Dialling as one that only looks: for the guest's NVML, which has no shim. Greeting as the shim does is kp_dial in shim.h. */
#ifndef KVMPOOL_SHIM_DIAL_H
#define KVMPOOL_SHIM_DIAL_H

#include "cuda_abi.h"
#include "frame.h"
#include "window.h"

/* A connected, blocking socket on which figures may be asked for, or -1 and a CUresult in *why. An answer is waited for at
 * most `seconds`; the endpoint is found as for the shim. */
int kp_dial_observer(int seconds, struct kp_welcome *welcome, CUresult *why);

/* shim_slots.c: whether the machine has a device of shared memory that this process may use, and the window in it that the
 * welcome tells of: 0, -EAGAIN where a process that lost its worker still has that window, or another negative errno. */
bool kp_slots_seen(void);
int kp_slots_open(const struct kp_welcome *welcome, struct kp_window *window);

#endif
