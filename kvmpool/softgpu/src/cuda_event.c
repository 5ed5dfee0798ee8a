/* Events: marks in a stream that can be asked for, waited for and subtracted. */
#include "cuda_core.h"

#include <stdlib.h>

#define EVENT_FLAGS (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)

CU_API CUresult cuEventCreate(CUevent *out, unsigned flags)
{
	SG_ENTER(context);
	if (!out || flags & ~(EVENT_FLAGS | CU_EVENT_INTERPROCESS))
		return CUDA_ERROR_INVALID_VALUE;
	if (flags & CU_EVENT_INTERPROCESS)
		return CUDA_ERROR_NOT_SUPPORTED;
	struct sg_cuevent *event = calloc(1, sizeof(*event));
	if (!event || !(event->progress = sg_progress_new())) {
		free(event);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	event->context = context;
	event->flags = flags;
	pthread_mutex_lock(&sg_lock);
	event->next = context->events;
	context->events = event;
	pthread_mutex_unlock(&sg_lock);
	sg_live_add(SG_EVENT, event);
	*out = event;
	return CUDA_SUCCESS;
}

/* With sg_lock held. */
static void free_event(struct sg_cuevent *event)
{
	sg_live_remove(event);
	free(event->captured.node);
	sg_progress_put(event->progress);
	free(event);
}

CU_API CUresult cuEventDestroy_v2(CUevent event)
{
	SG_TRY(sg_ready());
	if (!sg_live(SG_EVENT, event))
		return CUDA_ERROR_INVALID_HANDLE;
	CUresult status = sg_context_status(event->context);
	pthread_mutex_lock(&sg_lock);
	struct sg_cuevent **at = &event->context->events;
	while (*at != event)
		at = &(*at)->next;
	*at = event->next;
	free_event(event);
	pthread_mutex_unlock(&sg_lock);
	return status;
}

CU_API CUresult cuEventDestroy(CUevent event)
{
	return cuEventDestroy_v2(event);
}

void sg_events_end(struct sg_context *context)
{
	pthread_mutex_lock(&sg_lock);
	while (context->events) {
		struct sg_cuevent *event = context->events;
		context->events = event->next;
		free_event(event);
	}
	pthread_mutex_unlock(&sg_lock);
}

struct record_op {
	struct sg_op op;
	struct sg_progress *progress; /* its own reference: the event may be destroyed first */
	uint64_t target;
};

static void finish_record(struct sg_op *op)
{
	struct record_op *record = (struct record_op *)op;

	sg_progress_reach(record->progress, record->target);
	sg_progress_put(record->progress);
}

static CUresult record(CUevent event, CUstream handle, unsigned flags, bool per_thread)
{
	struct sg_stream *stream;
	bool done;

	SG_ENTER(context);
	if (flags > 1)
		return CUDA_ERROR_INVALID_VALUE;
	if (!sg_live(SG_EVENT, event))
		return CUDA_ERROR_INVALID_HANDLE;
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	if (stream->context != event->context)
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&sg_lock);
	CUresult rc = sg_capture_record(stream, event, &done);
	pthread_mutex_unlock(&sg_lock);
	if (rc || done)
		return rc;
	struct record_op *op = sg_op_new(sizeof(*op), NULL);
	if (!op)
		return CUDA_ERROR_OUT_OF_MEMORY;
	op->op.finish = finish_record;
	pthread_mutex_lock(&sg_lock);
	op->progress = event->progress;
	op->progress->refs++;
	op->target = ++event->recorded;
	pthread_mutex_unlock(&sg_lock);
	rc = sg_submit(stream, &op->op);
	if (rc) { /* it will never come: nobody shall wait for it */
		pthread_mutex_lock(&sg_lock);
		sg_progress_reach(event->progress, event->recorded);
		sg_progress_put(event->progress);
		pthread_mutex_unlock(&sg_lock);
	}
	return rc;
}

CU_API CUresult cuEventRecord(CUevent event, CUstream stream)
{
	return record(event, stream, 0, false);
}

CU_API CUresult cuEventRecord_ptsz(CUevent event, CUstream stream)
{
	return record(event, stream, 0, true);
}

CU_API CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned flags)
{
	return record(event, stream, flags, false);
}

CU_API CUresult cuEventRecordWithFlags_ptsz(CUevent event, CUstream stream, unsigned flags)
{
	return record(event, stream, flags, true);
}

static CUresult enter_event(CUevent event)
{
	SG_TRY(sg_ready());
	if (!sg_live(SG_EVENT, event))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&sg_lock);
	CUresult rc = sg_capture_forbids_event(event);
	pthread_mutex_unlock(&sg_lock);
	return rc ? rc : sg_context_status(event->context);
}

static bool happened(const struct sg_cuevent *event, uint64_t *stamp_ns)
{
	pthread_mutex_lock(&sg_lock);
	bool done = event->progress->done >= event->recorded;
	*stamp_ns = event->progress->stamp_ns;
	pthread_mutex_unlock(&sg_lock);
	return done;
}

CU_API CUresult cuEventQuery(CUevent event)
{
	uint64_t stamp_ns;

	SG_TRY(sg_capture_unsafe());
	SG_TRY(enter_event(event));
	return happened(event, &stamp_ns) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CU_API CUresult cuEventSynchronize(CUevent event)
{
	SG_TRY(enter_event(event));
	CUresult rc = sg_wait_progress(event->context, event->progress, event->recorded);
	sg_pools_synchronised();
	return rc;
}

CU_API CUresult cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
	uint64_t from_ns, to_ns;

	if (!milliseconds)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(enter_event(start));
	SG_TRY(enter_event(end));
	if (!start->recorded || !end->recorded || start->context != end->context)
		return CUDA_ERROR_INVALID_HANDLE;
	if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)
		return CUDA_ERROR_INVALID_HANDLE;
	if (!happened(start, &from_ns) || !happened(end, &to_ns))
		return CUDA_ERROR_NOT_READY;
	*milliseconds = (float)((double)(int64_t)(to_ns - from_ns) / 1e6);
	return CUDA_SUCCESS;
}

CU_API CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
	return cuEventElapsedTime_v2(milliseconds, start, end);
}
