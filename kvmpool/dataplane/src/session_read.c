/* Takes the guest's bytes off the socket or the ring, through one buffer, and checks each frame before anybody acts on it. */
#define _GNU_SOURCE
#include "session_state.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS 20000

/* While bulk is on its way the next piece is some us off, and a sleep costs the writer more than that: it has to wake this one.
 * -EAGAIN: nothing came soon. */
static ssize_t read_soon(int fd, void *to, size_t room)
{
    struct timespec begun, now;
    ssize_t n;

    clock_gettime(CLOCK_MONOTONIC, &begun);
    do {
        n = recv(fd, to, room, MSG_DONTWAIT);
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (n < 0 && errno == EAGAIN && (now.tv_sec - begun.tv_sec) * 1000000000l + now.tv_nsec - begun.tv_nsec < SPIN_NS);
    return n < 0 ? -errno : n;
}

ssize_t kp_read_more(struct kp_server *s, void *to, size_t room)
{
    ssize_t n;

    if (s->window.base != NULL)
        return kp_ring_read(&s->from_guest, to, room);
    if (room > KP_READ_BYTES && (n = read_soon(s->fd, to, room)) != -EAGAIN && n != -EINTR)
        return n;
    do
        n = read(s->fd, to, room);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

int kp_take(struct kp_server *s, void *to, size_t bytes)
{
    unsigned char *at = to;

    while (bytes > 0) {
        if (s->in_at < s->in_end) {
            size_t n = s->in_end - s->in_at < bytes ? s->in_end - s->in_at : bytes;
            if (at != NULL) {
                memcpy(at, s->in + s->in_at, n);
                at += n;
            }
            s->in_at += n;
            bytes -= n;
            continue;
        }
        kp_meter_idle(s);
        bool direct = at != NULL && bytes >= KP_READ_BYTES / 4;
        unsigned char *to_here = direct ? at : s->in;
        size_t room = direct ? bytes : KP_READ_BYTES;
        ssize_t n = s->host != NULL ? kp_host_read(s, to_here, room) : kp_read_more(s, to_here, room);
        if (n <= 0)
            return n == 0 ? -ECONNRESET : (int)n;
        if (direct) {
            at += n;
            bytes -= (size_t)n;
        } else {
            s->in_at = 0;
            s->in_end = (size_t)n;
        }
    }
    return 0;
}

int kp_take_bulk_frame(struct kp_server *s, uint32_t seq, size_t left, uint32_t *length)
{
    unsigned char header[KP_HEADER_BYTES];
    struct kp_frame frame;
    int rc = kp_take(s, header, sizeof header);

    if (rc == 0)
        rc = kp_frame_check(header, &frame);
    if (rc == 0 && (frame.op != KP_OP_DATA || frame.seq != seq || frame.flags != 0))
        rc = -EPROTO;
    if (rc == 0 && (frame.length == 0 || frame.length > left))
        rc = -EPROTO;
    if (rc == 0)
        *length = frame.length;
    return rc;
}

int kp_drain_bulk(struct kp_server *s, uint32_t seq, size_t left)
{
    uint32_t length;
    int rc = 0;

    while (rc == 0 && left > 0) {
        if ((rc = kp_take_bulk_frame(s, seq, left, &length)) == 0)
            rc = kp_take(s, NULL, length);
        left -= rc == 0 ? length : 0;
    }
    return rc;
}
