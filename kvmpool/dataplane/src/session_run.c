/* The session: welcome, then frames in order until the guest goes. See session.h. */
#define _GNU_SOURCE
#include "session_observe.h"
#include "session_state.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void kp_session_log(const struct kp_server *s, const char *format, ...)
{
    char line[256];
    va_list arguments;
    int used = snprintf(line, sizeof line, "session[%d] ", (int)getpid());

    va_start(arguments, format);
    used += vsnprintf(line + used, sizeof line - (size_t)used - 1, format, arguments);
    va_end(arguments);
    if (used > (int)sizeof line - 2)
        used = (int)sizeof line - 2;
    line[used++] = '\n';
    if (s->log_fd >= 0 && write(s->log_fd, line, (size_t)used) < 0)
        errno = 0; /* a full disk ends nobody's session */
}

static int decode(const struct kp_op_info *info, const struct kp_frame *frame, const unsigned char *body, struct kp_work *w)
{
    size_t number_bytes = info->numbers * sizeof w->in[0];

    if (frame->length < number_bytes || (info->tail == KP_TAIL_NONE && frame->length != number_bytes))
        return -EPROTO;
    memcpy(w->in, body, number_bytes);
    w->tail = body + number_bytes;
    w->tail_bytes = frame->length - (uint32_t)number_bytes;
    if (info->tail == KP_TAIL_TEXT) /* one end, at the end */
        if (w->tail_bytes == 0 || w->tail_bytes > KP_TEXT_MAX || strnlen((const char *)w->tail, w->tail_bytes) != w->tail_bytes - 1)
            return -EPROTO;
    return 0;
}

/* What a call gets instead of being made: no context, or an earlier error that its caller has to hear first. */
static CUresult refused(struct kp_server *s, const struct kp_op_info *info, const struct kp_work *w)
{
    if (!info->needs_context)
        return CUDA_SUCCESS;
    if (w->home == NULL)
        return CUDA_ERROR_INVALID_CONTEXT;
    if ((w->op == KP_OP_copy_in || w->op == KP_OP_copy_out) && !kp_memory_holds(s, w->in[0], w->in[1]))
        return CUDA_ERROR_INVALID_VALUE;
    return w->wanted ? kp_take_noted(s, w->home) : CUDA_SUCCESS;
}

static int run_call(struct kp_server *s, const struct kp_op_info *info, struct kp_work *w)
{
    int result = refused(s, info, w);

    if (result == CUDA_SUCCESS)
        kp_meter_call(s, w);
    if (result == CUDA_SUCCESS && info->cls == KP_CLASS_BLOCKING)
        return kp_wait_for(s, w);
    if (result == CUDA_SUCCESS) {
        result = info->run(s, w);
    } else if (info->bulk == KP_BULK_IN) {
        int rc = kp_drain_bulk(s, w->seq, w->in[1]); /* all bulk calls have their bytes there */
        result = rc < 0 ? rc : result;
    }
    if (result >= 0 && w->wanted)
        return kp_reply(s, w, result);
    free(w->give);
    if (result < 0)
        return result;
    kp_note(s, w->home, result);
    return 0;
}

static int serve_call(struct kp_server *s, const struct kp_frame *frame, const unsigned char *body)
{
    const struct kp_op_info *info;
    struct kp_work work = {.op = frame->op, .seq = frame->seq, .home = s->home, .home_number = s->home_number};
    int rc;

    if (frame->op < KP_OP_CALLS || (int)frame->op >= (int)KP_OP_CALLS_END)
        return -EPROTO;
    info = &kp_ops[frame->op - KP_OP_CALLS];
    work.wanted = (frame->flags & KP_FLAG_REPLY) != 0;
    if (!work.wanted && info->cls != KP_CLASS_ASYNC)
        return -EPROTO;
    if ((rc = decode(info, frame, body, &work)) != 0)
        return rc;
    return run_call(s, info, &work);
}

/* One frame: 0 to go on, 1 after BYE, or a negative errno. */
static int serve_frame(struct kp_server *s)
{
    unsigned char header[KP_HEADER_BYTES];
    struct kp_frame frame;
    uint64_t number;
    int rc = kp_take(s, header, sizeof header);

    if (rc == 0)
        rc = kp_frame_check(header, &frame);
    if (rc == 0 && frame.length > KP_CALL_MAX)
        rc = -EPROTO;
    if (rc == 0)
        rc = kp_take(s, s->body, frame.length);
    if (rc != 0)
        return rc;
    if (frame.op == KP_OP_BYE)
        return 1;
    if (frame.op != KP_OP_CONTEXT)
        return serve_call(s, &frame, s->body);
    if (frame.length != sizeof number)
        return -EPROTO;
    memcpy(&number, s->body, sizeof number);
    return kp_enter_home(s, number);
}

