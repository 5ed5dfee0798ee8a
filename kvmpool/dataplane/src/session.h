/* One guest process's session: decodes its frames and makes the calls of the real driver.
 *
 * Called in a process of its own (a fresh fork of the worker, single-threaded), because a CUDA driver cannot be
 * unloaded and a session that crashes must take nobody else with it.
 */
#ifndef KVMPOOL_SESSION_H
#define KVMPOOL_SESSION_H

#include <stdint.h>

#include "account.h"
#include "cache.h"
#include "frame.h"
#include "turns.h"

/* Its place in the domain's device of shared memory (slots.h). */
struct kp_place {
    uint64_t at, bytes; /* bytes 0: it has none */
    uint8_t device[16];
    int fd; /* of the file behind the device; holds the lock on the place */
};

struct kp_session {
    uint64_t memory_bytes; /* what the claim shows and may use */
    uint8_t uuid[16];      /* of the claim's virtual GPU */
    char pci[16];
    struct kp_account *account; /* shared by all sessions of the claim */
    struct kp_cache *cache;     /* likewise; NULL: no image is kept */
    unsigned slot;              /* this session's line in the account */
    int log_fd;                 /* one line an event; -1: none */
    struct kp_turns turns;      /* the claim's place at the card; page NULL: nothing is measured */
    struct kp_place place;
    uint64_t launch_timeout_ms; /* a batch of launches that takes longer ends the session; 0: never */
};

/* Loads libcuda.so.1 by its soname, sends the welcome (also the one that refuses), serves `fd` until BYE, end of file
 * or a frame that breaks the protocol. Does not close `fd`. The caller ends the process afterwards, with _exit.
 *
 * 0: the guest ended it. -EPROTO: the guest sent what no shim sends. -ENODEV: the driver or the card does not answer.
 */
int kp_session_run(const struct kp_session *session, int fd, const struct kp_hello *hello);

#endif
