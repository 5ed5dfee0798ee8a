/* A PCI device of shared memory (ivshmem-plain) that a guest and its host see, cut into windows: one a guest process.
 *
 * The host keeps it as a file, the guest sees it as BAR 2. At its start stands a head, which the domain's relay writes each
 * time it gives a window away: the guest may write there too, so nobody on the host reads it. Who uses a window holds a lock
 * on its bytes: on the host the session (of the file), in the guest the process (of the BAR). A kernel gives such a lock back
 * when the last mapping is gone, so a window is never given to two, however the one before ended.
 */
#ifndef KVMPOOL_SLOTS_H
#define KVMPOOL_SLOTS_H

#include <stdint.h>

#include "window.h"

#define KP_DEVICE_FILE_MIN (8ull << 20)  /* bytes of the file: one window with an arena of 3 MiB */
#define KP_DEVICE_FILE_MAX (64ull << 30)
#define KP_SLOT_BYTES (64ull << 20) /* of a window where there is room for more than one; then as many as fit */
#define KP_SLOTS_MAX 64u
#define KP_SLOTS_AT (1ull << 20) /* the first window's place, and what all are a multiple of */

struct kp_slots_head {
    char magic[16]; /* KP_SLOTS_MAGIC */
    uint8_t id[16]; /* of this life of the domain; what a guest process is told in its welcome */
};
#define KP_SLOTS_MAGIC "kvmpool window 1" /* all 16 bytes */

struct kp_slots {
    unsigned count;
    uint64_t bytes; /* of each */
};

/* The windows of a file of that size: 0, or -EINVAL where it is no power of two or out of bounds. */
int kp_slots_plan(uint64_t file_bytes, struct kp_slots *slots);

/* Takes the lock on `bytes` of the file or BAR from `at` on, as whoever opened `fd`: 0, -EAGAIN where another has it. The two
 * sides have a lock each, also where they are under one kernel. */
int kp_slots_lock(int fd, uint64_t at, uint64_t bytes, bool guest);

#endif
