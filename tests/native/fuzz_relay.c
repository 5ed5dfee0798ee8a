/* fuzz_relay.c: any bytes, in any pieces, to a relay's endpoint, to its control socket and as its worker's answer. What comes through must be a hello that
 * passes its check and holds the token; afterwards every place is free again. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../kvmpool/dataplane/src/relay_claims.c"
#define message control_message
#define drop drop_control
#define verbs control_verbs
#define on_listener on_control_listener
#include "../../kvmpool/dataplane/src/relay_control.c"
#undef message
#undef drop
#undef verbs
#undef on_listener
#include "../../kvmpool/dataplane/src/relay_guests.c"

struct relay the_relay;
static int has_ended;

void relay_end(struct relay *relay, const char *reason)
{
    (void)relay;
    (void)reason;
    has_ended = 1;
}

int relay_follow(struct relay *relay, uint64_t pid, uint64_t start_time)
{
    (void)relay;
    (void)pid;
    (void)start_time;
    return -ESRCH;
}

void relay_unwatched(struct relay *relay)
{
    relay->watcher = NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void start_once(void)
{
    static int started;

    if (started++)
        return;
    the_relay.window.fd = -1;
    relay_guests_init(&the_relay);
    relay_claims_init(&the_relay);
    for (unsigned i = 0; i < RELAY_CONTROLS; i++)
        the_relay.controls[i].watch.fd = -1;
    if (kp_loop_open(&the_relay.loop) || !relay_claim_add(&the_relay, "gpu0"))
        abort();
    strcpy(the_relay.token, "0123456789abcdef0123456789abcdef");
}

static void must(int holds)
{
    if (!holds)
        abort();
}

static void as_guest(int ours, int trusted, size_t piece, const uint8_t *data, size_t size)
{
    for (size_t at = 0; at < size; at += piece) {
        size_t length = size - at < piece ? size - at : piece;

        if (send(ours, data + at, length, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
            break;
        kp_loop_turn(&the_relay.loop, 0);
    }
    for (int i = 0; i < 4; i++)
        kp_loop_turn(&the_relay.loop, 0);
    for (unsigned i = 0; i < RELAY_GUESTS; i++) {
        const struct relay_guest *guest = &the_relay.guests[i];
        struct kp_hello hello;

        must(guest->state != GUEST_SERVED);
        if (guest->state != GUEST_WAITING)
            continue;
        must(!kp_hello_check(guest->bytes + KP_HEADER_BYTES, sizeof(hello), &hello));
        must(!strcmp(hello.claim, guest->claim->name));
        must(trusted || !strcmp(hello.token, the_relay.token));
    }
    relay_guests_cut(&the_relay, NULL);
    must(!relay_guests_next_ms(&the_relay) || relay_guests_next_ms(&the_relay) == UINT64_MAX);
}

static void as_control(int ours, int theirs, const uint8_t *data, size_t size)
{
    struct relay_control *control = &the_relay.controls[0];

    *control = (struct relay_control){ .watch = { .on_event = on_control, .fd = theirs } };
    must(!kp_loop_watch(&the_relay.loop, &control->watch, EPOLLIN));
    if (size)
        send(ours, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    kp_loop_turn(&the_relay.loop, 0);
    drop_control(&the_relay, control);
    for (unsigned i = 0; i < RELAY_CLAIMS; i++) {
        must(!the_relay.claims[i].asker);
        if (the_relay.claims[i].state == CLAIM_CONNECTING || the_relay.claims[i].state == CLAIM_POINTED)
            relay_claim_unpoint(&the_relay, &the_relay.claims[i], CLAIM_UNPOINTED, "next input");
    }
}

/* A worker that was asked for generation 7 says something. */
static void as_worker(int ours, int theirs, const uint8_t *data, size_t size)
{
    struct relay_claim *claim = &the_relay.claims[0];

    claim->link = (struct kp_watch){ .on_event = on_link, .fd = theirs };
    claim->state = CLAIM_CONNECTING;
    claim->generation = 7;
    must(!kp_loop_watch(&the_relay.loop, &claim->link, EPOLLIN));
    if (size)
        send(ours, data, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    kp_loop_turn(&the_relay.loop, 0);
    must(claim->state != CLAIM_POINTED || (size >= 2 && memchr(data, 'K', size)));
    relay_claim_unpoint(&the_relay, claim, CLAIM_UNPOINTED, "next input");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int pair[2], control;

    start_once();
    if (size < 2)
        return 0;
    control = data[0] & 6;
    must(!socketpair(AF_UNIX, control ? SOCK_SEQPACKET : SOCK_STREAM, 0, pair));
    if (data[0] & 4) {
        as_worker(pair[0], pair[1], data + 2, size - 2);
    } else if (control) {
        as_control(pair[0], pair[1], data + 2, size - 2);
    } else {
        relay_guest_admit(&the_relay, pair[1], "fuzz", data[0] & 1);
        as_guest(pair[0], data[0] & 1, data[1] + 1u, data + 2, size - 2);
    }
    close(pair[0]);
    return 0;
}
