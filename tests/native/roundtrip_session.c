/* The session's half of roundtrip.c: its own decoder, handlers and replies over a driver that records. */
#define _GNU_SOURCE
#include <stdlib.h>

#include "roundtrip.h"

#include "../../kvmpool/dataplane/src/session_state.h"

static struct kp_op_info rt_ops[KP_OP_CALLS_END - KP_OP_CALLS]; /* as kp_ops, with `record` for what is written by hand */
#define kp_ops rt_ops
#include "../../kvmpool/dataplane/src/session_run.c"
#include "../../kvmpool/dataplane/src/session_reply.c"
#include "../../kvmpool/dataplane/src/session_wait.c"
#undef kp_ops

static struct kp_server *server;
static struct kp_home home;

static CUresult succeed(void)
{
    return CUDA_SUCCESS;
}

static int take_bulk(struct kp_server *s, struct kp_work *w, size_t left)
{
    static unsigned char part[KP_BODY_MAX];
    uint32_t length;
    int rc = 0;

    while (rc == 0 && left > 0) {
        if ((rc = kp_take_bulk_frame(s, w->seq, left, &length)) == 0 && (rc = kp_take(s, part, length)) == 0)
            rt_arrived(part, length);
        left -= rc == 0 ? length : 0;
    }
    return rc;
}

static int give_bulk(struct kp_server *s, struct kp_work *w, size_t left)
{
    static unsigned char part[KP_BODY_MAX];
    size_t at = 0;
    int rc = 0;

    while (rc == 0 && left > 0) {
        uint32_t length = left < sizeof part ? (uint32_t)left : (uint32_t)sizeof part;
        for (uint32_t i = 0; i < length; i++)
            part[i] = rt_bulk_byte(at++);
        rc = kp_send_data(s, w->seq, part, length);
        left -= length;
    }
    return rc;
}

/* Stands for each handler that is written by hand. */
static int record(struct kp_server *s, struct kp_work *w)
{
    const struct kp_op_info *info = &kp_ops[w->op - KP_OP_CALLS];
    int rc = 0;

    for (unsigned i = 0; i < info->numbers; i++)
        rt_arrived(&w->in[i], sizeof w->in[i]);
    if (info->tail != KP_TAIL_NONE)
        rt_arrived(w->tail, w->tail_bytes);
    for (unsigned i = 0; i < info->outs; i++)
        rt_fill(&w->out[i], sizeof w->out[i]);
    if (info->bulk == KP_BULK_IN)
        rc = take_bulk(s, w, w->in[1]);
    else if (info->bulk == KP_BULK_OUT && rt_result() == CUDA_SUCCESS)
        rc = give_bulk(s, w, rt_bulk_bytes());
    if (rc == 0 && w->wanted && rt_give_bytes() > 0 && (w->give = malloc(rt_give_bytes())) != NULL) {
        w->give_bytes = (uint32_t)rt_give_bytes();
        rt_fill(w->give, w->give_bytes);
    }
    return rc < 0 ? rc : rt_result();
}

void rt_session_start(uint64_t context)
{
    static struct kp_session session = {.log_fd = -1};
    static const struct kp_hello hello = {.va_base = 1ull << 45};
    CUresult (*function)(void) = succeed;

    server = make_server(&session, RT_SESSION_FD, &hello);
    if (server == NULL)
        abort();
    for (unsigned i = 0; i < kp_driver_symbol_count; i++)
        memcpy((char *)&server->driver + kp_driver_symbols[i].offset, &function, sizeof function);
    rt_driver_fill(&server->driver);
    server->waiters = KP_WAITERS_MAX; /* so that calls that block are made here */
    rt_session_enter(context, KP_CONTEXT, &home);
    for (unsigned i = 0; i < rt_case_count; i++) {
        rt_ops[i] = kp_ops[i];
        if (rt_cases[i].by_hand)
            rt_ops[i].run = record;
    }
}

int rt_session_serve(const unsigned char *bytes, size_t length)
{
    int rc = 0;

    server->in = (unsigned char *)(uintptr_t)bytes;
    server->in_at = 0;
    server->in_end = length;
    while (rc == 0 && server->in_at < server->in_end)
        rc = serve_frame(server);
    return rc;
}

void rt_session_enter(uint64_t number, enum kp_kind kind, void *object)
{
    if (kp_handles_put(&server->handles, number, kind, object, 0) != 0)
        abort();
}

void *rt_session_object(uint64_t number, enum kp_kind kind)
{
    struct kp_handle *entry = kp_handles_get(&server->handles, number, kind);

    return entry != NULL ? entry->value : NULL;
}

void rt_session_drop(uint64_t number)
{
    kp_handles_drop(&server->handles, number);
}

/* What the session's other files do; nothing of it is on the way of a codec. */
int kp_observe(const struct kp_session *session, int fd, const struct kp_hello *hello)
{
    (void)session;
    (void)fd;
    (void)hello;
    return -ENOSYS;
}

int kp_driver_load(struct kp_server *s, char *text, size_t room)
{
    (void)s;
    (void)text;
    (void)room;
    return -ENOSYS;
}

bool kp_capturing(struct kp_server *s, CUstream stream)
{
    (void)s;
    (void)stream;
    return false;
}

void kp_exec_free(void *exec)
{
    (void)exec;
}

int kp_meter_start(struct kp_server *s)
{
    (void)s;
    return -ENOSYS;
}

void kp_meter_call(struct kp_server *s, const struct kp_work *w)
{
    (void)s;
    (void)w;
}

void kp_meter_leave(struct kp_server *s)
{
    (void)s;
}

void kp_meter_idle(struct kp_server *s)
{
    (void)s;
}

void kp_meter_forget(struct kp_server *s, const struct kp_home *of)
{
    (void)s;
    (void)of;
}

bool kp_memory_holds(struct kp_server *s, uint64_t va, uint64_t bytes)
{
    (void)s;
    (void)va;
    (void)bytes;
    return true;
}

void kp_memory_drop(struct kp_server *s, uint64_t number)
{
    (void)s;
    (void)number;
}

ssize_t kp_host_read(struct kp_server *s, void *to, size_t room)
{
    (void)s;
    (void)to;
    (void)room;
    return 0;
}

CUresult kp_own_context(struct kp_server *s, struct kp_home *of)
{
    (void)s;
    (void)of;
    return CUDA_SUCCESS;
}

void kp_own_leave(struct kp_server *s, struct kp_home *of)
{
    (void)s;
    (void)of;
}

void kp_arena_leave(struct kp_server *s, struct kp_home *of)
{
    (void)s;
    (void)of;
}
