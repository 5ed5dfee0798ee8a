/* Fills of device memory: 8, 16 and 32 bits wide, in lines and rectangles, at once (in the null stream) or in a stream. */
#include "cuda_core.h"

#include <string.h>

struct fill_op {
	struct sg_op op;
	char *at;
	size_t pitch, width, height; /* width in elements */
	unsigned value, element;
};

static void fill_row(char *at, size_t count, unsigned value, unsigned element)
{
	if (element == 1)
		memset(at, (int)(value & 0xff), count);
	else if (element == 2)
		for (size_t i = 0; i < count; i++)
			((uint16_t *)at)[i] = (uint16_t)value;
	else
		for (size_t i = 0; i < count; i++)
			((uint32_t *)at)[i] = value;
}

static void run_fill(struct sg_op *op, CUresult status)
{
	const struct fill_op *fill = (const struct fill_op *)op;

	(void)status;
	for (size_t row = 0; row < fill->height; row++)
		fill_row(fill->at + row * fill->pitch, fill->width, fill->value, fill->element);
}

CUresult sg_fill_op(const struct sg_fill *f, struct sg_op **out)
{
	size_t row, span;

	*out = NULL;
	if (!f->width || !f->height)
		return CUDA_SUCCESS;
	if (__builtin_mul_overflow(f->width, f->element, &row) || (f->height > 1 && f->pitch < row) || f->at % f->element ||
	    (f->height > 1 && f->pitch % f->element))
		return CUDA_ERROR_INVALID_VALUE;
	if (__builtin_mul_overflow(f->pitch, f->height - 1, &span) || __builtin_add_overflow(span, row, &span) ||
	    !sg_device_readable(f->at, span))
		return CUDA_ERROR_INVALID_VALUE;
	struct fill_op *op = sg_op_new(sizeof(*op), run_fill);
	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	op->op.type = SG_NODE_MEMSET;
	op->at = (char *)(uintptr_t)f->at;
	op->pitch = f->pitch;
	op->width = f->width;
	op->height = f->height;
	op->value = f->value;
	op->element = f->element;
	*out = &op->op;
	return CUDA_SUCCESS;
}

static CUresult fill(CUdeviceptr at, size_t pitch, unsigned value, unsigned element, size_t width, size_t height, CUstream handle,
		     bool per_thread)
{
	struct sg_stream *stream;
	struct sg_op *op;

	SG_ENTER(context);
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	SG_TRY(sg_fill_op(&(struct sg_fill){at, pitch, width, height, value, element}, &op));
	return op ? sg_submit(stream, op) : CUDA_SUCCESS;
}

#define FILL(bits, type) \
	CU_API CUresult cuMemsetD##bits##_v2(CUdeviceptr at, type v, size_t n) { return fill(at, 0, v, bits / 8, n, 1, NULL, false); } \
	CU_API CUresult cuMemsetD##bits##_v2_ptds(CUdeviceptr at, type v, size_t n) { return fill(at, 0, v, bits / 8, n, 1, NULL, true); } \
	CU_API CUresult cuMemsetD##bits##Async(CUdeviceptr at, type v, size_t n, CUstream s) \
	{ \
		return fill(at, 0, v, bits / 8, n, 1, s, false); \
	} \
	CU_API CUresult cuMemsetD##bits##Async_ptsz(CUdeviceptr at, type v, size_t n, CUstream s) \
	{ \
		return fill(at, 0, v, bits / 8, n, 1, s, true); \
	} \
	CU_API CUresult cuMemsetD2D##bits##_v2(CUdeviceptr at, size_t pitch, type v, size_t w, size_t h) \
	{ \
		return fill(at, pitch, v, bits / 8, w, h, NULL, false); \
	} \
	CU_API CUresult cuMemsetD2D##bits##_v2_ptds(CUdeviceptr at, size_t pitch, type v, size_t w, size_t h) \
	{ \
		return fill(at, pitch, v, bits / 8, w, h, NULL, true); \
	} \
	CU_API CUresult cuMemsetD2D##bits##Async(CUdeviceptr at, size_t pitch, type v, size_t w, size_t h, CUstream s) \
	{ \
		return fill(at, pitch, v, bits / 8, w, h, s, false); \
	} \
	CU_API CUresult cuMemsetD2D##bits##Async_ptsz(CUdeviceptr at, size_t pitch, type v, size_t w, size_t h, CUstream s) \
	{ \
		return fill(at, pitch, v, bits / 8, w, h, s, true); \
	}

FILL(8, unsigned char)
FILL(16, unsigned short)
FILL(32, unsigned)
