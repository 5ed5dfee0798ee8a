/* relay_claims.c: one connection to one worker a claim: it hands over sockets, and its end is the end of both sides' sessions. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "relay.h"

static struct kp_message message;

void relay_claims_init(struct relay *relay)
{
    for (unsigned i = 0; i < RELAY_CLAIMS; i++)
        relay->claims[i].link.fd = -1;
}

struct relay_claim *relay_claim_find(struct relay *relay, const char *name)
{
    for (unsigned i = 0; i < RELAY_CLAIMS; i++)
        if (relay->claims[i].state != CLAIM_FREE && !strcmp(relay->claims[i].name, name))
            return &relay->claims[i];
    return NULL;
}

struct relay_claim *relay_claim_add(struct relay *relay, const char *name)
{
    struct relay_claim *claim = relay_claim_find(relay, name);
    char checked[sizeof(claim->name)] = "";

    if (claim)
        return claim;
    if (kp_copy(checked, sizeof(checked), name) || kp_claim_name_check(checked, sizeof(checked)))
        return NULL;
    for (unsigned i = 0; i < RELAY_CLAIMS; i++) {
        claim = &relay->claims[i];
        if (claim->state != CLAIM_FREE)
            continue;
        *claim = (struct relay_claim){ .link.fd = -1, .state = CLAIM_UNPOINTED, .reason = "no card is bound yet" };
        memcpy(claim->name, checked, sizeof(checked));
        return claim;
    }
    return NULL;
}

static void answer(struct relay_claim *claim, const char *text)
{
    if (claim->asker)
        kp_control_say(claim->asker->watch.fd, "%s", text);
    claim->asker = NULL;
}

void relay_claim_unpoint(struct relay *relay, struct relay_claim *claim, enum relay_claim_state state, const char *reason)
{
    char text[RELAY_REASON_MAX + sizeof(claim->name) + 32];

    if (claim->state != state || strcmp(claim->reason, reason))
        kp_log(state == CLAIM_LOST ? KP_WARNING : KP_INFO, "%s: not pointed%s: %s", claim->name,
               state == CLAIM_LOST ? " any more" : "", reason);
    snprintf(text, sizeof(text), "ERROR %s: %s", claim->name, reason);
    answer(claim, text);
    /* First the link: the worker ends with it. The guests' sockets are shut here, whatever the worker does. */
    kp_loop_drop(&relay->loop, &claim->link);
    claim->state = state;
    snprintf(claim->reason, sizeof(claim->reason), "%s", reason);
    relay_guests_cut(relay, claim);
}

static void link_is_up(struct relay *relay, struct relay_claim *claim)
{
    claim->state = CLAIM_POINTED;
    claim->reason[0] = '\0';
    kp_log(KP_INFO, "%s: pointed at generation %llu", claim->name, (unsigned long long)claim->generation);
    answer(claim, "OK");
    relay_guests_serve(relay, claim);
}

static void on_link(struct kp_watch *watch, uint32_t events)
{
    struct relay_claim *claim = (struct relay_claim *)watch;
    int rc = kp_control_receive(watch->fd, &message);
    char reason[RELAY_REASON_MAX];

    (void)events;
    if (rc == -EAGAIN)
        return;
    if (rc <= 0) {
        relay_claim_unpoint(&the_relay, claim, CLAIM_LOST, "its worker's connection ended");
        return;
    }
    kp_message_close(&message); /* a worker passes nothing back */
    if (claim->state != CLAIM_CONNECTING)
        return;
    if (!strcmp(message.word[0], "OK")) {
        link_is_up(&the_relay, claim);
        return;
    }
    snprintf(reason, sizeof(reason), "its worker refused generation %llu", (unsigned long long)claim->generation);
    relay_claim_unpoint(&the_relay, claim, CLAIM_LOST, reason);
}

static int connect_link(struct relay *relay, struct relay_claim *claim)
{
    int rc, fd = kp_unix_connect(claim->worker, SOCK_SEQPACKET);

    if (fd < 0)
        return fd;
    claim->link = (struct kp_watch){ .on_event = on_link, .fd = fd };
    rc = kp_loop_watch(&relay->loop, &claim->link, EPOLLIN);
    if (!rc && !kp_peer_allowed(fd))
        rc = -EACCES;
    if (!rc)
        rc = kp_control_say(fd, "RELAY %llu", (unsigned long long)claim->generation);
    return rc;
}

