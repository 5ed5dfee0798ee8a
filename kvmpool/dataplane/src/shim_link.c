/* Sends calls: one total order for the process, fire-and-forget ones together.
 *
 * A call is appended to `out` under `tx`. The buffer goes out when a call waits for its reply, when it is full, or when
 * the flusher finds it unsent FLUSH_AFTER_NS after its first byte. This file does not know what a call means.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FLUSH_AFTER_NS 50000 /* design 03 section 3.2: 20 to 50 us; the kernel adds its timer slack of 50 us */
#define HOST_BULK_MAX (32u << 20) /* half of what the worker keeps while it cannot go on (session_host.c) */
#define SMALL_BULK 8192u     /* bulk that is copied behind its call rather than sent by a system call of its own */

struct kp_shim kp_shim = {
    .tx = PTHREAD_MUTEX_INITIALIZER,
    .filled = PTHREAD_COND_INITIALIZER,
    .host_idle = PTHREAD_COND_INITIALIZER,
    .link = {.fd = -1, .rx = PTHREAD_MUTEX_INITIALIZER, .idle = PTHREAD_COND_INITIALIZER},
};

/* One or two parts; loses the link where it fails. */
static int put(const struct iovec *part, int parts)
{
    struct kp_link *link = &kp_shim.link;
    int rc = -EPIPE;

    if (!atomic_load(&link->lost))
        rc = link->window.base != NULL ? kp_ring_write(&link->to_worker, part, parts)
                                       : kp_write_parts(link->fd, part, parts);
    if (rc != 0) {
        kp_link_lose(strerror(-rc));
        return rc;
    }
    for (int i = 0; i < parts; i++)
        kp_shim.stats.bytes_out += part[i].iov_len;
    kp_shim.stats.writes++;
    return 0;
}

int kp_link_flush(void)
{
    struct kp_link *link = &kp_shim.link;
    struct iovec part = {link->out, link->filled};

    link->filled = 0;
    return part.iov_len > 0 ? put(&part, 1) : 0;
}

static void *flush_for_ever(void *unused)
{
    struct timespec wait = {.tv_nsec = FLUSH_AFTER_NS};

    (void)unused;
    pthread_mutex_lock(&kp_shim.tx);
    for (;;) {
        while (!kp_shim.flushing)
            pthread_cond_wait(&kp_shim.filled, &kp_shim.tx);
        pthread_mutex_unlock(&kp_shim.tx);
        nanosleep(&wait, NULL);
        pthread_mutex_lock(&kp_shim.tx);
        kp_shim.flushing = false;
        kp_link_flush();
    }
    return NULL;
}

void kp_link_put(uint16_t op, uint16_t flags, uint32_t seq, const uint64_t *numbers, unsigned count, const void *tail,
                 uint32_t tail_bytes)
{
    struct kp_link *link = &kp_shim.link;
    size_t number_bytes = count * sizeof *numbers;
    struct kp_frame frame = {.magic = KP_MAGIC, .op = op, .flags = flags, .seq = seq};

    frame.length = (uint32_t)number_bytes + tail_bytes;
    if (link->filled + sizeof frame + frame.length > sizeof link->out)
        kp_link_flush();
    memcpy(link->out + link->filled, &frame, sizeof frame);
    link->filled += sizeof frame;
    if (count > 0)
        memcpy(link->out + link->filled, numbers, number_bytes);
    link->filled += number_bytes;
    if (tail_bytes > 0)
        memcpy(link->out + link->filled, tail, tail_bytes);
    link->filled += tail_bytes;
    kp_shim.stats.frames++;
}

