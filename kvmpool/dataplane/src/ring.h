/* A ring of bytes in memory shared with a process that is not trusted: one side writes, the other reads.
 *
 * What both can see is two counters and two notes on how each side waits. Each side keeps its own counter to itself and
 * never reads it back; the other's is read once, checked against the ring's size, and used from a copy. Bytes are copied
 * out before anybody decodes them, so nothing that was checked can change.
 *
 * The socket that the two met on stays open. It is the lifeline: its end is the ring's end. It is also the bell of a
 * reader that sleeps for long: spinning, where it helped lately, costs a few microseconds, then a futex waits NAP_MS, then
 * the reader blocks on the socket until the writer sends one byte. An idle connection costs nothing, and no thread watches it.
 * Where the two sides have a kernel each (a guest and its host) there is no futex: the reader goes from spinning to the socket.
 * This file does not know frames.
 */
#ifndef KVMPOOL_RING_H
#define KVMPOOL_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#define KP_RING_BYTES (1u << 20) /* a power of two: the counters wrap */

struct kp_ring_words {
    _Alignas(64) _Atomic uint32_t written; /* bytes so far, the writer's word */
    _Atomic uint32_t writer;               /* how it waits for room */
    _Alignas(64) _Atomic uint32_t taken;   /* likewise, the reader's */
    _Atomic uint32_t reader;
};

/* One end. Its owner serialises its calls. */
struct kp_ring {
    struct kp_ring_words *words;
    unsigned char *bytes;
    int fd;             /* the lifeline */
    bool far;           /* the other side is under another kernel: no futex reaches it */
    uint32_t at;        /* this end's own counter */
    uint64_t looked_ms; /* at the lifeline */
    unsigned vain;      /* waits in a row in which spinning did not help */
    bool ended;         /* it was cut: what is written later is not read */
    uint32_t end;
};

void kp_ring_init(struct kp_ring *ring, struct kp_ring_words *words, unsigned char *bytes, int fd, bool far);

/* At least one byte and at most `room`; 0 at the end, -EPROTO where the writer's counter cannot be. Blocking. */
ssize_t kp_ring_read(struct kp_ring *ring, void *to, size_t room);

/* All bytes of the parts in turn: 0, -EPIPE where nobody will read them, -EPROTO. Blocking. Leaves the parts alone. */
int kp_ring_write(struct kp_ring *ring, const struct iovec *part, int parts);

#endif
