/* What the session's files share: one guest process's half of the connection in the worker. */
#ifndef KVMPOOL_SESSION_STATE_H
#define KVMPOOL_SESSION_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "calls.h"
#include "cuda_abi.h"
#include "frame.h"
#include "handles.h"
#include "info.h"
#include "session.h"
#include "session_driver.h"
#include "window.h"

#define KP_CALL_MAX 65536u /* bytes of a call's own body; more than numbers, a launch's parameters or a name never need */
#define KP_READ_BYTES 16384u /* read ahead: a hundred launches; more would be copied twice before bulk */
#define KP_SLOTS_IN 8u  /* page-locked, of KP_BODY_MAX bytes: copies in flight to the card */
#define KP_SLOTS_OUT 2u /* one is sent while the other is filled */
#define KP_WAITERS_MAX 64u /* calls that block at once; one more makes the reader wait */

enum kp_class { KP_CLASS_ASYNC, KP_CLASS_SYNC, KP_CLASS_BLOCKING };
enum kp_tail { KP_TAIL_NONE, KP_TAIL_TEXT, KP_TAIL_BYTES };
enum kp_bulk { KP_BULK_NONE, KP_BULK_IN, KP_BULK_OUT };

struct kp_slot {
    unsigned char *memory;
    CUevent event;
    bool busy, pinned;
};

struct kp_errors {
    atomic_int deferred; /* first asynchronous one that nobody was told of */
    atomic_int sticky;   /* one that the context does not recover from */
};

/* A context of the guest and the staging memory that lives and dies with it. */
struct kp_home {
    CUcontext context;
    struct kp_slot in[KP_SLOTS_IN], out[KP_SLOTS_OUT];
    unsigned next_in;
    pthread_mutex_t out_lock;
    CUevent mark;   /* behind the last copy that named no stream; NULL: there was none */
    uint64_t marks; /* how often it was recorded */
    void *marked;   /* the stream it was last recorded in; these three are guarded by handles_lock */
    uint64_t tried, registered; /* chunks of the arena, a bit each */
    uint64_t own; /* bytes of the card that it costs by itself, with what its limits have asked for; these by memory_lock */
    uint64_t limit[3], usual[3]; /* of own: a limit's part; the limits as they were before the guest set one */
    bool usual_known[3];
    unsigned ordinal; /* of the session's contexts, from 0 */
    struct kp_errors errors;
    struct kp_home *retired; /* the next of those whose context is gone */
};

/* One call, decoded. A handler returns a CUresult, or a negative errno that ends the session. */
struct kp_work {
    uint16_t op;
    bool wanted; /* a reply is waited for */
    uint32_t seq;
    struct kp_home *home;
    uint64_t home_number;
    uint64_t in[KP_IN_MAX], out[KP_OUT_MAX];
    const unsigned char *tail;
    uint32_t tail_bytes;
    void *give; /* reply bytes: allocated by the handler, freed after the reply */
    uint32_t give_bytes;
    struct kp_work *next;
};

struct kp_mapping;
struct kp_host;

/* What kernels wrote and nobody fetched, in rings. */
#define KP_SPOOLS 2u
struct kp_print {
    pthread_mutex_t lock;
    struct kp_spool {
        uint16_t op; /* that it is given with */
        int fd;      /* the driver's text comes out here */
        unsigned char *text; /* KP_PRINT_MAX bytes */
        size_t at, used;
    } spool[KP_SPOOLS];
};
struct kp_meter;

/* An allocation that was freed and waits for the work that may use it. */
struct kp_grave {
    uint64_t va;
    struct kp_home *home;
    struct kp_grave *next;
};

/* A call that somebody in the guest waits for. */
struct kp_asked {
    bool used;
    uint16_t op;
    uint32_t seq;
};

#define KP_NVML_LISTS 2u

