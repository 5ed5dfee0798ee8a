/* loop.c: see loop.h. */
#define _GNU_SOURCE
#include "loop.h"

#include <errno.h>
#include <unistd.h>

int kp_loop_open(struct kp_loop *loop)
{
    loop->ended = 0;
    loop->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    return loop->epoll_fd < 0 ? -errno : 0;
}

void kp_loop_close(struct kp_loop *loop)
{
    if (loop->epoll_fd >= 0)
        close(loop->epoll_fd);
    loop->epoll_fd = -1;
}

int kp_loop_watch(struct kp_loop *loop, struct kp_watch *watch, uint32_t events)
{
    struct epoll_event event = { .events = events, .data.ptr = watch };

    return epoll_ctl(loop->epoll_fd, EPOLL_CTL_ADD, watch->fd, &event) ? -errno : 0;
}

int kp_loop_change(struct kp_loop *loop, struct kp_watch *watch, uint32_t events)
{
    struct epoll_event event = { .events = events, .data.ptr = watch };

    return epoll_ctl(loop->epoll_fd, EPOLL_CTL_MOD, watch->fd, &event) ? -errno : 0;
}

void kp_loop_drop(struct kp_loop *loop, struct kp_watch *watch)
{
    if (watch->fd < 0)
        return;
    /* Explicitly: a copy of this descriptor may live on in another process, and epoll would keep reporting it. */
    epoll_ctl(loop->epoll_fd, EPOLL_CTL_DEL, watch->fd, NULL);
    close(watch->fd);
    watch->fd = -1;
}

int kp_loop_turn(struct kp_loop *loop, int wait_ms)
{
    struct epoll_event event;
    int count = epoll_wait(loop->epoll_fd, &event, 1, wait_ms);

    if (count < 0)
        return errno == EINTR ? 0 : -errno;
    if (count > 0) {
        struct kp_watch *watch = event.data.ptr;

        if (watch->fd >= 0)
            watch->on_event(watch, event.events);
    }
    return 0;
}
