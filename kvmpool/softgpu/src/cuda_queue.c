/* The order of work: each stream is a queue with a thread, each piece of work waits for what must come before it.
 *
 * The legacy null stream waits for all blocking streams of its context and they wait for it, both as counters taken when the
 * work is submitted. All state here is guarded by sg_lock. This file does not know what the work is.
 */
#include "cuda_core.h"

#include <signal.h>
#include <stdlib.h>

struct sg_progress *sg_progress_new(void)
{
	struct sg_progress *progress = calloc(1, sizeof(*progress));

	if (progress)
		progress->refs = 1;
	return progress;
}

void sg_progress_put(struct sg_progress *progress)
{
	if (progress && --progress->refs == 0)
		free(progress);
}

void sg_progress_reach(struct sg_progress *progress, uint64_t target)
{
	if (progress->done < target) {
		progress->done = target;
		progress->stamp_ns = sg_now_ns();
		pthread_cond_broadcast(&sg_progress_made);
	}
}

void *sg_op_new(size_t size, void (*run)(struct sg_op *, CUresult))
{
	struct sg_op *op = calloc(1, size);

	if (op) {
		op->run = run;
		op->size = size;
		op->type = SG_NODE_NONE;
	}
	return op;
}

/* With sg_lock held. */
static CUresult add_wait(struct sg_op *op, struct sg_progress *on, uint64_t target)
{
	if (on->done >= target)
		return CUDA_SUCCESS;
	struct sg_wait *waits = realloc(op->waits, (op->wait_count + 1) * sizeof(*waits));
	if (!waits)
		return CUDA_ERROR_OUT_OF_MEMORY;
	on->refs++;
	op->waits = waits;
	op->waits[op->wait_count++] = (struct sg_wait){on, target};
	return CUDA_SUCCESS;
}

CUresult sg_op_wait_for(struct sg_op *op, struct sg_progress *on, uint64_t target)
{
	pthread_mutex_lock(&sg_lock);
	CUresult rc = add_wait(op, on, target);
	pthread_mutex_unlock(&sg_lock);
	return rc;
}

/* With sg_lock held. */
static void free_op(struct sg_op *op)
{
	for (unsigned i = 0; i < op->wait_count; i++)
		sg_progress_put(op->waits[i].on);
	free(op->waits);
	free(op);
}

void sg_op_free(struct sg_op *op)
{
	pthread_mutex_lock(&sg_lock);
	free_op(op);
	pthread_mutex_unlock(&sg_lock);
}

/* The legacy default stream's rule, with sg_lock held. */
static CUresult add_implicit_waits(struct sg_stream *stream, struct sg_op *op)
{
	struct sg_context *context = stream->context;

	if (stream->is_null) {
		for (struct sg_stream *other = context->streams; other; other = other->next)
			if (other != stream && !(other->flags & CU_STREAM_NON_BLOCKING))
				SG_TRY(add_wait(op, other->progress, other->submitted));
		return CUDA_SUCCESS;
	}
	if (stream->flags & CU_STREAM_NON_BLOCKING || !context->null_stream)
		return CUDA_SUCCESS;
	return add_wait(op, context->null_stream->progress, context->null_stream->submitted);
}

static bool waits_over(const struct sg_op *op)
{
	for (unsigned i = 0; i < op->wait_count; i++)
		if (op->waits[i].on->done < op->waits[i].target)
			return false;
	return true;
}

static CUresult error_of(const struct sg_context *context)
{
	return __atomic_load_n(&context->error, __ATOMIC_SEQ_CST);
}

/* Do one piece of work whose turn it is. With sg_lock held, released meanwhile. */
static void perform(struct sg_stream *stream, struct sg_op *op)
{
	CUresult status = error_of(stream->context);

	pthread_mutex_unlock(&sg_lock);
	if (op->run && (!status || op->always))
		op->run(op, status);
	pthread_mutex_lock(&sg_lock);
	if (op->finish)
		op->finish(op);
	sg_progress_reach(stream->progress, op->seq);
	free_op(op);
}

static void *stream_main(void *argument)
{
	struct sg_stream *stream = argument;

	pthread_mutex_lock(&sg_lock);
	for (;;) {
		while (!stream->running && !stream->head && !stream->closing)
			pthread_cond_wait(&stream->work, &sg_lock);
		if (stream->running) { /* by a caller's own thread, in sg_run_now */
			pthread_cond_wait(&stream->work, &sg_lock);
			continue;
		}
		struct sg_op *op = stream->head;
		if (!op)
			break;
		stream->head = op->next;
		if (!stream->head)
			stream->tail = &stream->head;
		stream->running = true;
		while (!waits_over(op) && !error_of(stream->context))
			pthread_cond_wait(&sg_progress_made, &sg_lock);
		perform(stream, op);
		stream->running = false;
	}
	sg_stream_gone(stream);
	pthread_mutex_unlock(&sg_lock);
	return NULL;
}

