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

static CUresult fill(CUdeviceptr at, size_t pitch, unsigned value, unsigned element, size_t width, size_t height, CUstream handle,
		     bool per_thread)
{
	struct sg_stream *stream;
	size_t row, span;

	SG_ENTER(context);
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	if (!width || !height)
		return CUDA_SUCCESS;
	if (__builtin_mul_overflow(width, element, &row) || (height > 1 && pitch < row) || at % element || (height > 1 && pitch % element))
		return CUDA_ERROR_INVALID_VALUE;
	if (__builtin_mul_overflow(pitch, height - 1, &span) || __builtin_add_overflow(span, row, &span) || !sg_device_readable(at, span))
		return CUDA_ERROR_INVALID_VALUE;
	struct fill_op *op = sg_op_new(sizeof(*op), run_fill);
	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	op->at = (char *)(uintptr_t)at;
	op->pitch = pitch;
	op->width = width;
	op->height = height;
	op->value = value;
	op->element = element;
	return sg_submit(stream, &op->op);
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
