/* Copies between guest and card, in chunks through page-locked slots: one is on the wire while another is on the bus.
 *
 * The bytes travel packed. On the card they are a box: a plain copy is a box of one row.
 */
#include "session_state.h"

#include <stdlib.h>

/* Rows of `width` bytes, `pitch` apart; `height` of them in each of `depth` layers, which have room for `rows`. */
struct box {
    uint64_t va, bytes, width, height, depth, pitch, rows;
    bool out; /* from the card */
};

static struct box plain_box(uint64_t va, uint64_t bytes, bool out)
{
    return (struct box){.va = va, .bytes = bytes, .width = bytes, .height = 1, .depth = 1, .pitch = bytes, .rows = 1, .out = out};
}

/* The next slot for data to the card, once the copy that used it last is over. */
static CUresult next_slot(struct kp_server *s, struct kp_home *home, struct kp_slot **out)
{
    struct kp_slot *slot = &home->in[home->next_in++ % KP_SLOTS_IN];
    CUresult rc = slot->busy ? s->driver.cuEventSynchronize(slot->event) : CUDA_SUCCESS;

    slot->busy = false;
    *out = slot;
    return rc;
}

static CUresult move_rows(struct kp_server *s, const struct box *box, uint64_t va, void *memory, uint64_t rows, void *stream)
{
    CUDA_MEMCPY2D copy = {.WidthInBytes = box->width, .Height = rows};

    if (box->out) {
        copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.srcDevice = va;
        copy.srcPitch = box->pitch;
        copy.dstMemoryType = CU_MEMORYTYPE_HOST;
        copy.dstHost = memory;
        copy.dstPitch = box->width;
    } else {
        copy.srcMemoryType = CU_MEMORYTYPE_HOST;
        copy.srcHost = memory;
        copy.srcPitch = box->width;
        copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.dstDevice = va;
        copy.dstPitch = box->pitch;
    }
    return s->driver.cuMemcpy2DAsync_v2(&copy, stream);
}

/* The piece of the box that begins at byte `at` of its packed form: whole rows of a layer at once, else a part of one. */
static CUresult move_piece(struct kp_server *s, const struct box *box, uint64_t at, unsigned char *memory, uint64_t bytes, void *stream)
{
    CUresult rc = CUDA_SUCCESS;

    while (bytes > 0 && rc == CUDA_SUCCESS) {
        uint64_t x = at % box->width, y = at / box->width % box->height, z = at / box->width / box->height;
        uint64_t va = box->va + (z * box->rows + y) * box->pitch + x, moved = box->width - x, rows = bytes / box->width;
        if (x == 0 && rows > 1 && box->height - y > 1) {
            rows = rows < box->height - y ? rows : box->height - y;
            moved = rows * box->width;
            rc = move_rows(s, box, va, memory, rows, stream);
        } else {
            moved = moved < bytes ? moved : bytes;
            rc = box->out ? s->driver.cuMemcpyDtoHAsync_v2(memory, va, moved, stream)
                          : s->driver.cuMemcpyHtoDAsync_v2(va, memory, moved, stream);
        }
        at += moved;
        memory += moved;
        bytes -= moved;
    }
    return rc;
}

static CUresult to_card(struct kp_server *s, const struct box *box, struct kp_slot *slot, uint64_t at, uint32_t bytes, void *stream)
{
    CUresult rc = move_piece(s, box, at, slot->memory, bytes, stream);

    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuEventRecord(slot->event, stream);
    slot->busy = rc == CUDA_SUCCESS;
    if (rc == CUDA_SUCCESS && !slot->pinned) {
        slot->busy = false;
        rc = s->driver.cuStreamSynchronize(stream);
    }
    return rc;
}

/* `result`: what the call has come to before its bytes; they are taken off the connection all the same. */
static int copy_in(struct kp_server *s, struct kp_work *w, const struct box *box, void *stream, int result)
{
    struct kp_slot *slot = NULL;
    uint64_t at = 0;
    uint32_t length;
    int rc;

    if (result == CUDA_SUCCESS)
        result = kp_refuse_capture(s, stream);
    while (at < box->bytes && result == CUDA_SUCCESS) {
        if ((rc = kp_take_bulk_frame(s, w->seq, box->bytes - at, &length)) != 0)
            return rc;
        result = next_slot(s, w->home, &slot);
        if ((rc = kp_take(s, slot->memory, length)) != 0)
            return rc;
        if (result == CUDA_SUCCESS)
            result = to_card(s, box, slot, at, length, stream);
        at += length;
    }
    rc = kp_drain_bulk(s, w->seq, box->bytes - at); /* of a copy that failed: the stream of frames goes on behind it */
    return rc != 0 ? rc : result;
}