static CUresult start_thread(struct sg_stream *stream)
{
	sigset_t all, old;
	pthread_t thread;
	pthread_attr_t attributes;

	sigfillset(&all);
	int keep[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}; /* raised by the thread itself */
	for (size_t i = 0; i < sizeof(keep) / sizeof(*keep); i++)
		sigdelset(&all, keep[i]);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	int rc = pthread_create(&thread, &attributes, stream_main, stream);
	pthread_attr_destroy(&attributes);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	stream->has_thread = rc == 0;
	return rc ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

/* With sg_lock held. */
static CUresult enqueue(struct sg_stream *stream, struct sg_op *op)
{
	if (!stream->has_thread)
		SG_TRY(start_thread(stream));
	op->seq = ++stream->submitted;
	op->stream = stream;
	*stream->tail = op;
	stream->tail = &op->next;
	pthread_cond_signal(&stream->work);
	return CUDA_SUCCESS;
}

CUresult sg_submit(struct sg_stream *stream, struct sg_op *op)
{
	CUresult rc;

	pthread_mutex_lock(&sg_lock);
	if (!sg_capture_op(stream, op, &rc)) {
		rc = add_implicit_waits(stream, op);
		if (!rc)
			rc = enqueue(stream, op);
	}
	if (rc)
		free_op(op);
	pthread_mutex_unlock(&sg_lock);
	return rc;
}

/* Strictly until it is done: a dead context's work is skipped, so this ends soon, and nothing still writes to the caller's
 * memory when it does. With sg_lock held. */
static void wait_for(struct sg_progress *on, uint64_t target)
{
	on->refs++;
	while (on->done < target)
		pthread_cond_wait(&sg_progress_made, &sg_lock);
	sg_progress_put(on);
}

CUresult sg_run_now(struct sg_stream *stream, struct sg_op *op)
{
	struct sg_context *context = stream->context;

	pthread_mutex_lock(&sg_lock);
	CUresult rc = sg_capture_forbids(stream);
	if (!rc)
		rc = add_implicit_waits(stream, op);
	if (!rc && !stream->head && !stream->running && waits_over(op)) {
		stream->running = true;
		op->seq = ++stream->submitted;
		op->stream = stream;
		perform(stream, op);
		stream->running = false;
		pthread_cond_signal(&stream->work);
	} else if (!rc) {
		rc = enqueue(stream, op);
		if (!rc)
			wait_for(stream->progress, op->seq);
	}
	if (rc)
		free_op(op);
	pthread_mutex_unlock(&sg_lock);
	return rc ? rc : sg_context_status(context);
}

CUresult sg_wait_stream(struct sg_stream *stream)
{
	struct sg_context *context = stream->context;

	pthread_mutex_lock(&sg_lock);
	CUresult rc = sg_capture_forbids(stream);
	if (!rc)
		wait_for(stream->progress, stream->submitted);
	pthread_mutex_unlock(&sg_lock);
	return rc ? rc : sg_context_status(context);
}

CUresult sg_wait_progress(struct sg_context *context, struct sg_progress *on, uint64_t target)
{
	pthread_mutex_lock(&sg_lock);
	wait_for(on, target);
	pthread_mutex_unlock(&sg_lock);
	return sg_context_status(context);
}

bool sg_stream_idle(struct sg_stream *stream)
{
	pthread_mutex_lock(&sg_lock);
	bool idle = stream->progress->done >= stream->submitted;
	pthread_mutex_unlock(&sg_lock);
	return idle;
}

/* The first stream that still works, with its goal; NULL: none. With sg_lock held. */
static struct sg_stream *busy_stream(struct sg_context *context)
{
	for (struct sg_stream *stream = context->streams; stream; stream = stream->next)
		if (stream->progress->done < stream->submitted)
			return stream;
	return NULL;
}

CUresult sg_wait_context(struct sg_context *context)
{
	struct sg_stream *stream;

	pthread_mutex_lock(&sg_lock);
	while (!error_of(context) && (stream = busy_stream(context)))
		wait_for(stream->progress, stream->submitted);
	pthread_mutex_unlock(&sg_lock);
	return sg_context_status(context);
}
