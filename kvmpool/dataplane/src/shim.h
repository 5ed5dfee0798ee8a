/* The guest's half: what the shim's files share. The shim is a guest in somebody's process: it prints nothing of
 * its own, never exits, takes no signal and survives fork. Its only global is the connection, `kp_shim` (and each thread's contexts).
 */
#ifndef KVMPOOL_SHIM_H
#define KVMPOOL_SHIM_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "blake2b.h"
#include "calls.h"
#include "cuda_abi.h"
#include "frame.h"
#include "handles.h"
#include "info.h"
#include "shim_api.h"
#include "window.h"

#define KP_EXPORT __attribute__((visibility("default")))
#define KP_OUT_BYTES 65536u /* of calls that wait to be sent together */
#define KP_DRIVER_VERSION 13000 /* highest API version the shim implements */
#ifndef KP_VA_BASE
#define KP_VA_BASE 0x300000000000ull /* the device addresses of a session: free in any x86-64 process, also under ASan */
#endif

/* Where a reply goes. `out` takes `outs` numbers, then `bytes` up to `room`; `bulk` exactly `bulk_bytes` of DATA. */
struct kp_answer {
    uint64_t *out;
    unsigned outs;
    void *bytes;
    size_t room, got;
    void *bulk;
    size_t bulk_bytes;
};

struct kp_waiter;

struct kp_stats {
    uint64_t round_trips, frames, writes, bytes_out, dials; /* guarded by `tx` */
    atomic_ullong bytes_in;
};

/* The connection. `tx` orders everything that is sent and guards all but the members of the receiving side. */
struct kp_link {
    int fd; /* -1: none */
    struct kp_window window; /* without base: all goes over the socket */
    struct kp_ring to_worker, from_worker;
    atomic_bool lost; /* the worker is gone; until the next dial */
    uint32_t epoch;   /* counts dials: a context of an older one is dead */
    uint32_t seq;
    uint64_t context; /* that the worker knows as current */
    size_t filled;
    unsigned char out[KP_OUT_BYTES];

    pthread_mutex_t rx;
    pthread_cond_t idle; /* nobody receives and nobody waits */
    bool reading;
    struct kp_waiter *waiters;
    size_t in_at, in_end;
    unsigned char in[16384];
};

struct kp_context {
    uint64_t number;
    uint32_t epoch;
    unsigned flags, version;
    bool primary;
    unsigned attached;
    CUresult sticky; /* error that it does not recover from */
};

#define KP_OCCUPANCIES 8 /* answers kept for a function */
struct kp_occupancy {
    int size; /* 0: none */
    unsigned flags;
    size_t shared;
    int32_t blocks;
};

struct kp_function {
    uint64_t module, library; /* one of them, for a kernel and its functions the latter */
    uint64_t in_context, as_function; /* of a kernel: what cuKernelGetFunction answered last */
    uint32_t epoch;
    uint32_t param_bytes; /* of its parameter buffer */
    struct kp_function_info info;
    struct kp_occupancy occupancy[KP_OCCUPANCIES];
    unsigned occupancies;
    char name[];
};

#define KP_CAPTURES_MAX 64 /* of a process at once */
struct kp_capture {
    uint64_t stream;
    CUstreamCaptureMode mode;
    pthread_t thread; /* that began it */
};

struct kp_shim {
    pthread_mutex_t tx;
    pthread_cond_t filled; /* the flusher's: `flushing` was set */
    atomic_int ready;      /* cuInit has succeeded */
    atomic_bool forked;    /* this is a child of the process that called cuInit */
    bool flusher, synchronous;
    bool flushing; /* the flusher was woken and has not flushed since */
    struct kp_link link;
    struct kp_handles handles;
    struct kp_welcome welcome;
    struct kp_device_info device;
    unsigned char params[KP_PARAM_BYTES_MAX + 4]; /* of the launch that is being packed */
    atomic_uint pooled; /* blocks that pools hold unused */
    unsigned host_pending; /* functions of the program that streams have yet to run */
    size_t host_bulk;      /* bytes sent while there were some */
    pthread_cond_t host_idle;
    struct kp_stats stats;
    atomic_uint captures; /* under way; written with `tx` held. No call is fire-and-forget then */
    struct kp_capture capture[KP_CAPTURES_MAX];
};

extern struct kp_shim kp_shim;

