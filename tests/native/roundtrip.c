/* Every op of calls.toml from the shim's encoder to the session's decoder and back, both as they are built, in one process.
 *
 * For each op: values all zero, all ones, and random ones; each field must arrive as it was sent and each answer as it was
 * given. Then what was sent is cut at every byte, and made too long: the session must refuse it and make no call. Likewise
 * the answer. Prints one line for what is wrong and ends with 1; a seed is its argument.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define kp_write_parts write_parts_to_fd
#include "../../kvmpool/dataplane/src/frame.c"
#undef kp_write_parts
int kp_write_parts(int fd, const struct iovec *part, int parts);

#include "roundtrip.h"

#include "../../kvmpool/dataplane/src/shim.h"

static ssize_t read_from_session(int fd, void *to, size_t room);
#define read read_from_session
#include "../../kvmpool/dataplane/src/shim_receive.c"
#undef read

#define ROUNDS 12
#define ERROR_ROUND 7 /* in which the driver refuses */
#define EXPECTED_MAX 64
#define STREAM_MAX (4u << 20)
#define GIVE_MAX 4000u
#define CALL_MAX 65536u /* KP_CALL_MAX of the session, and KP_OUT_BYTES of the shim */

enum damage { NONE, REPLY_CUT, REPLY_SHORT, REPLY_LONG, TEXT_LONG };

struct bytes {
    const char *name;
    unsigned char *at;
    size_t length;
};

static struct {
    const struct rt_case *of;
    unsigned round, wrong;
    enum damage damage;
    size_t cut;
    struct bytes expected[EXPECTED_MAX], filled[EXPECTED_MAX];
    unsigned expects, arrived, fills, came;
    bool compares; /* else only `arrived` is counted */
    void *made;
    uint64_t random;
} now;

struct stream {
    unsigned char at[STREAM_MAX];
    size_t begin, end;
};
static struct stream sent, answered, last; /* last: what the call at hand sent */
static struct kp_context *context;

static void wrong(const char *what, const char *detail)
{
    if (now.wrong++ < 40)
        printf("%s: round %u: %s %s\n", now.of->name, now.round, what, detail);
}

static uint64_t random_bits(void)
{
    now.random ^= now.random << 13;
    now.random ^= now.random >> 7;
    now.random ^= now.random << 17;
    return now.random;
}

void rt_choose(void *value, size_t bytes)
{
    unsigned char *at = value;

    for (size_t i = 0; i < bytes; i++)
        at[i] = now.round == 0 ? 0 : now.round == 1 ? 0xff : (unsigned char)random_bits();
}

const char *rt_text(void)
{
    static char text[KP_TEXT_MAX];
    size_t length = now.round == 0 ? 0 : now.round == 1 ? KP_TEXT_MAX - 2 : now.round == 2 ? 1 : random_bits() % 40;

    if (now.damage == TEXT_LONG)
        length = KP_TEXT_MAX - 1;
    for (size_t i = 0; i < length; i++)
        text[i] = (char)(random_bits() % 255 + 1);
    text[length] = 0;
    return text;
}

struct rt_object rt_object(enum kp_kind kind, int to_delete)
{
    struct rt_object made = {0, rt_made()};

    if (kind == KP_STREAM && now.round == 0 && !to_delete) /* the default stream is no object */
        return (struct rt_object){0, NULL};
    made.number = kp_handles_new(&kp_shim.handles, kind, NULL, context->number);
    rt_session_enter(made.number, kind, made.object);
    return made;
}

CUdeviceptr rt_address(CUdeviceptr chosen)
{
    return (chosen & ~(CUdeviceptr)0xfff) | 0x1000; /* no address is 0; all are whole elements */
}

void rt_rectangle(size_t *count, size_t *rows, size_t *pitch, size_t element)
{
    *pitch = (*pitch >> 1 & ~(element - 1)) | element;
    *count %= *pitch / element + 1;
    *rows %= SIZE_MAX / *pitch;
}

