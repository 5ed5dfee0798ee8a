/* turns.h: whose work the card does next, agreed between all workers of one card over a page of memory they share.
 *
 * One session at a time has the turn, so what its events measure is its own; who is next is the claim that had least of the card
 * for its weight (start-time fair queueing), and within a claim the sessions in a circle. Nobody waits for one that wants nothing:
 * an idle card's share goes to whoever has work. A claim's hard limit is kept by a clock of its own. The turn itself is a lock that
 * the kernel drops with its holder's process; no state of a dead one has to be repaired.
 */
#ifndef KP_TURNS_H
#define KP_TURNS_H

#include <stdatomic.h>
#include <stdint.h>

#include "account.h"

#define KP_TURNS_CLAIMS 128u
#define KP_TURNS_MAGIC 0x4e525554u /* "TURN" */
#define KP_TURN_NS UINT64_C(10000000)       /* of the card before another claim's turn: 100 changes a second cost ~1 % */
#define KP_TURN_CREDIT_NS UINT64_C(200000000) /* of virtual time: one that waits for its guest between two turns loses nothing */
#define KP_TURN_LATE_NS UINT64_C(100000000) /* that a claim with a hard limit may have waited for others and still catch up */
#define KP_TURN_FRESH_NS UINT64_C(50000000) /* a wish older than this is of one that died or stopped */
#define KP_TURN_TICK_NS 5000000             /* a waiter looks again, and renews its wish */
#define KP_TURN_WAIT_NS UINT64_C(10000000000) /* then it works without: a neighbour that keeps the turn must not stop it */

struct kp_turns_claim {
    _Atomic uint32_t taken;     /* 1: since this card's page began, somebody had the seat */
    _Atomic uint32_t last_slot; /* session that had the claim's last turn */
    _Atomic uint64_t tag_ns;    /* virtual time: of the card / weight x 100 */
    _Atomic uint64_t used_ns;   /* of the card, all sessions that ever were */
    _Atomic uint64_t closed_until_ns; /* CLOCK_MONOTONIC; by the hard limit */
    _Atomic uint64_t wish_ns[KP_ACCOUNT_SLOTS]; /* CLOCK_MONOTONIC; 0: wants nothing */
};

struct kp_turns_page {
    _Atomic uint32_t magic;
    _Atomic uint32_t bell; /* rung, as a futex, when a turn ends */
    _Atomic uint64_t now_tag_ns; /* of the newest turn, at its start */
    struct kp_turns_claim claim[KP_TURNS_CLAIMS];
};

struct kp_turns {
    struct kp_turns_page *page;
    int fd;               /* the worker's: keeps the seat; a session's: takes the turn, and cannot write */
    _Atomic uint64_t *closed_until_ns; /* the claim's own; the page's is for the others, and a neighbour could set it */
    unsigned seat, slot;  /* the claim's and the session's place */
    uint32_t weight, limit_percent; /* the limit is hard; 100: none */
    int free; /* the card divides itself (MPS): nobody waits, it is only counted */
};

/* In the worker: opens `path` (made where it is not) and takes a seat. 0, -EUSERS when every seat is taken, or -errno. */
int kp_turns_open(struct kp_turns *turns, const char *path, uint32_t weight_percent, uint32_t limit_percent);

/* In a session's process, before it is confined: a descriptor of its own, because the turn is a lock of one; only for reading,
 * because a page that is cut short ends whoever has it mapped. 0 or -errno. */
int kp_turns_join(struct kp_turns *turns, unsigned slot);

/* In the worker, once the session of `slot` is gone. */
void kp_turns_forget(struct kp_turns *turns, unsigned slot);

/* Waits for the turn. 0: it is ours. -ETIMEDOUT: nobody gave it in KP_TURN_WAIT_NS. */
int kp_turns_take(struct kp_turns *turns);

/* Whether the turn should end: the claim's hard limit, or somebody who is next. Where not, it begins anew. */
int kp_turns_due(struct kp_turns *turns);

/* Whether anybody else waits, or the claim has a hard limit: then little is submitted ahead. */
int kp_turns_shared(const struct kp_turns *turns);

/* `ns` of the card were used, just now. */
void kp_turns_charge(struct kp_turns *turns, uint64_t ns);

void kp_turns_leave(struct kp_turns *turns);

/* Before it leaves, by one that will take the turn again: else whoever the bell wakes finds that nobody else wants it. */
void kp_turns_wish(struct kp_turns *turns);

uint64_t kp_turns_used(const struct kp_turns *turns);

#endif
