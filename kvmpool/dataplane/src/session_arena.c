/* Page-locked memory of the program: what it may have, and copies between the card and such memory in the window, none of whose
 * bytes is on the way.
 *
 * Memory in the window is charged by chunks of the arena, because a chunk is registered as one, and only what is charged is
 * copied from or to. Memory elsewhere is the guest's own and costs this host nothing; it counts because the program asked for it.
 */
#include "session_state.h"

#include <errno.h>

/* A chunk is registered with the driver when the first copy touches it. Where that fails (another context has it, or the
 * driver cannot) the copy is right all the same, and slower. */
static void have_registered(struct kp_server *s, struct kp_home *home, uint64_t chunk)
{
    unsigned char *start = s->window.base + KP_ARENA_AT + chunk * KP_ARENA_CHUNK;
    uint64_t left = s->window.arena - chunk * KP_ARENA_CHUNK, bytes = left < KP_ARENA_CHUNK ? left : KP_ARENA_CHUNK;

    if ((home->tried >> chunk & 1) != 0)
        return;
    home->tried |= 1ull << chunk;
    if (s->driver.cuMemHostRegister_v2(start, bytes, 1 /* for all contexts */) == CUDA_SUCCESS)
        home->registered |= 1ull << chunk;
}

void kp_arena_register(struct kp_server *s, struct kp_home *home, uint64_t at, uint64_t bytes)
{
    for (uint64_t chunk = at / KP_ARENA_CHUNK; bytes > 0 && chunk <= (at + bytes - 1) / KP_ARENA_CHUNK; chunk++)
        have_registered(s, home, chunk);
}

void kp_arena_leave(struct kp_server *s, struct kp_home *home)
{
    for (uint64_t chunk = 0; chunk < KP_ARENA_CHUNKS; chunk++)
        if ((home->registered >> chunk & 1) != 0)
            s->driver.cuMemHostUnregister(s->window.base + KP_ARENA_AT + chunk * KP_ARENA_CHUNK);
    home->registered = home->tried = 0;
}

/* The chunks of the arena that these bytes touch; false where they are not in it. */
static bool chunks_of(const struct kp_server *s, uint64_t offset, uint64_t bytes, unsigned *first, unsigned *end)
{
    if (s->window.base == NULL || bytes == 0 || offset > s->window.arena || bytes > s->window.arena - offset)
        return false;
    *first = (unsigned)(offset / KP_ARENA_CHUNK);
    *end = (unsigned)((offset + bytes - 1) / KP_ARENA_CHUNK) + 1;
    return true;
}

static void give_chunks(struct kp_server *s, unsigned first, unsigned end)
{
    for (unsigned chunk = first; chunk < end; chunk++)
        if (s->pinned_chunks[chunk] > 0 && --s->pinned_chunks[chunk] == 0)
            kp_account_unpin(s->session->account, s->session->slot, KP_ARENA_CHUNK);
}

static int take_chunks(struct kp_server *s, unsigned first, unsigned end)
{
    for (unsigned chunk = first; chunk < end; chunk++) {
        if (s->pinned_chunks[chunk] == 0 && kp_account_pin(s->session->account, s->session->slot, KP_ARENA_CHUNK) != 0) {
            give_chunks(s, first, chunk);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        s->pinned_chunks[chunk]++;
    }
    return CUDA_SUCCESS;
}

int kp_do_pinned_take(struct kp_server *s, struct kp_work *w)
{
    uint64_t bytes = w->in[KP_PINNED_TAKE_BYTES];
    unsigned first, end;

    if (w->in[KP_PINNED_TAKE_OFFSET] != KP_PINNED_PLAIN)
        return chunks_of(s, w->in[KP_PINNED_TAKE_OFFSET], bytes, &first, &end) ? take_chunks(s, first, end) : -EPROTO;
    if (bytes > KP_ACCOUNT_LIMIT_MAX || kp_account_pin(s->session->account, s->session->slot, bytes) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    s->pinned += bytes;
    return CUDA_SUCCESS;
}

int kp_do_pinned_give(struct kp_server *s, struct kp_work *w)
{
    uint64_t bytes = w->in[KP_PINNED_GIVE_BYTES];
    unsigned first, end;

    if (w->in[KP_PINNED_GIVE_OFFSET] != KP_PINNED_PLAIN) {
        if (!chunks_of(s, w->in[KP_PINNED_GIVE_OFFSET], bytes, &first, &end))
            return -EPROTO;
        give_chunks(s, first, end);
        return CUDA_SUCCESS;
    }
    if (bytes > s->pinned)
        return -EPROTO;
    s->pinned -= bytes;
    kp_account_unpin(s->session->account, s->session->slot, bytes);
    return CUDA_SUCCESS;
}

static bool charged(const struct kp_server *s, uint64_t offset, uint64_t bytes)
{
    unsigned first, end;

    if (!chunks_of(s, offset, bytes, &first, &end))
        return bytes == 0;
    while (first < end && s->pinned_chunks[first] > 0)
        first++;
    return first == end;
}

static int copy(struct kp_server *s, struct kp_work *w, bool out)
{
    uint64_t va = w->in[KP_ARENA_IN_VA], left = w->in[KP_ARENA_IN_BYTES], at = w->in[KP_ARENA_IN_OFFSET];
    void *stream;
    int rc;

    if (s->window.base == NULL || at > s->window.arena || left > s->window.arena - at)
        return -EPROTO;
    if (!charged(s, at, left) || !kp_memory_holds(s, va, left))
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