int kp_do_copy_in(struct kp_server *s, struct kp_work *w)
{
    struct box box = plain_box(w->in[KP_COPY_IN_VA], w->in[KP_COPY_IN_BYTES], false);
    void *stream;
    int result = kp_resolve(s, w->in[KP_COPY_IN_STREAM], KP_STREAM, &stream);

    return copy_in(s, w, &box, stream, result);
}

/* Starts to bring a chunk into `slot`. */
static CUresult from_card(struct kp_server *s, const struct box *box, struct kp_slot *slot, uint64_t at, uint32_t bytes, void *stream)
{
    CUresult rc = move_piece(s, box, at, slot->memory, bytes, stream);

    return rc == CUDA_SUCCESS ? s->driver.cuEventRecord(slot->event, stream) : rc;
}

static uint32_t chunk_of(uint64_t left)
{
    return left < KP_BODY_MAX ? (uint32_t)left : KP_BODY_MAX;
}

/* Through the two slots of the context: the next chunk is on its way while this one is sent. */
static int copy_pipelined(struct kp_server *s, struct kp_work *w, const struct box *box, void *stream)
{
    uint64_t at = 0;
    struct kp_slot *slots = w->home->out;
    unsigned turn = 0;
    int rc = from_card(s, box, &slots[0], at, chunk_of(box->bytes), stream);

    while (rc == CUDA_SUCCESS && at < box->bytes) {
        struct kp_slot *slot = &slots[turn++ % KP_SLOTS_OUT];
        uint32_t bytes = chunk_of(box->bytes - at), next;
        at += bytes;
        next = chunk_of(box->bytes - at);
        if ((rc = s->driver.cuEventSynchronize(slot->event)) != CUDA_SUCCESS)
            break;
        if (next > 0 && (rc = from_card(s, box, &slots[turn % KP_SLOTS_OUT], at, next, stream)) != CUDA_SUCCESS)
            break;
        rc = kp_send_data(s, w->seq, slot->memory, bytes);
    }
    return rc;
}

/* While another thread has the slots: through memory of its own, a chunk at a time. */
static int copy_plain(struct kp_server *s, struct kp_work *w, const struct box *box, void *stream)
{
    unsigned char *memory = malloc(chunk_of(box->bytes));
    int rc = memory != NULL ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    uint32_t bytes;

    for (uint64_t at = 0; rc == CUDA_SUCCESS && at < box->bytes; at += bytes) {
        bytes = chunk_of(box->bytes - at);
        rc = move_piece(s, box, at, memory, bytes, stream);
        if (rc == CUDA_SUCCESS)
            rc = s->driver.cuStreamSynchronize(stream);
        if (rc == CUDA_SUCCESS)
            rc = kp_send_data(s, w->seq, memory, bytes);
    }
    free(memory);
    return rc;
}

static int copy_out(struct kp_server *s, struct kp_work *w, const struct box *box, uint64_t stream_number)
{
    void *stream;
    int rc = kp_resolve(s, stream_number, KP_STREAM, &stream);

    if (rc != CUDA_SUCCESS || box->bytes == 0 || (rc = kp_refuse_capture(s, stream)) != CUDA_SUCCESS)
        return rc;
    if (pthread_mutex_trylock(&w->home->out_lock) != 0)
        return copy_plain(s, w, box, stream);
    rc = copy_pipelined(s, w, box, stream);
    pthread_mutex_unlock(&w->home->out_lock);
    return rc;
}

int kp_do_copy_out(struct kp_server *s, struct kp_work *w)
{
    struct box box = plain_box(w->in[KP_COPY_OUT_VA], w->in[KP_COPY_OUT_BYTES], true);

    return copy_out(s, w, &box, w->in[KP_COPY_OUT_STREAM]);
}

/* `*sum` = a * b + c; false where that is more than 64 bits. */
static bool mul_add(uint64_t a, uint64_t b, uint64_t c, uint64_t *sum)
{
    return !__builtin_mul_overflow(a, b, sum) && !__builtin_add_overflow(*sum, c, sum);
}

bool kp_box_span(uint64_t width, uint64_t height, uint64_t depth, uint64_t pitch, uint64_t rows, uint64_t *span)
{
    uint64_t layer;

    if (width == 0 || height == 0 || depth == 0 || pitch < width || rows < height)
        return false;
    return mul_add(rows, pitch, 0, &layer) && mul_add(height - 1, pitch, width, span) && mul_add(depth - 1, layer, *span, span);
}

