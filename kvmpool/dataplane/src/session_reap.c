/* The reaper: waits until the card has done what may use freed memory, then gives the memory back. */
#include "session_state.h"

#include <stdlib.h>

#define STACK_BYTES (256 * 1024)

static CUresult reap(struct kp_server *s, struct kp_grave *grave, bool note)
{
    CUresult rc = s->driver.cuCtxSetCurrent(grave->home->context);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuCtxSynchronize();
    rc = kp_memory_reap(s, grave->va, rc, note ? grave->home : NULL);
    free(grave);
    return rc;
}

static void *reap_for_ever(void *argument)
{
    struct kp_server *s = argument;

    for (;;) {
        struct kp_grave *grave, *next;
        pthread_mutex_lock(&s->queue_lock);
        while (s->graves == NULL)
            pthread_cond_wait(&s->buried, &s->queue_lock);
        grave = s->graves;
        s->graves = NULL;
        pthread_mutex_unlock(&s->queue_lock);
        for (; grave != NULL; grave = next) { /* the wait of the first is nearly always that of all */
            next = grave->next;
            reap(s, grave, true);
        }
    }
    return NULL;
}

static bool start_reaper(struct kp_server *s)
{
    pthread_attr_t attr;
    pthread_t thread;

    if (s->has_reaper || pthread_attr_init(&attr) != 0)
        return s->has_reaper;
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attr, STACK_BYTES);
    s->has_reaper = pthread_create(&thread, &attr, reap_for_ever, s) == 0;
    pthread_attr_destroy(&attr);
    return s->has_reaper;
}

CUresult kp_bury(struct kp_server *s, struct kp_grave *grave, bool wait)
{
    if (wait || !start_reaper(s))
        return reap(s, grave, false); /* with no thread to be had the reader waits */
    pthread_mutex_lock(&s->queue_lock);
    grave->next = s->graves;
    s->graves = grave;
    pthread_cond_signal(&s->buried);
    pthread_mutex_unlock(&s->queue_lock);
    return CUDA_SUCCESS;
}
