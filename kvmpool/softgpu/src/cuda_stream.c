/* Streams: creation, the default ones, destruction, queries, host functions in them. */
#include "cuda_core.h"

#include <stdlib.h>
#include <string.h>

CUresult sg_stream_new(struct sg_context *context, unsigned flags, int priority, bool is_null, struct sg_stream **out)
{
	static uint64_t ids;
	struct sg_stream *stream = calloc(1, sizeof(*stream));

	if (!stream || !(stream->progress = sg_progress_new())) {
		free(stream);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	stream->context = context;
	stream->flags = flags;
	stream->priority = priority < -5 ? -5 : priority > 0 ? 0 : priority;
	stream->is_null = is_null;
	stream->tail = &stream->head;
	pthread_cond_init(&stream->work, NULL);
	pthread_mutex_lock(&sg_lock);
	stream->id = ++ids;
	stream->next = context->streams;
	context->streams = stream;
	pthread_mutex_unlock(&sg_lock);
	sg_live_add(SG_STREAM, stream);
	*out = stream;
	return CUDA_SUCCESS;
}

void sg_stream_gone(struct sg_stream *stream)
{
	struct sg_stream **at = &stream->context->streams;

	while (*at != stream)
		at = &(*at)->next;
	*at = stream->next;
	sg_progress_put(stream->progress);
	pthread_cond_destroy(&stream->work);
	free(stream);
	pthread_cond_broadcast(&sg_progress_made); /* for sg_streams_end */
}

/* With sg_lock held. */
static void close_locked(struct sg_stream *stream)
{
	if (stream->closing)
		return;
	stream->closing = true;
	sg_capture_leave(stream);
	sg_live_remove(stream);
	if (stream->has_thread)
		pthread_cond_signal(&stream->work);
	else
		sg_stream_gone(stream);
}

void sg_stream_close(struct sg_stream *stream)
{
	pthread_mutex_lock(&sg_lock);
	close_locked(stream);
	pthread_mutex_unlock(&sg_lock);
}

void sg_streams_end(struct sg_context *context)
{
	pthread_mutex_lock(&sg_lock);
	for (struct sg_stream *stream = context->streams, *next; stream; stream = next) {
		next = stream->next;
		close_locked(stream);
	}
	while (context->streams)
		pthread_cond_wait(&sg_progress_made, &sg_lock);
	context->null_stream = NULL;
	pthread_mutex_unlock(&sg_lock);
}

/* ---- per-thread default streams: one a thread and context, closed when the thread ends ---- */

struct own {
	struct own *next;
	struct sg_context *context;
	uint64_t context_id;
	struct sg_stream *stream;
};

static pthread_key_t own_key;
static pthread_once_t own_once = PTHREAD_ONCE_INIT;

static bool own_valid(const struct own *own)
{
	return sg_live(SG_CONTEXT, own->context) && own->context->id == own->context_id;
}

static void close_owns(void *list)
{
	for (struct own *own = list, *next; own; own = next) {
		next = own->next;
		if (!sg_process.forked && own_valid(own))
			sg_stream_close(own->stream);
		free(own);
	}
}

static void make_own_key(void)
{
	pthread_key_create(&own_key, close_owns);
}

static CUresult own_stream(struct sg_context *context, struct sg_stream **out)
{
	pthread_once(&own_once, make_own_key);
	struct own *list = pthread_getspecific(own_key);
	for (struct own *own = list; own; own = own->next) {
		if (own->context == context && own->context_id == context->id) {
			*out = own->stream;
			return CUDA_SUCCESS;
		}
	}
	struct own *own = calloc(1, sizeof(*own));
	if (!own)
		return CUDA_ERROR_OUT_OF_MEMORY;
	CUresult rc = sg_stream_new(context, 0, 0, false, &own->stream);
	if (rc) {
		free(own);
		return rc;
	}
	own->context = context;
	own->context_id = context->id;
	own->next = list;
	*out = own->stream;
	if (pthread_setspecific(own_key, own)) {
		sg_stream_close(own->stream);
		free(own);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	return CUDA_SUCCESS;
}

CUresult sg_stream_of(struct sg_context *context, CUstream handle, bool per_thread, struct sg_stream **out)
{
	if (handle == CU_STREAM_PER_THREAD || (!handle && per_thread))
		return own_stream(context, out);
	if (!handle || handle == CU_STREAM_LEGACY) {
		*out = context->null_stream;
		return CUDA_SUCCESS;
	}
	if (!sg_live(SG_STREAM, handle))
		return CUDA_ERROR_INVALID_HANDLE;
	*out = handle;
	return CUDA_SUCCESS;
}

/* ---- the API ---- */

CU_API CUresult cuStreamCreateWithPriority(CUstream *out, unsigned flags, int priority)
{
	SG_ENTER(context);
	if (!out || flags & ~CU_STREAM_NON_BLOCKING)
		return CUDA_ERROR_INVALID_VALUE;
	return sg_stream_new(context, flags, priority, false, out);
}

CU_API CUresult cuStreamCreate(CUstream *out, unsigned flags)
{
	return cuStreamCreateWithPriority(out, flags, 0);
}

CU_API CUresult cuStreamDestroy_v2(CUstream handle)
{
	SG_TRY(sg_ready());
	if (!sg_live(SG_STREAM, handle) || handle->is_null)
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult status = sg_context_status(handle->context);
	sg_stream_close(handle);
	return status;
}

CU_API CUresult cuStreamDestroy(CUstream handle)
{
	return cuStreamDestroy_v2(handle);
}

/* The stream and its context, whether or not that context is current. */
#define STREAM_ENTER(stream, handle, per_thread) \
	struct sg_context *context; \
	struct sg_stream *stream; \
	SG_TRY(sg_enter(&context)); \
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream))

