/* See ring.h. The order that loses no wake-up: a waiter says how it waits, then looks at the other's counter once more;
 * the other moves its counter, then looks how the waiter waits. All four are sequentially consistent. */
#define _GNU_SOURCE
#include "ring.h"

#include <errno.h>
#include <linux/futex.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NAP_MS 20    /* in the futex; then the lifeline is looked at: how late an end of a sleeping peer is noticed */
#define LOOK_MS 10   /* a ring that is never empty is looked after that often */
#define SPINS 150    /* a pause each: 2 to 6 us on x86-64, less than a sleep and a wake-up cost */
#define FAR_SPINS 1000 /* likewise: there a wake-up crosses a network device */
#define REST_NS 50000 /* of a far writer that finds no room: the other side needs longer for a ring of bytes */
#define VAIN_MAX 4   /* waits that spin in vain until it is given up */
#define RETRY 64     /* of the waits after that, one spins */
#define PIECE 65536u /* published at once: the reader copies one while the writer copies the next */

enum { AWAKE, AT_FUTEX, AT_SOCKET };

void kp_ring_init(struct kp_ring *ring, struct kp_ring_words *words, unsigned char *bytes, int fd, bool far)
{
    *ring = (struct kp_ring){.words = words, .bytes = bytes, .fd = fd, .far = far};
}

/* True where the word moved on while spinning. Where that was in vain lately (the other side is busy, or has no processor
 * of its own) it is tried once in a while only. */
static bool spun(struct kp_ring *ring, _Atomic uint32_t *word, uint32_t seen)
{
    static _Atomic int processors;

    if (atomic_load_explicit(&processors, memory_order_relaxed) == 0)
        atomic_store_explicit(&processors, (int)sysconf(_SC_NPROCESSORS_ONLN), memory_order_relaxed);
    if (atomic_load_explicit(&processors, memory_order_relaxed) == 1)
        return false;
    if (ring->vain >= VAIN_MAX && ++ring->vain % RETRY != 0)
        return false;
    for (int i = 0; i < (ring->far ? FAR_SPINS : SPINS); i++) {
        if (atomic_load_explicit(word, memory_order_acquire) != seen) {
            ring->vain = 0;
            return true;
        }
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    ring->vain++;
    return false;
}

/* Sleeps while the word is `seen`, NAP_MS at most; true where it slept that long. */
static bool napped(_Atomic uint32_t *word, uint32_t seen)
{
    struct timespec limit = {.tv_nsec = NAP_MS * 1000000};

    return syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, NULL, 0) != 0 && errno == ETIMEDOUT;
}

/* The waiter's note is taken away with the wake-up, so that the next move makes no system call for the same sleep. */
static void wake(struct kp_ring *ring, _Atomic uint32_t *word, _Atomic uint32_t *note)
{
    uint32_t how = atomic_load(note);

    if (how == AWAKE)
        return;
    if (how == AT_FUTEX && atomic_compare_exchange_strong(note, &how, AWAKE))
        syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
    if (how == AT_SOCKET && atomic_compare_exchange_strong(note, &how, AWAKE))
        (void)!send(ring->fd, "", 1, MSG_NOSIGNAL | MSG_DONTWAIT); /* full: bells are waiting already */
}

static bool cut(const struct kp_ring *ring)
{
    struct pollfd line = {.fd = ring->fd, .events = POLLRDHUP};

    return poll(&line, 1, 0) != 0 && line.revents != 0;
}

/* From here on, only what was in the ring now is read, and nothing waits for room. */
static void end(struct kp_ring *ring)
{
    ring->ended = true;
    ring->end = atomic_load(&ring->words->written);
}

/* A busy ring learns of its end here, a sleeping one at the socket. */
static void look(struct kp_ring *ring)
{
    struct timespec time;
    uint64_t now;

    clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
    now = (uint64_t)time.tv_sec * 1000 + (uint64_t)time.tv_nsec / 1000000;
    if (ring->ended || now - ring->looked_ms < LOOK_MS)
        return;
    ring->looked_ms = now;
    if (cut(ring))
        end(ring);
}

