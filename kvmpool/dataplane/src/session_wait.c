/* Calls that can block: made on threads of their own, so that the guest's other threads go on. */
#define _GNU_SOURCE
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>

#define STACK_BYTES (256 * 1024)

/* There is a place for each thread and the reader. */
static struct kp_asked *begin_wait(struct kp_server *s, const struct kp_work *w)
{
    struct kp_asked *asked = s->asked;

    pthread_mutex_lock(&s->queue_lock);
    while (asked->used)
        asked++;
    *asked = (struct kp_asked){.used = true, .op = w->op, .seq = w->seq};
    pthread_mutex_unlock(&s->queue_lock);
    return asked;
}

static void end_wait(struct kp_server *s, struct kp_asked *asked)
{
    pthread_mutex_lock(&s->queue_lock);
    asked->used = false;
    pthread_mutex_unlock(&s->queue_lock);
}

void kp_tell_waiters(struct kp_server *s, CUresult result)
{
    pthread_mutex_lock(&s->queue_lock);
    for (unsigned i = 0; i <= KP_WAITERS_MAX; i++) {
        struct kp_work work = {.op = s->asked[i].op, .seq = s->asked[i].seq};
        if (s->asked[i].used)
            kp_reply(s, &work, result);
    }
    pthread_mutex_unlock(&s->queue_lock);
}

/* Makes the call and answers it, with the first earlier error that nobody was told of where it has none itself. */
static int finish(struct kp_server *s, struct kp_work *w)
{
    struct kp_asked *asked = begin_wait(s, w);
    int result = kp_ops[w->op - KP_OP_CALLS].run(s, w);

    end_wait(s, asked);
    if (result == CUDA_SUCCESS)
        result = (int)kp_take_noted(s, w->home);
    return result < 0 ? result : kp_reply(s, w, result);
}

static struct kp_work *next_work(struct kp_server *s)
{
    struct kp_work *work;

    pthread_mutex_lock(&s->queue_lock);
    s->idle++;
    while (s->queue == NULL)
        pthread_cond_wait(&s->queued, &s->queue_lock);
    s->idle--;
    work = s->queue;
    s->queue = work->next;
    if (s->queue == NULL)
        s->queue_end = &s->queue;
    pthread_mutex_unlock(&s->queue_lock);
    return work;
}

static void *wait_for_ever(void *argument)
{
    struct kp_server *s = argument;
    CUcontext current = NULL;

    for (;;) {
        struct kp_work *work = next_work(s);
        CUresult rc = CUDA_SUCCESS;
        if (work->home->context != current)
            rc = s->driver.cuCtxSetCurrent(work->home->context);
        current = rc == CUDA_SUCCESS ? work->home->context : NULL;
        if ((rc == CUDA_SUCCESS ? finish(s, work) : kp_reply(s, work, rc)) < 0)
            shutdown(s->fd, SHUT_RDWR); /* the reader ends the session */
        free(work);
    }
    return NULL;
}

/* True where the call would not block now, as far as one question to the driver can tell. */
static bool ready(struct kp_server *s, const struct kp_work *w)
{
    void *object;

    switch (w->op) {
    case KP_OP_cuStreamSynchronize:
        return kp_resolve(s, w->in[0], KP_STREAM, &object) != CUDA_SUCCESS || kp_capturing(s, object) ||
               s->driver.cuStreamQuery(object) != CUDA_ERROR_NOT_READY;
    case KP_OP_cuEventSynchronize:
        return kp_resolve(s, w->in[0], KP_EVENT, &object) != CUDA_SUCCESS ||
               s->driver.cuEventQuery(object) != CUDA_ERROR_NOT_READY;
    case KP_OP_copy_out:
        return w->in[KP_COPY_OUT_BYTES] <= KP_BODY_MAX &&
               (kp_resolve(s, w->in[KP_COPY_OUT_STREAM], KP_STREAM, &object) != CUDA_SUCCESS || kp_capturing(s, object) ||
                s->driver.cuStreamQuery(object) != CUDA_ERROR_NOT_READY);
    default: return false;
    }
}

/* With the lock held: one more thread where none is free. False: there is none to be had. */
static bool have_thread(struct kp_server *s, unsigned waiting)
{
    pthread_attr_t attr;
    pthread_t thread;
    bool made;

    if (s->idle > waiting)
        return true;
    if (s->waiters == KP_WAITERS_MAX || pthread_attr_init(&attr) != 0)
        return false;
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    made = pthread_create(&thread, &attr, wait_for_ever, s) == 0;
    pthread_attr_destroy(&attr);
    s->waiters += made;
    return made;
}

int kp_wait_for(struct kp_server *s, const struct kp_work *w)
{
    struct kp_work *copy, here = *w;
    unsigned waiting = 0;
    bool handed;

    if (ready(s, w) || (copy = malloc(sizeof *copy)) == NULL)
        return finish(s, &here);
    *copy = *w;
    copy->next = NULL;
    pthread_mutex_lock(&s->queue_lock);
    for (struct kp_work *each = s->queue; each != NULL; each = each->next)
        waiting++;
    handed = have_thread(s, waiting);
    if (handed) {
        *s->queue_end = copy;
        s->queue_end = &copy->next;
        pthread_cond_signal(&s->queued);
    }
    pthread_mutex_unlock(&s->queue_lock);
    if (handed)
        return 0;
    free(copy);
    return finish(s, &here);
}