/* shim_life.c */
CUresult kp_start(void);
CUresult kp_unsupported(const char *name);
void kp_log(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* shim_dial.c: a connected socket (blocking, with a timeout while it greets), or a CUresult in *why. The window has a base
 * where the worker gave one. */
int kp_dial(struct kp_welcome *welcome, struct kp_window *window, CUresult *why);

/* shim_link.c. kp_enter takes `tx` when it returns 0; kp_send, kp_ask and kp_leave give it back. */
CUresult kp_enter(void);        /* for a call that runs in the thread's current context */
CUresult kp_enter_any(void);    /* likewise, also where the thread has none */
CUresult kp_enter_device(void); /* for one that needs no context: dials again where the worker was lost */
CUresult kp_leave(CUresult result);
CUresult kp_send(uint16_t op, const uint64_t *numbers, unsigned count, const void *tail, uint32_t tail_bytes);
CUresult kp_ask(uint16_t op, const uint64_t *numbers, unsigned count, const void *tail, uint32_t tail_bytes,
                struct kp_answer *answer);
CUresult kp_send_bulk(uint16_t op, const uint64_t *numbers, unsigned count, const void *tail, uint32_t tail_bytes,
                      const void *bulk, size_t bytes, struct kp_answer *answer); /* answer NULL: not waited for */
CUresult kp_link_open(void);
int kp_link_flush(void); /* with `tx` held */
void kp_link_put(uint16_t op, uint16_t flags, uint32_t seq, const uint64_t *numbers, unsigned count, const void *tail,
                 uint32_t tail_bytes); /* with `tx` held */

/* shim_receive.c: waits for the reply to `seq`, whose waiter was entered while `tx` was held. */
struct kp_waiter {
    uint32_t seq;
    bool done, reader;
    CUresult result, sticky;
    uint64_t context; /* the call is made in, 0: in none */
    size_t bulk_got;
    struct kp_answer *answer;
    struct kp_text { /* kernels' for stdout and stderr: written by the thread that waits, so that only it stands still where those do */
        char *text;
        size_t bytes;
    } printed, asserted;
    pthread_cond_t woken;
    struct kp_waiter *next;
};
void kp_expect(struct kp_waiter *waiter, uint32_t seq, struct kp_answer *answer);
CUresult kp_await(struct kp_waiter *waiter);
void kp_link_lose(const char *why);

/* shim_objects.c, with `tx` held: handles as the program sees them. */
uint64_t kp_object_new(enum kp_kind kind);
void kp_object_drop(uint64_t number);
void kp_object_lose(uint64_t number); /* the same, taking `tx` itself: of what the worker did not make */
CUresult kp_object_number(enum kp_kind kind, const void *object, uint64_t *number);
CUresult kp_stream_number(CUstream stream, uint64_t *number);
CUresult kp_device_number(CUdeviceptr address, size_t element, size_t count, size_t rows, size_t pitch, uint64_t *number);
CUstream kp_per_thread(CUstream stream);

/* shim_thread.c: the calling thread's own; NULL where memory is short. */
#define KP_CONTEXTS_MAX 64  /* on one thread's stack */
#define KP_THREAD_STREAMS 8 /* contexts that a thread uses its per-thread default stream in */
struct kp_thread {
    unsigned depth;
    bool unsettled; /* a copy of memory in the window was sent since kp_copy_begin */
    uint64_t contexts[KP_CONTEXTS_MAX];
    struct {
        uint64_t context, stream;
    } streams[KP_THREAD_STREAMS];
};
struct kp_thread *kp_thread(void);
bool kp_program_is_static(void);

/* shim_context.c */
#define KP_CONTEXT_FLAGS 0x7fu
uint64_t kp_current(void); /* this thread's context's handle, 0: none */
struct kp_context *kp_context_of(uint64_t number); /* with `tx` held */
CUresult kp_ready(void); /* NOT_INITIALIZED before cuInit, and in a child of the process that called it */
CUresult kp_context_create(unsigned flags, bool primary, uint64_t *number); /* dials again where the worker was lost; not current yet */
CUresult kp_context_destroy(uint64_t number); /* with all that lives in it, whether or not its worker is still there */

/* shim_space.c, with `tx` held: device addresses. */
CUdeviceptr kp_space_take(size_t bytes, uint64_t context); /* 0: the window is full */
bool kp_space_give(CUdeviceptr address); /* false: not the start of an allocation */
bool kp_space_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes);
uint64_t kp_space_context(CUdeviceptr address); /* the context it was allocated in, 0: none */
void kp_space_drop(uint64_t context); /* all that was allocated in it */
void kp_space_resize(CUdeviceptr address, size_t bytes); /* of an allocation: not beyond what it had at first */
CUdeviceptr kp_space_reserve(size_t bytes, size_t alignment); /* whole pages for the program to map; 0: the window is full */
bool kp_space_unreserve(CUdeviceptr address, size_t bytes);   /* false: not a reservation */
bool kp_space_reserved(CUdeviceptr address, size_t bytes);    /* all of it in one reservation */

/* shim_vmm.c, with `tx` held: the mapping with access that an address is in. */
bool kp_vmm_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes);

/* shim_pool.c. */
bool kp_pools_give(void);             /* all that pools hold unused goes back to the claim; false: they held nothing */
void kp_pools_synchronised(void);     /* the program has waited for the card: what is beyond the thresholds goes back */
void kp_pools_drop(uint64_t context); /* with `tx` held, as the next: what was allocated in it is no pool's any more */
bool kp_pools_forget(CUdeviceptr at); /* before cuMemFree; false: it was freed already */

/* shim_global.c: variables of modules that the program was told of. */
void kp_global_keep(CUdeviceptr at, size_t bytes);
bool kp_global_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes, uint64_t *context); /* `context` NULL: not asked for */