/* Bulk of the call `seq`, in DATA frames; the buffer goes first, so the order stays. */
static int put_bulk(uint32_t seq, const unsigned char *bulk, size_t bytes)
{
    while (bytes > 0) {
        uint32_t n = bytes < KP_BODY_MAX ? (uint32_t)bytes : KP_BODY_MAX;
        struct kp_frame frame = {.magic = KP_MAGIC, .op = KP_OP_DATA, .length = n, .seq = seq};
        if (n <= SMALL_BULK) {
            kp_link_put(KP_OP_DATA, 0, seq, NULL, 0, bulk, n);
        } else {
            struct iovec part[2] = {{&frame, sizeof frame}, {(void *)(uintptr_t)bulk, n}};
            int rc = kp_link_flush();
            if (rc != 0 || (rc = put(part, 2)) != 0)
                return rc;
            kp_shim.stats.frames++;
        }
        bulk += n;
        bytes -= n;
    }
    return 0;
}

CUresult kp_enter(void)
{
    struct kp_link *link = &kp_shim.link;
    uint64_t current = kp_current();
    struct kp_context *context;
    CUresult rc = kp_ready();

    if (rc != CUDA_SUCCESS)
        return rc;
    if (current == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&kp_shim.tx);
    if ((context = kp_context_of(current)) == NULL)
        return kp_leave(CUDA_ERROR_CONTEXT_IS_DESTROYED);
    if (context->epoch != link->epoch || atomic_load(&link->lost))
        return kp_leave(CUDA_ERROR_DEVICE_UNAVAILABLE);
    if (context->sticky != CUDA_SUCCESS)
        return kp_leave(context->sticky);
    if (link->context != current) {
        kp_link_put(KP_OP_CONTEXT, 0, link->seq++, &current, 1, NULL, 0);
        link->context = current;
    }
    return CUDA_SUCCESS;
}

CUresult kp_enter_any(void)
{
    struct kp_link *link = &kp_shim.link;
    uint64_t none = 0;
    CUresult rc;

    if (kp_current() != 0)
        return kp_enter();
    if ((rc = kp_enter_device()) == CUDA_SUCCESS && link->context != 0) {
        kp_link_put(KP_OP_CONTEXT, 0, link->seq++, &none, 1, NULL, 0);
        link->context = 0;
    }
    return rc;
}

CUresult kp_enter_device(void)
{
    CUresult rc = kp_ready();

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&kp_shim.tx);
    if (atomic_load(&kp_shim.link.lost) && (rc = kp_link_open()) != CUDA_SUCCESS)
        return kp_leave(rc);
    return CUDA_SUCCESS;
}

/* With `tx` held, before it is given back: what stays in the buffer is sent soon. A call that flushes wakes nobody. */
static void leave_to_flusher(void)
{
    if (kp_shim.link.filled > 0 && kp_shim.flusher && !kp_shim.flushing) {
        kp_shim.flushing = true;
        pthread_cond_signal(&kp_shim.filled);
    }
}

CUresult kp_leave(CUresult result)
{
    leave_to_flusher();
    pthread_mutex_unlock(&kp_shim.tx);
    return result;
}

/* With `tx` held, given back meanwhile: the worker hears only so much ahead while a stream waits for a function of the program,
 * and its word that the function is over must get through. A copy from plain memory may wait, in CUDA too. */
static void wait_for_functions(const void *bulk, size_t bulk_bytes)
{
    bool pinned = bulk_bytes > 0 && kp_host_find(bulk, NULL, NULL); /* to be read in the stream's turn: a function may write it */
    struct kp_link *link = &kp_shim.link;
    uint64_t context = link->context;

    if (kp_shim.host_pending == 0 || bulk_bytes == 0)
        return;
    while (kp_shim.host_pending > 0 && (pinned || kp_shim.host_bulk + bulk_bytes > HOST_BULK_MAX) && !atomic_load(&link->lost))
        pthread_cond_wait(&kp_shim.host_idle, &kp_shim.tx);
    if (kp_shim.host_pending > 0)
        kp_shim.host_bulk += bulk_bytes;
    if (link->context != context)
        kp_link_put(KP_OP_CONTEXT, 0, link->seq++, &context, 1, NULL, 0);
    link->context = context;
}

