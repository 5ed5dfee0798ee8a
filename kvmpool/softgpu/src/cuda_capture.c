/* Stream capture: what is submitted to a capturing stream becomes a node of a graph instead of being done.
 *
 * A capture begins in one stream; others join it by waiting for an event that was recorded in it. Whatever cannot be part of it makes it
 * invalid, which its streams hear until it is ended. The list of captures is guarded by sg_lock.
 */
#include "cuda_graph.h"

#include <stdlib.h>
#include <string.h>

enum { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED };
enum { STATUS_NONE, STATUS_ACTIVE, STATUS_INVALIDATED };

struct sg_capture {
	struct sg_capture *next;
	struct sg_context *context;
	struct sg_stream *origin;
	struct sg_graph *graph;
	int mode;
	pthread_t thread; /* that began it */
	bool invalid;
	uint64_t id;
};

static struct sg_capture *captures;
static __thread int thread_mode;

/* ---- with sg_lock held ---- */

static CUresult spoil(struct sg_capture *capture, CUresult why)
{
	if (capture->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	capture->invalid = true;
	return why;
}

static bool blocks_legacy(const struct sg_capture *capture)
{
	for (const struct sg_stream *stream = capture->context->streams; stream; stream = stream->next)
		if (stream->capture == capture && !(stream->flags & CU_STREAM_NON_BLOCKING))
			return true;
	return false;
}

/* The legacy stream would have to wait for a stream that captures. */
static bool is_implicit(const struct sg_stream *stream, bool spoils)
{
	bool found = false;

	if (!stream->is_null)
		return false;
	for (struct sg_capture *capture = captures; capture; capture = capture->next) {
		if (capture->context != stream->context || !blocks_legacy(capture))
			continue;
		capture->invalid |= spoils;
		found = true;
	}
	return found;
}

static struct sg_capture *capture_of(uint64_t id)
{
	struct sg_capture *capture = captures;

	while (id && capture && capture->id != id)
		capture = capture->next;
	return id ? capture : NULL;
}

bool sg_capture_op(struct sg_stream *stream, struct sg_op *op, CUresult *rc)
{
	struct sg_capture *capture = stream->capture;
	struct sg_node *node;

	if (!capture && !is_implicit(stream, true))
		return false;
	*rc = !capture ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
	if (!*rc && op->type == SG_NODE_NONE)
		*rc = spoil(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	if (*rc)
		return true;
	*rc = sg_graph_add(capture->graph, op->type, op, &stream->behind, &node);
	if (*rc) {
		spoil(capture, 0);
		return true;
	}
	sg_set_clear(&stream->behind);
	if (sg_set_add(&stream->behind, &(struct sg_node_set){&node, 1}))
		spoil(capture, 0); /* heard by the next call */
	return true;
}

CUresult sg_capture_forbids(struct sg_stream *stream)
{
	if (stream->capture)
		return spoil(stream->capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	return is_implicit(stream, true) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
}

CUresult sg_capture_forbids_context(struct sg_context *context)
{
	CUresult rc = CUDA_SUCCESS;

	for (struct sg_capture *capture = captures; capture; capture = capture->next)
		if (capture->context == context)
			rc = spoil(capture, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
	return rc;
}

CUresult sg_capture_forbids_event(struct sg_cuevent *event)
{
	struct sg_capture *capture = capture_of(event->capture_id);

	if (capture)
		spoil(capture, 0);
	return event->capture_id ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
}

CUresult sg_capture_record(struct sg_stream *stream, struct sg_cuevent *event, bool *done)
{
	struct sg_capture *capture = stream->capture;

	*done = capture != NULL;
	if (!capture) {
		if (is_implicit(stream, true))
			return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
		event->capture_id = 0;
		sg_set_clear(&event->captured);
		return CUDA_SUCCESS;
	}
	if (capture->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	event->capture_id = capture->id;
	sg_set_clear(&event->captured);
	return sg_set_add(&event->captured, &stream->behind);
}

CUresult sg_capture_wait(struct sg_stream *stream, struct sg_cuevent *event, bool *done)
{
	struct sg_capture *capture = capture_of(event->capture_id);

	*done = stream->capture || event->capture_id;
	if (!*done)
		return is_implicit(stream, true) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
	if (stream->capture && stream->capture->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (stream->capture && !capture) /* its work is outside, or in a capture that has ended */
		return !event->capture_id && !event->recorded ? CUDA_SUCCESS : spoil(stream->capture, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
	if (!capture)
		return CUDA_ERROR_CAPTURED_EVENT;
	if (capture->invalid)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	if (stream->is_null || stream->context != capture->context)
		return spoil(capture, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
	if (stream->capture && stream->capture != capture) {
		spoil(capture, 0);
		return spoil(stream->capture, CUDA_ERROR_STREAM_CAPTURE_MERGE);
	}
	stream->capture = capture;
	CUresult rc = sg_set_add(&stream->behind, &event->captured);
	return rc ? spoil(capture, rc) : CUDA_SUCCESS;
}

/* It takes nobody out of a stream but the capture itself; the graph is the caller's. */
static void end(struct sg_capture *capture)
{
	struct sg_capture **at = &captures;

	for (struct sg_stream *stream = capture->context->streams; stream; stream = stream->next)
		if (stream->capture == capture) {
			stream->capture = NULL;
			sg_set_clear(&stream->behind);
		}
	while (*at != capture)
		at = &(*at)->next;
	*at = capture->next;
	free(capture);
}

void sg_capture_leave(struct sg_stream *stream)
{
	struct sg_capture *capture = stream->capture;

	if (!capture)
		return;
	stream->capture = NULL;
	sg_set_clear(&stream->behind);
	capture->invalid = true;
	if (capture->origin == stream) {
		sg_graph_free(capture->graph);
		end(capture);
	}
}

/* ---- without it ---- */

bool sg_capturing(struct sg_stream *stream)
{
	pthread_mutex_lock(&sg_lock);
	bool capturing = stream->capture != NULL;
	pthread_mutex_unlock(&sg_lock);
	return capturing;
}

CUresult sg_capture_refuses(struct sg_stream *stream)
{
	pthread_mutex_lock(&sg_lock);
	CUresult rc = stream->capture ? sg_capture_forbids(stream) : CUDA_SUCCESS;
	pthread_mutex_unlock(&sg_lock);
	return rc;
}

CUresult sg_capture_unsafe(void)
{
	CUresult rc = CUDA_SUCCESS;

	pthread_mutex_lock(&sg_lock);
	for (struct sg_capture *capture = captures; capture && thread_mode != MODE_RELAXED; capture = capture->next) {
		bool own = pthread_equal(capture->thread, pthread_self());
		if (own ? capture->mode == MODE_RELAXED : capture->mode != MODE_GLOBAL || thread_mode != MODE_GLOBAL)
			continue;
		spoil(capture, 0);
		rc = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	}
	pthread_mutex_unlock(&sg_lock);
	return rc;
}

CU_API CUresult cuThreadExchangeStreamCaptureMode(int *mode)
{
	SG_TRY(sg_ready());
	if (!mode || *mode < MODE_GLOBAL || *mode > MODE_RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	int old = thread_mode;
	thread_mode = *mode;
	*mode = old;
	return CUDA_SUCCESS;
}

static CUresult start(struct sg_stream *stream, int mode)
{
	static uint64_t ids;
	struct sg_capture *capture = calloc(1, sizeof(*capture));
	struct sg_graph *graph = sg_graph_new();

	if (!capture || !graph || stream->capture) {
		CUresult rc = stream->capture ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_OUT_OF_MEMORY;
		if (graph)
			sg_graph_free(graph);
		free(capture);
		return rc;
	}
	graph->inner = true; /* until it is the program's */
	*capture = (struct sg_capture){captures, stream->context, stream, graph, mode, pthread_self(), false, ++ids};
	captures = stream->capture = capture;
	return CUDA_SUCCESS;
}

static CUresult begin(CUstream handle, int mode, bool per_thread)
{
	struct sg_stream *stream;

	SG_ENTER(context);
	if (mode < MODE_GLOBAL || mode > MODE_RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	if (stream->is_null)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	pthread_mutex_lock(&sg_lock);
	CUresult rc = start(stream, mode);
	pthread_mutex_unlock(&sg_lock);
	return rc;
}

/* Whether all that was captured comes before what comes next in the first stream: so it is where each end is one of its ends. */
static bool is_joined(const struct sg_capture *capture)
{
	const struct sg_node_set *tail = &capture->origin->behind;

	for (struct sg_node *node = capture->graph->first; node; node = node->next) {
		node->place = 0;
		for (size_t i = 0; i < node->needs.count; i++)
			node->needs.node[i]->place = 1; /* made before it */
	}
	for (size_t i = 0; i < tail->count; i++)
		tail->node[i]->place = 1;
	for (const struct sg_node *node = capture->graph->first; node; node = node->next)
		if (!node->place)
			return false;
	return true;
}

static CUresult finish(struct sg_stream *stream, struct sg_graph **out)
{
	struct sg_capture *capture = stream->capture;
	struct sg_graph *graph;

	if (!capture)
		return is_implicit(stream, false) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_ERROR_ILLEGAL_STATE;
	if (capture->origin != stream)
		return spoil(capture, CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	if (capture->mode != MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
		return spoil(capture, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
	CUresult rc = capture->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : is_joined(capture) ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
	graph = capture->graph;
	end(capture);
	graph->inner = false;
	if (rc)
		sg_graph_free(graph);
	else
		*out = graph;
	return rc;
}

static CUresult end_capture(CUstream handle, CUgraph *out, bool per_thread)
{
	struct sg_stream *stream;

	SG_ENTER(context);
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	*out = NULL;
	pthread_mutex_lock(&sg_lock);
	CUresult rc = finish(stream, out);
	pthread_mutex_unlock(&sg_lock);
	return rc;
}

struct info {
	int *status;
	uint64_t *id;
	CUgraph *graph;
	const CUgraphNode **needs;
	const CUgraphEdgeData **edges;
	size_t *count;
};

/* The pointers stay right until the stream is used again, as with CUDA. */
static CUresult get_info(CUstream handle, const struct info *info, bool per_thread)
{
	struct sg_stream *stream;

	SG_ENTER(context);
	if (!info->status)
		return CUDA_ERROR_INVALID_VALUE;
	SG_TRY(sg_stream_of(context, handle, per_thread, &stream));
	pthread_mutex_lock(&sg_lock);
	const struct sg_capture *capture = stream->capture;
	CUresult rc = is_implicit(stream, false) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS;
	if (!rc)
		*info->status = !capture ? STATUS_NONE : capture->invalid ? STATUS_INVALIDATED : STATUS_ACTIVE;
	if (!rc && capture && !capture->invalid) {
		if (info->id)
			*info->id = capture->id;
		if (info->graph)
			*info->graph = capture->graph;
		if (info->needs)
			*info->needs = stream->behind.node;
		if (info->edges)
			*info->edges = NULL;
		if (info->count)
			*info->count = stream->behind.count;
	}
	pthread_mutex_unlock(&sg_lock);
	return rc;
}

#define PAIR(name, impl, params, ...) \
	CU_API CUresult name params { return impl(__VA_ARGS__, false); } \
	CU_API CUresult name##_ptsz params { return impl(__VA_ARGS__, true); }
#define INFO(...) (&(struct info){__VA_ARGS__})

PAIR(cuStreamBeginCapture, begin, (CUstream s), s, MODE_GLOBAL)
PAIR(cuStreamBeginCapture_v2, begin, (CUstream s, int mode), s, mode)
PAIR(cuStreamEndCapture, end_capture, (CUstream s, CUgraph *g), s, g)
PAIR(cuStreamIsCapturing, get_info, (CUstream s, int *status), s, INFO(status, NULL, NULL, NULL, NULL, NULL))
PAIR(cuStreamGetCaptureInfo, get_info, (CUstream s, int *status, uint64_t *id), s, INFO(status, id, NULL, NULL, NULL, NULL))
PAIR(cuStreamGetCaptureInfo_v2, get_info, (CUstream s, int *status, uint64_t *id, CUgraph *g, const CUgraphNode **needs, size_t *count), s,
     INFO(status, id, g, needs, NULL, count))
PAIR(cuStreamGetCaptureInfo_v3, get_info, (CUstream s, int *status, uint64_t *id, CUgraph *g, const CUgraphNode **needs,
     const CUgraphEdgeData **edges, size_t *count), s, INFO(status, id, g, needs, edges, count))