static void remember(struct bytes *to, const char *name, const void *value, size_t length)
{
    *to = (struct bytes){name, malloc(length + 1), length};
    memcpy(to->at, value, length);
}

void rt_expect(const char *name, const void *value, size_t bytes)
{
    if (now.expects == EXPECTED_MAX)
        abort();
    remember(&now.expected[now.expects++], name, value, bytes);
}

int rt_tries(uint16_t op)
{
    return now.of->op == op;
}

void rt_arrived(const void *value, size_t bytes)
{
    const struct bytes *want = &now.expected[now.arrived < EXPECTED_MAX ? now.arrived : 0];

    now.arrived++;
    if (!now.compares)
        return;
    if (now.arrived > now.expects)
        wrong("more arrived than was sent", "");
    else if (want->length != bytes || memcmp(want->at, value, bytes) != 0)
        wrong("arrived as something else:", want->name);
}

void rt_fill(void *out, size_t bytes)
{
    rt_choose(out, bytes);
    if (now.fills < EXPECTED_MAX)
        remember(&now.filled[now.fills++], "", out, bytes);
}

void *rt_made(void)
{
    static uintptr_t next = 0x5000;

    return now.made = (void *)(next += 64);
}

CUresult rt_result(void)
{
    return now.of->waits && now.round == ERROR_ROUND ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS;
}

size_t rt_bulk_bytes(void)
{
    return now.round == 3 ? 5 : now.round == 0 ? 0 : now.round == 1 ? KP_BODY_MAX + 1 : now.round == 2 ? 1 : 3000;
}

unsigned char rt_bulk_byte(size_t at)
{
    return (unsigned char)(at * 31 + at / 251 + now.round);
}

size_t rt_give_bytes(void)
{
    return now.of->call != NULL ? 0 : now.round == 0 ? 0 : now.round == 1 ? GIVE_MAX : 8;
}

static void append(struct stream *to, const void *bytes, size_t length)
{
    if (length > sizeof to->at - to->end)
        abort();
    memcpy(to->at + to->end, bytes, length);
    to->end += length;
}

int kp_write_parts(int fd, const struct iovec *part, int parts)
{
    for (int i = 0; i < parts; i++)
        append(fd == RT_SESSION_FD ? &answered : &sent, part[i].iov_base, part[i].iov_len);
    return 0;
}

static void set_length(unsigned char *frame, uint32_t length)
{
    memcpy(frame + offsetof(struct kp_frame, length), &length, sizeof length);
}

static uint32_t length_of(const unsigned char *frame)
{
    uint32_t length;

    memcpy(&length, frame + offsetof(struct kp_frame, length), sizeof length);
    return length;
}

/* The last frame of a stream of whole ones. */
static unsigned char *last_frame(struct stream *of)
{
    unsigned char *at = of->at;

    while (at + KP_HEADER_BYTES + length_of(at) < of->at + of->end)
        at += KP_HEADER_BYTES + length_of(at);
    return at;
}

static void damage_answer(void)
{
    unsigned char *reply = last_frame(&answered);
    static const unsigned char none;

    if (now.damage == REPLY_CUT && now.cut < answered.end)
        answered.end = now.cut;
    if (now.damage == REPLY_SHORT) {
        set_length(reply, (uint32_t)now.cut);
        answered.end = (size_t)(reply - answered.at) + KP_HEADER_BYTES + now.cut;
    }
    if (now.damage == REPLY_LONG) {
        set_length(reply, length_of(reply) + 1);
        append(&answered, &none, 1);
    }
}

/* The session's turn: all that the shim has sent. */
static void serve(void)
{
    if (sent.end == 0)
        return;
    last.end = 0;
    append(&last, sent.at, sent.end);
    answered.begin = answered.end = 0;
    if (rt_session_serve(sent.at, sent.end) != 0)
        wrong("the session refused what the shim sends", "");
    sent.end = 0;
    if (answered.end > 0)
        damage_answer();
}

