/* Tables of virtual handles. See handles.h. */
#include "handles.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static uint32_t index_of(uint64_t number)
{
    return (uint32_t)(number & (KP_HANDLES_MAX - 1));
}

/* The entry at `index`, its page made where `make`; NULL where there is none. */
static struct kp_handle *entry_at(struct kp_handles *table, uint32_t index, int make)
{
    struct kp_handle **page = &table->pages[index / KP_HANDLES_PAGE];

    if (*page == NULL && make)
        *page = calloc(KP_HANDLES_PAGE, sizeof **page);
    return *page == NULL ? NULL : &(*page)[index % KP_HANDLES_PAGE];
}

int kp_handles_room(const struct kp_handles *table, enum kp_kind kind)
{
    static const uint32_t most[KP_KINDS] = {
        [KP_CONTEXT] = KP_CONTEXT_COUNT_MAX, [KP_STREAM] = KP_STREAM_COUNT_MAX,   [KP_EVENT] = KP_EVENT_COUNT_MAX,
        [KP_MODULE] = KP_MODULE_COUNT_MAX,   [KP_LIBRARY] = KP_MODULE_COUNT_MAX, [KP_LINK] = KP_MODULE_COUNT_MAX,
        [KP_PHYSICAL] = KP_PHYSICAL_COUNT_MAX, [KP_GRAPH] = KP_GRAPH_COUNT_MAX, [KP_EXEC] = KP_GRAPH_COUNT_MAX,
    };

    return most[kind] == 0 || table->live[kind] < most[kind];
}

uint64_t kp_handles_new(struct kp_handles *table, enum kp_kind kind, void *value, uint64_t parent)
{
    uint32_t index = table->unused != 0 ? table->unused - 1 : table->end;
    struct kp_handle *entry = index < KP_HANDLES_MAX ? entry_at(table, index, 1) : NULL;

    if (entry == NULL || !kp_handles_room(table, kind))
        return 0;
    if (table->unused != 0)
        table->unused = (uint32_t)(uintptr_t)entry->value;
    else
        table->end++;
    table->serial = (table->serial + 1) & 0xfffffffu;
    entry->number = (uint64_t)kind << 48 | (uint64_t)table->serial << 20 | index;
    entry->value = value;
    entry->parent = parent;
    entry->other = entry->note = 0;
    table->live[kind]++;
    return entry->number;
}

int kp_handles_put(struct kp_handles *table, uint64_t number, enum kp_kind kind, void *value, uint64_t parent)
{
    struct kp_handle *entry;

    if (kp_handle_kind(number) != kind || number >> 56 != 0)
        return -EPROTO;
    if ((entry = entry_at(table, index_of(number), 1)) == NULL)
        return -ENOMEM;
    if (entry->number != 0)
        return -EPROTO;
    if (!kp_handles_room(table, kind))
        return -ENOMEM;
    table->live[kind]++;
    *entry = (struct kp_handle){.number = number, .parent = parent, .value = value};
    if (index_of(number) >= table->end)
        table->end = index_of(number) + 1;
    return 0;
}

struct kp_handle *kp_handles_get(const struct kp_handles *table, uint64_t number, enum kp_kind kind)
{
    const struct kp_handle *page = table->pages[index_of(number) / KP_HANDLES_PAGE];
    const struct kp_handle *entry = page == NULL ? NULL : &page[index_of(number) % KP_HANDLES_PAGE];

    if (entry == NULL || number == 0 || entry->number != number || kp_handle_kind(number) != kind)
        return NULL;
    return (struct kp_handle *)(uintptr_t)entry;
}

uint64_t kp_handles_find(struct kp_handles *table, enum kp_kind kind, uint64_t parent, uint64_t other)
{
    for (uint32_t index = 0; index < table->end; index++) {
        const struct kp_handle *entry = entry_at(table, index, 0);
        if (entry != NULL && entry->number != 0 && kp_handle_kind(entry->number) == kind && entry->parent == parent && entry->other == other)
            return entry->number;
    }
    return 0;
}

void kp_handles_drop(struct kp_handles *table, uint64_t number)
{
    struct kp_handle *entry = entry_at(table, index_of(number), 0);

    if (entry == NULL || number == 0 || entry->number != number)
        return;
    table->live[kp_handle_kind(number)]--;
    entry->number = 0;
    entry->parent = entry->other = 0;
    entry->value = (void *)(uintptr_t)table->unused;
    table->unused = index_of(number) + 1;
}

/* Nothing is ever entered under one of these. */
static int is_leaf(enum kp_kind kind)
{
    return kind == KP_FUNCTION || kind == KP_STREAM || kind == KP_EVENT || kind == KP_KERNEL || kind == KP_LINK || kind == KP_PHYSICAL ||
           kind == KP_POOL || kind == KP_NODE || kind == KP_EXEC;
}

void kp_handles_drop_children(struct kp_handles *table, uint64_t number, void (*gone)(struct kp_handle *))
{
    if (is_leaf(kp_handle_kind(number))) /* a search of all, for each of 65,536 events */
        return;
    for (uint32_t index = 0; number != 0 && index < table->end; index++) { /* 0 is nobody's number */
        struct kp_handle *entry = entry_at(table, index, 0);
        if (entry == NULL || entry->number == 0 || (entry->parent != number && entry->other != number))
            continue;
        uint64_t child = entry->number;
        /* only these have children of their own; this ends the recursion */
        if (kp_handle_kind(child) == KP_MODULE || kp_handle_kind(child) == KP_GRAPH)
            kp_handles_drop_children(table, child, gone);
        if (gone != NULL)
            gone(entry);
        kp_handles_drop(table, child);
    }
}

void kp_handles_clear(struct kp_handles *table)
{
    for (uint32_t page = 0; page < KP_HANDLES_MAX / KP_HANDLES_PAGE; page++)
        free(table->pages[page]);
    memset(table, 0, sizeof *table);
}
