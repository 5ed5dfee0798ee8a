/* What the parts of softgpu's libcuda share: its objects and the calls between its files.
 *
 * A process has one `sg_process`. An object's handle is its address, and `sg_live` says whether that address is an object
 * of that kind, so a stale or made-up handle is refused instead of followed. Objects die only by their own destroy call
 * or their context's; a caller that destroys what another thread uses breaks CUDA's rules, as on a real card.
 */
#ifndef KVMPOOL_SOFTGPU_CUDA_CORE_H
#define KVMPOOL_SOFTGPU_CUDA_CORE_H

#include <pthread.h>
#include <stdbool.h>

#include "cuda_api.h"
#include "engine.h"
#include "state.h"

#define SG_CONTEXT_STACK 64
#define SG_LIMIT_PRINTF 1 /* CU_LIMIT_PRINTF_FIFO_SIZE */
#define SG_LIMIT_HEAP 2   /* CU_LIMIT_MALLOC_HEAP_SIZE */

enum sg_kind { SG_CONTEXT = 1, SG_STREAM, SG_EVENT, SG_MODULE, SG_FUNCTION, SG_KERNEL, SG_LIBRARY, SG_LINK, SG_PHYSICAL, SG_POOL, SG_GRAPH, SG_NODE, SG_EXEC };

struct sg_device {
	struct sg_map map;
	struct sg_context *primary; /* allocated at init, alive while primary_refs > 0 */
	unsigned primary_refs, primary_flags;
	unsigned contexts;          /* alive, of any sort: the process slot is held while there are some */
};

/* A counter that only grows: what a waiter waits for. Guarded by sg_lock. */
struct sg_progress {
	uint64_t done;
	uint64_t stamp_ns; /* when it last grew */
	unsigned refs;
};

struct sg_wait {
	struct sg_progress *on;
	uint64_t target;
};

/* CUgraphNodeType */
enum sg_node_type { SG_NODE_KERNEL, SG_NODE_MEMCPY, SG_NODE_MEMSET, SG_NODE_HOST, SG_NODE_GRAPH, SG_NODE_EMPTY, SG_NODE_NONE };

struct sg_node_set {
	struct sg_node **node;
	size_t count;
};

struct sg_op {
	struct sg_op *next;
	uint64_t seq;
	size_t size;
	enum sg_node_type type;                         /* as a node of a graph. SG_NODE_NONE: it cannot be captured */
	void (*run)(struct sg_op *op, CUresult status); /* or NULL. status: the context's sticky error, 0: do the work */
	void (*finish)(struct sg_op *op);               /* or NULL: with sg_lock held, in the moment the stream's progress grows */
	bool always;                                    /* run even when the context is dead (with its error) */
	unsigned wait_count;
	struct sg_wait *waits;
	struct sg_stream *stream;
	/* the arguments follow, in a struct that begins with this one */
};

struct sg_stream {
	struct sg_context *context;
	unsigned flags;
	int priority;
	bool is_null, closing, running, has_thread;
	uint64_t submitted;
	struct sg_progress *progress;
	struct sg_op *head, **tail;
	pthread_cond_t work;
	struct sg_stream *next; /* in the context's list */
	uint64_t id;
	struct sg_capture *capture; /* that it takes part in, or NULL */
	struct sg_node_set behind;  /* what the next captured work of this stream comes after */
};

struct sg_cuevent {
	struct sg_context *context;
	unsigned flags;
	uint64_t recorded;      /* number of records so far; 0: never */
	struct sg_progress *progress;
	struct sg_cuevent *next;
	uint64_t capture_id;     /* it was last recorded in that capture; 0: in none */
	struct sg_node_set captured;
};

struct sg_context {
	struct sg_device *device;
	unsigned flags;
	unsigned api_version;
	uint64_t id;
	bool primary;
	CUresult error;          /* sticky; atomic */
	uint32_t fatal_serial;   /* of the card when this context began */
	struct sg_stream *null_stream;
	struct sg_stream *streams;     /* all, the null stream too */
	struct sg_cuevent *events;
	struct sg_module *modules;
	size_t limits[8];
	int cache_config, shared_config;
	unsigned attached;       /* cuCtxAttach */
};

/* ---- cuda_process.c ---- */
struct sg_process {
	bool initialised, forked;
	int device_count;
	struct sg_device devices[SG_MAX_CARDS];
};
extern struct sg_process sg_process;
extern pthread_mutex_t sg_lock;    /* guards the insides of contexts, streams, events and modules; held for moments only */
extern pthread_cond_t sg_progress_made; /* broadcast when anything is done or a context dies */

void sg_live_add(enum sg_kind kind, const void *object);
void sg_live_remove(const void *object);
bool sg_live(enum sg_kind kind, const void *object);
CUresult sg_ready(void);                                   /* 0, or 3: not initialised or forked */
CUresult sg_device_of(CUdevice ordinal, struct sg_device **out);

