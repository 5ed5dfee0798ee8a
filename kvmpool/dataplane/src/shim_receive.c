/* Receives replies for all threads of the process: whoever waits and finds nobody reading, reads.
 *
 * The reader takes frames off the socket until its own reply came, puts each into its waiter's memory and wakes it,
 * then makes another waiting thread the reader. So a blocked call stalls nobody and an unblocked one needs no
 * hand-over from a thread of its own.
 */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

/* At least a byte of the stream; 0 at its end. */
static ssize_t more(struct kp_link *link, void *to, size_t room)
{
    ssize_t n;

    if (link->window.base != NULL)
        return kp_ring_read(&link->from_worker, to, room);
    do
        n = read(link->fd, to, room);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

/* Takes `bytes` off the stream into `to`, or nowhere where `to` is NULL. Only the reader calls this. */
static int take(struct kp_link *link, void *to, size_t bytes)
{
    unsigned char *at = to;

    while (bytes > 0) {
        if (link->in_at < link->in_end) {
            size_t n = link->in_end - link->in_at < bytes ? link->in_end - link->in_at : bytes;
            if (at != NULL) {
                memcpy(at, link->in + link->in_at, n);
                at += n;
            }
            link->in_at += n;
            bytes -= n;
            continue;
        }
        int direct = at != NULL && bytes >= sizeof link->in;
        ssize_t n = more(link, direct ? at : link->in, direct ? bytes : sizeof link->in);
        if (n <= 0)
            return n == 0 ? -ECONNRESET : (int)n;
        atomic_fetch_add_explicit(&kp_shim.stats.bytes_in, (size_t)n, memory_order_relaxed);
        if (direct) {
            at += n;
            bytes -= (size_t)n;
        } else {
            link->in_at = 0;
            link->in_end = (size_t)n;
        }
    }
    return 0;
}

static struct kp_waiter *waiter_of(struct kp_link *link, uint32_t seq)
{
    struct kp_waiter *waiter;

    pthread_mutex_lock(&link->rx);
    for (waiter = link->waiters; waiter != NULL && waiter->seq != seq; waiter = waiter->next)
        ;
    pthread_mutex_unlock(&link->rx);
    return waiter;
}

static void finish(struct kp_waiter *waiter, CUresult result) /* with `rx` held */
{
    waiter->result = result;
    waiter->done = true;
    pthread_cond_signal(&waiter->woken);
}

static int take_data(struct kp_link *link, struct kp_waiter *waiter, uint32_t length)
{
    struct kp_answer *answer = waiter->answer;

    if (length == 0 || length > answer->bulk_bytes - waiter->bulk_got)
        return -EPROTO;
    int rc = take(link, (char *)answer->bulk + waiter->bulk_got, length);
    waiter->bulk_got += length;
    return rc;
}

/* What kernels wrote. Where memory is short it is lost, as it is on a card whose buffer overflows. */
static int take_text(struct kp_link *link, struct kp_text *to, uint32_t length)
{
    char *more;
    int rc;

    if (length > KP_PRINT_MAX - to->bytes)
        return -EPROTO;
    if ((more = realloc(to->text, to->bytes + length + 1)) == NULL)
        return take(link, NULL, length);
    to->text = more;
    rc = take(link, more + to->bytes, length);
    to->bytes += rc == 0 ? length : 0;
    return rc;
}

static void write_text(struct kp_text *text, FILE *to)
{
    if (text->text == NULL)
        return;
    fwrite(text->text, 1, text->bytes, to);
    fflush(to);
    free(text->text);
}

static int take_reply(struct kp_link *link, struct kp_waiter *waiter, uint32_t length)
{
    struct kp_answer *answer = waiter->answer;
    struct kp_reply_head head;
    size_t numbers = answer->outs * sizeof *answer->out;
    int rc = length < sizeof head ? -EPROTO : take(link, &head, sizeof head);

    length -= (uint32_t)sizeof head;
    if (rc == 0 && length >= numbers) {
        rc = take(link, answer->out, numbers);
        length -= (uint32_t)numbers;
    } else if (rc == 0 && head.result == CUDA_SUCCESS) {
        rc = -EPROTO;
    }
    if (rc == 0 && length > answer->room) /* both halves are of one build: nothing is longer than was asked for */
        rc = -EPROTO;
    if (rc == 0 && length > 0) {
        answer->got = length;
        rc = take(link, answer->bytes, length);
    }
    if (rc == 0 && head.result == CUDA_SUCCESS && waiter->bulk_got != answer->bulk_bytes)
        rc = -EPROTO;
    if (rc != 0)
        return rc;
    waiter->sticky = head.sticky;
    pthread_mutex_lock(&link->rx);
    finish(waiter, head.result);
    pthread_mutex_unlock(&link->rx);
    return 0;
}

static int take_frame(struct kp_link *link)
{
    unsigned char header[KP_HEADER_BYTES];
    struct kp_frame frame;
    struct kp_waiter *waiter;
    int rc = take(link, header, sizeof header);

    if (rc == 0)
        rc = kp_frame_check(header, &frame);
    if (rc != 0)
        return rc;
    if ((waiter = waiter_of(link, frame.seq)) == NULL)
        return -EPROTO;
    if (frame.op == KP_OP_DATA)
        return take_data(link, waiter, frame.length);
    if (frame.op == KP_OP_PRINTED || frame.op == KP_OP_ASSERTED)
        return take_text(link, frame.op == KP_OP_PRINTED ? &waiter->printed : &waiter->asserted, frame.length);
    return frame.op == KP_OP_REPLY ? take_reply(link, waiter, frame.length) : -EPROTO;
}

void kp_link_lose(const char *why)
{
    struct kp_link *link = &kp_shim.link;

    if (!atomic_exchange(&link->lost, true)) {
        kp_log("connection %u lost: %s", link->epoch, why);
        if (link->fd >= 0)
            shutdown(link->fd, SHUT_RDWR); /* whoever reads or writes finds out; the number stays taken until a dial */
    }
}

void kp_expect(struct kp_waiter *waiter, uint32_t seq, struct kp_answer *answer)
{
    struct kp_link *link = &kp_shim.link;

    *waiter = (struct kp_waiter){.seq = seq, .answer = answer, .context = link->context};
    pthread_cond_init(&waiter->woken, NULL);
    pthread_mutex_lock(&link->rx);
    waiter->next = link->waiters;
    link->waiters = waiter;
    pthread_mutex_unlock(&link->rx);
}

static void forget(struct kp_link *link, struct kp_waiter *waiter) /* with `rx` held */
{
    struct kp_waiter **at = &link->waiters;

    while (*at != NULL && *at != waiter)
        at = &(*at)->next;
    if (*at != NULL)
        *at = waiter->next;
    if (!link->reading && link->waiters != NULL)
        pthread_cond_signal(&link->waiters->woken); /* the next reader */
    if (!link->reading && link->waiters == NULL)
        pthread_cond_broadcast(&link->idle);
}

/* The context that the call was made in is of no use any more; others are. */
static void mark_context(const struct kp_waiter *waiter)
{
    struct kp_context *context;

    pthread_mutex_lock(&kp_shim.tx);
    if ((context = kp_context_of(waiter->context)) != NULL && context->sticky == CUDA_SUCCESS)
        context->sticky = waiter->sticky;
    pthread_mutex_unlock(&kp_shim.tx);
}

CUresult kp_await(struct kp_waiter *waiter)
{
    struct kp_link *link = &kp_shim.link;

    pthread_mutex_lock(&link->rx);
    while (!waiter->done) {
        if (link->reading) {
            pthread_cond_wait(&waiter->woken, &link->rx);
            continue;
        }
        link->reading = true;
        pthread_mutex_unlock(&link->rx);
        int rc = atomic_load(&link->lost) ? -ECONNRESET : take_frame(link);
        if (rc != 0)
            kp_link_lose(rc == -EPROTO ? "the worker sent what no worker sends" : strerror(-rc));
        pthread_mutex_lock(&link->rx);
        link->reading = false;
        if (rc != 0)
            for (struct kp_waiter *each = link->waiters; each != NULL; each = each->next)
                if (!each->done)
                    finish(each, CUDA_ERROR_DEVICE_UNAVAILABLE);
    }
    forget(link, waiter);
    pthread_mutex_unlock(&link->rx);
    pthread_cond_destroy(&waiter->woken);
    if (waiter->sticky != CUDA_SUCCESS)
        mark_context(waiter);
    write_text(&waiter->printed, stdout);
    write_text(&waiter->asserted, stderr);
    return waiter->result;
}
