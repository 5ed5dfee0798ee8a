/* Copies between guest and card, in chunks through page-locked slots: one is on the wire while another is on the bus. */
#include "session_state.h"

#include <stdlib.h>

/* The next slot for data to the card, once the copy that used it last is over. */
static CUresult next_slot(struct kp_server *s, struct kp_home *home, struct kp_slot **out)
{
    struct kp_slot *slot = &home->in[home->next_in++ % KP_SLOTS_IN];
    CUresult rc = slot->busy ? s->driver.cuEventSynchronize(slot->event) : CUDA_SUCCESS;

    slot->busy = false;
    *out = slot;
    return rc;
}

static CUresult to_card(struct kp_server *s, struct kp_slot *slot, uint64_t va, uint32_t bytes, void *stream)
{
    CUresult rc = s->driver.cuMemcpyHtoDAsync_v2(va, slot->memory, bytes, stream);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuEventRecord(slot->event, stream);
    slot->busy = rc == CUDA_SUCCESS;
    if (rc == CUDA_SUCCESS && !slot->pinned) {
        slot->busy = false;
        rc = s->driver.cuStreamSynchronize(stream);
    }
    return rc;
}

int kp_do_copy_in(struct kp_server *s, struct kp_work *w)
{
    uint64_t va = w->in[KP_COPY_IN_VA], left = w->in[KP_COPY_IN_BYTES];
    struct kp_slot *slot = NULL;
    void *stream;
    uint32_t length;
    int result = kp_resolve(s, w->in[KP_COPY_IN_STREAM], KP_STREAM, &stream), rc;

    while (left > 0 && result == CUDA_SUCCESS) {
        if ((rc = kp_take_bulk_frame(s, w->seq, left, &length)) != 0)
            return rc;
        result = next_slot(s, w->home, &slot);
        if ((rc = kp_take(s, slot->memory, length)) != 0)
            return rc;
        if (result == CUDA_SUCCESS)
            result = to_card(s, slot, va, length, stream);
        va += length;
        left -= length;
    }
    rc = kp_drain_bulk(s, w->seq, left); /* of a copy that failed: the stream of frames goes on behind it */
    return rc != 0 ? rc : result;
}

/* Starts to bring a chunk into `slot`. */
static CUresult from_card(struct kp_server *s, struct kp_slot *slot, uint64_t va, uint32_t bytes, void *stream)
{
    CUresult rc = s->driver.cuMemcpyDtoHAsync_v2(slot->memory, va, bytes, stream);

    return rc == CUDA_SUCCESS ? s->driver.cuEventRecord(slot->event, stream) : rc;
}

static uint32_t chunk_of(uint64_t left)
{
    return left < KP_BODY_MAX ? (uint32_t)left : KP_BODY_MAX;
}

/* Through the two slots of the context: the next chunk is on its way while this one is sent. */
static int copy_pipelined(struct kp_server *s, struct kp_work *w, void *stream)
{
    uint64_t va = w->in[KP_COPY_OUT_VA], left = w->in[KP_COPY_OUT_BYTES];
    struct kp_slot *slots = w->home->out;
    unsigned turn = 0;
    int rc = from_card(s, &slots[0], va, chunk_of(left), stream);

    while (rc == CUDA_SUCCESS && left > 0) {
        struct kp_slot *slot = &slots[turn++ % KP_SLOTS_OUT];
        uint32_t bytes = chunk_of(left);
        va += bytes;
        left -= bytes;
        if ((rc = s->driver.cuEventSynchronize(slot->event)) != CUDA_SUCCESS)
            break;
        if (left > 0 && (rc = from_card(s, &slots[turn % KP_SLOTS_OUT], va, chunk_of(left), stream)) != CUDA_SUCCESS)
            break;
        rc = kp_send_data(s, w->seq, slot->memory, bytes);
    }
    return rc;
}

/* While another thread has the slots: through memory of its own, a chunk at a time. */
static int copy_plain(struct kp_server *s, struct kp_work *w, void *stream)
{
    uint64_t va = w->in[KP_COPY_OUT_VA], left = w->in[KP_COPY_OUT_BYTES];
    void *memory = malloc(chunk_of(left));
    int rc = memory != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;

    while (rc == CUDA_SUCCESS && left > 0) {
        uint32_t bytes = chunk_of(left);
        rc = s->driver.cuMemcpyDtoHAsync_v2(memory, va, bytes, stream);
        if (rc == CUDA_SUCCESS)
            rc = s->driver.cuStreamSynchronize(stream);
        if (rc == CUDA_SUCCESS)
            rc = kp_send_data(s, w->seq, memory, bytes);
        va += bytes;
        left -= bytes;
    }
    free(memory);
    return rc;
}

int kp_do_copy_out(struct kp_server *s, struct kp_work *w)
{
    void *stream;
    int rc = kp_resolve(s, w->in[KP_COPY_OUT_STREAM], KP_STREAM, &stream);

    if (rc != CUDA_SUCCESS || w->in[KP_COPY_OUT_BYTES] == 0)
        return rc;
    if (pthread_mutex_trylock(&w->home->out_lock) != 0)
        return copy_plain(s, w, stream);
    rc = copy_pipelined(s, w, stream);
    pthread_mutex_unlock(&w->home->out_lock);
    return rc;
}
