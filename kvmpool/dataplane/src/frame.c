/* Reads, writes and checks frames. See frame.h. */
#define _GNU_SOURCE
#include "frame.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static uint32_t body_max(uint16_t op)
{
    switch (op) {
    case KP_OP_HELLO: return sizeof(struct kp_hello);
    case KP_OP_WELCOME: return sizeof(struct kp_welcome);
    case KP_OP_BYE: return 0;
    case KP_OP_CONTEXT: return 8;
    case KP_OP_FIGURES: return sizeof(struct kp_figures);
    default: return KP_BODY_MAX;
    }
}

int kp_frame_check(const void *header, struct kp_frame *out)
{
    struct kp_frame frame;

    memcpy(&frame, header, sizeof frame);
    if (frame.magic != KP_MAGIC || frame.zero != 0)
        return -EPROTO;
    if (frame.op == 0 || frame.op >= KP_OP_MAX || (frame.op > KP_OP_ASSERTED && frame.op < KP_OP_CALLS))
        return -EPROTO;
    if ((frame.flags & ~KP_FLAGS_KNOWN) != 0 || frame.length > body_max(frame.op))
        return -EPROTO;
    *out = frame;
    return 0;
}

/* A terminated text of printable ASCII; what follows the terminator must be zero, so that equal means equal. */
static int text_check(const char *text, size_t room)
{
    size_t length = strnlen(text, room);

    if (length == room)
        return -EPROTO;
    for (size_t i = 0; i < room; i++)
        if (i < length ? (text[i] < 0x20 || text[i] > 0x7e) : text[i] != 0)
            return -EPROTO;
    return 0;
}

int kp_claim_name_check(const char *name, size_t room)
{
    if (text_check(name, room) != 0 || name[0] == 0)
        return -EPROTO;
    for (const char *c = name; *c != 0; c++) {
        int letter = (*c >= 'a' && *c <= 'z') || (*c >= 'A' && *c <= 'Z');
        int digit = *c >= '0' && *c <= '9';
        if (!letter && !digit && *c != '-' && *c != '_')
            return -EPROTO;
    }
    return 0;
}

int kp_hello_check(const void *body, size_t length, struct kp_hello *out)
{
    struct kp_hello hello;

    if (length != sizeof hello)
        return -EPROTO;
    memcpy(&hello, body, sizeof hello);
    if (hello.wire_version != KP_WIRE_VERSION || (hello.flags & ~KP_HELLO_FLAGS_KNOWN) != 0)
        return -EPROTO;
    if (kp_claim_name_check(hello.claim, sizeof hello.claim) != 0 ||
        text_check(hello.token, sizeof hello.token) != 0 || text_check(hello.program, sizeof hello.program) != 0)
        return -EPROTO;
    if (hello.va_base < KP_VA_MIN || hello.va_base > KP_VA_MAX - KP_VA_WINDOW || hello.va_base % KP_VA_PAGE != 0)
        return -EPROTO;
    *out = hello;
    return 0;
}

int kp_welcome_check(const void *body, size_t length, struct kp_welcome *out)
{
    struct kp_welcome welcome;

    if (length != sizeof welcome)
        return -EPROTO;
    memcpy(&welcome, body, sizeof welcome);
    if (welcome.status > 0 || welcome.status < -4095)
        return -EPROTO;
    if (welcome.window_at > KP_DEVICE_MAX || welcome.window_bytes > KP_DEVICE_MAX - welcome.window_at)
        return -EPROTO;
    if (text_check(welcome.pci, sizeof welcome.pci) != 0 || text_check(welcome.text, sizeof welcome.text) != 0)
        return -EPROTO;
    *out = welcome;
    return 0;
}

int kp_figures_check(const void *body, size_t length, struct kp_figures *out)
{
    struct kp_figures figures;

    if (length != sizeof figures)
        return -EPROTO;
    memcpy(&figures, body, sizeof figures);
    if (text_check(figures.name, sizeof figures.name) != 0 || text_check(figures.driver, sizeof figures.driver) != 0)
        return -EPROTO;
    if (figures.processes > KP_FIGURE_PROCESSES || figures.busy_known > 1 || figures.cuda_version < 0 || figures.major < 0 ||
        figures.minor < 0 || figures.multiprocessors < 0)
        return -EPROTO;
    *out = figures;
    return 0;
}

