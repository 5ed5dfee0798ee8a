/* relay_guests.c: a guest's socket from accept to hello to worker; then a copy of it, kept to cut the guest off on a move. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "refuse.h"
#include "relay.h"

void relay_guests_init(struct relay *relay)
{
    for (unsigned i = 0; i < RELAY_GUESTS; i++)
        relay->guests[i].watch.fd = -1;
}

static void drop(struct relay *relay, struct relay_guest *guest)
{
    if (guest->watch.fd >= 0)
        shutdown(guest->watch.fd, SHUT_RDWR); /* for every copy, the worker's too */
    kp_loop_drop(&relay->loop, &guest->watch);
    guest->state = GUEST_FREE;
    guest->claim = NULL;
}

static void refuse(struct relay *relay, struct relay_guest *guest, uint64_t *counter, int status, const char *why)
{
    const char *claim = guest->claim ? guest->claim->name : "";

    (*counter)++;
    kp_log_rated(&relay->rate, KP_WARNING, "guest %s%s%s refused: %s", guest->peer, claim[0] ? " for " : "", claim, why);
    if (status)
        kp_refuse(guest->watch.fd, status, "%s%s%s: %s", relay->options.domain, claim[0] ? "/" : "", claim, why);
    drop(relay, guest);
}

/* No early way out: the time says nothing about how much of a guess is right. */
static int token_matches(const struct relay *relay, const char given[RELAY_TOKEN_MAX])
{
    unsigned char different = 0;

    for (size_t i = 0; i < RELAY_TOKEN_MAX; i++)
        different |= (unsigned char)(relay->token[i] ^ given[i]);
    return !different;
}

static void hand_over(struct relay *relay, struct relay_guest *guest)
{
    struct kp_hello hello;
    int rc;

    memcpy(&hello, guest->bytes + KP_HEADER_BYTES, sizeof(hello));
    memset(hello.token, 0, sizeof(hello.token)); /* the worker has no use for it */
    rc = relay_claim_pass(relay, guest->claim, guest->watch.fd, &hello);
    if (rc) {
        refuse(relay, guest, &relay->refused_unserved, -EAGAIN, "its worker does not take it");
        return;
    }
    relay->passed++;
    guest->state = GUEST_SERVED;
    guest->since_ms = kp_now_ms();
    /* Only the end of both directions is of interest, and once: the worker shuts the socket down when its session ends. */
    if (kp_loop_change(&relay->loop, &guest->watch, EPOLLET))
        drop(relay, guest);
}

static void hello_is_whole(struct relay *relay, struct relay_guest *guest)
{
    struct kp_hello hello;

    if (kp_hello_check(guest->bytes + KP_HEADER_BYTES, sizeof(hello), &hello)) {
        refuse(relay, guest, &relay->refused_garbage, -EPROTO, "its hello cannot be read (another version of kvmpool?)");
        return;
    }
    if (relay->token[0] && !guest->trusted && !token_matches(relay, hello.token)) {
        refuse(relay, guest, &relay->refused_token, -EACCES, "wrong token");
        return;
    }
    guest->claim = relay_claim_find(relay, hello.claim);
    if (!guest->claim) {
        char why[64];

        snprintf(why, sizeof(why), "the domain has no claim \"%s\"", hello.claim);
        refuse(relay, guest, &relay->refused_claim, -ENOENT, why);
        return;
    }
    if (guest->claim->state == CLAIM_POINTED) {
        hand_over(relay, guest);
        return;
    }
    if (relay_guests_count(relay, GUEST_WAITING, NULL) >= RELAY_WAITING_MAX) {
        refuse(relay, guest, &relay->refused_full, -EAGAIN, "too many wait already");
        return;
    }
    guest->state = GUEST_WAITING;
    guest->since_ms = kp_now_ms();
    if (kp_loop_change(&relay->loop, &guest->watch, EPOLLRDHUP)) /* what follows the hello is the worker's to read */
        drop(relay, guest);
}

/* The header says what the body must be; only a hello of exactly the right length is read any further. */
static int header_is_right(const struct relay_guest *guest)
{
    struct kp_frame frame;

    return !kp_frame_check(guest->bytes, &frame) && frame.op == KP_OP_HELLO && frame.length == sizeof(struct kp_hello);
}

