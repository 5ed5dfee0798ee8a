/* worker.h: the worker's parent process: one binding, its lock and socket, its relay, its sessions. Never loads CUDA. */
#ifndef KP_WORKER_H
#define KP_WORKER_H

#include <stdint.h>
#include <sys/types.h>

#include "account.h"
#include "confine.h"
#include "control.h"
#include "json.h"
#include "log.h"
#include "loop.h"
#include "session.h"

#define WORKER_PEERS 16u           /* connections to the control socket at once; the one heard of least makes room */
#define WORKER_SILENCE_MS 10000u   /* a relay sends a keepalive each second; after this it is gone (design 01 §1.4) */
#define WORKER_STUCK_MS 2000u      /* a killed session that lives longer is reported as stuck in the driver */
#define WORKER_CARD_MS 8000u       /* a card that does not open in this time does not answer */
#define WORKER_GONE_MS 500u        /* a session whose guest went ends by itself; one still in a driver's call then is killed */
#define WORKER_EXIT_CARD 4         /* exit code: the card does not open */
#define WORKER_EXIT_BUSY 3         /* exit code: this generation already has a worker */

struct worker_options {
    char uuid[KP_UUID_MAX], domain[KP_DOMAIN_MAX], claim[32];
    char directory[KP_PATH_MAX], card[64], virtual_uuid[KP_UUID_MAX], virtual_pci[16];
    uint64_t generation, memory_mib, pinned_mib, compute_percent, card_deadline_ms; /* pinned_mib 0: as much as memory_mib */
    uint64_t compute_limit_percent, launch_timeout_ms;
    int ready_fd; /* -1, or where "ready" or "card <why>" is written once */
    int detach;
    struct kp_confine confine;
};

struct worker_session {
    struct kp_watch guest; /* first: a copy of its socket, to see its end and to cut it; -1 where the slot is free */
    pid_t pid;             /* 0: the slot is free */
    uint64_t started_ms, gone_ms; /* gone_ms: its guest went then; 0: it is there, or the session was killed for it */
    uint32_t guest_pid;
    const char *transport; /* "unix", "tcp", "vsock"; "shm" is told by the account */
    char program[64];
};

enum worker_peer_kind { PEER_NEW, PEER_CONTROL, PEER_RELAY };

struct worker_peer {
    struct kp_watch watch;
    enum worker_peer_kind kind;
    uint64_t heard_ms;
};

struct worker {
    struct worker_options options;
    char label[KP_DOMAIN_MAX + 64];
    struct kp_loop loop;
    struct kp_watch listener, signals;
    struct worker_peer peers[WORKER_PEERS];
    struct worker_session sessions[KP_ACCOUNT_SLOTS];
    struct kp_account *account;
    struct kp_session shared; /* what every session is given; only the slot differs */
    int lock_fd;
    int relay_connected;
    uint64_t ending_since_ms; /* 0: serving */
    uint64_t stuck_logged_ms;
    uint64_t served, refused_generation, refused_protocol, refused_full, refused_peer;
    struct kp_rate rate;
};

/* worker_options.c: reads argv; 0, or -EINVAL after one line to standard error. */
int worker_options_read(struct worker_options *options, int argc, char **argv);
int worker_uuid_parse(const char *text, uint8_t uuid[16]);

/* worker_peers.c: the control socket. */
int worker_peers_listen(struct worker *worker, const char *path);
uint64_t worker_relay_heard_ms(const struct worker *worker);

/* worker_sessions.c: the children. */
void worker_session_start(struct worker *worker, int guest_fd, const struct kp_hello *hello, const struct kp_place *place);
void worker_sessions_reap(struct worker *worker);
void worker_sessions_kill(struct worker *worker);
uint64_t worker_sessions_next_ms(const struct worker *worker); /* when the next one is due to be killed; UINT64_MAX: none */
void worker_sessions_expire(struct worker *worker, uint64_t now_ms);
unsigned worker_sessions_count(const struct worker *worker);
void worker_sessions_report(const struct worker *worker, struct kp_json *json);

/* worker.c: begins the end: kills the sessions; the process leaves when the last of them is reaped. */
void worker_end(struct worker *worker, const char *reason);

#endif