static ssize_t read_from_session(int fd, void *to, size_t room)
{
    size_t n;

    (void)fd;
    serve();
    n = answered.end - answered.begin < room ? answered.end - answered.begin : room;
    memcpy(to, answered.at + answered.begin, n);
    answered.begin += n;
    return (ssize_t)n;
}

void rt_called(CUresult rc)
{
    CUresult want = now.damage == NONE ? rt_result() : now.damage == TEXT_LONG ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_DEVICE_UNAVAILABLE;
    char words[64];

    kp_link_flush();
    serve();
    snprintf(words, sizeof words, "%d instead of %d", rc, want);
    if (rc != want)
        wrong(now.damage == REPLY_CUT || now.damage == REPLY_SHORT ? "a cut answer is" :
              now.damage == REPLY_LONG ? "an answer that is too long is" : "the caller gets", words);
    if (now.damage == TEXT_LONG ? now.arrived != 0 : now.arrived != now.expects)
        wrong("arrived in another number than sent", "");
}

void rt_came(const char *name, const void *value, size_t bytes)
{
    const struct bytes *fill = &now.filled[now.came++];
    static const unsigned char untouched[GIVE_MAX];

    if (now.damage != NONE)
        return;
    if (now.came > now.fills || fill->length < bytes || memcmp(rt_result() == CUDA_SUCCESS ? fill->at : untouched, value, bytes) != 0)
        wrong("came back as something else:", name);
}

void rt_adopted(const char *name, enum kp_kind kind, uint64_t number)
{
    if (number == 0 || rt_session_object(number, kind) != now.made || kp_handles_get(&kp_shim.handles, number, kind) == NULL)
        wrong("the two halves do not know the same new object:", name);
    rt_session_drop(number);
    kp_object_drop(number);
}

void rt_let_go(const char *name, uint64_t number, int deleted)
{
    if (deleted && number != 0 && now.damage == NONE &&
        (rt_session_object(number, kp_handle_kind(number)) != NULL || kp_handles_get(&kp_shim.handles, number, kp_handle_kind(number)) != NULL))
        wrong("is not gone from both halves:", name);
    rt_session_drop(number);
    kp_object_drop(number);
}

/* An op that has no stub: its numbers, tail and bulk as the hand-written code would send them. */
static CUresult call_op(void)
{
    static unsigned char tail[CALL_MAX - KP_HEADER_BYTES], bulk[KP_BODY_MAX + 1], came[KP_BODY_MAX + 1], bytes[GIVE_MAX];
    const struct rt_case *of = now.of;
    uint64_t in[KP_IN_MAX] = {0}, out[KP_OUT_MAX];
    struct kp_answer answer = {.out = out, .outs = of->outs, .bytes = bytes, .room = rt_give_bytes()};
    size_t tail_bytes = now.round == 0 ? 0 : now.round == 1 ? sizeof tail - of->numbers * 8 : now.round == 2 ? 1 : 17;
    size_t bulk_bytes = of->bulk != RT_BULK_NONE ? rt_bulk_bytes() : 0;
    CUresult rc;

    for (unsigned i = 0; i < of->numbers; i++)
        rt_choose(&in[i], sizeof in[i]);
    if (of->bulk != RT_BULK_NONE)
        in[1] = bulk_bytes;
    for (unsigned i = 0; i < of->numbers; i++)
        rt_expect("a number", &in[i], sizeof in[i]);
    if (of->tail == RT_TAIL_TEXT) {
        const char *text = rt_text();
        tail_bytes = strlen(text) + 1;
        memcpy(tail, text, tail_bytes);
    } else if (of->tail == RT_TAIL_BYTES) {
        rt_choose(tail, tail_bytes);
    } else {
        tail_bytes = 0;
    }
    if (of->tail != RT_TAIL_NONE)
        rt_expect("its tail", tail, tail_bytes);
    for (size_t i = 0; i < bulk_bytes; i++)
        bulk[i] = rt_bulk_byte(i);
    for (size_t at = 0; of->bulk == RT_BULK_IN && at < bulk_bytes; at += KP_BODY_MAX)
        rt_expect("its bulk", bulk + at, bulk_bytes - at < KP_BODY_MAX ? bulk_bytes - at : KP_BODY_MAX);
    if (of->bulk == RT_BULK_OUT) {
        answer.bulk = came;
        answer.bulk_bytes = bulk_bytes;
    }
    if ((rc = kp_enter()) != CUDA_SUCCESS)
        return rc;
    rc = kp_send_bulk(of->op, in, of->numbers, tail, (uint32_t)tail_bytes, bulk, of->bulk == RT_BULK_IN ? bulk_bytes : 0,
                      of->waits ? &answer : NULL);
    rt_called(rc);
    if (now.damage == NONE && rc == CUDA_SUCCESS && of->bulk == RT_BULK_OUT && memcmp(came, bulk, bulk_bytes) != 0)
        wrong("its bulk came as something else", "");
    if (now.damage == NONE && of->waits && (answer.got != rt_give_bytes() || (now.fills > of->outs && memcmp(bytes, now.filled[of->outs].at, answer.got) != 0)))
        wrong("its bytes came as something else", "");
    return rc;
}