static CUresult query(CUstream handle, bool per_thread)
{
	STREAM_ENTER(stream, handle, per_thread);
	SG_TRY(sg_context_status(stream->context));
	pthread_mutex_lock(&sg_lock);
	CUresult rc = sg_capture_forbids(stream);
	pthread_mutex_unlock(&sg_lock);
	SG_TRY(rc);
	return sg_stream_idle(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

static CUresult synchronize(CUstream handle, bool per_thread)
{
	STREAM_ENTER(stream, handle, per_thread);
	CUresult rc = sg_wait_stream(stream);
	sg_pools_synchronised();
	return rc;
}

static CUresult wait_event(CUstream handle, CUevent event, unsigned flags, bool per_thread)
{
	bool done;

	STREAM_ENTER(stream, handle, per_thread);
	if (flags > 1)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_EVENT, event))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&sg_lock);
	CUresult rc = sg_capture_wait(stream, event, &done);
	pthread_mutex_unlock(&sg_lock);
	if (rc || done || !event->recorded)
		return rc;
	struct sg_op *op = sg_op_new(sizeof(*op), NULL);
	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	rc = sg_op_wait_for(op, event->progress, event->recorded);
	if (rc) {
		sg_op_free(op);
		return rc;
	}
	return sg_submit(stream, op);
}

struct host_op {
	struct sg_op op;
	CUhostFn function;
	CUstreamCallback callback;
	CUstream handle;
	void *data;
};

static void run_host(struct sg_op *op, CUresult status)
{
	struct host_op *host = (struct host_op *)op;

	if (host->callback)
		host->callback(host->handle, status, host->data);
	else if (!status)
		host->function(host->data);
}

static CUresult add_host(CUstream handle, CUhostFn function, CUstreamCallback callback, void *data, bool per_thread)
{
	STREAM_ENTER(stream, handle, per_thread);
	if (!function && !callback)
		return CUDA_ERROR_INVALID_VALUE;
	struct host_op *host = sg_op_new(sizeof(*host), run_host);
	if (!host)
		return CUDA_ERROR_OUT_OF_MEMORY;
	host->function = function;
	host->callback = callback;
	host->handle = handle;
	host->data = data;
	host->op.always = callback != NULL;
	host->op.type = callback ? SG_NODE_NONE : SG_NODE_HOST; /* as with CUDA: callbacks cannot be captured */
	return sg_submit(stream, &host->op);
}

static CUresult get_priority(CUstream handle, int *out, bool per_thread)
{
	STREAM_ENTER(stream, handle, per_thread);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = stream->priority;
	return CUDA_SUCCESS;
}

static CUresult get_flags(CUstream handle, unsigned *out, bool per_thread)
{
	STREAM_ENTER(stream, handle, per_thread);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = stream->flags;
	return CUDA_SUCCESS;
}

static CUresult get_context(CUstream handle, CUcontext *out, bool per_thread)
{
	STREAM_ENTER(stream, handle, per_thread);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = stream->context;
	return CUDA_SUCCESS;
}

static CUresult get_device(CUstream handle, CUdevice *out, bool per_thread)
{
	STREAM_ENTER(stream, handle, per_thread);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = (CUdevice)(stream->context->device - sg_process.devices);
	return CUDA_SUCCESS;
}

static CUresult get_id(CUstream handle, unsigned long long *out, bool per_thread)
{
	STREAM_ENTER(stream, handle, per_thread);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	*out = stream->id;
	return CUDA_SUCCESS;
}

#define PAIR(name, impl, params, ...) \
	CU_API CUresult name params { return impl(__VA_ARGS__, false); } \
	CU_API CUresult name##_ptsz params { return impl(__VA_ARGS__, true); }

PAIR(cuStreamQuery, query, (CUstream s), s)
PAIR(cuStreamSynchronize, synchronize, (CUstream s), s)
PAIR(cuStreamWaitEvent, wait_event, (CUstream s, CUevent e, unsigned f), s, e, f)
PAIR(cuStreamGetPriority, get_priority, (CUstream s, int *p), s, p)
PAIR(cuStreamGetFlags, get_flags, (CUstream s, unsigned *f), s, f)
PAIR(cuStreamGetCtx, get_context, (CUstream s, CUcontext *c), s, c)
PAIR(cuStreamGetDevice, get_device, (CUstream s, CUdevice *d), s, d)
PAIR(cuStreamGetId, get_id, (CUstream s, unsigned long long *i), s, i)
PAIR(cuLaunchHostFunc, add_host, (CUstream s, CUhostFn f, void *d), s, f, NULL, d)

static CUresult add_callback(CUstream s, CUstreamCallback f, void *d, unsigned flags, bool per_thread)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : add_host(s, NULL, f, d, per_thread);
}

PAIR(cuStreamAddCallback, add_callback, (CUstream s, CUstreamCallback f, void *d, unsigned flags), s, f, d, flags)