int kp_read_full(int fd, void *buffer, size_t length)
{
    char *at = buffer;

    while (length > 0) {
        ssize_t n = read(fd, at, length);
        if (n == 0)
            return -ECONNRESET;
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        at += n;
        length -= (size_t)n;
    }
    return 0;
}

void kp_socket_widen(int fd)
{
    int domain = 0, bytes = KP_BODY_MAX;
    socklen_t length = sizeof domain;

    if (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) != 0 || domain != AF_UNIX)
        return;
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes) != 0) /* beyond wmem_max, for root */
        setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
}

int kp_write_full(int fd, const void *buffer, size_t length)
{
    const char *at = buffer;

    while (length > 0) {
        ssize_t n = send(fd, at, length, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        at += n;
        length -= (size_t)n;
    }
    return 0;
}

int kp_frame_read(int fd, struct kp_frame *frame, void *body, size_t room)
{
    unsigned char header[KP_HEADER_BYTES];
    int rc = kp_read_full(fd, header, sizeof header);

    if (rc == 0)
        rc = kp_frame_check(header, frame);
    if (rc == 0 && frame->length > room)
        rc = -EPROTO;
    return rc == 0 ? kp_read_full(fd, body, frame->length) : rc;
}

int kp_write_parts(int fd, const struct iovec *part, int parts)
{
    struct iovec left[2] = {part[0], parts > 1 ? part[1] : (struct iovec){NULL, 0}};
    struct msghdr message = {.msg_iov = left, .msg_iovlen = 2};

    while (left[0].iov_len + left[1].iov_len > 0) {
        ssize_t n = left[1].iov_len == 0 ? send(fd, left[0].iov_base, left[0].iov_len, MSG_NOSIGNAL)
                                         : sendmsg(fd, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -errno;
        for (int i = 0; i < 2; i++) {
            size_t gone = (size_t)n < left[i].iov_len ? (size_t)n : left[i].iov_len;
            if (gone > 0) /* a part without bytes may be nowhere */
                left[i].iov_base = (char *)left[i].iov_base + gone;
            left[i].iov_len -= gone;
            n -= (ssize_t)gone;
        }
    }
    return 0;
}

int kp_frame_write(int fd, uint16_t op, uint16_t flags, uint32_t seq, const void *body, uint32_t length)
{
    struct kp_frame frame = {.magic = KP_MAGIC, .op = op, .flags = flags, .length = length, .seq = seq};
    struct iovec part[2] = {{&frame, sizeof frame}, {(void *)(uintptr_t)body, length}};

    return length > body_max(op) ? -EMSGSIZE : kp_write_parts(fd, part, 2);
}

int kp_hello_read(int fd, struct kp_hello *out)
{
    unsigned char body[sizeof(struct kp_hello)];
    struct kp_frame frame;
    int rc = kp_frame_read(fd, &frame, body, sizeof body);

    if (rc == 0 && frame.op != KP_OP_HELLO)
        rc = -EPROTO;
    return rc == 0 ? kp_hello_check(body, frame.length, out) : rc;
}

int kp_hello_write(int fd, const struct kp_hello *hello)
{
    return kp_frame_write(fd, KP_OP_HELLO, 0, 0, hello, sizeof *hello);
}

int kp_welcome_read(int fd, struct kp_welcome *out)
{
    unsigned char body[sizeof(struct kp_welcome)];
    struct kp_frame frame;
    int rc = kp_frame_read(fd, &frame, body, sizeof body);

    if (rc == 0 && frame.op != KP_OP_WELCOME)
        rc = -EPROTO;
    return rc == 0 ? kp_welcome_check(body, frame.length, out) : rc;
}

int kp_welcome_write(int fd, const struct kp_welcome *welcome)
{
    return kp_frame_write(fd, KP_OP_WELCOME, 0, 0, welcome, sizeof *welcome);
}
