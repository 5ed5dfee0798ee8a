/* loop.h: the one epoll loop of a program: descriptors with a function each, and a tick. No threads, no allocation. */
#ifndef KP_LOOP_H
#define KP_LOOP_H

#include <stdint.h>
#include <sys/epoll.h>

/* Owned by the caller; lives as long as it is watched. `on_event` may close and forget its own or any other watch. */
struct kp_watch {
    void (*on_event)(struct kp_watch *watch, uint32_t events);
    int fd;
};

struct kp_loop {
    int epoll_fd;
    int ended;
};

int kp_loop_open(struct kp_loop *loop);
void kp_loop_close(struct kp_loop *loop);

int kp_loop_watch(struct kp_loop *loop, struct kp_watch *watch, uint32_t events);
int kp_loop_change(struct kp_loop *loop, struct kp_watch *watch, uint32_t events);

/* Stops watching and closes the descriptor (once; -1 afterwards). */
void kp_loop_drop(struct kp_loop *loop, struct kp_watch *watch);

/* Waits for one event, at most `wait_ms` (-1: for ever), and hands it out. One at a time: a watch that a handler just
 * dropped and gave to another descriptor must not see the old one's event. Returns 0, or -errno. */
int kp_loop_turn(struct kp_loop *loop, int wait_ms);

#endif