static void listen_for_bell(struct kp_ring *ring)
{
    char bells[64];
    ssize_t n = recv(ring->fd, bells, sizeof bells, 0);

    if (n == 0 || (n < 0 && errno != EINTR && errno != EAGAIN))
        end(ring);
}

static void await_bytes(struct kp_ring *ring)
{
    struct kp_ring_words *words = ring->words;

    if (spun(ring, &words->written, ring->at))
        return;
    atomic_store(&words->reader, ring->far ? AT_SOCKET : AT_FUTEX);
    if (atomic_load(&words->written) == ring->at && (ring->far || napped(&words->written, ring->at))) {
        atomic_store(&words->reader, AT_SOCKET);
        if (atomic_load(&words->written) == ring->at)
            listen_for_bell(ring);
    }
    atomic_store(&words->reader, AWAKE);
}

ssize_t kp_ring_read(struct kp_ring *ring, void *to, size_t room)
{
    struct kp_ring_words *words = ring->words;

    for (;;) {
        look(ring);
        uint32_t written = ring->ended ? ring->end : atomic_load_explicit(&words->written, memory_order_acquire);
        uint32_t ready = written - ring->at, from = ring->at % KP_RING_BYTES;
        if (ready > KP_RING_BYTES)
            return -EPROTO;
        if (ready > 0) {
            size_t n = ready < room ? ready : room;
            size_t first = n < KP_RING_BYTES - from ? n : KP_RING_BYTES - from;
            memcpy(to, ring->bytes + from, first);
            memcpy((char *)to + first, ring->bytes, n - first);
            ring->at += (uint32_t)n;
            atomic_store(&words->taken, ring->at);
            wake(ring, &words->taken, &words->writer);
            return (ssize_t)n;
        }
        if (ring->ended)
            return 0;
        await_bytes(ring);
    }
}

static void publish(struct kp_ring *ring)
{
    atomic_store(&ring->words->written, ring->at);
    wake(ring, &ring->words->written, &ring->words->reader);
}

/* The ring was full with the reader at `taken`. */
static int await_room(struct kp_ring *ring, uint32_t taken)
{
    static const struct timespec rest = {.tv_nsec = REST_NS};
    struct kp_ring_words *words = ring->words;

    if (spun(ring, &words->taken, taken))
        return 0;
    if (ring->far) { /* the socket's bells are for this side's reader, which may be another thread */
        nanosleep(&rest, NULL);
    } else {
        atomic_store(&words->writer, AT_FUTEX);
        if (atomic_load(&words->taken) == taken)
            napped(&words->taken, taken);
        atomic_store(&words->writer, AWAKE);
    }
    look(ring);
    return ring->ended ? -EPIPE : 0;
}

static int write_part(struct kp_ring *ring, const unsigned char *from, size_t left)
{
    while (left > 0) {
        uint32_t taken = atomic_load_explicit(&ring->words->taken, memory_order_acquire);
        uint32_t used = ring->at - taken, to = ring->at % KP_RING_BYTES;
        if (used > KP_RING_BYTES)
            return -EPROTO;
        if (used == KP_RING_BYTES) {
            int rc;
            publish(ring);
            if ((rc = await_room(ring, taken)) != 0)
                return rc;
            continue;
        }
        size_t n = KP_RING_BYTES - used < left ? KP_RING_BYTES - used : left;
        n = n < PIECE ? n : PIECE;
        n = n < KP_RING_BYTES - to ? n : KP_RING_BYTES - to;
        memcpy(ring->bytes + to, from, n);
        ring->at += (uint32_t)n;
        from += n;
        left -= n;
        if (left > 0)
            publish(ring);
    }
    return 0;
}

int kp_ring_write(struct kp_ring *ring, const struct iovec *part, int parts)
{
    int rc = 0;

    for (int i = 0; i < parts && rc == 0; i++)
        rc = write_part(ring, part[i].iov_base, part[i].iov_len);
    publish(ring);
    return rc;
}