/* One call, with `tx` held, which it gives back before it waits. `answer` NULL: not waited for. */
static CUresult call(uint16_t op, const uint64_t *numbers, unsigned count, const void *tail, uint32_t tail_bytes,
                     const void *bulk, size_t bulk_bytes, struct kp_answer *answer)
{
    struct kp_link *link = &kp_shim.link;
    struct kp_answer nothing = {0};
    struct kp_waiter waiter;
    uint32_t seq;

    wait_for_functions(bulk, bulk_bytes);
    seq = link->seq++;

    if (answer == NULL && (kp_shim.synchronous || atomic_load(&kp_shim.captures) > 0))
        answer = &nothing;
    if (answer != NULL)
        kp_expect(&waiter, seq, answer);
    kp_link_put(op, answer != NULL ? KP_FLAG_REPLY : 0, seq, numbers, count, tail, tail_bytes);
    put_bulk(seq, bulk, bulk_bytes);
    if (answer != NULL || !kp_shim.flusher)
        kp_link_flush();
    if (answer != NULL)
        kp_shim.stats.round_trips++;
    else
        leave_to_flusher();
    pthread_mutex_unlock(&kp_shim.tx);
    if (answer != NULL)
        return kp_await(&waiter);
    return atomic_load(&link->lost) ? CUDA_ERROR_DEVICE_UNAVAILABLE : CUDA_SUCCESS;
}

CUresult kp_send(uint16_t op, const uint64_t *numbers, unsigned count, const void *tail, uint32_t tail_bytes)
{
    return call(op, numbers, count, tail, tail_bytes, NULL, 0, NULL);
}

CUresult kp_ask(uint16_t op, const uint64_t *numbers, unsigned count, const void *tail, uint32_t tail_bytes,
                struct kp_answer *answer)
{
    CUresult rc = call(op, numbers, count, tail, tail_bytes, NULL, 0, answer);

    if (rc == CUDA_SUCCESS && (op == KP_OP_cuStreamSynchronize || op == KP_OP_cuCtxSynchronize || op == KP_OP_cuEventSynchronize))
        kp_pools_synchronised();
    return rc;
}

CUresult kp_send_bulk(uint16_t op, const uint64_t *numbers, unsigned count, const void *tail, uint32_t tail_bytes,
                      const void *bulk, size_t bytes, struct kp_answer *answer)
{
    return call(op, numbers, count, tail, tail_bytes, bulk, bytes, answer);
}

static void start_flusher(void)
{
    pthread_attr_t attr;
    pthread_t thread;

    if (kp_shim.flusher || kp_program_is_static() /* its C library is not ours: no threads */ || pthread_attr_init(&attr) != 0)
        return;
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, 64 * 1024);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old); /* the program's signals are for the program's threads */
    kp_shim.flusher = pthread_create(&thread, &attr, flush_for_ever, NULL) == 0; /* else each call is sent at once */
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
}

CUresult kp_link_open(void)
{
    struct kp_link *link = &kp_shim.link;
    struct kp_window window = {.base = NULL};
    struct kp_welcome welcome;
    CUresult why;
    int fd;

    pthread_mutex_lock(&link->rx);
    while (link->reading || link->waiters != NULL) /* of the lost connection: they are being told */
        pthread_cond_wait(&link->idle, &link->rx);
    pthread_mutex_unlock(&link->rx);
    if ((fd = kp_dial(&welcome, &window, &why)) < 0)
        return why;
    if (link->fd >= 0)
        close(link->fd);
    link->fd = fd;
    kp_host_leave(&link->window);
    link->window = window;
    if (window.base != NULL)
        kp_window_rings(&window, false, fd, &link->from_worker, &link->to_worker);
    link->context = 0;
    link->filled = 0;
    link->in_at = link->in_end = 0;
    link->epoch++;
    kp_shim.welcome = welcome;
    kp_shim.stats.dials++;
    atomic_store(&link->lost, false);
    start_flusher();
    return CUDA_SUCCESS;
}
