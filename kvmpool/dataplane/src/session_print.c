/* What kernels print. The driver writes it to the standard output of its process, this one, when it synchronises; here that is
 * a pipe, and what comes out of it goes to the guest in front of the next reply that CUDA flushes at.
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

/* With the lock held: takes what the pipe holds now into the ring; no more than a ring, however fast the pipe fills. */
static void drain(struct kp_print *print)
{
    size_t taken = 0;

    while (taken < KP_PRINT_MAX) {
        size_t end = (print->at + print->used) % KP_PRINT_MAX;
        ssize_t n = read(print->fd, print->text + end, KP_PRINT_MAX - end);
        if (n <= 0)
            return;
        taken += (size_t)n;
        print->used += (size_t)n;
        if (print->used > KP_PRINT_MAX) {
            print->at = (print->at + print->used - KP_PRINT_MAX) % KP_PRINT_MAX;
            print->used = KP_PRINT_MAX;
        }
    }
}

/* Keeps the pipe from filling up: the driver would wait for room, and whoever waits for the driver too. */
static void *drain_for_ever(void *argument)
{
    struct kp_print *print = argument;
    struct pollfd wait = {.fd = print->fd, .events = POLLIN};

    for (;;) {
        if (poll(&wait, 1, -1) < 0)
            continue;
        pthread_mutex_lock(&print->lock);
        drain(print);
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

int kp_print_start(struct kp_server *s)
{
    int ends[2];

    s->print.text = mmap(NULL, KP_PRINT_MAX, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s->print.text == MAP_FAILED || pipe2(ends, O_CLOEXEC) != 0)
        return -errno;
    s->print.fd = ends[0];
    if (fcntl(ends[0], F_SETFL, O_NONBLOCK) != 0 || dup2(ends[1], STDOUT_FILENO) < 0)
        return -errno;
    close(ends[1]);
    return start_thread(&s->print);
}

static int give(struct kp_server *s, uint32_t seq, const unsigned char *text, size_t bytes)
{
    int rc = 0;

    while (rc == 0 && bytes > 0) {
        uint32_t n = bytes < KP_BODY_MAX ? (uint32_t)bytes : KP_BODY_MAX;
        struct kp_frame frame = {.magic = KP_MAGIC, .op = KP_OP_PRINTED, .length = n, .seq = seq};
        struct iovec part[2] = {{&frame, sizeof frame}, {(void *)(uintptr_t)text, n}};
        rc = kp_put(s, part, 2);
        text += n;
        bytes -= n;
    }
    return rc;
}

int kp_print_give(struct kp_server *s, uint32_t seq)
{
    struct kp_print *print = &s->print;
    int rc = 0;

    fflush(stdout); /* the driver's words may still be in the C library */
    pthread_mutex_lock(&print->lock);
    drain(print);
    if (print->used > 0) {
        size_t first = print->used < KP_PRINT_MAX - print->at ? print->used : KP_PRINT_MAX - print->at;
        rc = give(s, seq, print->text + print->at, first);
        if (rc == 0)
            rc = give(s, seq, print->text, print->used - first);
        print->at = print->used = 0;
    }
    pthread_mutex_unlock(&print->lock);
    return rc;
}