static void clear_records(void)
{
    for (unsigned i = 0; i < now.expects; i++)
        free(now.expected[i].at);
    for (unsigned i = 0; i < now.fills; i++)
        free(now.filled[i].at);
    now.expects = now.arrived = now.fills = now.came = 0;
}

/* One call, the connection as new before it. */
static void once(enum damage damage, size_t cut)
{
    struct kp_link *link = &kp_shim.link;

    clear_records();
    now.damage = damage;
    now.cut = cut;
    now.compares = damage != TEXT_LONG;
    sent.end = answered.begin = answered.end = 0;
    link->in_at = link->in_end = link->filled = 0;
    atomic_store(&link->lost, false);
    if (now.of->call != NULL)
        now.of->call();
    else
        call_op();
    now.compares = false;
    now.damage = NONE;
}

static void must_refuse(const unsigned char *bytes, size_t length, const char *how)
{
    int rc;

    now.arrived = 0;
    rc = rt_session_serve(bytes, length);
    if (rc >= 0 || (now.of->bulk != RT_BULK_IN && now.arrived > 0))
        wrong("the session took a call that is", how);
}

/* What the last call sent, cut at every byte: as a stream that ends there, and as a frame that says so. */
static void cut_request(void)
{
    static unsigned char copy[STREAM_MAX];
    size_t numbers = now.of->numbers * sizeof(uint64_t);

    for (size_t n = 1; n < last.end; n++)
        must_refuse(last.at, n, "cut off");
    memcpy(copy, last.at, last.end);
    for (uint32_t n = 0; n < length_of(last.at); n++) {
        set_length(copy, n);
        if (now.of->tail != RT_TAIL_BYTES || n < numbers)
            must_refuse(copy, KP_HEADER_BYTES + n, "too short");
    }
}

static void lengthen_request(void)
{
    static unsigned char copy[STREAM_MAX];
    uint32_t length = length_of(last.at), numbers = now.of->numbers * (uint32_t)sizeof(uint64_t);

    memset(copy, 0, sizeof copy);
    memcpy(copy, last.at, KP_HEADER_BYTES + length);
    set_length(copy, length + 1);
    if (now.of->tail != RT_TAIL_BYTES)
        must_refuse(copy, KP_HEADER_BYTES + length + 1, "too long");
    if (now.of->tail == RT_TAIL_TEXT) {
        memset(copy + KP_HEADER_BYTES + numbers, 'x', KP_TEXT_MAX);
        set_length(copy, numbers + KP_TEXT_MAX + 1);
        must_refuse(copy, KP_HEADER_BYTES + numbers + KP_TEXT_MAX + 1, "too long a text");
    }
    set_length(copy, CALL_MAX + 1);
    must_refuse(copy, CALL_MAX + KP_HEADER_BYTES + 1, "longer than any call");
    if (now.of->bulk == RT_BULK_IN) {
        memcpy(copy, last.at, last.end);
        unsigned char *data = copy + KP_HEADER_BYTES + length;
        set_length(data, length_of(data) + 1);
        must_refuse(copy, last.end + 1, "of more bulk than it says");
    }
    if (now.of->waits) {
        memcpy(copy, last.at, last.end);
        copy[offsetof(struct kp_frame, flags)] = 0;
        must_refuse(copy, last.end, "to be answered, and does not ask for it");
    }
}

