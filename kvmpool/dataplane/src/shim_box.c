/* Copies of rectangles and boxes: their rows are gathered here and travel packed, or stay on the card. */
#include "shim.h"

#include <stdlib.h>
#include <string.h>

struct side {
    CUmemorytype type;
    char *host;
    CUdeviceptr device;
    size_t x, y, z, pitch, rows;
    size_t span; /* worked out: bytes from its first byte to its last */
};

struct shape {
    size_t width, height, depth, bytes;
};

/* `*sum` = a * b + c; false where that overflows. */
static bool mul_add(size_t a, size_t b, size_t c, size_t *sum)
{
    return !__builtin_mul_overflow(a, b, sum) && !__builtin_add_overflow(*sum, c, sum);
}

/* Says which memory a side is in, moves it to its first byte and measures it. */
static CUresult work_out(struct side *side, const struct shape *shape)
{
    size_t layer, offset, span;

    if (side->type == CU_MEMORYTYPE_ARRAY)
        return kp_unsupported("cuMemcpy2D or 3D of an array");
    if (side->type < CU_MEMORYTYPE_HOST || side->type > CU_MEMORYTYPE_UNIFIED)
        return CUDA_ERROR_INVALID_VALUE;
    if (side->type == CU_MEMORYTYPE_UNIFIED) {
        side->type = kp_on_device(side->device) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        side->host = (char *)(uintptr_t)side->device;
    }
    if (side->pitch == 0)
        side->pitch = side->x + shape->width;
    if (side->rows == 0)
        side->rows = side->y + shape->height;
    if (side->x > side->pitch || side->pitch - side->x < shape->width)
        return CUDA_ERROR_INVALID_VALUE;
    if (side->y > side->rows || side->rows - side->y < shape->height)
        return CUDA_ERROR_INVALID_VALUE;
    if (!mul_add(side->pitch, side->rows, 0, &layer) || !mul_add(side->z, layer, side->x, &offset) ||
        !mul_add(side->y, side->pitch, offset, &offset))
        return CUDA_ERROR_INVALID_VALUE;
    if (!mul_add(shape->depth - 1, layer, shape->width, &span) || !mul_add(shape->height - 1, side->pitch, span, &side->span))
        return CUDA_ERROR_INVALID_VALUE;
    if (side->type == CU_MEMORYTYPE_DEVICE ? side->device == 0 : side->host == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    if (side->type == CU_MEMORYTYPE_DEVICE)
        side->device += offset;
    else
        side->host += offset;
    return CUDA_SUCCESS;
}

static bool is_packed(const struct side *side, const struct shape *shape)
{
    return side->span == shape->bytes;
}

/* Between the program's memory and packed rows. */
static void pack(const struct side *side, const struct shape *shape, char *packed, bool out)
{
    for (size_t z = 0; z < shape->depth; z++)
        for (size_t y = 0; y < shape->height; y++, packed += shape->width) {
            char *row = side->host + (z * side->rows + y) * side->pitch;
            memcpy(out ? row : packed, out ? packed : row, shape->width);
        }
}

static void fill(uint64_t *in, const struct side *card, const struct shape *shape)
{
    in[KP_BOX_IN_VA] = card->device;
    in[KP_BOX_IN_BYTES] = shape->bytes;
    in[KP_BOX_IN_WIDTH] = shape->width;
    in[KP_BOX_IN_HEIGHT] = shape->height;
    in[KP_BOX_IN_DEPTH] = shape->depth;
    in[KP_BOX_IN_PITCH] = card->pitch;
    in[KP_BOX_IN_ROWS] = card->rows;
}

/* Takes `tx` and returns 0 where the call may be sent. */
static CUresult enter(const struct side *card, CUstream stream, uint64_t *number)
{
    CUresult rc = kp_enter();

    if (rc != CUDA_SUCCESS)
        return rc;
    rc = kp_device_range(card->device, card->span);
    if (rc == CUDA_SUCCESS)
        rc = kp_stream_number(stream, number);
    return rc == CUDA_SUCCESS ? rc : kp_leave(rc);
}

/* Rows are read here and now: a copy into them that is under way in the stream comes first. */
static CUresult arrived(const struct side *from, CUstream stream)
{
    uint64_t offset;
    bool shared;

    pthread_mutex_lock(&kp_shim.tx);
    shared = kp_host_shared(from->host, 1, &offset);
    pthread_mutex_unlock(&kp_shim.tx);
    return shared ? kp_cuStreamSynchronize(stream) : CUDA_SUCCESS;
}

static CUresult box_in(const struct side *from, const struct side *to, const struct shape *shape, CUstream stream)
{
    uint64_t in[KP_BOX_IN_IN];
    char *packed = is_packed(from, shape) ? from->host : malloc(shape->bytes);
    CUresult rc;

    if (packed == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fill(in, to, shape);
    if ((rc = arrived(from, stream)) == CUDA_SUCCESS && (rc = enter(to, stream, &in[KP_BOX_IN_STREAM])) == CUDA_SUCCESS) {
        if (packed != from->host)
            pack(from, shape, packed, false);
        rc = kp_send_bulk(KP_OP_box_in, in, KP_BOX_IN_IN, NULL, 0, packed, shape->bytes, NULL);
    }
    if (packed != from->host)
        free(packed);
    return rc;
}

static CUresult box_out(const struct side *from, const struct side *to, const struct shape *shape, CUstream stream)
{
    uint64_t in[KP_BOX_OUT_IN];
    char *packed = is_packed(to, shape) ? to->host : malloc(shape->bytes);
    struct kp_answer answer = {.bulk = packed, .bulk_bytes = shape->bytes};
    CUresult rc;

    if (packed == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    fill(in, from, shape);
    if ((rc = enter(from, stream, &in[KP_BOX_OUT_STREAM])) == CUDA_SUCCESS)
        rc = kp_ask(KP_OP_box_out, in, KP_BOX_OUT_IN, NULL, 0, &answer);
    if (packed != to->host) {
        if (rc == CUDA_SUCCESS)
            pack(to, shape, packed, true);
        free(packed);
    }
    return rc;
}

static CUresult box_between(const struct side *from, const struct side *to, const struct shape *shape, CUstream stream)
{
    uint64_t in[KP_BOX_BETWEEN_IN] = {
        [KP_BOX_BETWEEN_FROM] = from->device, [KP_BOX_BETWEEN_FROM_PITCH] = from->pitch, [KP_BOX_BETWEEN_FROM_ROWS] = from->rows,
        [KP_BOX_BETWEEN_TO] = to->device, [KP_BOX_BETWEEN_TO_PITCH] = to->pitch, [KP_BOX_BETWEEN_TO_ROWS] = to->rows,
        [KP_BOX_BETWEEN_WIDTH] = shape->width, [KP_BOX_BETWEEN_HEIGHT] = shape->height, [KP_BOX_BETWEEN_DEPTH] = shape->depth,
    };
    CUresult rc = enter(from, stream, &in[KP_BOX_BETWEEN_STREAM]);

    if (rc == CUDA_SUCCESS && (rc = kp_device_range(to->device, to->span)) != CUDA_SUCCESS)
        return kp_leave(rc);
    return rc == CUDA_SUCCESS ? kp_send(KP_OP_box_between, in, KP_BOX_BETWEEN_IN, NULL, 0) : rc;
}

/* Both ends in the program's memory: the copy is its turn in the stream. */
static CUresult box_here(const struct side *from, const struct side *to, const struct shape *shape, CUstream stream)
{
    CUresult rc = kp_cuStreamSynchronize(stream);

    for (size_t z = 0; rc == CUDA_SUCCESS && z < shape->depth; z++)
        for (size_t y = 0; y < shape->height; y++)
            memmove(to->host + (z * to->rows + y) * to->pitch, from->host + (z * from->rows + y) * from->pitch, shape->width);
    return rc;
}

static CUresult copy(struct side *from, struct side *to, struct shape *shape, CUstream stream)
{
    CUresult rc;

    if (shape->width == 0 || shape->height == 0 || shape->depth == 0) {
        rc = kp_enter();
        return rc == CUDA_SUCCESS ? kp_leave(rc) : rc;
    }
    if (!mul_add(shape->width, shape->height, 0, &shape->bytes) || !mul_add(shape->bytes, shape->depth, 0, &shape->bytes))
        return CUDA_ERROR_INVALID_VALUE;
    if ((rc = work_out(from, shape)) != CUDA_SUCCESS || (rc = work_out(to, shape)) != CUDA_SUCCESS)
        return rc;
    if (from->type == CU_MEMORYTYPE_DEVICE)
        return to->type == CU_MEMORYTYPE_DEVICE ? box_between(from, to, shape, stream) : box_out(from, to, shape, stream);
    return to->type == CU_MEMORYTYPE_DEVICE ? box_in(from, to, shape, stream) : box_here(from, to, shape, stream);
}

CUresult kp_cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *c, CUstream hStream)
{
    if (c == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    struct side from = {.type = c->srcMemoryType, .host = (char *)(uintptr_t)c->srcHost, .device = c->srcDevice,
                        .x = c->srcXInBytes, .y = c->srcY, .pitch = c->srcPitch};
    struct side to = {.type = c->dstMemoryType, .host = c->dstHost, .device = c->dstDevice,
                      .x = c->dstXInBytes, .y = c->dstY, .pitch = c->dstPitch};
    struct shape shape = {.width = c->WidthInBytes, .height = c->Height, .depth = 1};
    return copy(&from, &to, &shape, hStream);
}

#define SIDE_FROM(c)                                                                                                               \
    {.type = (c)->srcMemoryType, .host = (char *)(uintptr_t)(c)->srcHost, .device = (c)->srcDevice, .x = (c)->srcXInBytes,         \
     .y = (c)->srcY, .z = (c)->srcZ, .pitch = (c)->srcPitch, .rows = (c)->srcHeight}
#define SIDE_TO(c)                                                                                                                 \
    {.type = (c)->dstMemoryType, .host = (c)->dstHost, .device = (c)->dstDevice, .x = (c)->dstXInBytes, .y = (c)->dstY,            \
     .z = (c)->dstZ, .pitch = (c)->dstPitch, .rows = (c)->dstHeight}

CUresult kp_cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *c, CUstream hStream)
{
    if (c == NULL || c->srcLOD != 0 || c->dstLOD != 0)
        return CUDA_ERROR_INVALID_VALUE;
    struct side from = SIDE_FROM(c), to = SIDE_TO(c);
    struct shape shape = {.width = c->WidthInBytes, .height = c->Height, .depth = c->Depth};
    return copy(&from, &to, &shape, hStream);
}

/* Both contexts are of the one card, so its addresses say all. */
CUresult kp_cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *c, CUstream hStream)
{
    return kp_cuMemcpy3DAsync_v2(c, hStream);
}

/* One end of it: card memory, or where it is in the window. */
static CUresult node_side(struct side *side, const struct shape *shape, uint64_t *at, uint64_t window, uint64_t *in)
{
    CUresult rc = work_out(side, shape);

    at[0] = side->device;
    at[1] = side->pitch;
    at[2] = side->rows;
    if (rc != CUDA_SUCCESS || side->type == CU_MEMORYTYPE_DEVICE)
        return rc != CUDA_SUCCESS ? rc : kp_device_range(side->device, side->span);
    in[KP_NODE_COPY_WINDOW] |= window;
    return kp_host_shared(side->host, side->span, at) ? CUDA_SUCCESS : kp_unsupported("cuGraphAddMemcpyNode of memory that is not page-locked in the window");
}

CUresult kp_box_node(const CUDA_MEMCPY3D *c, uint64_t *in)
{
    struct side from = SIDE_FROM(c), to = SIDE_TO(c);
    struct shape shape = {.width = c->WidthInBytes, .height = c->Height, .depth = c->Depth};
    CUresult rc;

    if (c->srcLOD != 0 || c->dstLOD != 0 || shape.width == 0 || shape.height == 0 || shape.depth == 0)
        return CUDA_ERROR_INVALID_VALUE;
    in[KP_NODE_COPY_WIDTH] = shape.width;
    in[KP_NODE_COPY_HEIGHT] = shape.height;
    in[KP_NODE_COPY_DEPTH] = shape.depth;
    in[KP_NODE_COPY_WINDOW] = 0;
    if ((rc = node_side(&from, &shape, &in[KP_NODE_COPY_FROM], 1, in)) != CUDA_SUCCESS)
        return rc;
    return node_side(&to, &shape, &in[KP_NODE_COPY_TO], 2, in);
}