/* shim_memory.c */
CUresult kp_settle(CUresult result, CUstream stream); /* behind a copy, whose result it is: no later work overtakes it */
bool kp_on_device(CUdeviceptr address); /* of the window or a variable: no address of the program's */
CUresult kp_device_range(CUdeviceptr address, size_t bytes); /* with `tx` held: INVALID_VALUE where it leaves an allocation */

/* shim_module.c, with `tx` held: NULL where it is no function (or kernel). */
struct kp_function *kp_function_of(CUfunction f);
struct kp_function *kp_kernel_of(CUkernel kernel);
CUresult kp_function_param(const struct kp_function *function, size_t index, size_t *offset, size_t *size);
/* These two give `tx` back. */
CUresult kp_function_fetch(uint16_t op, enum kp_kind kind, uint64_t *in, unsigned count, uint64_t parent, const char *name, void **out);
CUresult kp_function_change(uint16_t op, const uint64_t *in, unsigned count, CUfunction f);

/* shim_image.c: what is compiled or linked, and how. */
struct kp_image {
    const void *data;
    size_t bytes;
    void *owned; /* memory to free, or NULL */
    uint64_t hash[KP_HASH_BYTES / sizeof(uint64_t)]; /* of its content, from KP_CACHE_MIN bytes on */
};
struct kp_log_buffer {
    char *text;
    size_t room;
    unsigned size; /* 1 + index of the option that its length is given back in, 0: none */
};
struct kp_jit {
    struct kp_jit_option options[KP_JIT_OPTIONS_MAX];
    unsigned count;
    struct kp_log_buffer info, error;
    void **values; /* the program's */
};
void kp_fatbin_prune(struct kp_image *image); /* shim_fatbin.c: of a fatbin, what this card can use */
CUresult kp_image_read(struct kp_image *image, const char *path);
CUresult kp_image_open(struct kp_image *image, const void *data, const char *path, struct kp_jit *jit, unsigned count,
                       const CUjit_option *options, void **values); /* `path` NULL: what is at `data` */
void kp_image_drop(struct kp_image *image);
CUresult kp_image_load(uint16_t op, uint64_t handle, const struct kp_image *image, const struct kp_jit *jit,
                       void **out); /* gives `tx` back, and `handle` (0: there was none left) where it fails */
CUresult kp_jit_read(struct kp_jit *jit, unsigned count, const CUjit_option *options, void **values);
void kp_jit_give(const struct kp_jit *jit, const void *reply, size_t got); /* its struct kp_logs */

/* shim_launch.c, with `tx` held: checked and packed; `buffer` stays right while `tx` is held. */
struct kp_launch {
    unsigned grid[3], block[3], shared;
    CUstream stream;
    bool cooperative;
};
CUresult kp_launch_pack(CUfunction f, const struct kp_launch *launch, void **params, void **extra, const void **buffer, uint32_t *bytes);

/* shim_capture.c */
CUresult kp_capture_unsafe(void); /* 0, or 900 where a capture forbids this thread what may be unsafe: then it is invalid */
CUresult kp_capture_refuses(CUstream stream, const char *what); /* 0, or 900 where it captures, which is then invalid */
void kp_capture_forget(uint64_t stream); /* with `tx` held */

/* shim_graph.c */
void kp_graph_free(void *nodes);
CUresult kp_graph_has(uint64_t graph, uint32_t count); /* a graph's first nodes */
/* With `tx` held: */
CUresult kp_graph_number(CUgraph graph, uint64_t *number);
CUresult kp_node_number(CUgraphNode node, uint64_t *graph, uint32_t *number);
CUgraphNode kp_node_next(uint64_t graph, uint32_t *number); /* NULL: there is no room for it */
void kp_node_undo(uint64_t graph, uint32_t number);
CUgraphNode kp_node_of(uint64_t graph, uint32_t number); /* NULL: there is none */

/* shim_box.c, with `tx` held: what op node_copy says of a copy. */
CUresult kp_box_node(const CUDA_MEMCPY3D *copy, uint64_t *in);

/* shim_linker.c */
void kp_linker_free(void *linker);

/* shim_host.c: page-locked host memory: in the window where there is one with room, plain memory otherwise. */
bool kp_host_find(const void *address, void **start, size_t *bytes); /* with `tx` held */
bool kp_host_shared(const void *address, size_t bytes, uint64_t *offset); /* with `tx` held: all of it in the window */
void kp_host_leave(struct kp_window *window); /* with `tx` held: its worker is lost */

/* A copy of memory in the window is over when its stream says so. A call that must not return earlier begins and ends so. */
void kp_copy_begin(void);
CUresult kp_copy_end(CUresult result, CUstream stream);

CUresult kp_cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction f, void **params, void **extra);

struct kp_proc {
    const char *name;
    void *function;
    int version;
    int per_thread;
};
struct kp_error {
    CUresult code;
    const char *name, *words;
};
extern const struct kp_proc kp_procs[], kp_unsupported_procs[]; /* sorted by name, then version */
extern const struct kp_error kp_errors[];
extern const unsigned kp_proc_count, kp_unsupported_proc_count, kp_error_count;

#endif