bool kp_box_holds(struct kp_server *s, uint64_t va, uint64_t width, uint64_t height, uint64_t depth, uint64_t pitch, uint64_t rows)
{
    uint64_t span;

    return kp_box_span(width, height, depth, pitch, rows, &span) && kp_memory_holds(s, va, span);
}

/* The numbers of box_in and box_out are the same; false where they are no box. */
static bool read_box(struct kp_server *s, const struct kp_work *w, bool out, struct box *box)
{
    const uint64_t *in = w->in;
    uint64_t bytes;

    *box = (struct box){in[KP_BOX_IN_VA], in[KP_BOX_IN_BYTES], in[KP_BOX_IN_WIDTH], in[KP_BOX_IN_HEIGHT],
                        in[KP_BOX_IN_DEPTH], in[KP_BOX_IN_PITCH], in[KP_BOX_IN_ROWS], out};
    if (!mul_add(box->width, box->height, 0, &bytes) || !mul_add(bytes, box->depth, 0, &bytes) || bytes != box->bytes)
        return false;
    return kp_box_holds(s, box->va, box->width, box->height, box->depth, box->pitch, box->rows);
}
_Static_assert((int)KP_BOX_IN_STREAM == (int)KP_BOX_OUT_STREAM && (int)KP_BOX_IN_IN == (int)KP_BOX_OUT_IN, "read_box");

int kp_do_box_in(struct kp_server *s, struct kp_work *w)
{
    struct box box;
    void *stream = NULL;
    int result = CUDA_ERROR_INVALID_VALUE;

    if (read_box(s, w, false, &box))
        result = kp_resolve(s, w->in[KP_BOX_IN_STREAM], KP_STREAM, &stream);
    return copy_in(s, w, &box, stream, result);
}

int kp_do_box_out(struct kp_server *s, struct kp_work *w)
{
    struct box box;

    return read_box(s, w, true, &box) ? copy_out(s, w, &box, w->in[KP_BOX_OUT_STREAM]) : CUDA_ERROR_INVALID_VALUE;
}

int kp_do_box_between(struct kp_server *s, struct kp_work *w)
{
    const uint64_t *in = &w->in[KP_BOX_BETWEEN_WIDTH]; /* width, height, depth */
    CUDA_MEMCPY3D copy = {
        .srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = w->in[KP_BOX_BETWEEN_FROM],
        .srcPitch = w->in[KP_BOX_BETWEEN_FROM_PITCH], .srcHeight = w->in[KP_BOX_BETWEEN_FROM_ROWS],
        .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = w->in[KP_BOX_BETWEEN_TO],
        .dstPitch = w->in[KP_BOX_BETWEEN_TO_PITCH], .dstHeight = w->in[KP_BOX_BETWEEN_TO_ROWS],
        .WidthInBytes = in[0], .Height = in[1], .Depth = in[2],
    };
    void *stream;
    int rc = kp_resolve(s, w->in[KP_BOX_BETWEEN_STREAM], KP_STREAM, &stream);

    if (rc != CUDA_SUCCESS)
        return rc;
    if (!kp_box_holds(s, copy.srcDevice, in[0], in[1], in[2], copy.srcPitch, copy.srcHeight) ||
        !kp_box_holds(s, copy.dstDevice, in[0], in[1], in[2], copy.dstPitch, copy.dstHeight))
        return CUDA_ERROR_INVALID_VALUE;
    return s->driver.cuMemcpy3DAsync_v2(&copy, stream);
}

/* The copy is marked by an event that other streams wait for when they are next used; nobody waits here. */
int kp_do_settle(struct kp_server *s, struct kp_work *w)
{
    struct kp_home *home = w->home;
    void *stream;
    int rc = kp_resolve(s, w->in[KP_SETTLE_STREAM], KP_STREAM, &stream); /* it waits for a mark before this one */

    pthread_mutex_lock(&s->handles_lock);
    if (rc == CUDA_SUCCESS && home->mark == NULL)
        rc = s->driver.cuEventCreate(&home->mark, 2 /* no timing */);
    if (rc == CUDA_SUCCESS && stream == NULL && home->marked != NULL)
        rc = s->driver.cuStreamWaitEvent(NULL, home->mark, 0);
    if (rc == CUDA_SUCCESS)
        rc = s->driver.cuEventRecord(home->mark, stream);
    home->marks += rc == CUDA_SUCCESS;
    home->marked = stream;
    pthread_mutex_unlock(&s->handles_lock);
    return rc;
}