/* What the driver takes of the card beside what the session maps; guarded by memory_lock. */
struct kp_own {
    uint64_t charged, known; /* bytes the claim pays; of them: those that contexts cost at their begin and limits asked for */
    uint64_t looked_ns;
    unsigned contexts; /* that live: with none, a process that NVML does not list holds nothing */
    bool looked_for_nvml, said_unknown;
    void *nvml_card; /* NULL: not to be had */
    int (*list[KP_NVML_LISTS])(void *card, unsigned *count, void *processes);
};

struct kp_server {
    const struct kp_session *session;
    int fd, log_fd;
    struct kp_window window; /* without base: all goes over the socket */
    struct kp_ring from_guest, to_guest;
    uint64_t va_base;
    struct kp_driver driver;
    CUdevice device;

    struct kp_handles handles;
    pthread_mutex_t handles_lock;
    struct kp_home *home; /* current, NULL: none */
    uint64_t home_number;
    struct kp_home *retired;
    unsigned homes; /* made so far */

    struct kp_errors errors; /* of calls that were made in no context */
    atomic_uint captures; /* that were begun and not seen to end */

    unsigned char *in;   /* KP_READ_BYTES, made at start */
    unsigned char *body; /* KP_CALL_MAX: of the call that is being made */
    size_t in_at, in_end;
    pthread_mutex_t tx;

    pthread_mutex_t memory_lock;
    pthread_cond_t reaped;
    struct kp_mapping **pages, *mappings; /* by page of the window; all */
    unsigned reaping;       /* allocations freed and not yet gone */
    uint64_t reaping_bytes; /* of mappings that go with them */
    uint64_t mapped;        /* bytes of the card that the session made itself */
    struct kp_own own;
    uint32_t pinned_chunks[KP_ARENA_CHUNKS]; /* blocks of page-locked memory that lie in each chunk of the arena */
    uint64_t pinned;                         /* bytes charged for what lies elsewhere */
    pthread_cond_t buried;
    struct kp_grave *graves; /* newest first */
    bool has_reaper;

    pthread_mutex_t queue_lock;
    pthread_cond_t queued;
    struct kp_work *queue, **queue_end;
    unsigned waiters, idle;
    struct kp_asked asked[KP_WAITERS_MAX + 1]; /* the calls that block now; the reader may make one too */
    struct kp_print print;
    struct kp_host *host;   /* NULL: no function of the guest was in a stream yet */
    struct kp_meter *meter; /* NULL: nothing is measured */
};

struct kp_op_info {
    const char *name;
    enum kp_class cls;
    unsigned numbers, outs;
    enum kp_tail tail;
    enum kp_bulk bulk;
    bool needs_context;
    int (*run)(struct kp_server *s, struct kp_work *w);
};

struct kp_driver_symbol {
    const char *name;
    size_t offset; /* into struct kp_driver */
};

extern const struct kp_op_info kp_ops[];
extern const struct kp_driver_symbol kp_driver_symbols[];
extern const unsigned kp_driver_symbol_count;

/* session_load.c: 0 or -ENODEV, with one line in `text`. */
int kp_driver_load(struct kp_server *s, char *text, size_t room);

/* session_read.c: the stream from the guest. */
ssize_t kp_read_more(struct kp_server *s, void *to, size_t room); /* of the connection: at least a byte, 0 at its end */
int kp_take(struct kp_server *s, void *to, size_t bytes); /* `to` NULL: thrown away */
int kp_take_bulk_frame(struct kp_server *s, uint32_t seq, size_t left, uint32_t *length); /* header of the next DATA */
int kp_drain_bulk(struct kp_server *s, uint32_t seq, size_t left);

/* session_host.c: the same, of what its ear has heard. */
ssize_t kp_host_read(struct kp_server *s, void *to, size_t room);

/* session_reply.c */
int kp_put(struct kp_server *s, const struct iovec *part, int parts); /* in one piece behind what others put */
void kp_note(struct kp_server *s, struct kp_home *home, CUresult result); /* an asynchronous call's; home NULL: made in none */
CUresult kp_take_noted(struct kp_server *s, struct kp_home *home); /* for a caller in it, who is told */
int kp_reply(struct kp_server *s, struct kp_work *w, CUresult result);
int kp_send_data(struct kp_server *s, uint32_t seq, const void *data, uint32_t bytes);

