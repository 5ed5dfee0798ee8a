/* Copies: one-dimensional, between host and device in every direction, at once or in a stream.
 *
 * Pageable host memory behaves as with the real driver: a copy from it is staged before the call returns, a copy to it is
 * done before the call returns; only page-locked memory is read and written later.
 */
#include "cuda_core.h"

#include <stdlib.h>
#include <string.h>

enum side { HOST, DEVICE, ANY };

struct copy_op {
	struct sg_op op;
	void *to;
	const void *from;
	size_t bytes;
	void *staged;
};

static void run_copy(struct sg_op *op, CUresult status)
{
	struct copy_op *copy = (struct copy_op *)op;
	struct sg_slot *slot = sg_slot_mine(&op->stream->context->device->map);

	if (!status)
		memmove(copy->to, copy->from, copy->bytes);
	free(copy->staged);
	if (slot)
		__atomic_add_fetch(&slot->copied_bytes, copy->bytes, __ATOMIC_RELAXED);
}

static bool usable(enum side side, const void *address, size_t bytes)
{
	if (side == DEVICE)
		return sg_device_readable((uintptr_t)address, bytes);
	return address != NULL;
}

struct request {
	void *to;
	const void *from;
	size_t bytes;
	enum side to_side, from_side;
	CUstream stream;
	bool per_thread, async;
};

static CUresult copy(const struct request *request)
{
	struct sg_stream *stream;

	SG_ENTER(context);
	SG_TRY(sg_stream_of(context, request->stream, request->per_thread, &stream));
	if (!request->bytes)
		return CUDA_SUCCESS;
	if (!usable(request->to_side, request->to, request->bytes) || !usable(request->from_side, request->from, request->bytes))
		return CUDA_ERROR_INVALID_VALUE;
	bool to_pageable = request->to_side != DEVICE && !sg_device_readable((uintptr_t)request->to, request->bytes);
	bool from_pageable = request->from_side != DEVICE && !sg_device_readable((uintptr_t)request->from, request->bytes);
	bool device_only = request->to_side == DEVICE && request->from_side == DEVICE;
	struct copy_op *op = sg_op_new(sizeof(*op), run_copy);
	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*op = (struct copy_op){.op = op->op, .to = request->to, .from = request->from, .bytes = request->bytes};
	if (request->async && sg_capturing(stream)) { /* then the host's memory is used at each launch */
		op->op.type = SG_NODE_MEMCPY;
		return sg_submit(stream, &op->op);
	}
	if (to_pageable || (!request->async && !device_only))
		return sg_run_now(stream, &op->op);
	if (from_pageable) {
		op->staged = malloc(op->bytes);
		if (!op->staged)
			return sg_run_now(stream, &op->op);
		op->from = memcpy(op->staged, op->from, op->bytes);
		op->op.always = true; /* to free it */
	}
	return sg_submit(stream, &op->op);
}

#define DPTR(address) ((void *)(uintptr_t)(address))

#define SYNC(name, params, to_, from_, bytes_, to_side_, from_side_) \
	CU_API CUresult name params \
	{ \
		return copy(&(struct request){to_, from_, bytes_, to_side_, from_side_, NULL, false, false}); \
	} \
	CU_API CUresult name##_ptds params \
	{ \
		return copy(&(struct request){to_, from_, bytes_, to_side_, from_side_, NULL, true, false}); \
	}

#define ASYNC(name, params, to_, from_, bytes_, to_side_, from_side_) \
	CU_API CUresult name params \
	{ \
		return copy(&(struct request){to_, from_, bytes_, to_side_, from_side_, stream, false, true}); \
	} \
	CU_API CUresult name##_ptsz params \
	{ \
		return copy(&(struct request){to_, from_, bytes_, to_side_, from_side_, stream, true, true}); \
	}

SYNC(cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t bytes), DPTR(to), from, bytes, DEVICE, HOST)
SYNC(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t bytes), to, DPTR(from), bytes, HOST, DEVICE)
SYNC(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes), DPTR(to), DPTR(from), bytes, DEVICE, DEVICE)
SYNC(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t bytes), DPTR(to), DPTR(from), bytes, ANY, ANY)
ASYNC(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream), DPTR(to), from, bytes, DEVICE, HOST)
ASYNC(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t bytes, CUstream stream), to, DPTR(from), bytes, HOST, DEVICE)
ASYNC(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), DPTR(to), DPTR(from), bytes, DEVICE,
      DEVICE)
ASYNC(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream), DPTR(to), DPTR(from), bytes, ANY, ANY)
SYNC(cuMemcpyPeer, (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes),
     ((void)to_context, (void)from_context, DPTR(to)), DPTR(from), bytes, DEVICE, DEVICE)
ASYNC(cuMemcpyPeerAsync, (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream),
      ((void)to_context, (void)from_context, DPTR(to)), DPTR(from), bytes, DEVICE, DEVICE)
