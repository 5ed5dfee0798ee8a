/* The memory that a guest process and its session share on one host: two rings for frames, and an arena for page-locked
 * memory that the program allocates, so that its copies need no bytes on the way.
 *
 * For a process of its own host the session makes it, sealed against being resized, and sends it with its welcome; the shim
 * maps it only where size and seals are right: then no access can fault, whatever the other side does. For a process in a
 * virtual machine it is a place in a device of shared memory (slots.h); there only that domain's QEMU could make an access of
 * the session fault, which ends that session. Pages cost memory once they are touched.
 */
#ifndef KVMPOOL_WINDOW_H
#define KVMPOOL_WINDOW_H

#include "frame.h"
#include "ring.h"

#define KP_ARENA_BYTES (512ull << 20) /* the most page-locked memory of a guest process; beyond it copies go through the ring */
#define KP_ARENA_MIN (1ull << 20)
#define KP_ARENA_CHUNK (8ull << 20)   /* registered with the driver at once; a copy is cut where one ends */
#define KP_ARENA_CHUNKS (KP_ARENA_BYTES / KP_ARENA_CHUNK)
_Static_assert(KP_ARENA_CHUNKS <= 64, "a bit for each in a word");
#define KP_RINGS_AT 4096ull
#define KP_ARENA_AT (4ull << 20)
#define KP_WINDOW_BYTES (KP_ARENA_AT + KP_ARENA_BYTES)

struct kp_window {
    unsigned char *base; /* NULL: none */
    uint64_t arena;      /* bytes of it, at most KP_ARENA_BYTES */
    bool far;            /* the other side is in another machine */
};

struct kp_window_head {
    struct kp_ring_words to_session, to_shim;
};
_Static_assert(sizeof(struct kp_window_head) <= KP_RINGS_AT, "rings behind their words");
_Static_assert(KP_RINGS_AT + 2ull * KP_RING_BYTES <= KP_ARENA_AT, "arena behind the rings");

/* The two ends' rings over the socket `fd`; `session`: this is the session's end. */
void kp_window_rings(const struct kp_window *window, bool session, int fd, struct kp_ring *in, struct kp_ring *out);

/* True where the socket's other end is on this host and may be sent a window. */
bool kp_window_possible(int fd);

/* 0 or a negative errno; *memory is a descriptor to send and close. */
int kp_window_make(struct kp_window *window, int *memory);

/* Maps what the other side sent: 0, -EPROTO where it is no sealed window, or another negative errno. */
int kp_window_open(struct kp_window *window, int memory);
void kp_window_close(struct kp_window *window);

/* Maps `bytes` from `at` on of a device, or of the host's file behind it: 0, -EPROTO where that is no window, or another
 * negative errno. The mapping keeps what `fd` has locked. */
int kp_window_map(struct kp_window *window, int fd, uint64_t at, uint64_t bytes);
void kp_window_keep_from_children(const struct kp_window *window); /* the rings; the arena is shared with them */

/* A welcome with the window's descriptor, or with none where `memory` is -1. */
int kp_window_welcome_write(int fd, const struct kp_welcome *welcome, int memory);
int kp_window_welcome_read(int fd, struct kp_welcome *welcome, int *memory);

#endif
