/* worker_peers.c: who connects to the worker's socket and what they may ask: one relay, and anybody of the host's control. */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static struct kp_message message; /* one at a time; 32 KiB is much for a stack */
static struct worker *the_worker; /* a watch knows its place in here only */

static void drop(struct worker *worker, struct worker_peer *peer)
{
    int was_relay = peer->kind == PEER_RELAY;

    kp_loop_drop(&worker->loop, &peer->watch);
    peer->kind = PEER_NEW;
    if (was_relay) {
        worker->relay_connected = 0;
        worker_end(worker, "its relay's connection ended");
    }
}

static void do_status(struct worker *worker, struct worker_peer *peer)
{
    static char text[KP_CONTROL_MAX];
    struct kp_json json;

    kp_json_begin(&json, text, sizeof(text));
    kp_json_object(&json, NULL);
    kp_json_number(&json, "pid", (uint64_t)getpid());
    kp_json_text(&json, "uuid", worker->options.uuid);
    kp_json_text(&json, "domain", worker->options.domain);
    kp_json_text(&json, "claim", worker->options.claim);
    kp_json_number(&json, "generation", worker->options.generation);
    kp_json_text(&json, "card", worker->options.card);
    kp_json_number(&json, "compute_percent", worker->options.compute_percent);
    kp_json_number(&json, "compute_limit_percent", worker->options.compute_limit_percent);
    kp_json_number(&json, "compute_used_ms", kp_turns_used(&worker->shared.turns) / 1000000);
    kp_json_number(&json, "memory_limit", worker->account->limit);
    kp_json_number(&json, "memory_used", kp_account_used(worker->account));
    kp_json_number(&json, "pinned_limit", worker->account->pinned_limit);
    kp_json_number(&json, "pinned_used", kp_account_pinned(worker->account));
    kp_json_number(&json, "sessions", worker_sessions_count(worker));
    kp_json_number(&json, "served", worker->served);
    kp_json_bool(&json, "relay_connected", worker->relay_connected);
    kp_json_bool(&json, "ending", worker->ending_since_ms != 0);
    kp_json_number(&json, "ending_ms", worker->ending_since_ms ? kp_now_ms() - worker->ending_since_ms : 0);
    kp_json_object(&json, "refused");
    kp_json_number(&json, "generation", worker->refused_generation);
    kp_json_number(&json, "protocol", worker->refused_protocol);
    kp_json_number(&json, "full", worker->refused_full);
    kp_json_number(&json, "peer", worker->refused_peer);
    kp_json_object_end(&json);
    kp_confine_report(&worker->options.confine, &json);
    worker_sessions_report(worker, &json);
    kp_json_object_end(&json);
    kp_control_answer(peer->watch.fd, &json);
}

static void do_stop(struct worker *worker, struct worker_peer *peer)
{
    kp_control_say(peer->watch.fd, "OK");
    worker_end(worker, "told to stop");
}

/* "RELAY generation": this connection is the relay's from now on, and the worker's life hangs on it. */
static void do_relay(struct worker *worker, struct worker_peer *peer)
{
    uint64_t generation;

    if (kp_number(message.word[1], INT64_MAX, &generation) || generation != worker->options.generation) {
        worker->refused_generation++;
        kp_log_rated(&worker->rate, KP_WARNING, "relay refused: it asked for generation \"%s\"", message.word[1]);
        kp_control_say(peer->watch.fd, "ERROR %s: generation %s is not served here", worker->label, message.word[1]);
        drop(worker, peer);
    } else if (worker->relay_connected || worker->ending_since_ms) {
        worker->refused_peer++;
        kp_control_say(peer->watch.fd, "ERROR %s: %s", worker->label,
                       worker->relay_connected ? "another relay is connected" : "it is ending");
        drop(worker, peer);
    } else {
        peer->kind = PEER_RELAY;
        worker->relay_connected = 1;
        kp_log(KP_INFO, "relay connected");
        kp_control_say(peer->watch.fd, "OK");
    }
}

static void do_keepalive(struct worker *worker, struct worker_peer *peer)
{
    (void)worker;
    (void)peer; /* being heard was all */
}

/* "at bytes device", with the file that they are of: 0, or -EINVAL. Without a file there is no place, which is right too. */
static int read_place(struct kp_place *place)
{
    struct stat about;

    *place = (struct kp_place){ .fd = message.second_fd };
    if (place->fd < 0)
        return 0;
    if (kp_number(message.word[1], INT64_MAX, &place->at) || kp_number(message.word[2], INT64_MAX, &place->bytes) ||
        strlen(message.word[3]) != 2 * sizeof(place->device) || fstat(place->fd, &about) || !S_ISREG(about.st_mode) ||
        place->bytes > (uint64_t)about.st_size || place->at > (uint64_t)about.st_size - place->bytes)
        return -EINVAL;
    for (size_t i = 0; i < sizeof(place->device); i++)
        if (sscanf(message.word[3] + 2 * i, "%2hhx", &place->device[i]) != 1)
            return -EINVAL;
    return 0;
}

