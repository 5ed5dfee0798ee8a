/* Any bytes as a guest's frames behind its hello: the session decodes, keeps its tables and never leaves its memory.
 *
 * The driver under it succeeds and does nothing; the reply goes nowhere. Bytes come from the reader's own buffer.
 */
#define _GNU_SOURCE
#include "../../kvmpool/dataplane/src/session_run.c"

#include "session_memory.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned char slot_memory[KP_BODY_MAX];

static CUresult succeed(void)
{
    return CUDA_SUCCESS;
}

static CUresult reserve(CUdeviceptr *at, size_t bytes, size_t align, CUdeviceptr wanted, unsigned long long flags)
{
    (void)align;
    (void)flags;
    *at = wanted;
    return bytes % KP_VA_PAGE == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult no_callback(CUstream stream, CUstreamCallback callback, void *data, unsigned flags)
{
    (void)stream;
    (void)callback;
    (void)data;
    (void)flags;
    return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult page_locked(void **memory, size_t bytes)
{
    *memory = slot_memory;
    return bytes <= sizeof slot_memory ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult no_parameter(CUfunction f, size_t index, size_t *offset, size_t *size)
{
    (void)f;
    *offset = *size = index;
    return index < 3 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult some_graph(CUgraph *graph, unsigned flags)
{
    *graph = (CUgraph)slot_memory;
    return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult captured_graph(CUstream stream, CUgraph *graph)
{
    (void)stream;
    return some_graph(graph, 0);
}

static CUresult cloned_graph(CUgraph *clone, CUgraph graph)
{
    return some_graph(clone, graph == NULL);
}

static CUgraphNode some_node(size_t number)
{
    return (CUgraphNode)&slot_memory[16 * (number + 1)];
}

/* Of every graph three nodes, and what is asked about them. */
static CUresult three_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    (void)graph;
    for (size_t i = 0; nodes != NULL && i < *count; i++)
        nodes[i] = i < 3 ? some_node(i) : NULL;
    *count = 3;
    return CUDA_SUCCESS;
}

static CUresult three_around(CUgraphNode node, CUgraphNode *nodes, size_t *count)
{
    return three_nodes((CUgraph)node, nodes, count);
}

static CUresult three_edges(CUgraph graph, CUgraphNode *from, CUgraphNode *to, size_t *count)
{
    return three_nodes(graph, from, count) + three_nodes(graph, to, count);
}

static CUresult add_node(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count)
{
    static size_t made;

    (void)graph;
    for (size_t i = 0; i < count; i++)
        if (needs[i] == NULL)
            abort();
    *node = some_node(made++ % 1000);
    return CUDA_SUCCESS;
}

static CUresult add_kernel(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count, const CUDA_KERNEL_NODE_PARAMS *params)
{
    if (params->extra != NULL && ((const unsigned char *)params->extra[1])[*(size_t *)params->extra[3] - 1] == 255) /* reads the last byte */
        return CUDA_ERROR_INVALID_VALUE;
    return add_node(node, graph, needs, count);
}

/* Page-locked memory is in the window, all of it. */
static CUresult add_copy(CUgraphNode *node, CUgraph graph, const CUgraphNode *needs, size_t count, const CUDA_MEMCPY3D *copy, CUcontext context)
{
    size_t last = ((copy->Depth - 1) * copy->dstHeight + copy->Height - 1) * copy->dstPitch + copy->WidthInBytes - 1;

    (void)context;
    if (copy->dstMemoryType == CU_MEMORYTYPE_HOST)
        *((volatile unsigned char *)copy->dstHost + last) = 1;
    return add_node(node, graph, needs, count);
}

static void have_graphs(struct kp_driver *driver)
{
    driver->cuGraphCreate = some_graph;
    driver->cuStreamEndCapture = captured_graph;
    driver->cuGraphClone = cloned_graph;
    driver->cuGraphGetNodes = three_nodes;
    driver->cuGraphGetRootNodes = three_nodes;
    driver->cuGraphNodeGetDependencies = three_around;
    driver->cuGraphNodeGetDependentNodes = three_around;
    driver->cuGraphGetEdges = three_edges;
    driver->cuGraphAddEmptyNode = add_node;
    driver->cuGraphAddKernelNode_v2 = add_kernel;
    driver->cuGraphAddMemcpyNode = add_copy;
}

int kp_driver_load(struct kp_server *s, char *text, size_t room)
{
    CUresult (*function)(void) = succeed;

    (void)text;
    (void)room;
    for (unsigned i = 0; i < kp_driver_symbol_count; i++)
        memcpy((char *)&s->driver + kp_driver_symbols[i].offset, &function, sizeof function);
    s->driver.cuMemAddressReserve = reserve;
    s->driver.cuMemAllocHost_v2 = page_locked;
    s->driver.cuStreamAddCallback = no_callback;
    s->driver.cuFuncGetParamInfo = no_parameter;
    have_graphs(&s->driver);
    return 0;
}

CUresult kp_bury(struct kp_server *s, struct kp_grave *grave, bool wait) /* at once, so that what was charged can be compared */
{
    CUresult rc = kp_memory_reap(s, grave->va, CUDA_SUCCESS, false);

    (void)wait;

    free(grave);
    return rc;
}

int kp_do_device_info(struct kp_server *s, struct kp_work *w)
{
    (void)s;
    (void)w;
    return CUDA_SUCCESS;
}

void kp_note(struct kp_server *s, struct kp_home *home, CUresult result)
{
    (void)home;
    if (result != CUDA_SUCCESS)
        atomic_store(&s->errors.deferred, result);
}

CUresult kp_take_noted(struct kp_server *s, struct kp_home *home)
{
    (void)home;
    return atomic_exchange(&s->errors.deferred, 0);
}

int kp_reply(struct kp_server *s, struct kp_work *w, CUresult result)
{
    (void)s;
    (void)result;
    free(w->give);
    return 0;
}

int kp_send_data(struct kp_server *s, uint32_t seq, const void *data, uint32_t bytes)
{
    (void)s;
    (void)seq;
    return bytes > 0 && ((const unsigned char *)data)[bytes - 1] == 255 ? -EPIPE : 0; /* reads the last byte */
}

int kp_print_start(struct kp_server *s)
{
    (void)s;
    return 0;
}

static void empty(struct kp_server *s, struct kp_account *account)
{
    for (struct kp_mapping *mapping = s->mappings, *next; mapping != NULL; mapping = next) {
        next = mapping->next;
        if (mapping->physical != NULL) /* others go with their context */
            kp_mapping_leave(s, mapping);
    }
    s->mapped = 0;
    for (uint32_t page = 0; page < KP_HANDLES_MAX / KP_HANDLES_PAGE; page++)
        for (uint32_t i = 0; s->handles.pages[page] != NULL && i < KP_HANDLES_PAGE; i++) {
            struct kp_handle *entry = &s->handles.pages[page][i];
            if (entry->number != 0 && kp_handle_kind(entry->number) == KP_LINK)
                kp_linker_free(entry->value);
            if (entry->number != 0 && kp_handle_kind(entry->number) == KP_GRAPH)
                kp_graph_free(entry->value);
            if (entry->number != 0 && kp_handle_kind(entry->number) == KP_EXEC)
                kp_exec_free(entry->value);
            if (entry->number != 0 && kp_handle_kind(entry->number) == KP_CONTEXT) {
                kp_memory_drop(s, entry->number);
                free(entry->value);
            }
            if (entry->number != 0 && kp_handle_kind(entry->number) == KP_PHYSICAL) {
                kp_account_release(account, 0, ((struct kp_physical *)entry->value)->bytes);
                free(entry->value);
            }
        }
    kp_handles_clear(&s->handles);
    for (struct kp_home *home = s->retired, *next; home != NULL; home = next) {
        next = home->retired;
        free(home);
    }
    s->retired = NULL;
    kp_account_release(account, 0, s->own.charged); /* the contexts were not destroyed, only forgotten */
    s->own.charged = s->own.known = 0;
    s->own.contexts = 0;
    kp_account_unpin(account, 0, kp_account_pinned(account));
    memset(s->pinned_chunks, 0, sizeof s->pinned_chunks);
    s->pinned = 0;
    if (kp_account_used(account) != 0)
        abort(); /* what was charged was given back */
    s->home = NULL;
    s->home_number = 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct kp_account *account;
    static struct kp_session session = {.memory_bytes = 1ull << 30, .log_fd = -1};
    static struct kp_hello hello = {.va_base = 1ull << 45};
    static struct kp_server *s;
    char text[8];
    int memory;

    if (s == NULL) {
        session.account = account = kp_account_new(session.memory_bytes);
        s = make_server(&session, -1, &hello);
        kp_driver_load(s, text, sizeof text);
        if (kp_window_make(&s->window, &memory) != 0)
            abort();
        kp_window_rings(&s->window, true, -1, &s->from_guest, &s->to_guest);
        s->from_guest.ended = true; /* with nothing in it: an arena is all this is for */
        s->waiters = KP_WAITERS_MAX; /* so that calls that block are made here */
    }
    if (size > KP_READ_BYTES)
        return 0;
    memcpy(s->in, data, size);
    s->in_at = 0;
    s->in_end = size;
    atomic_store(&s->errors.deferred, 0);
    while (serve_frame(s) == 0)
        ;
    empty(s, account);
    return 0;
}
