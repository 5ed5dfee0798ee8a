/* fuzz_worker.c: any message, from a stranger or from the relay, to a worker's socket. A session starts only from the relay, with a
 * stream socket and a hello that passes its check and names the claim. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../kvmpool/dataplane/src/worker_peers.c"

static struct worker worker;
static enum worker_peer_kind speaking;

#define FILE_BYTES (2u << 20)
static int file = -1; /* behind a device of shared memory */

static void must(int holds)
{
    if (!holds)
        abort();
}

void worker_end(struct worker *self, const char *reason)
{
    (void)self;
    (void)reason;
}

void worker_session_start(struct worker *self, int guest_fd, const struct kp_hello *hello, const struct kp_place *place)
{
    struct kp_hello again;

    must(speaking == PEER_RELAY && !kp_hello_check(hello, sizeof(*hello), &again));
    must(!strcmp(hello->claim, self->options.claim));
    must(place->bytes <= FILE_BYTES && place->at <= FILE_BYTES - place->bytes && (!place->bytes || place->fd >= 0));
    close(guest_fd);
}

unsigned worker_sessions_count(const struct worker *self)
{
    (void)self;
    return 0;
}

void worker_sessions_report(const struct worker *self, struct kp_json *json)
{
    (void)self;
    kp_json_text(json, "label", self->label);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void start_once(void)
{
    static int started;

    if (started++)
        return;
    the_worker = &worker;
    for (unsigned i = 0; i < WORKER_PEERS; i++)
        worker.peers[i].watch.fd = -1;
    strcpy(worker.label, "vm0/gpu0#1");
    strcpy(worker.options.claim, "gpu0");
    worker.options.generation = 1;
    worker.account = kp_account_new(1 << 20);
    must(worker.account && !kp_loop_open(&worker.loop));
    file = memfd_create("device", 0);
    must(file >= 0 && !ftruncate(file, FILE_BYTES));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct worker_peer *peer = &worker.peers[0];
    int pair[2], passed[2];

    start_once();
    if (size < 2)
        return 0;
    must(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) && !socketpair(AF_UNIX, SOCK_STREAM, 0, passed));
    speaking = data[0] & 1 ? PEER_RELAY : PEER_NEW;
    worker.relay_connected = speaking == PEER_RELAY;
    *peer = (struct worker_peer){ .watch = { .on_event = on_peer, .fd = pair[1] }, .kind = speaking };
    must(!kp_loop_watch(&worker.loop, &peer->watch, EPOLLIN));
    kp_control_send_two(pair[0], data + 1, size - 1, data[0] & 2 ? passed[0] : data[0] & 4 ? STDIN_FILENO : -1,
                        data[0] & 8 ? file : -1);
    kp_loop_turn(&worker.loop, 0);
    drop(&worker, peer);
    close(pair[0]);
    close(passed[0]);
    close(passed[1]);
    return 0;
}
