/* relay_control.c: what kvmpoold and the acceptor may ask of a relay. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "relay.h"

static struct kp_message message;

static void drop(struct relay *relay, struct relay_control *control)
{
    relay_claims_forget_asker(relay, control);
    kp_loop_drop(&relay->loop, &control->watch);
    if (control == relay->watcher)
        relay_unwatched(relay);
}

static void report_claims(struct relay *relay, struct kp_json *json)
{
    static const char *const words[] = { "", "unpointed", "connecting", "pointed", "lost" };

    kp_json_object(json, "claims");
    for (unsigned i = 0; i < RELAY_CLAIMS; i++) {
        const struct relay_claim *claim = &relay->claims[i];

        if (claim->state == CLAIM_FREE)
            continue;
        kp_json_object(json, claim->name);
        kp_json_text(json, "state", words[claim->state]);
        kp_json_number(json, "generation", claim->generation);
        kp_json_number(json, "memory_mib", claim->memory_mib);
        kp_json_text(json, "reason", claim->reason);
        kp_json_number(json, "sessions", relay_guests_count(relay, GUEST_SERVED, claim));
        kp_json_number(json, "waiting", relay_guests_count(relay, GUEST_WAITING, claim));
        kp_json_object_end(json);
    }
    kp_json_object_end(json);
}

static void do_status(struct relay *relay, struct relay_control *control)
{
    static char text[KP_CONTROL_MAX];
    struct kp_json json;

    kp_json_begin(&json, text, sizeof(text));
    kp_json_object(&json, NULL);
    kp_json_number(&json, "pid", (uint64_t)getpid());
    kp_json_text(&json, "uuid", relay->options.uuid);
    kp_json_text(&json, "domain", relay->options.domain);
    kp_json_text(&json, "endpoint", relay->endpoint);
    report_claims(relay, &json);
    kp_json_number(&json, "sessions", relay_guests_count(relay, GUEST_SERVED, NULL));
    kp_json_number(&json, "waiting", relay_guests_count(relay, GUEST_WAITING, NULL));
    kp_json_number(&json, "greeting", relay_guests_count(relay, GUEST_GREETING, NULL));
    kp_json_number(&json, "accepted", relay->accepted);
    kp_json_number(&json, "passed", relay->passed);
    kp_json_object(&json, "refused");
    kp_json_number(&json, "garbage", relay->refused_garbage);
    kp_json_number(&json, "token", relay->refused_token);
    kp_json_number(&json, "claim", relay->refused_claim);
    kp_json_number(&json, "late", relay->refused_late);
    kp_json_number(&json, "unserved", relay->refused_unserved);
    kp_json_number(&json, "full", relay->refused_full);
    kp_json_object_end(&json);
    kp_json_number(&json, "follows", relay->watcher ? relay->followed_pid : 0); /* unwatched, it wants a new watcher */
    kp_json_object_end(&json);
    kp_control_answer(control->watch.fd, &json);
}

/* "POINT claim generation memory_mib" with the worker's socket as payload. Answered when the worker has answered. */
static void do_point(struct relay *relay, struct relay_control *control)
{
    struct relay_claim *claim = relay_claim_add(relay, message.word[1]);
    uint64_t generation, memory_mib;

    if (!claim || kp_number(message.word[2], INT64_MAX, &generation) || !generation ||
        kp_number(message.word[3], UINT32_MAX, &memory_mib) || message.payload[0] != '/' ||
        message.payload_length >= KP_PATH_MAX)
        kp_control_say(control->watch.fd, "ERROR POINT wants: claim generation memory_mib, then the worker's path");
    else
        relay_claim_point(relay, claim, generation, memory_mib, message.payload, control);
}

static void do_unpoint(struct relay *relay, struct relay_control *control)
{
    struct relay_claim *claim = relay_claim_add(relay, message.word[1]);

    if (!claim) {
        kp_control_say(control->watch.fd, "ERROR UNPOINT wants: claim, then the reason");
        return;
    }
    relay_claim_unpoint(relay, claim, CLAIM_UNPOINTED, message.payload[0] ? message.payload : "nothing serves it now");
    kp_control_say(control->watch.fd, "OK");
}