/* With a window where the guest can have one; without it all goes over the socket, which is slower and no error. */
static int send_welcome(struct kp_server *s, const struct kp_hello *hello, struct kp_welcome *answer)
{
    const struct kp_place *place = &s->session->place;
    int memory = -1, rc = 0;

    if (answer->status == 0 && (hello->flags & KP_HELLO_WINDOW) != 0 && kp_window_possible(s->fd))
        rc = kp_window_make(&s->window, &memory);
    else if (answer->status == 0 && place->bytes > 0)
        rc = kp_window_map(&s->window, place->fd, place->at, place->bytes);
    if (rc != 0)
        kp_session_log(s, "no shared memory with %s: %s", hello->program, strerror(-rc));
    if (s->window.far) {
        memcpy(answer->device, place->device, sizeof answer->device);
        answer->window_at = place->at;
        answer->window_bytes = place->bytes;
    }
    rc = kp_window_welcome_write(s->fd, answer, memory);
    if (memory >= 0)
        close(memory);
    if (place->bytes > 0)
        close(place->fd); /* the mapping keeps the lock */
    if (s->window.base != NULL) {
        atomic_store(&s->session->account->shared[s->session->slot], 1);
        kp_window_rings(&s->window, true, s->fd, &s->from_guest, &s->to_guest);
    }
    return rc;
}

static int welcome(struct kp_server *s, const struct kp_hello *hello)
{
    const uint8_t hash[16] = KP_CAPS_HASH;
    struct kp_welcome answer = {.memory_bytes = s->session->memory_bytes};
    int rc;

    memcpy(answer.caps_hash, hash, sizeof hash);
    memcpy(answer.uuid, s->session->uuid, sizeof answer.uuid);
    snprintf(answer.pci, sizeof answer.pci, "%s", s->session->pci);
    if (memcmp(hello->caps_hash, hash, sizeof hash) != 0) {
        answer.status = -EPROTO;
        snprintf(answer.text, sizeof answer.text, "the guest's libcuda.so.1 is of another build. Next: copy this host's shim into the guest");
    } else {
        answer.status = kp_driver_load(s, answer.text, sizeof answer.text);
        if (answer.status == 0 && ((answer.status = kp_meter_start(s)) != 0 || (answer.status = kp_print_start(s)) != 0))
            snprintf(answer.text, sizeof answer.text, "the host has no thread for the session");
    }
    if (answer.status != 0)
        kp_session_log(s, "refused %s: %s", hello->program, answer.text);
    rc = send_welcome(s, hello, &answer);
    return answer.status != 0 ? answer.status : rc;
}

/* Everything the session needs, at its start; it is never given back, because the process ends with the session. */
static struct kp_server *make_server(const struct kp_session *session, int fd, const struct kp_hello *hello)
{
    struct kp_server *s = calloc(1, sizeof *s);

    if (s == NULL)
        return NULL;
    s->session = session;
    s->fd = fd;
    s->log_fd = session->log_fd;
    s->va_base = hello->va_base;
    s->in = malloc(KP_READ_BYTES);
    s->body = malloc(KP_CALL_MAX + 1);
    s->pages = calloc(KP_VA_WINDOW / KP_VA_PAGE, sizeof *s->pages);
    s->queue_end = &s->queue;
    pthread_mutex_init(&s->handles_lock, NULL);
    pthread_mutex_init(&s->tx, NULL);
    pthread_mutex_init(&s->queue_lock, NULL);
    pthread_mutex_init(&s->memory_lock, NULL);
    pthread_mutex_init(&s->print.lock, NULL);
    pthread_cond_init(&s->reaped, NULL);
    pthread_cond_init(&s->buried, NULL);
    pthread_cond_init(&s->queued, NULL);
    return s->in != NULL && s->body != NULL && s->pages != NULL ? s : NULL;
}

int kp_session_run(const struct kp_session *session, int fd, const struct kp_hello *hello)
{
    struct kp_server *s;
    int rc;

    if ((hello->flags & KP_HELLO_OBSERVER) != 0)
        return kp_observe(session, fd, hello);
    atomic_store(&session->account->pid[session->slot], hello->pid);
    if ((s = make_server(session, fd, hello)) == NULL)
        return -ENOMEM;
    if ((rc = welcome(s, hello)) != 0)
        return rc == -EPIPE ? 0 : rc;
    kp_session_log(s, "serves %s (pid %u in the guest) over %s", hello->program, hello->pid,
             s->window.base != NULL ? "shared memory" : "its socket");
    while ((rc = serve_frame(s)) == 0)
        ;
    if (rc == 1 || rc == -ECONNRESET || rc == -EPIPE)
        rc = 0;
    kp_session_log(s, "ends: %s", rc == 0 ? "the guest went" : strerror(-rc));
    return rc;
}
