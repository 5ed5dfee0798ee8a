/* Copies between the card and page-locked memory in the window: none of their bytes is on the way. */
#include "session_state.h"

#include <errno.h>

/* A chunk is registered with the driver when the first copy touches it. Where that fails (another context has it, or the
 * driver cannot) the copy is right all the same, and slower. */
static void have_registered(struct kp_server *s, struct kp_home *home, uint64_t chunk)
{
    unsigned char *start = s->window.base + KP_ARENA_AT + chunk * KP_ARENA_CHUNK;

    if ((home->tried >> chunk & 1) != 0)
        return;
    home->tried |= 1ull << chunk;
    if (s->driver.cuMemHostRegister_v2(start, KP_ARENA_CHUNK, 1 /* for all contexts */) == CUDA_SUCCESS)
        home->registered |= 1ull << chunk;
}

void kp_arena_leave(struct kp_server *s, struct kp_home *home)
{
    for (uint64_t chunk = 0; chunk < KP_ARENA_CHUNKS; chunk++)
        if ((home->registered >> chunk & 1) != 0)
            s->driver.cuMemHostUnregister(s->window.base + KP_ARENA_AT + chunk * KP_ARENA_CHUNK);
    home->registered = home->tried = 0;
}

static int copy(struct kp_server *s, struct kp_work *w, bool out)
{
    uint64_t va = w->in[KP_ARENA_IN_VA], left = w->in[KP_ARENA_IN_BYTES], at = w->in[KP_ARENA_IN_OFFSET];
    void *stream;
    int rc;

    if (s->window.base == NULL || at > KP_ARENA_BYTES || left > KP_ARENA_BYTES - at)
        return -EPROTO;
    if (!kp_memory_holds(s, va, left))
        return CUDA_ERROR_INVALID_VALUE;
    rc = kp_resolve(s, w->in[KP_ARENA_IN_STREAM], KP_STREAM, &stream);
    while (rc == CUDA_SUCCESS && left > 0) {
        uint64_t room = KP_ARENA_CHUNK - at % KP_ARENA_CHUNK, bytes = left < room ? left : room;
        unsigned char *memory = s->window.base + KP_ARENA_AT + at;
        have_registered(s, w->home, at / KP_ARENA_CHUNK);
        rc = out ? s->driver.cuMemcpyDtoHAsync_v2(memory, va, bytes, stream)
                 : s->driver.cuMemcpyHtoDAsync_v2(va, memory, bytes, stream);
        at += bytes;
        va += bytes;
        left -= bytes;
    }
    return rc;
}

int kp_do_arena_in(struct kp_server *s, struct kp_work *w)
{
    return copy(s, w, false);
}

int kp_do_arena_out(struct kp_server *s, struct kp_work *w)
{
    return copy(s, w, true);
}
