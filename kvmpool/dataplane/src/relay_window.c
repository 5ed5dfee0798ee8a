/* relay_window.c: the domain's device of shared memory: which part of it a guest process gets. See slots.h. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "relay.h"

/* As it must be: the guest may have written over it, and one that was restored brings back what it had. */
static int write_head(const struct relay_window *window)
{
    struct kp_slots_head head;

    memcpy(head.magic, KP_SLOTS_MAGIC, sizeof(head.magic));
    memcpy(head.id, window->id, sizeof(head.id));
    return pwrite(window->fd, &head, sizeof(head), 0) == sizeof(head) ? 0 : -EIO;
}

int relay_window_open(struct relay *relay)
{
    struct relay_window *window = &relay->window;
    struct stat about;
    int rc = 0;

    window->fd = -1;
    if (!relay->options.window[0])
        return 0;
    window->fd = open(relay->options.window, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (window->fd < 0 || fstat(window->fd, &about))
        return -errno;
    if (!S_ISREG(about.st_mode) || about.st_nlink != 1)
        rc = -EPERM; /* somebody else's, who has a name for it */
    else
        rc = kp_slots_plan((uint64_t)about.st_size, &window->slots);
    if (!rc && getrandom(window->id, sizeof(window->id), 0) != sizeof(window->id))
        rc = -EIO;
    return rc ? rc : write_head(window);
}

/* With rings that begin anew. The arena stays as it is: a process that lost its worker may still have memory in it, and then
 * has the guest's lock, which is only known there. */
static int renew(const struct relay_window *window, uint64_t at)
{
    static const char words[KP_RINGS_AT];

    if (pwrite(window->fd, words, sizeof(words), (off_t)at) != sizeof(words))
        return -EIO;
    return write_head(window);
}

int relay_window_take(struct relay *relay, uint64_t *at)
{
    struct relay_window *window = &relay->window;
    char path[64];
    int fd, rc = -EAGAIN;

    if (window->fd < 0)
        return -ENODEV;
    snprintf(path, sizeof(path), "/proc/self/fd/%d", window->fd);
    fd = open(path, O_RDWR | O_CLOEXEC); /* as its own: locks are of who opened the file */
    if (fd < 0)
        return -errno;
    for (unsigned i = 0; i < window->slots.count && rc == -EAGAIN; i++) {
        *at = KP_SLOTS_AT + window->next++ % window->slots.count * window->slots.bytes;
        rc = kp_slots_lock(fd, *at, window->slots.bytes, false);
    }
    if (!rc)
        rc = renew(window, *at);
    if (!rc)
        return fd;
    close(fd);
    if (rc != -EAGAIN)
        kp_log_rated(&relay->rate, KP_WARNING, "shared memory: no window: %s", strerror(-rc));
    return rc;
}
