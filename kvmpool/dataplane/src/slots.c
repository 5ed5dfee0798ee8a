/* See slots.h. */
#define _GNU_SOURCE
#include "slots.h"

#include <errno.h>
#include <fcntl.h>

int kp_slots_plan(uint64_t file_bytes, struct kp_slots *slots)
{
    uint64_t room = file_bytes - KP_SLOTS_AT;

    if (file_bytes < KP_DEVICE_FILE_MIN || file_bytes > KP_DEVICE_FILE_MAX || (file_bytes & (file_bytes - 1)) != 0)
        return -EINVAL;
    slots->count = (unsigned)(file_bytes / KP_SLOT_BYTES);
    slots->count = slots->count < 1 ? 1 : slots->count > KP_SLOTS_MAX ? KP_SLOTS_MAX : slots->count;
    slots->bytes = room / slots->count / KP_SLOTS_AT * KP_SLOTS_AT;
    if (slots->bytes > KP_WINDOW_BYTES)
        slots->bytes = KP_WINDOW_BYTES;
    return 0;
}

int kp_slots_lock(int fd, uint64_t at, uint64_t bytes, bool guest)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)at, .l_len = (off_t)bytes};

    lock.l_start += guest ? (off_t)KP_DEVICE_MAX : 0; /* behind any end: a lock needs no byte there */
    if (fcntl(fd, F_OFD_SETLK, &lock) == 0)
        return 0;
    return errno == EACCES ? -EAGAIN : -errno;
}