/* session_wait.c: runs a call that may block, on a thread that may. */
int kp_wait_for(struct kp_server *s, const struct kp_work *w);
void kp_tell_waiters(struct kp_server *s, CUresult result); /* before the process ends: all that wait get it */

/* session_meter.c: what the launches cost the card, and whose turn it is. */
int kp_meter_start(struct kp_server *s);
void kp_meter_call(struct kp_server *s, const struct kp_work *w); /* before a call is made; a launch waits for its turn */
void kp_meter_idle(struct kp_server *s); /* before the reader waits for the guest */
void kp_meter_leave(struct kp_server *s); /* before another context becomes current */
void kp_meter_forget(struct kp_server *s, const struct kp_home *home); /* before its context is destroyed */

/* session_print.c: kernels' text, which the driver writes to this process's standard output and error. */
int kp_print_start(struct kp_server *s);
int kp_print_give(struct kp_server *s, uint32_t seq); /* all there is, in front of the reply of that seq */

/* session_run.c */
void kp_session_log(const struct kp_server *s, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* session_objects.c */
int kp_resolve(struct kp_server *s, uint64_t number, enum kp_kind kind, void **object); /* or CUDA_ERROR_INVALID_HANDLE */
uint64_t kp_parent_of(struct kp_server *s, uint64_t number, enum kp_kind kind); /* 0: it is none, or has none */
int kp_adopt(struct kp_server *s, struct kp_work *w, uint64_t number, enum kp_kind kind, void *object);
int kp_adopt_under(struct kp_server *s, uint64_t number, enum kp_kind kind, void *object, uint64_t parent, uint64_t other);
int kp_may_adopt(struct kp_server *s, uint64_t number, enum kp_kind kind); /* before the driver is asked for one more */
void kp_forget(struct kp_server *s, uint64_t number);
int kp_enter_home(struct kp_server *s, uint64_t number);

/* session_image.c: what is compiled or linked, with options and logs as the driver takes them. */
#define KP_JIT_OURS 4u
#define KP_NAMES_MAX 65536u
#define KP_NAMES_BYTES_MAX (KP_BODY_MAX - 64)
struct kp_compiler {
    unsigned count;
    CUjit_option options[KP_JIT_OURS + KP_JIT_OPTIONS_MAX];
    void *values[KP_JIT_OURS + KP_JIT_OPTIONS_MAX];
    char info[KP_LOG_MAX], error[KP_LOG_MAX];
};
int kp_image_take(struct kp_server *s, struct kp_work *w, uint64_t bytes, unsigned char **image); /* with an end behind it */
int kp_compiler_read(const struct kp_work *w, struct kp_compiler *compiler);
CUresult kp_compiler_give(struct kp_work *w, const struct kp_compiler *compiler, uint64_t *image_bytes); /* NULL: not said */

CUresult kp_container_check(const unsigned char *image, uint64_t bytes); /* session_container.c: INVALID_IMAGE where it reaches beyond */

/* session_capture.c */
bool kp_capturing(struct kp_server *s, CUstream stream);
CUresult kp_refuse_capture(struct kp_server *s, CUstream stream); /* 0, or 900 where it captures, which is then invalid */

/* session_graph.c: what is behind KP_GRAPH and KP_EXEC. */
struct kp_graph {
    const struct kp_driver *driver;
    CUgraph graph;
    CUgraphNode *node; /* by its number on the wire; NULL: destroyed */
    uint32_t nodes, room;
};
struct kp_exec {
    const struct kp_driver *driver;
    CUgraphExec exec;
    unsigned launches; /* that one of it counts for */
};
int kp_graph_adopt(struct kp_server *s, struct kp_work *w, uint64_t number, CUgraph graph); /* takes it, whatever it answers */
CUresult kp_graph_of(struct kp_server *s, uint64_t number, struct kp_graph **graph);
CUresult kp_graph_node(const struct kp_graph *graph, uint64_t index, CUgraphNode *node);
bool kp_graph_room(struct kp_graph *graph); /* for one node more */
void kp_graph_free(void *graph);
void kp_exec_free(void *exec);
unsigned kp_exec_launches(struct kp_server *s, uint64_t number); /* 0: it is none */

void kp_linker_free(void *linker); /* session_linker.c: the session's half of one whose context is gone */

/* session_module.c: the reply's bytes are a struct kp_function_info. */
CUresult kp_give_function(struct kp_server *s, struct kp_work *w, CUfunction function);
CUresult kp_give_kernel(struct kp_server *s, struct kp_work *w, CUkernel kernel);

/* session_memory.c */
CUresult kp_memory_reap(struct kp_server *s, uint64_t va, CUresult waited, struct kp_home *note); /* takes away what kp_do_free has
    marked; its error is noted there, NULL: only returned */
bool kp_memory_holds(struct kp_server *s, uint64_t va, uint64_t bytes); /* false: surely no memory of the session */
void kp_memory_drop(struct kp_server *s, uint64_t home_number);

int kp_memory_charge(struct kp_server *s, uint64_t bytes); /* with memory_lock held, which a wait for the reaper gives back */

/* session_own.c: memory of the card that the driver takes for itself. OUT_OF_MEMORY: it does not fit; the caller undoes it. */
CUresult kp_own_charge(struct kp_server *s);
CUresult kp_own_context(struct kp_server *s, struct kp_home *home); /* likewise, behind the making of a context */
void kp_own_leave(struct kp_server *s, struct kp_home *home);       /* behind its end */
void kp_own_look(struct kp_server *s); /* with memory_lock held: charges what is there now, whether or not it fits */
void kp_own_look_sometimes(struct kp_server *s); /* likewise, where the last look is a while ago */
int kp_have_library(struct kp_server *s, const struct kp_home *home, uint64_t number); /* loaded in the context, and charged */

/* session_copy.c: whether the box is one, from its first byte to its last; and the session's memory holds all of it. */
bool kp_box_span(uint64_t width, uint64_t height, uint64_t depth, uint64_t pitch, uint64_t rows, uint64_t *span);
bool kp_box_holds(struct kp_server *s, uint64_t va, uint64_t width, uint64_t height, uint64_t depth, uint64_t pitch, uint64_t rows);

/* session_arena.c */
void kp_arena_register(struct kp_server *s, struct kp_home *home, uint64_t at, uint64_t bytes); /* before the card uses it */
void kp_arena_leave(struct kp_server *s, struct kp_home *home); /* before its context goes */

/* session_reap.c: hands a freed allocation to the reaper, which owns it then; where `wait`, it is gone on return. */
CUresult kp_bury(struct kp_server *s, struct kp_grave *grave, bool wait);

/* Handlers that are written by hand; why, says calls.toml. */
int kp_do_device_info(struct kp_server *s, struct kp_work *w);
int kp_do_context_create(struct kp_server *s, struct kp_work *w);
int kp_do_context_destroy(struct kp_server *s, struct kp_work *w);
int kp_do_module_load(struct kp_server *s, struct kp_work *w);
int kp_do_function_get(struct kp_server *s, struct kp_work *w);
int kp_do_function_set(struct kp_server *s, struct kp_work *w);
int kp_do_launch(struct kp_server *s, struct kp_work *w);
int kp_do_alloc(struct kp_server *s, struct kp_work *w);
int kp_do_free(struct kp_server *s, struct kp_work *w);
int kp_do_copy_in(struct kp_server *s, struct kp_work *w);
int kp_do_copy_out(struct kp_server *s, struct kp_work *w);
int kp_do_arena_in(struct kp_server *s, struct kp_work *w);
int kp_do_arena_out(struct kp_server *s, struct kp_work *w);
int kp_do_module_find(struct kp_server *s, struct kp_work *w);
int kp_do_library_find(struct kp_server *s, struct kp_work *w);
int kp_do_capture_begin(struct kp_server *s, struct kp_work *w);
int kp_do_capture_end(struct kp_server *s, struct kp_work *w);
int kp_do_capture_info(struct kp_server *s, struct kp_work *w);
int kp_do_graph_create(struct kp_server *s, struct kp_work *w);
int kp_do_graph_clone(struct kp_server *s, struct kp_work *w);
int kp_do_graph_list(struct kp_server *s, struct kp_work *w);
int kp_do_graph_edges(struct kp_server *s, struct kp_work *w);
int kp_do_graph_exec(struct kp_server *s, struct kp_work *w);
int kp_do_exec_update(struct kp_server *s, struct kp_work *w);
int kp_do_node_kernel(struct kp_server *s, struct kp_work *w);
int kp_do_node_kernel_set(struct kp_server *s, struct kp_work *w);
int kp_do_node_fill(struct kp_server *s, struct kp_work *w);
int kp_do_node_copy(struct kp_server *s, struct kp_work *w);
int kp_do_node_graph(struct kp_server *s, struct kp_work *w);
int kp_do_node_destroy(struct kp_server *s, struct kp_work *w);
int kp_do_cuGraphDestroy(struct kp_server *s, struct kp_work *w);
int kp_do_cuGraphExecDestroy(struct kp_server *s, struct kp_work *w);
int kp_do_cuGraphUpload(struct kp_server *s, struct kp_work *w);
int kp_do_cuGraphLaunch(struct kp_server *s, struct kp_work *w);
int kp_do_names(struct kp_server *s, struct kp_work *w);
int kp_do_library_load(struct kp_server *s, struct kp_work *w);
int kp_do_library_module(struct kp_server *s, struct kp_work *w);
int kp_do_kernel_get(struct kp_server *s, struct kp_work *w);
int kp_do_kernel_set(struct kp_server *s, struct kp_work *w);
int kp_do_kernel_function(struct kp_server *s, struct kp_work *w);
int kp_do_link_create(struct kp_server *s, struct kp_work *w);
int kp_do_link_add(struct kp_server *s, struct kp_work *w);
int kp_do_link_complete(struct kp_server *s, struct kp_work *w);
int kp_do_link_image(struct kp_server *s, struct kp_work *w);
int kp_do_cuLinkDestroy(struct kp_server *s, struct kp_work *w);
int kp_do_occupancy(struct kp_server *s, struct kp_work *w);
int kp_do_stream_info(struct kp_server *s, struct kp_work *w);
int kp_do_priority_range(struct kp_server *s, struct kp_work *w);
int kp_do_block_size(struct kp_server *s, struct kp_work *w);
int kp_do_settle(struct kp_server *s, struct kp_work *w);
int kp_do_box_in(struct kp_server *s, struct kp_work *w);
int kp_do_box_out(struct kp_server *s, struct kp_work *w);
int kp_do_box_between(struct kp_server *s, struct kp_work *w);
int kp_do_cuCtxSetLimit(struct kp_server *s, struct kp_work *w);
int kp_do_cuLibraryGetGlobal(struct kp_server *s, struct kp_work *w);
int kp_do_pinned_take(struct kp_server *s, struct kp_work *w);
int kp_do_pinned_give(struct kp_server *s, struct kp_work *w);
int kp_do_host_func(struct kp_server *s, struct kp_work *w);
int kp_do_host_next(struct kp_server *s, struct kp_work *w);
int kp_do_physical_create(struct kp_server *s, struct kp_work *w);
int kp_do_physical_release(struct kp_server *s, struct kp_work *w);
int kp_do_vmm_map(struct kp_server *s, struct kp_work *w);
int kp_do_vmm_unmap(struct kp_server *s, struct kp_work *w);
int kp_do_vmm_access(struct kp_server *s, struct kp_work *w);
int kp_do_cuMemGetInfo_v2(struct kp_server *s, struct kp_work *w);

#endif
