/* See window.h. */
#define _GNU_SOURCE
#include "window.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)

void kp_window_rings(const struct kp_window *window, bool session, int fd, struct kp_ring *in, struct kp_ring *out)
{
    struct kp_window_head *head = (struct kp_window_head *)(void *)window->base;
    unsigned char *first = window->base + KP_RINGS_AT;

    kp_ring_init(session ? in : out, &head->to_session, first, fd, window->far);
    kp_ring_init(session ? out : in, &head->to_shim, first + KP_RING_BYTES, fd, window->far);
}

bool kp_window_possible(int fd)
{
    int domain = 0;
    socklen_t length = sizeof domain;

    return getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 && domain == AF_UNIX;
}

static int map(struct kp_window *window, int memory, uint64_t at, uint64_t bytes, bool far)
{
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory, (off_t)at);

    if (base == MAP_FAILED)
        return -errno;
    *window = (struct kp_window){.base = base, .arena = bytes - KP_ARENA_AT, .far = far};
    return 0;
}

int kp_window_map(struct kp_window *window, int fd, uint64_t at, uint64_t bytes)
{
    if (bytes < KP_ARENA_AT + KP_ARENA_MIN || bytes > KP_WINDOW_BYTES || bytes % KP_ARENA_MIN != 0 || at % KP_ARENA_MIN != 0)
        return -EPROTO;
    return map(window, fd, at, bytes, true);
}

void kp_window_keep_from_children(const struct kp_window *window)
{
    madvise(window->base, KP_ARENA_AT, MADV_DONTFORK); /* a child must not touch its parent's rings */
}

int kp_window_make(struct kp_window *window, int *memory)
{
    int rc;

    *memory = memfd_create("kvmpool", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*memory < 0)
        return -errno;
    rc = ftruncate(*memory, (off_t)KP_WINDOW_BYTES) == 0 && fcntl(*memory, F_ADD_SEALS, SEALS) == 0 ? 0 : -errno;
    if (rc == 0)
        rc = map(window, *memory, 0, KP_WINDOW_BYTES, false);
    if (rc != 0) {
        close(*memory);
        *memory = -1;
    }
    return rc;
}

int kp_window_open(struct kp_window *window, int memory)
{
    struct stat about;

    if (fstat(memory, &about) != 0)
        return -errno;
    if ((unsigned long long)about.st_size != KP_WINDOW_BYTES || (fcntl(memory, F_GET_SEALS) & SEALS) != SEALS)
        return -EPROTO;
    int rc = map(window, memory, 0, KP_WINDOW_BYTES, false);
    if (rc == 0)
        kp_window_keep_from_children(window);
    return rc;
}

void kp_window_close(struct kp_window *window)
{
    if (window->base != NULL)
        munmap(window->base, KP_ARENA_AT + window->arena);
    window->base = NULL;
}

int kp_window_welcome_write(int fd, const struct kp_welcome *welcome, int memory)
{
    struct kp_frame frame = {.magic = KP_MAGIC, .op = KP_OP_WELCOME, .length = sizeof *welcome};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof memory)];
    } control = {{0}};
    struct iovec first = {&frame, sizeof frame};
    struct msghdr message = {.msg_iov = &first, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    ssize_t n;

    if (memory < 0)
        return kp_welcome_write(fd, welcome);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof memory);
    memcpy(CMSG_DATA(head), &memory, sizeof memory);
    do
        n = sendmsg(fd, &message, MSG_NOSIGNAL);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        return -errno;
    if ((size_t)n < sizeof frame)
        return -EIO; /* 16 bytes into an empty buffer */
    return kp_write_full(fd, welcome, sizeof *welcome);
}

/* The first descriptor of the message; further ones, which nobody asked for, are closed. */
static void keep_one(struct cmsghdr *head, int *memory)
{
    size_t count = (head->cmsg_len - CMSG_LEN(0)) / sizeof *memory;

    for (size_t i = 0; i < count; i++) {
        int fd;
        memcpy(&fd, CMSG_DATA(head) + i * sizeof fd, sizeof fd);
        if (*memory < 0)
            *memory = fd;
        else
            close(fd);
    }
}

/* The header of the first frame, with what came along. */
static int read_header(int fd, void *header, int *memory)
{
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof *memory)];
    } control;
    struct iovec first = {header, KP_HEADER_BYTES};
    struct msghdr message = {.msg_iov = &first, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;

    do
        n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n <= 0)
        return n == 0 ? -ECONNRESET : -errno;
    for (struct cmsghdr *head = CMSG_FIRSTHDR(&message); head != NULL; head = CMSG_NXTHDR(&message, head))
        if (head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS)
            keep_one(head, memory);
    return kp_read_full(fd, (char *)header + n, KP_HEADER_BYTES - (size_t)n);
}

int kp_window_welcome_read(int fd, struct kp_welcome *welcome, int *memory)
{
    unsigned char header[KP_HEADER_BYTES], body[sizeof *welcome];
    struct kp_frame frame;
    int rc;

    *memory = -1;
    rc = read_header(fd, header, memory);
    if (rc == 0)
        rc = kp_frame_check(header, &frame);
    if (rc == 0 && (frame.op != KP_OP_WELCOME || frame.length != sizeof body))
        rc = -EPROTO;
    if (rc == 0)
        rc = kp_read_full(fd, body, sizeof body);
    if (rc == 0)
        rc = kp_welcome_check(body, sizeof body, welcome);
    if (rc != 0 && *memory >= 0) {
        close(*memory);
        *memory = -1;
    }
    return rc;
}
