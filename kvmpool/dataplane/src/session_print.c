/* What kernels print, and what their assertions say. The driver writes it to the standard output and error of its process, this
 * one, when it synchronises; here those are pipes, and what comes out of them goes to the guest in front of the next reply that
 * CUDA flushes at. The session's own log has left the standard error before.
 *
 * As in CUDA, text that nobody fetches is overwritten, oldest first: no guest makes the session grow, or wait.
 */
#define _GNU_SOURCE
#include "session_state.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define STACK_BYTES (64 * 1024)

extern void __sanitizer_set_report_fd(void *fd) __attribute__((weak)); /* there where the build has checks */

/* With the lock held: takes what the pipe holds now into the ring; no more than a ring, however fast the pipe fills. */
static void drain(struct kp_spool *spool)
{
    size_t taken = 0;

    while (taken < KP_PRINT_MAX) {
        size_t end = (spool->at + spool->used) % KP_PRINT_MAX;
        ssize_t n = read(spool->fd, spool->text + end, KP_PRINT_MAX - end);
        if (n <= 0)
            return;
        taken += (size_t)n;
        spool->used += (size_t)n;
        if (spool->used > KP_PRINT_MAX) {
            spool->at = (spool->at + spool->used - KP_PRINT_MAX) % KP_PRINT_MAX;
            spool->used = KP_PRINT_MAX;
        }
    }
}

/* Keeps the pipes from filling up: the driver would wait for room, and whoever waits for the driver too. */
static void *drain_for_ever(void *argument)
{
    struct kp_print *print = argument;
    struct pollfd wait[KP_SPOOLS];

    for (unsigned i = 0; i < KP_SPOOLS; i++)
        wait[i] = (struct pollfd){.fd = print->spool[i].fd, .events = POLLIN};
    for (;;) {
        if (poll(wait, KP_SPOOLS, -1) < 0)
            continue;
        pthread_mutex_lock(&print->lock);
        for (unsigned i = 0; i < KP_SPOOLS; i++)
            drain(&print->spool[i]);
        pthread_mutex_unlock(&print->lock);
    }
    return NULL;
}

static int start_thread(struct kp_print *print)
{
    pthread_attr_t attr;
    pthread_t thread;
    int rc = pthread_attr_init(&attr);

    if (rc != 0)
        return -rc;
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    rc = pthread_create(&thread, &attr, drain_for_ever, print);
    pthread_attr_destroy(&attr);
    return -rc;
}

/* Makes `fd` a pipe into the spool. */
static int start_spool(struct kp_spool *spool, int fd, uint16_t op)
{
    int ends[2];

    spool->op = op;
    spool->text = mmap(NULL, KP_PRINT_MAX, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (spool->text == MAP_FAILED || pipe2(ends, O_CLOEXEC) != 0)
        return -errno;
    spool->fd = ends[0];
    if (fcntl(ends[0], F_SETFL, O_NONBLOCK) != 0 || dup2(ends[1], fd) < 0)
        return -errno;
    close(ends[1]);
    return 0;
}

/* What is not the driver's keeps its way: the session's log, and the reports of a build with checks. */
static int leave_stderr(struct kp_server *s)
{
    int fd = fcntl(STDERR_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);

    if (fd < 0)
        return -errno;
    if (s->log_fd == STDERR_FILENO)
        s->log_fd = fd;
    if (__sanitizer_set_report_fd != NULL)
        __sanitizer_set_report_fd((void *)(intptr_t)fd);
    return 0;
}

int kp_print_start(struct kp_server *s)
{
    int rc = leave_stderr(s);

    if (rc == 0)
        rc = start_spool(&s->print.spool[0], STDOUT_FILENO, KP_OP_PRINTED);
    if (rc == 0)
        rc = start_spool(&s->print.spool[1], STDERR_FILENO, KP_OP_ASSERTED);
    return rc == 0 ? start_thread(&s->print) : rc;
}

static int give(struct kp_server *s, uint32_t seq, uint16_t op, const unsigned char *text, size_t bytes)
{
    int rc = 0;

    while (rc == 0 && bytes > 0) {
        uint32_t n = bytes < KP_BODY_MAX ? (uint32_t)bytes : KP_BODY_MAX;
        struct kp_frame frame = {.magic = KP_MAGIC, .op = op, .length = n, .seq = seq};
        struct iovec part[2] = {{&frame, sizeof frame}, {(void *)(uintptr_t)text, n}};
        rc = kp_put(s, part, 2);
        text += n;
        bytes -= n;
    }
    return rc;
}

static int give_spool(struct kp_server *s, uint32_t seq, struct kp_spool *spool)
{
    size_t first = spool->used < KP_PRINT_MAX - spool->at ? spool->used : KP_PRINT_MAX - spool->at;
    int rc = give(s, seq, spool->op, spool->text + spool->at, first);

    if (rc == 0)
        rc = give(s, seq, spool->op, spool->text, spool->used - first);
    spool->at = spool->used = 0;
    return rc;
}

int kp_print_give(struct kp_server *s, uint32_t seq)
{
    struct kp_print *print = &s->print;
    int rc = 0;

    fflush(stdout); /* the driver's words may still be in the C library */
    fflush(stderr);
    pthread_mutex_lock(&print->lock);
    for (unsigned i = 0; i < KP_SPOOLS && rc == 0; i++) {
        drain(&print->spool[i]);
        rc = give_spool(s, seq, &print->spool[i]);
    }
    pthread_mutex_unlock(&print->lock);
    return rc;
}