/* ---- cuda_context.c ---- */
struct sg_context *sg_current(void);
/* The current context of a usable process, or 3, 201, or the context's own sticky error. */
CUresult sg_enter(struct sg_context **out);
/* 0, or the sticky error; looks at the card's faults. */
CUresult sg_context_status(struct sg_context *context);
/* Make `error` sticky (the first one stays) and wake all who wait. */
void sg_context_kill(struct sg_context *context, CUresult error);
CUresult sg_context_new(struct sg_device *device, unsigned flags, bool primary, struct sg_context **out);
void sg_context_end(struct sg_context *context);
/* Of the card, by itself: the printf buffer and the malloc heap, as CUDA's contexts have them there. */
uint64_t sg_context_bytes(const struct sg_context *context);

/* ---- cuda_stream.c ---- */
CUresult sg_stream_new(struct sg_context *context, unsigned flags, int priority, bool is_null, struct sg_stream **out);
/* The stream a handle means; `per_thread`: the call was a _ptds/_ptsz one, where 0 is the thread's own. */
CUresult sg_stream_of(struct sg_context *context, CUstream handle, bool per_thread, struct sg_stream **out);
void sg_streams_end(struct sg_context *context);
void sg_stream_close(struct sg_stream *stream); /* work goes on; gone when it is done */
void sg_stream_gone(struct sg_stream *stream);  /* with sg_lock held, by the last who works on it */

/* ---- cuda_queue.c ---- */
void *sg_op_new(size_t size, void (*run)(struct sg_op *, CUresult));
CUresult sg_op_wait_for(struct sg_op *op, struct sg_progress *on, uint64_t target); /* before it is submitted */
void sg_op_free(struct sg_op *op);
CUresult sg_submit(struct sg_stream *stream, struct sg_op *op);     /* takes `op`, whatever it answers */
CUresult sg_run_now(struct sg_stream *stream, struct sg_op *op);    /* submit and wait till it is done, on this thread if idle */
CUresult sg_wait_stream(struct sg_stream *stream);                  /* till all submitted so far is done */
/* Till `on` reaches `target`; a dead context's work is skipped, not waited for. Takes a reference of its own. */
CUresult sg_wait_progress(struct sg_context *context, struct sg_progress *on, uint64_t target);
bool sg_stream_idle(struct sg_stream *stream);
CUresult sg_wait_context(struct sg_context *context);
struct sg_progress *sg_progress_new(void);
void sg_progress_put(struct sg_progress *progress);                 /* with sg_lock held */
void sg_progress_reach(struct sg_progress *progress, uint64_t target);

/* ---- cuda_capture.c: all but the last three with sg_lock held ---- */
/* True: the work was captured, and `op` taken where *rc is 0. False: it is to be done. */
bool sg_capture_op(struct sg_stream *stream, struct sg_op *op, CUresult *rc);
/* 0, or why the stream must not be waited for or asked (then its capture is invalid). */
CUresult sg_capture_forbids(struct sg_stream *stream);
CUresult sg_capture_forbids_context(struct sg_context *context);
CUresult sg_capture_forbids_event(struct sg_cuevent *event);
/* Likewise what record and wait do where a capture is concerned; *done: that was all. */
CUresult sg_capture_record(struct sg_stream *stream, struct sg_cuevent *event, bool *done);
CUresult sg_capture_wait(struct sg_stream *stream, struct sg_cuevent *event, bool *done);
void sg_capture_leave(struct sg_stream *stream);
/* For a call that may be unsafe during a capture (cuThreadExchangeStreamCaptureMode): 0, or 900 and the capture is invalid. */
CUresult sg_capture_unsafe(void);
CUresult sg_capture_refuses(struct sg_stream *stream); /* 0, or 900 where it captures, which is then invalid */
bool sg_capturing(struct sg_stream *stream);

/* ---- cuda_event.c ---- */
void sg_events_end(struct sg_context *context);

/* ---- cuda_space.c: which addresses are what ---- */
enum sg_range_kind { SG_RANGE_DEVICE = 1, SG_RANGE_HOST, SG_RANGE_REGISTERED, SG_RANGE_MODULE, SG_RANGE_RESERVED, SG_RANGE_MAPPED };
struct sg_range {
	uint64_t start, size;
	enum sg_range_kind kind;
	unsigned flags;
	uint64_t outer_start, outer_size; /* of its mmap, guards included; 0: not ours to unmap */
	struct sg_context *context;       /* whose; NULL: any */
	struct sg_device *device;
	void *physical;                   /* SG_RANGE_MAPPED */
	uint64_t id;
};
CUresult sg_range_add(const struct sg_range *range);
bool sg_range_find(uint64_t address, struct sg_range *out); /* the innermost: a mapping before its reservation */
bool sg_range_at(uint64_t start, enum sg_range_kind kind, struct sg_range *out);
bool sg_range_remove(uint64_t start, enum sg_range_kind kind, struct sg_range *out);
/* Take out any range of this context; false: none is left. */
bool sg_range_take_of(const struct sg_context *context, struct sg_range *out);
bool sg_range_overlaps(uint64_t start, uint64_t size, enum sg_range_kind kind);
/* True when all of [address, address + size) is memory a device copy may touch. */
bool sg_device_readable(uint64_t address, uint64_t size);
/* True when it is page-locked (host allocated or registered) memory. */
bool sg_host_pinned(const void *address, uint64_t size);