/* "SESSION" with the guest's socket and, as payload, the hello that was read from it; where the guest has one, its place in a
 * device of shared memory. */
static void do_session(struct worker *worker, struct worker_peer *peer)
{
    struct kp_hello hello;
    int fd = kp_control_stream(&message);
    struct kp_place place;

    (void)peer;
    if (fd < 0 || kp_hello_check(message.payload, message.payload_length, &hello) || strcmp(hello.claim, worker->options.claim) ||
        read_place(&place)) {
        worker->refused_protocol++;
        kp_log_rated(&worker->rate, KP_WARNING, "session refused: not a guest's socket with a hello for this claim");
        if (fd >= 0) {
            shutdown(fd, SHUT_RDWR);
            close(fd);
        }
        return;
    }
    worker_session_start(worker, fd, &hello, &place); /* what is passed beside the socket is closed with the message */
}

static const struct {
    const char *verb;
    unsigned kinds; /* bit 1 << kind: who may say it */
    void (*act)(struct worker *worker, struct worker_peer *peer);
} verbs[] = {
    { "STATUS", 1 << PEER_NEW | 1 << PEER_CONTROL, do_status },
    { "STOP", 1 << PEER_NEW | 1 << PEER_CONTROL, do_stop },
    { "RELAY", 1 << PEER_NEW, do_relay },
    { "KEEPALIVE", 1 << PEER_RELAY, do_keepalive },
    { "SESSION", 1 << PEER_RELAY, do_session },
};

static void obey(struct worker *worker, struct worker_peer *peer)
{
    peer->heard_ms = kp_now_ms();
    for (size_t i = 0; i < sizeof(verbs) / sizeof(verbs[0]); i++) {
        if (strcmp(verbs[i].verb, message.word[0]) || !(verbs[i].kinds & 1u << peer->kind))
            continue;
        if (peer->kind == PEER_NEW)
            peer->kind = PEER_CONTROL;
        if (verbs[i].act == do_relay)
            peer->kind = PEER_NEW; /* it becomes more only when it is accepted */
        verbs[i].act(worker, peer);
        goto out;
    }
    worker->refused_protocol++;
    kp_log_rated(&worker->rate, KP_WARNING, "a control connection is cut: unknown or misplaced \"%.16s\"", message.word[0]);
    if (peer->kind != PEER_RELAY)
        drop(worker, peer);
out:
    kp_message_close(&message);
}

static void on_peer(struct kp_watch *watch, uint32_t events)
{
    struct worker_peer *peer = (struct worker_peer *)watch; /* its first member */
    int rc = kp_control_receive(watch->fd, &message);

    (void)events;
    if (rc > 0)
        obey(the_worker, peer);
    else if (rc != -EAGAIN)
        drop(the_worker, peer);
}

/* A free place, or that of the connection not heard of for longest; never the relay's. */
static struct worker_peer *place_for_peer(struct worker *worker)
{
    struct worker_peer *oldest = &worker->peers[0];

    for (unsigned i = 0; i < WORKER_PEERS; i++) {
        struct worker_peer *peer = &worker->peers[i];

        if (peer->watch.fd < 0)
            return peer;
        if (oldest->kind == PEER_RELAY || (peer->kind != PEER_RELAY && peer->heard_ms < oldest->heard_ms))
            oldest = peer;
    }
    drop(worker, oldest);
    return oldest;
}

static void on_listener(struct kp_watch *watch, uint32_t events)
{
    struct worker_peer *peer;
    int fd = kp_control_accept(watch->fd);

    (void)events;
    the_worker->refused_peer += fd == -EACCES;
    if (fd < 0)
        return;
    peer = place_for_peer(the_worker);
    peer->watch = (struct kp_watch){ .on_event = on_peer, .fd = fd };
    peer->kind = PEER_NEW;
    peer->heard_ms = kp_now_ms();
    if (kp_loop_watch(&the_worker->loop, &peer->watch, EPOLLIN))
        drop(the_worker, peer);
}

int worker_peers_listen(struct worker *worker, const char *path)
{
    the_worker = worker;
    for (unsigned i = 0; i < WORKER_PEERS; i++)
        worker->peers[i].watch.fd = -1;
    worker->listener = (struct kp_watch){ .on_event = on_listener, .fd = kp_unix_listen(path, SOCK_SEQPACKET) };
    if (worker->listener.fd < 0)
        return worker->listener.fd;
    return kp_loop_watch(&worker->loop, &worker->listener, EPOLLIN);
}

uint64_t worker_relay_heard_ms(const struct worker *worker)
{
    for (unsigned i = 0; i < WORKER_PEERS; i++)
        if (worker->peers[i].watch.fd >= 0 && worker->peers[i].kind == PEER_RELAY)
            return worker->peers[i].heard_ms;
    return 0;
}
