/* Event sets. No event of the physical card is the guest's: a set waits its time out, or ends early because the card is lost. */
#define _GNU_SOURCE
#include "gnvml.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#define POLL_NS 20000000u
#define LOOK_AGE_NS 500000000u /* whether the card is still there, while one waits */

struct event_set {
    struct event_set *next; /* of all that live */
    bool registered;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* never held over a call that waits or forks */
static struct event_set *sets;

/* With the lock held: where `set` hangs, or the end. */
static struct event_set **place(const struct event_set *set)
{
    struct event_set **at = &sets;

    while (*at != NULL && *at != set)
        at = &(*at)->next;
    return at;
}

GN_API nvmlReturn_t nvmlEventSetCreate(struct event_set **out)
{
    GN_TRY(gn_ready());
    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    struct event_set *set = calloc(1, sizeof *set);
    if (set == NULL)
        return NVML_ERROR_MEMORY;
    pthread_mutex_lock(&lock);
    set->next = sets;
    sets = set;
    pthread_mutex_unlock(&lock);
    *out = set;
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlEventSetFree(struct event_set *set)
{
    GN_TRY(gn_ready());
    pthread_mutex_lock(&lock);
    struct event_set **at = place(set);
    bool found = *at != NULL;
    if (found)
        *at = set->next;
    pthread_mutex_unlock(&lock);
    if (!found)
        return NVML_ERROR_INVALID_ARGUMENT;
    free(set);
    return NVML_SUCCESS;
}

GN_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(void *handle, unsigned long long *out)
{
    GN_ENTER(handle, out != NULL, GN_IDENTITY_AGE_NS);
    *out = 0;
    return NVML_SUCCESS;
}

/* Any type may be waited for; monitors give a card up that refuses. */
GN_API nvmlReturn_t nvmlDeviceRegisterEvents(void *handle, unsigned long long types, struct event_set *set)
{
    (void)types;
    GN_ENTER(handle, set != NULL, GN_IDENTITY_AGE_NS);
    pthread_mutex_lock(&lock);
    bool found = *place(set) != NULL;
    if (found)
        set->registered = true;
    pthread_mutex_unlock(&lock);
    return found ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

GN_API nvmlReturn_t nvmlEventSetWait_v2(struct event_set *set, void *out, unsigned timeout_ms)
{
    uint64_t until_ns = gn_now_ns() + (uint64_t)timeout_ms * 1000000u;
    struct gn_card card;

    if (out == NULL)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (;;) {
        GN_TRY(gn_ready());
        pthread_mutex_lock(&lock);
        bool valid = *place(set) != NULL, registered = valid && set->registered;
        pthread_mutex_unlock(&lock);
        if (!valid)
            return NVML_ERROR_INVALID_ARGUMENT;
        if (registered)
            GN_TRY(gn_look(&card, LOOK_AGE_NS));
        uint64_t now_ns = gn_now_ns();
        if (now_ns >= until_ns)
            return NVML_ERROR_TIMEOUT;
        uint64_t left_ns = until_ns - now_ns;
        nanosleep(&(struct timespec){.tv_nsec = (long)(left_ns < POLL_NS ? left_ns : POLL_NS)}, NULL);
    }
}

GN_API nvmlReturn_t nvmlEventSetWait(struct event_set *set, void *out, unsigned timeout_ms)
{
    return nvmlEventSetWait_v2(set, out, timeout_ms);
}