static void damage_reply(void)
{
    size_t whole, body;

    once(NONE, 0);
    whole = answered.end;
    body = length_of(last_frame(&answered));
    for (size_t n = 0; n < whole; n++)
        once(REPLY_CUT, n);
    body -= rt_give_bytes(); /* how much of that comes is the caller's to check */
    for (size_t n = 0; n < body; n++)
        once(REPLY_SHORT, n);
    once(REPLY_LONG, 0);
}

static void try(const struct rt_case *of)
{
    now.of = of;
    for (now.round = 0; now.round < ROUNDS; now.round++)
        once(NONE, 0);
    now.round = 3; /* short texts and tails, real objects, success */
    once(NONE, 0);
    cut_request();
    lengthen_request();
    if (of->waits)
        damage_reply();
    if (of->tail == RT_TAIL_TEXT && of->call != NULL)
        once(TEXT_LONG, 0);
}

int main(int argc, char **argv)
{
    struct kp_link *link = &kp_shim.link;

    now.random = argc > 1 ? strtoull(argv[1], NULL, 0) | 1 : 1;
    atomic_store(&kp_shim.ready, 1);
    link->fd = RT_SHIM_FD;
    context = calloc(1, sizeof *context);
    context->number = kp_handles_new(&kp_shim.handles, KP_CONTEXT, context, 0);
    context->epoch = link->epoch;
    rt_session_start(context->number);
    now.of = &rt_cases[0];
    if (kp_cuCtxPushCurrent_v2((CUcontext)(uintptr_t)context->number) != CUDA_SUCCESS || kp_enter() != CUDA_SUCCESS)
        return 2;
    kp_link_flush(); /* which context it is, once for all */
    kp_leave(CUDA_SUCCESS);
    serve();
    for (unsigned i = 0; i < rt_case_count; i++)
        try(&rt_cases[i]);
    clear_records();
    printf("%u ops, %u wrong\n", rt_case_count, now.wrong);
    return now.wrong > 0;
}

/* What the shim's other files do; nothing of it is on the way of a codec. */
void kp_log(const char *format, ...)
{
    (void)format;
}

CUresult kp_unsupported(const char *name)
{
    (void)name;
    return CUDA_ERROR_NOT_SUPPORTED;
}

int kp_dial(struct kp_welcome *welcome, struct kp_window *window, CUresult *why)
{
    (void)welcome;
    (void)window;
    *why = CUDA_ERROR_DEVICE_UNAVAILABLE;
    return -1;
}

void kp_host_leave(struct kp_window *window)
{
    (void)window;
}

bool kp_host_find(const void *address, void **start, size_t *bytes)
{
    (void)address;
    (void)start;
    (void)bytes;
    return false;
}

void kp_pools_drop(uint64_t context)
{
    (void)context;
}

void kp_pools_synchronised(void)
{
}

bool kp_vmm_find(CUdeviceptr address, CUdeviceptr *start, size_t *bytes)
{
    (void)address;
    (void)start;
    (void)bytes;
    return false;
}

CUresult kp_capture_unsafe(void)
{
    return CUDA_SUCCESS;
}

void kp_capture_forget(uint64_t stream)
{
    (void)stream;
}

void kp_graph_free(void *graph) /* of both halves */
{
    (void)graph;
}

void kp_linker_free(void *linker)
{
    (void)linker;
}

CUresult kp_device_range(CUdeviceptr address, size_t bytes)
{
    (void)address;
    (void)bytes;
    return CUDA_SUCCESS;
}