static void do_claim(struct relay *relay, struct relay_control *control)
{
    if (relay_claim_add(relay, message.word[1]))
        kp_control_say(control->watch.fd, "OK");
    else
        kp_control_say(control->watch.fd, "ERROR %s: not a claim's name, or a domain has at most %u", message.word[1],
                       RELAY_CLAIMS);
}

/* "FOLLOW pid start-time": end with that process, once nobody is left to say so: who asks watches for as long as it holds this
 * connection. */
static void do_follow(struct relay *relay, struct relay_control *control)
{
    uint64_t pid, start_time;
    int rc = -EINVAL;

    if (!kp_number(message.word[1], INT32_MAX, &pid) && !kp_number(message.word[2], INT64_MAX, &start_time))
        rc = relay_follow(relay, pid, start_time);
    if (rc)
        kp_control_say(control->watch.fd, "ERROR process %s is not there: %s", message.word[1], strerror(-rc));
    else
        kp_control_say(control->watch.fd, "OK");
    if (!rc)
        relay->watcher = control;
}

static void do_close(struct relay *relay, struct relay_control *control)
{
    kp_control_say(control->watch.fd, "OK");
    relay_end(relay, "told to close");
}

/* "GUEST" with a socket that the acceptor accepted: the hypervisor said which domain it is. */
static void do_guest(struct relay *relay, struct relay_control *control)
{
    int fd = kp_control_stream(&message);

    if (fd < 0)
        kp_control_say(control->watch.fd, "ERROR GUEST wants a stream socket");
    else
        relay_guest_admit(relay, fd, "vsock", 1);
}

static const struct {
    const char *verb;
    void (*act)(struct relay *relay, struct relay_control *control);
} verbs[] = {
    { "STATUS", do_status }, { "POINT", do_point }, { "UNPOINT", do_unpoint }, { "CLAIM", do_claim },
    { "FOLLOW", do_follow }, { "CLOSE", do_close }, { "GUEST", do_guest },
};

static void on_control(struct kp_watch *watch, uint32_t events)
{
    struct relay_control *control = (struct relay_control *)watch;
    int rc = kp_control_receive(watch->fd, &message);

    (void)events;
    if (rc == -EAGAIN)
        return;
    if (rc <= 0) {
        drop(&the_relay, control);
        return;
    }
    control->heard_ms = kp_now_ms();
    for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++) {
        if (!strcmp(verbs[i].verb, message.word[0])) {
            verbs[i].act(&the_relay, control);
            goto out;
        }
    }
    kp_log_rated(&the_relay.rate, KP_WARNING, "a control connection is cut: unknown \"%.16s\"", message.word[0]);
    drop(&the_relay, control);
out:
    kp_message_close(&message);
}

static struct relay_control *place_for_control(struct relay *relay)
{
    struct relay_control *oldest = NULL;

    for (unsigned i = 0; i < RELAY_CONTROLS; i++) {
        if (relay->controls[i].watch.fd < 0)
            return &relay->controls[i];
        if (&relay->controls[i] != relay->watcher && (!oldest || relay->controls[i].heard_ms < oldest->heard_ms))
            oldest = &relay->controls[i];
    }
    drop(relay, oldest);
    return oldest;
}

static void on_listener(struct kp_watch *watch, uint32_t events)
{
    struct relay_control *control;
    int fd = kp_control_accept(watch->fd);

    (void)events;
    if (fd == -EACCES)
        kp_log_rated(&the_relay.rate, KP_WARNING, "a control connection of another user is cut");
    if (fd < 0)
        return;
    control = place_for_control(&the_relay);
    *control = (struct relay_control){ .watch = { .on_event = on_control, .fd = fd }, .heard_ms = kp_now_ms() };
    if (kp_loop_watch(&the_relay.loop, &control->watch, EPOLLIN))
        drop(&the_relay, control);
}

int relay_control_listen(struct relay *relay, const char *path)
{
    for (unsigned i = 0; i < RELAY_CONTROLS; i++)
        relay->controls[i].watch.fd = -1;
    relay->control_listener = (struct kp_watch){ .on_event = on_listener, .fd = kp_unix_listen(path, SOCK_SEQPACKET) };
    if (relay->control_listener.fd < 0)
        return relay->control_listener.fd;
    return kp_loop_watch(&relay->loop, &relay->control_listener, EPOLLIN);
}
