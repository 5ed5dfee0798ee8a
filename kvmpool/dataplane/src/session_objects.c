/* The guest's handles and the driver's objects behind them; contexts with their staging memory. */
#include "session_state.h"

#include <errno.h>
#include <stdlib.h>

/* With the lock held, before a stream is used: it waits for the mark of its context, once for each. A stream's handle has
 * no other parent; it keeps there which mark that was.
 */
static void wait_for_mark(struct kp_server *s, struct kp_handle *stream)
{
    struct kp_handle *context = kp_handles_get(&s->handles, stream->parent, KP_CONTEXT);
    struct kp_home *home = context != NULL ? context->value : NULL;

    if (home == NULL || home->mark == NULL || stream->other == home->marks || kp_capturing(s, stream->value))
        return; /* what is captured waits when it is launched */
    stream->other = home->marks;
    if (s->driver.cuEventQuery(home->mark) == CUDA_ERROR_NOT_READY)
        kp_note(s, home, s->driver.cuStreamWaitEvent(stream->value, home->mark, 0));
}

int kp_resolve(struct kp_server *s, uint64_t number, enum kp_kind kind, void **object)
{
    struct kp_handle *entry;

    *object = NULL;
    if (kind == KP_STREAM && number == 0) /* the legacy default stream */
        return CUDA_SUCCESS;
    pthread_mutex_lock(&s->handles_lock);
    if (kind == KP_FUNCTION && kp_handle_kind(number) == KP_KERNEL) /* a kernel may stand for a function */
        kind = KP_KERNEL;
    entry = kp_handles_get(&s->handles, number, kind);
    if (entry != NULL && kind == KP_STREAM)
        wait_for_mark(s, entry);
    if (entry != NULL)
        *object = entry->value;
    pthread_mutex_unlock(&s->handles_lock);
    if (entry == NULL)
        return kind == KP_GRAPH || kind == KP_EXEC ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    return CUDA_SUCCESS;
}

uint64_t kp_parent_of(struct kp_server *s, uint64_t number, enum kp_kind kind)
{
    const struct kp_handle *entry;
    uint64_t parent;

    pthread_mutex_lock(&s->handles_lock);
    entry = kp_handles_get(&s->handles, number, kind);
    parent = entry != NULL ? entry->parent : 0;
    pthread_mutex_unlock(&s->handles_lock);
    return parent;
}

int kp_adopt(struct kp_server *s, struct kp_work *w, uint64_t number, enum kp_kind kind, void *object)
{
    return kp_adopt_under(s, number, kind, object, kind == KP_CONTEXT ? 0 : w->home_number, 0);
}

int kp_adopt_under(struct kp_server *s, uint64_t number, enum kp_kind kind, void *object, uint64_t parent, uint64_t other)
{
    int rc;

    pthread_mutex_lock(&s->handles_lock);
    rc = kp_handles_put(&s->handles, number, kind, object, parent);
    if (rc == 0)
        kp_handles_get(&s->handles, number, kind)->other = other;
    pthread_mutex_unlock(&s->handles_lock);
    return rc == -ENOMEM ? CUDA_ERROR_OUT_OF_MEMORY : rc;
}

int kp_may_adopt(struct kp_server *s, uint64_t number, enum kp_kind kind)
{
    int room;

    if (kp_handle_kind(number) != kind)
        return -EPROTO;
    pthread_mutex_lock(&s->handles_lock);
    room = kp_handles_room(&s->handles, kind);
    pthread_mutex_unlock(&s->handles_lock);
    return room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* What is behind other handles is the driver's. */
static void gone(struct kp_handle *entry)
{
    switch (kp_handle_kind(entry->number)) {
    case KP_LINK: kp_linker_free(entry->value); break;
    case KP_GRAPH: kp_graph_free(entry->value); break;
    case KP_EXEC: kp_exec_free(entry->value); break;
    default: break;
    }
}

void kp_forget(struct kp_server *s, uint64_t number)
{
    struct kp_handle *entry;

    pthread_mutex_lock(&s->handles_lock);
    kp_handles_drop_children(&s->handles, number, gone);
    if ((entry = kp_handles_get(&s->handles, number, kp_handle_kind(number))) != NULL)
        gone(entry);
    kp_handles_drop(&s->handles, number);
    pthread_mutex_unlock(&s->handles_lock);
}

int kp_enter_home(struct kp_server *s, uint64_t number)
{
    void *home;

    kp_meter_leave(s);
    if (number == 0) { /* the guest's thread has none */
        s->home = NULL;
        s->home_number = 0;
        kp_note(s, NULL, s->driver.cuCtxSetCurrent(NULL));
        return 0;
    }
    if (kp_resolve(s, number, KP_CONTEXT, &home) != CUDA_SUCCESS)
        return -EPROTO;
    s->home = home;
    s->home_number = number;
    kp_note(s, s->home, s->driver.cuCtxSetCurrent(s->home->context));
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
    struct kp_home *home;
    int rc = kp_may_adopt(s, w->in[KP_CONTEXT_CREATE_HANDLE], KP_CONTEXT);

    if (rc != CUDA_SUCCESS)
        return rc;
    if ((home = calloc(1, sizeof *home)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    home->ordinal = s->homes++;
    pthread_mutex_init(&home->out_lock, NULL);
    rc = s->driver.cuCtxCreate_v2(&home->context, (unsigned)w->in[KP_CONTEXT_CREATE_FLAGS], s->device);
    if (rc != CUDA_SUCCESS) {
        free(home);
        return rc;
    }
    rc = kp_own_context(s, home);
    for (unsigned i = 0; i < KP_SLOTS_IN && rc == CUDA_SUCCESS; i++)
        rc = make_slot(s, &home->in[i]);
    for (unsigned i = 0; i < KP_SLOTS_OUT && rc == CUDA_SUCCESS; i++)
        rc = make_slot(s, &home->out[i]);
    if (rc == CUDA_SUCCESS)
        rc = kp_adopt(s, w, w->in[KP_CONTEXT_CREATE_HANDLE], KP_CONTEXT, home);
    if (rc != CUDA_SUCCESS) {
        drop_slots(home);
        s->driver.cuCtxDestroy_v2(home->context);
        kp_own_leave(s, home);
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
    int rc = kp_resolve(s, number, KP_CONTEXT, &object), late;

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
    kp_own_leave(s, home);
    home->retired = s->retired;
    s->retired = home;
    s->home = NULL;
    s->home_number = 0;
    late = kp_take_noted(s, home); /* nobody else would hear of it */
    return rc != CUDA_SUCCESS ? rc : late;
}

int kp_do_stream_info(struct kp_server *s, struct kp_work *w)
{
    struct kp_stream_info *info = calloc(1, sizeof *info);
    void *stream;
    int rc = kp_resolve(s, w->in[KP_STREAM_INFO_STREAM], KP_STREAM, &stream);

    if ((w->give = info) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    w->give_bytes = sizeof *info;
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuStreamGetPriority(stream, &info->priority);
    return rc == CUDA_SUCCESS ? s->driver.cuStreamGetFlags(stream, &info->flags) : rc;
}

int kp_do_priority_range(struct kp_server *s, struct kp_work *w)
{
    int32_t *range = calloc(2, sizeof *range);

    if ((w->give = range) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    w->give_bytes = 2 * sizeof *range;
    return s->driver.cuCtxGetStreamPriorityRange(&range[0], &range[1]);
}
