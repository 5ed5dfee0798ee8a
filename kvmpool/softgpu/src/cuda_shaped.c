/* Copies of rectangles and boxes: cuMemcpy2D, 3D and their forms. Arrays (textures) are not supported. */
#include "cuda_core.h"

#include <stdlib.h>
#include <string.h>

struct box_op {
	struct sg_op op;
	char *to;
	const char *from;
	size_t to_pitch, to_slice, from_pitch, from_slice;
	size_t width, height, depth;
	void *staged;
};

static void run_box(struct sg_op *op, CUresult status)
{
	const struct box_op *box = (const struct box_op *)op;

	for (size_t z = 0; !status && z < box->depth; z++)
		for (size_t y = 0; y < box->height; y++)
			memmove(box->to + z * box->to_slice + y * box->to_pitch, box->from + z * box->from_slice + y * box->from_pitch,
				box->width);
	free(box->staged);
}

struct side {
	int type;
	const void *host;
	CUdeviceptr device;
	size_t x, y, z, pitch, height;
	/* worked out */
	char *base;
	size_t slice, span;
	bool pageable;
};

/* `*sum` = a * b + c, false on overflow. */
static bool mul_add(size_t a, size_t b, size_t c, size_t *sum)
{
	size_t product;

	return !__builtin_mul_overflow(a, b, &product) && !__builtin_add_overflow(product, c, sum);
}

static CUresult work_out(struct side *side, size_t width, size_t height, size_t depth)
{
	size_t offset, span;

	if (side->type == CU_MEMORYTYPE_ARRAY)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (side->type < CU_MEMORYTYPE_HOST || side->type > CU_MEMORYTYPE_UNIFIED)
		return CUDA_ERROR_INVALID_VALUE;
	if (!side->pitch)
		side->pitch = side->x + width;
	if (!side->height)
		side->height = side->y + height;
	if (side->y > side->height || side->height - side->y < height)
		return CUDA_ERROR_INVALID_VALUE;
	if (side->x > side->pitch || side->pitch - side->x < width || __builtin_mul_overflow(side->pitch, side->height, &side->slice))
		return CUDA_ERROR_INVALID_VALUE;
	if (!mul_add(side->z, side->slice, side->x, &offset) || !mul_add(side->y, side->pitch, offset, &offset))
		return CUDA_ERROR_INVALID_VALUE;
	if (!mul_add(depth - 1, side->slice, width, &span) || !mul_add(height - 1, side->pitch, span, &span))
		return CUDA_ERROR_INVALID_VALUE;
	uintptr_t start = side->type == CU_MEMORYTYPE_HOST ? (uintptr_t)side->host : (uintptr_t)side->device;
	if (__builtin_add_overflow(start, offset, &start) || !start)
		return CUDA_ERROR_INVALID_VALUE;
	side->base = (char *)start;
	side->span = span;
	bool ours = sg_device_readable(start, span);
	if (side->type == CU_MEMORYTYPE_DEVICE && !ours)
		return CUDA_ERROR_INVALID_VALUE;
	side->pageable = !ours;
	return CUDA_SUCCESS;
}

static CUresult make_box(struct side *from, struct side *to, size_t width, size_t height, size_t depth, struct box_op **out)
{
	*out = NULL;
	if (!width || !height || !depth)
		return CUDA_SUCCESS;
	SG_TRY(work_out(from, width, height, depth));
	SG_TRY(work_out(to, width, height, depth));
	struct box_op *box = sg_op_new(sizeof(*box), run_box);
	if (!box)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*box = (struct box_op){.op = box->op, .to = to->base, .from = from->base, .to_pitch = to->pitch, .to_slice = to->slice,
			       .from_pitch = from->pitch, .from_slice = from->slice, .width = width, .height = height, .depth = depth};
	*out = box;
	return CUDA_SUCCESS;
}