/* ---- cuda_memory.c ---- */
void sg_memory_end(struct sg_context *context);
void sg_range_release(const struct sg_range *range);
CUresult sg_memory_take(struct sg_context *context, uint64_t bytes, CUdeviceptr *out); /* as cuMemAlloc; a multiple of 512 */
void sg_memory_give(CUdeviceptr address);                                              /* at once, waiting for nobody */

/* ---- cuda_pool.c ---- */
void sg_pools_synchronised(void);               /* the program has waited: what is beyond the thresholds goes back */
void sg_pools_end(struct sg_context *context);
bool sg_pools_forget(CUdeviceptr at);           /* before cuMemFree; false: it was freed already */

/* ---- cuda_module.c ---- */
struct sg_function {
	struct sg_module *module;
	struct kp_function *kernel;
	struct kp_function_attributes attributes;
	int max_dynamic_shared, carveout;
	struct sg_function *next;
};
struct sg_module {
	struct sg_context *context;
	struct kp_module *engine;
	struct sg_function *functions;
	struct sg_library *library; /* whose instance it is, or NULL */
	uint64_t memory_bytes;      /* charged */
	struct sg_module *next;
};
CUresult sg_module_load(struct sg_context *context, const void *image, size_t size, char *log, size_t log_size, struct sg_module **out);
void sg_module_unlink(struct sg_module *module);
void sg_module_end(struct sg_module *module);
void sg_modules_end(struct sg_context *context);
CUresult sg_module_function(struct sg_module *module, const char *name, struct sg_function **out);

/* Read a whole file into malloc memory, NUL-ended. */
CUresult sg_read_file(const char *path, char **data, size_t *size);

/* ---- cuda_link.c ---- */
bool sg_is_linked(const void *image);
/* A copy in malloc memory. */
CUresult sg_copy_linked(const void *image, char **copy, size_t *size);
CUresult sg_load_linked(const void *image, struct kp_module **out, char *log, size_t log_size);

/* ---- cuda_library.c ---- */
/* The function a CUfunction or CUkernel handle means in `context`. */
CUresult sg_function_of(struct sg_context *context, const void *handle, struct sg_function **out);
void sg_libraries_forget(struct sg_context *context);

/* ---- cuda_launch.c ---- */
struct sg_launch {
	const void *function;
	uint32_t grid[3], block[3];
	uint32_t shared;
	void **params, **extra;
	bool cooperative;
};
/* Checked and packed, to be submitted in a stream of `where`. */
CUresult sg_launch_op(struct sg_context *context, const struct sg_context *where, const struct sg_launch *launch, struct sg_op **out);

/* ---- cuda_memset.c, cuda_shaped.c: likewise, and *out is NULL where there is nothing to do ---- */
struct sg_fill {
	CUdeviceptr at;
	size_t pitch, width, height; /* width in elements */
	unsigned value, element;
};
CUresult sg_fill_op(const struct sg_fill *fill, struct sg_op **out);
CUresult sg_box_op(const CUDA_MEMCPY3D *copy, struct sg_op **out);

/* ---- cuda_function.c ---- */
#define SG_MAX_DYNAMIC_SHARED 8 /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
CUresult sg_function_attribute(int *out, int attribute, const struct sg_function *function);
CUresult sg_function_set_attribute(struct sg_function *function, int attribute, int value);

/* ---- cuda_occupancy.c ---- */
int sg_blocks_on_processor(const struct sg_function *function, int block_size, size_t dynamic_shared);

/* ---- cuda_watch.c ---- */
/* Announce a launch; the watch stops it when its context dies or it runs too long. */
void sg_watch_start(void);
void sg_watch_begin(struct sg_context *context, struct kp_launch_ctl *ctl);
void sg_watch_end(struct kp_launch_ctl *ctl);

uint64_t sg_now_ns(void); /* CLOCK_MONOTONIC */

#define SG_TRY(call) \
	do { \
		CUresult sg_try = (call); \
		if (sg_try) \
			return sg_try; \
	} while (0)

/* Enter: declares `context`, returns the error to the caller when there is one. */
#define SG_ENTER(context) \
	struct sg_context *context; \
	SG_TRY(sg_enter(&context))

#endif