void relay_claim_point(struct relay *relay, struct relay_claim *claim, uint64_t generation, uint64_t memory_mib,
                       const char *worker, struct relay_control *asker)
{
    char reason[RELAY_REASON_MAX];
    int rc;

    if (claim->generation > generation) {
        kp_control_say(asker->watch.fd, "ERROR %s: generation %llu is older than %llu, which it had", claim->name,
                       (unsigned long long)generation, (unsigned long long)claim->generation);
        return;
    }
    if (claim->generation == generation && claim->state == CLAIM_POINTED) {
        kp_control_say(asker->watch.fd, "OK");
        return;
    }
    if (claim->generation == generation && claim->state == CLAIM_CONNECTING) {
        claim->asker = asker; /* the same question again: the later asker gets the answer */
        return;
    }
    if (claim->state == CLAIM_POINTED || claim->state == CLAIM_CONNECTING) {
        snprintf(reason, sizeof(reason), "generation %llu takes over", (unsigned long long)generation);
        relay_claim_unpoint(relay, claim, CLAIM_UNPOINTED, reason);
    }
    claim->generation = generation;
    claim->memory_mib = memory_mib;
    claim->asked_ms = kp_now_ms();
    claim->asker = asker;
    claim->state = CLAIM_CONNECTING;
    snprintf(claim->worker, sizeof(claim->worker), "%s", worker);
    rc = connect_link(relay, claim);
    if (rc) {
        snprintf(reason, sizeof(reason), "its worker of generation %llu is not reached: %s", (unsigned long long)generation,
                 strerror(-rc));
        relay_claim_unpoint(relay, claim, CLAIM_LOST, reason);
    }
}

int relay_claim_pass(struct relay *relay, struct relay_claim *claim, int guest_fd, const struct kp_hello *hello)
{
    char text[128 + sizeof(*hello)];
    uint64_t at = 0;
    int rc, window = hello->flags & KP_HELLO_DEVICE ? relay_window_take(relay, &at) : -1;
    int length = snprintf(text, sizeof(text), "SESSION");

    if (window >= 0) {
        length += snprintf(text + length, sizeof(text) - (size_t)length, " %llu %llu ", (unsigned long long)at,
                           (unsigned long long)relay->window.slots.bytes);
        for (size_t i = 0; i < sizeof(relay->window.id); i++)
            length += snprintf(text + length, sizeof(text) - (size_t)length, "%02x", relay->window.id[i]);
    }
    text[length++] = '\n';
    memcpy(text + length, hello, sizeof(*hello));
    rc = kp_control_send_two(claim->link.fd, text, (size_t)length + sizeof(*hello), guest_fd, window);
    if (window >= 0)
        close(window); /* the session holds the lock from now on */
    return rc;
}

void relay_claims_tick(struct relay *relay, uint64_t now_ms)
{
    int send = now_ms >= relay->next_keepalive_ms;

    for (unsigned i = 0; i < RELAY_CLAIMS; i++) {
        struct relay_claim *claim = &relay->claims[i];

        if (claim->state == CLAIM_CONNECTING && now_ms - claim->asked_ms >= RELAY_WORKER_MS) {
            relay_claim_unpoint(relay, claim, CLAIM_LOST, "its worker did not answer in 2 s");
        } else if (claim->state == CLAIM_POINTED && send) {
            int rc = kp_control_say(claim->link.fd, "KEEPALIVE");

            if (rc && rc != -EAGAIN) /* a full queue: it is slow or stopped; its daemon sees that */
                relay_claim_unpoint(relay, claim, CLAIM_LOST, "its worker's connection broke");
        }
    }
    if (send)
        relay->next_keepalive_ms = now_ms + RELAY_KEEPALIVE_MS;
}

void relay_claims_forget_asker(struct relay *relay, const struct relay_control *asker)
{
    for (unsigned i = 0; i < RELAY_CLAIMS; i++)
        if (relay->claims[i].asker == asker)
            relay->claims[i].asker = NULL;
}

uint64_t relay_claims_next_ms(const struct relay *relay)
{
    uint64_t next = UINT64_MAX;

    for (unsigned i = 0; i < RELAY_CLAIMS; i++) {
        const struct relay_claim *claim = &relay->claims[i];

        if (claim->state == CLAIM_CONNECTING && claim->asked_ms + RELAY_WORKER_MS < next)
            next = claim->asked_ms + RELAY_WORKER_MS;
        if (claim->state == CLAIM_POINTED && relay->next_keepalive_ms < next)
            next = relay->next_keepalive_ms;
    }
    return next;
}