static void read_hello(struct relay *relay, struct relay_guest *guest)
{
    size_t want = guest->received < KP_HEADER_BYTES ? KP_HEADER_BYTES : sizeof(guest->bytes);
    ssize_t length = recv(guest->watch.fd, guest->bytes + guest->received, want - guest->received, MSG_DONTWAIT);

    if (length < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (length <= 0) {
        refuse(relay, guest, &relay->refused_garbage, 0, "it left before its hello was whole");
        return;
    }
    guest->received += (size_t)length;
    if (guest->received == KP_HEADER_BYTES && !header_is_right(guest))
        refuse(relay, guest, &relay->refused_garbage, 0, "its first bytes are no hello");
    else if (guest->received == sizeof(guest->bytes))
        hello_is_whole(relay, guest);
}

static void on_guest(struct kp_watch *watch, uint32_t events)
{
    struct relay_guest *guest = (struct relay_guest *)watch;

    switch (guest->state) {
    case GUEST_GREETING:
        read_hello(&the_relay, guest);
        break;
    case GUEST_WAITING:
        drop(&the_relay, guest);
        break;
    case GUEST_SERVED:
        if (events & EPOLLHUP)
            drop(&the_relay, guest);
        break;
    case GUEST_FREE:
        break;
    }
}

unsigned relay_guests_count(const struct relay *relay, enum relay_guest_state state, const struct relay_claim *claim)
{
    unsigned count = 0;

    for (unsigned i = 0; i < RELAY_GUESTS; i++)
        count += relay->guests[i].state == state && (!claim || relay->guests[i].claim == claim);
    return count;
}

/* A free place. Greeting guests may hold few of them, and the oldest goes first: a real shim says hello at once. */
static struct relay_guest *place_for_guest(struct relay *relay)
{
    struct relay_guest *free_place = NULL, *oldest = NULL;
    unsigned greeting = 0;

    for (unsigned i = 0; i < RELAY_GUESTS; i++) {
        struct relay_guest *guest = &relay->guests[i];

        if (guest->state == GUEST_FREE)
            free_place = guest;
        if (guest->state != GUEST_GREETING)
            continue;
        greeting++;
        if (!oldest || guest->since_ms < oldest->since_ms)
            oldest = guest;
    }
    if (greeting < RELAY_GREETING_MAX && free_place)
        return free_place;
    if (oldest)
        refuse(relay, oldest, &relay->refused_late, 0, "others came after it and it has not said hello");
    return oldest;
}

void relay_guest_admit(struct relay *relay, int fd, const char *peer, int trusted)
{
    struct relay_guest *guest = place_for_guest(relay);

    relay->accepted++;
    if (!guest || (trusted && relay->orphaned)) { /* the CID of a guest that has ended is another's by now */
        relay->refused_full++;
        close(fd);
        return;
    }
    *guest = (struct relay_guest){ .watch = { .on_event = on_guest, .fd = fd }, .state = GUEST_GREETING,
                                   .trusted = trusted, .since_ms = kp_now_ms() };
    snprintf(guest->peer, sizeof(guest->peer), "%s", peer);
    if (kp_loop_watch(&relay->loop, &guest->watch, EPOLLIN))
        drop(relay, guest);
}

void relay_guests_serve(struct relay *relay, struct relay_claim *claim)
{
    for (unsigned i = 0; i < RELAY_GUESTS && claim->state == CLAIM_POINTED; i++)
        if (relay->guests[i].state == GUEST_WAITING && relay->guests[i].claim == claim)
            hand_over(relay, &relay->guests[i]);
}

void relay_guests_cut(struct relay *relay, const struct relay_claim *claim)
{
    for (unsigned i = 0; i < RELAY_GUESTS; i++) {
        struct relay_guest *guest = &relay->guests[i];

        if (guest->state != GUEST_FREE && (!claim || (guest->state == GUEST_SERVED && guest->claim == claim)))
            drop(relay, guest);
    }
}

static uint64_t limit_ms(const struct relay *relay, const struct relay_guest *guest)
{
    if (guest->state == GUEST_GREETING)
        return guest->since_ms + relay->options.hello_ms;
    return guest->state == GUEST_WAITING ? guest->since_ms + relay->options.hold_ms : UINT64_MAX;
}

void relay_guests_expire(struct relay *relay, uint64_t now_ms)
{
    for (unsigned i = 0; i < RELAY_GUESTS; i++) {
        struct relay_guest *guest = &relay->guests[i];

        if (limit_ms(relay, guest) > now_ms)
            continue;
        if (guest->state == GUEST_GREETING)
            refuse(relay, guest, &relay->refused_late, 0, "its hello took too long");
        else
            refuse(relay, guest, &relay->refused_unserved, -EAGAIN, guest->claim->reason);
    }
}

uint64_t relay_guests_next_ms(const struct relay *relay)
{
    uint64_t next = UINT64_MAX;

    for (unsigned i = 0; i < RELAY_GUESTS; i++) {
        uint64_t limit = limit_ms(relay, &relay->guests[i]);

        if (limit < next)
            next = limit;
    }
    return next;
}
