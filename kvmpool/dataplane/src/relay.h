/* relay.h: the relay of one domain: accepts its guests at one endpoint that never changes, and hands each guest's socket to the
 * worker its claim is pointed at. Carries no data byte after the hello. Memory is fixed: whatever comes in finds a place in
 * these arrays or is turned away. */
#ifndef KP_RELAY_H
#define KP_RELAY_H

#include <stdint.h>

#include "control.h"
#include "frame.h"
#include "json.h"
#include "log.h"
#include "loop.h"
#include "slots.h"

#define RELAY_CLAIMS 16u
#define RELAY_GUESTS 1024u         /* sockets in all states: 16 claims of 64 sessions */
#define RELAY_GREETING_MAX 64u     /* of those, still without a whole hello; the oldest makes room */
#define RELAY_WAITING_MAX 128u     /* of those, waiting for their claim to be pointed */
#define RELAY_CONTROLS 16u         /* control connections at once; the one heard of least makes room */
#define RELAY_HELLO_MS 5000u       /* a whole hello must be here by then */
#define RELAY_HOLD_MS 10000u       /* how long a guest waits for its claim to be pointed: longer than a failover takes */
#define RELAY_KEEPALIVE_MS 1000u   /* the worker ends after ten of these (worker.h, WORKER_SILENCE_MS) */
#define RELAY_WORKER_MS 2000u      /* a worker that has not answered a new relay by then is lost */
#define RELAY_EXIT_BUSY 3          /* exit code: this domain already has a relay */
#define RELAY_TOKEN_MAX 64u        /* as in struct kp_hello */
#define RELAY_ENDPOINT_MAX 256u
#define RELAY_REASON_MAX 160u

struct relay_options {
    char uuid[KP_UUID_MAX], domain[KP_DOMAIN_MAX], directory[KP_PATH_MAX], endpoint[RELAY_ENDPOINT_MAX], token_file[KP_PATH_MAX];
    char window[KP_PATH_MAX]; /* the file behind the domain's device of shared memory; empty: it has none */
    uint64_t hello_ms, hold_ms;
    int ready_fd; /* -1, or where "ready <endpoint>" is written once */
    int detach;
};

enum relay_guest_state { GUEST_FREE, GUEST_GREETING, GUEST_WAITING, GUEST_SERVED };

struct relay_claim;

struct relay_guest {
    struct kp_watch watch; /* first: a watch is its guest */
    enum relay_guest_state state;
    int trusted; /* the hypervisor vouches for it (vsock): no token */
    uint64_t since_ms;
    size_t received;
    unsigned char bytes[KP_HEADER_BYTES + sizeof(struct kp_hello)];
    struct relay_claim *claim; /* from GUEST_WAITING on */
    char peer[64];
};

enum relay_claim_state { CLAIM_FREE, CLAIM_UNPOINTED, CLAIM_CONNECTING, CLAIM_POINTED, CLAIM_LOST };

struct relay_claim {
    struct kp_watch link; /* first: to the worker; -1 unless CONNECTING or POINTED */
    enum relay_claim_state state;
    char name[32];
    uint64_t generation; /* of the link, or the last one; never goes down */
    uint64_t memory_mib; /* as pointed; for people */
    uint64_t asked_ms;
    char worker[KP_PATH_MAX];
    char reason[RELAY_REASON_MAX]; /* why it is not pointed */
    struct relay_control *asker;   /* waits for CONNECTING to end; NULL when it left */
};

struct relay_window {
    int fd; /* -1: there is none */
    unsigned next;
    uint8_t id[16];
    struct kp_slots slots;
};

struct relay_control {
    struct kp_watch watch; /* first */
    uint64_t heard_ms;
};

struct relay {
    struct relay_options options;
    struct kp_loop loop;
    struct kp_watch listener, signals, followed;
    uint64_t followed_pid;         /* the domain's QEMU, also when it has ended; 0: none is known */
    int orphaned;                  /* its QEMU has ended: it ends too as soon as nobody watches */
    struct relay_control *watcher; /* the kvmpoold that said FOLLOW and still holds that connection; it may close this relay */
    struct relay_claim claims[RELAY_CLAIMS];
    struct relay_guest guests[RELAY_GUESTS];
    struct relay_control controls[RELAY_CONTROLS];
    struct kp_watch control_listener;
    struct relay_window window;
    char token[RELAY_TOKEN_MAX]; /* zero-filled; empty: none is asked for */
    char endpoint[RELAY_ENDPOINT_MAX];
    char unix_path[RELAY_ENDPOINT_MAX]; /* to unlink at the end */
    uint64_t next_keepalive_ms;
    uint64_t accepted, passed, refused_garbage, refused_token, refused_claim, refused_late, refused_unserved, refused_full;
    struct kp_rate rate;
};

/* relay_options.c */
int relay_options_read(struct relay *relay, int argc, char **argv);
int relay_token_read(struct relay *relay);

/* relay_listen.c: opens the endpoint; fills relay->endpoint with what a guest must dial. */
int relay_listen(struct relay *relay);

/* relay_guests.c: sockets until they are a worker's, and the copies kept to cut them. */
void relay_guests_init(struct relay *relay);
void relay_guest_admit(struct relay *relay, int fd, const char *peer, int trusted);
void relay_guests_serve(struct relay *relay, struct relay_claim *claim); /* the waiting ones, now that it is pointed */
void relay_guests_cut(struct relay *relay, const struct relay_claim *claim); /* the served ones; NULL: all guests */
void relay_guests_expire(struct relay *relay, uint64_t now_ms);
uint64_t relay_guests_next_ms(const struct relay *relay); /* when the next one expires; UINT64_MAX: none */
unsigned relay_guests_count(const struct relay *relay, enum relay_guest_state state, const struct relay_claim *claim);

/* relay_window.c: a descriptor that holds the lock on a window that nobody uses, for a session, and where that window is;
 * or a negative errno: -EAGAIN: all are used. */
int relay_window_open(struct relay *relay);
int relay_window_take(struct relay *relay, uint64_t *at);

/* relay_claims.c: where each claim points, and the one connection to its worker. */
void relay_claims_init(struct relay *relay);
struct relay_claim *relay_claim_find(struct relay *relay, const char *name);
struct relay_claim *relay_claim_add(struct relay *relay, const char *name); /* NULL: not a name, or no place */
void relay_claim_point(struct relay *relay, struct relay_claim *claim, uint64_t generation, uint64_t memory_mib,
                       const char *worker, struct relay_control *asker);
void relay_claim_unpoint(struct relay *relay, struct relay_claim *claim, enum relay_claim_state state, const char *reason);
int relay_claim_pass(struct relay *relay, struct relay_claim *claim, int guest_fd, const struct kp_hello *hello);
void relay_claims_tick(struct relay *relay, uint64_t now_ms);
void relay_claims_forget_asker(struct relay *relay, const struct relay_control *asker);
uint64_t relay_claims_next_ms(const struct relay *relay);

/* relay_control.c */
int relay_control_listen(struct relay *relay, const char *path);

/* relay.c: begins the end; the loop leaves after the current turn. */
void relay_end(struct relay *relay, const char *reason);
int relay_follow(struct relay *relay, uint64_t pid, uint64_t start_time);
void relay_unwatched(struct relay *relay); /* the watcher has gone, or there was none */

extern struct relay the_relay; /* a watch knows its own place in it only */

#endif
