/* The guest's handles and the driver's objects behind them; contexts with their staging memory. */
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>

int kp_resolve(struct kp_server *s, uint64_t number, enum kp_kind kind, void **object)
{
    struct kp_handle *entry;

    *object = NULL;
    if (kind == KP_STREAM && number == 0) /* the legacy default stream */
        return CUDA_SUCCESS;
    pthread_mutex_lock(&s->handles_lock);
    entry = kp_handles_get(&s->handles, number, kind);
    if (entry != NULL)
        *object = entry->value;
    pthread_mutex_unlock(&s->handles_lock);
    return entry != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

int kp_adopt(struct kp_server *s, struct kp_work *w, uint64_t number, enum kp_kind kind, void *object)
{
    uint64_t parent = kind == KP_CONTEXT ? 0 : kind == KP_FUNCTION ? w->in[KP_FUNCTION_GET_MODULE] : w->home_number;
    int rc;

    pthread_mutex_lock(&s->handles_lock);
    rc = kp_handles_put(&s->handles, number, kind, object, parent);
    pthread_mutex_unlock(&s->handles_lock);
    return rc == -ENOMEM ? CUDA_ERROR_OUT_OF_MEMORY : rc;
}

void kp_forget(struct kp_server *s, uint64_t number)
{
    pthread_mutex_lock(&s->handles_lock);
    kp_handles_drop_children(&s->handles, number, NULL);
    kp_handles_drop(&s->handles, number);
    pthread_mutex_unlock(&s->handles_lock);
}

int kp_enter_home(struct kp_server *s, uint64_t number)
{
    void *home;

    if (kp_resolve(s, number, KP_CONTEXT, &home) != CUDA_SUCCESS)
        return -EPROTO;
    s->home = home;
    s->home_number = number;
    kp_note(s, s->driver.cuCtxSetCurrent(s->home->context));
    return 0;
}

/* Page-locked staging where the driver gives it, plain memory otherwise (then each copy is waited for). */
static int make_slot(struct kp_server *s, struct kp_slot *slot)
{
    void *memory = NULL;

    slot->pinned = s->driver.cuMemAllocHost_v2(&memory, KP_BODY_MAX) == CUDA_SUCCESS;
    if (!slot->pinned && (memory = malloc(KP_BODY_MAX)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    slot->memory = memory;
    return s->driver.cuEventCreate(&slot->event, 2 /* no timing */);
}

/* What is page-locked goes with its context. The slots for copies out stay: a thread may still be at one. */
static void drop_slots(struct kp_home *home)
{
    for (unsigned i = 0; i < KP_SLOTS_IN; i++)
        if (!home->in[i].pinned)
            free(home->in[i].memory);
}

int kp_do_context_create(struct kp_server *s, struct kp_work *w)
{
    struct kp_home *home = calloc(1, sizeof *home);
    int rc;

    if (home == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_init(&home->out_lock, NULL);
    rc = s->driver.cuCtxCreate_v2(&home->context, (unsigned)w->in[KP_CONTEXT_CREATE_FLAGS], s->device);
    if (rc != CUDA_SUCCESS) {
        free(home);
        return rc;
    }
    for (unsigned i = 0; i < KP_SLOTS_IN && rc == CUDA_SUCCESS; i++)
        rc = make_slot(s, &home->in[i]);
    for (unsigned i = 0; i < KP_SLOTS_OUT && rc == CUDA_SUCCESS; i++)
        rc = make_slot(s, &home->out[i]);
    if (rc == CUDA_SUCCESS)
        rc = kp_adopt(s, w, w->in[KP_CONTEXT_CREATE_HANDLE], KP_CONTEXT, home);
    if (rc != CUDA_SUCCESS) {
        drop_slots(home);
        s->driver.cuCtxDestroy_v2(home->context);
        free(home);
    }
    s->home = NULL; /* the guest names its context before the next call */
    s->home_number = 0;
    return rc;
}

/* A thread that waits may still look at the home, so its memory stays; the driver frees what was page-locked. */
int kp_do_context_destroy(struct kp_server *s, struct kp_work *w)
{
    uint64_t number = w->in[KP_CONTEXT_DESTROY_HANDLE];
    void *object;
    struct kp_home *home;
    int rc = kp_resolve(s, number, KP_CONTEXT, &object);

    if (rc != CUDA_SUCCESS)
        return CUDA_ERROR_INVALID_CONTEXT;
    home = object;
    s->driver.cuCtxSetCurrent(home->context);
    kp_meter_forget(s, home);
    kp_memory_drop(s, number);
    kp_forget(s, number);
    drop_slots(home);
    kp_arena_leave(s, home);
    rc = s->driver.cuCtxDestroy_v2(home->context);
    home->retired = s->retired;
    s->retired = home;
    s->home = NULL;
    s->home_number = 0;
    atomic_store(&s->sticky, CUDA_SUCCESS);
    atomic_store(&s->deferred, CUDA_SUCCESS);
    return rc;
}