static CUresult copy_box(struct side *from, struct side *to, size_t width, size_t height, size_t depth, CUstream handle, bool per_thread,
			 bool async)
{
	struct sg_stream *stream;
	struct box_op *box;

	SG_ENTER(context);
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	SG_TRY(make_box(from, to, width, height, depth, &box));
	if (!box)
		return CUDA_SUCCESS;
	if (async && sg_capturing(stream)) { /* then the host's memory is used at each launch */
		box->op.type = SG_NODE_MEMCPY;
		return sg_submit(stream, &box->op);
	}
	if (to->pageable || !async)
		return sg_run_now(stream, &box->op);
	if (from->pageable) {
		box->staged = malloc(from->span);
		if (!box->staged)
			return sg_run_now(stream, &box->op);
		box->from = memcpy(box->staged, from->base, from->span);
		box->op.always = true; /* to free it */
	}
	return sg_submit(stream, &box->op);
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c, CUstream stream, bool per_thread, bool async)
{
	if (!c)
		return CUDA_ERROR_INVALID_VALUE;
	struct side from = {.type = c->srcMemoryType, .host = c->srcHost, .device = c->srcDevice, .x = c->srcXInBytes, .y = c->srcY,
			    .pitch = c->srcPitch};
	struct side to = {.type = c->dstMemoryType, .host = c->dstHost, .device = c->dstDevice, .x = c->dstXInBytes, .y = c->dstY,
			  .pitch = c->dstPitch};
	return copy_box(&from, &to, c->WidthInBytes, c->Height, 1, stream, per_thread, async);
}

#define FROM_3D(c) \
	{.type = (c)->srcMemoryType, .host = (c)->srcHost, .device = (c)->srcDevice, .x = (c)->srcXInBytes, .y = (c)->srcY, \
	 .z = (c)->srcZ, .pitch = (c)->srcPitch, .height = (c)->srcHeight}
#define TO_3D(c) \
	{.type = (c)->dstMemoryType, .host = (c)->dstHost, .device = (c)->dstDevice, .x = (c)->dstXInBytes, .y = (c)->dstY, \
	 .z = (c)->dstZ, .pitch = (c)->dstPitch, .height = (c)->dstHeight}

CUresult sg_box_op(const CUDA_MEMCPY3D *c, struct sg_op **out)
{
	struct side from = FROM_3D(c), to = TO_3D(c);
	struct box_op *box;

	if (c->srcLOD || c->dstLOD)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(make_box(&from, &to, c->WidthInBytes, c->Height, c->Depth, &box));
	if (box)
		box->op.type = SG_NODE_MEMCPY;
	*out = box ? &box->op : NULL;
	return CUDA_SUCCESS;
}

static CUresult copy_3d(const CUDA_MEMCPY3D *c, CUstream stream, bool per_thread, bool async)
{
	if (!c || c->srcLOD || c->dstLOD)
		return CUDA_ERROR_INVALID_VALUE;
	struct side from = FROM_3D(c), to = TO_3D(c);
	return copy_box(&from, &to, c->WidthInBytes, c->Height, c->Depth, stream, per_thread, async);
}

#define SYNC(name, type, impl) \
	CU_API CUresult name(const type *c) { return impl(c, NULL, false, false); } \
	CU_API CUresult name##_ptds(const type *c) { return impl(c, NULL, true, false); }
#define ASYNC(name, type, impl) \
	CU_API CUresult name(const type *c, CUstream s) { return impl(c, s, false, true); } \
	CU_API CUresult name##_ptsz(const type *c, CUstream s) { return impl(c, s, true, true); }

SYNC(cuMemcpy2D_v2, CUDA_MEMCPY2D, copy_2d)
SYNC(cuMemcpy2DUnaligned_v2, CUDA_MEMCPY2D, copy_2d)
ASYNC(cuMemcpy2DAsync_v2, CUDA_MEMCPY2D, copy_2d)
SYNC(cuMemcpy3D_v2, CUDA_MEMCPY3D, copy_3d)
ASYNC(cuMemcpy3DAsync_v2, CUDA_MEMCPY3D, copy_3d)
/* A peer's box has contexts in the reserved words; all of this library's cards share one address space. */
SYNC(cuMemcpy3DPeer, CUDA_MEMCPY3D, copy_3d)
ASYNC(cuMemcpy3DPeerAsync, CUDA_MEMCPY3D, copy_3d)
