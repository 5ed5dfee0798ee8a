/* Virtual handles: numbers that the guest assigns and that mean nothing outside a session.
 *
 * Both halves keep such a table: the shim's says what a handle is and belongs to, the worker's also the driver's object.
 * A handle is kind << 48 | serial << 20 | index, so a stale or foreign number is found out, never dereferenced.
 * Not thread-safe: the owner has a lock.
 */
#ifndef KVMPOOL_HANDLES_H
#define KVMPOOL_HANDLES_H

#include <stdint.h>

#define KP_HANDLES_MAX (1u << 20) /* live at once in one session */
#define KP_HANDLES_PAGE 1024u

enum kp_kind { KP_CONTEXT = 1, KP_MODULE, KP_FUNCTION, KP_STREAM, KP_EVENT, KP_LIBRARY, KP_KERNEL, KP_LINK, KP_PHYSICAL, KP_POOL, KP_GRAPH, KP_NODE, KP_EXEC, KP_KINDS };

/* How many of a kind may live at once in one session: far more than programs have, few enough that what the driver holds for
 * each (a stream some KiB on the card and a queue on the host, a context page-locked staging memory) stays bounded. */
#define KP_CONTEXT_COUNT_MAX 64u
#define KP_STREAM_COUNT_MAX 4096u
#define KP_EVENT_COUNT_MAX 65536u
#define KP_PHYSICAL_COUNT_MAX 65536u
#define KP_MODULE_COUNT_MAX 16384u /* libraries, modules and linkers, each */
#define KP_GRAPH_COUNT_MAX 16384u  /* and executable ones */

struct kp_handle {
    uint64_t number; /* 0: free */
    uint64_t parent; /* the handle it goes away with, or 0 */
    uint64_t other;  /* likewise: a library's module is also its context's; the owner sets it */
    uint64_t note;   /* its owner's, 0 at first */
    void *value;     /* likewise */
};

struct kp_handles {
    struct kp_handle *pages[KP_HANDLES_MAX / KP_HANDLES_PAGE];
    uint32_t end;    /* first index never used */
    uint32_t unused; /* head of the list of freed indices + 1; 0: empty */
    uint32_t serial;
    uint32_t live[KP_KINDS]; /* of each kind */
};

/* False where as many of `kind` live as may. */
int kp_handles_room(const struct kp_handles *table, enum kp_kind kind);

/* A number nobody uses, entered; 0 where the table is full, there are too many of the kind, or memory is short. */
uint64_t kp_handles_new(struct kp_handles *table, enum kp_kind kind, void *value, uint64_t parent);

/* Enters a number the other side chose: 0, -EPROTO where it is malformed, of another kind or in use, -ENOMEM. */
int kp_handles_put(struct kp_handles *table, uint64_t number, enum kp_kind kind, void *value, uint64_t parent);

/* The entry, or NULL where the number is not live or of another kind. Valid until dropped. */
struct kp_handle *kp_handles_get(const struct kp_handles *table, uint64_t number, enum kp_kind kind);

/* The first of that kind with these two parents, 0: none. */
uint64_t kp_handles_find(struct kp_handles *table, enum kp_kind kind, uint64_t parent, uint64_t other);

void kp_handles_drop(struct kp_handles *table, uint64_t number);

/* Drops all whose parent (or other) is `number`, and theirs; calls `gone` (or NULL) with each before it is dropped. */
void kp_handles_drop_children(struct kp_handles *table, uint64_t number, void (*gone)(struct kp_handle *));

void kp_handles_clear(struct kp_handles *table);

static inline enum kp_kind kp_handle_kind(uint64_t number)
{
    return (enum kp_kind)(number >> 48);
}

#endif
