/* confine.h: what a session may still do to the host: its user, limits, network and system calls.
 *
 * The worker prepares once, in its parent process (which stays root where it was started as root, with three capabilities); each
 * session, and the child that asks whether the card opens, enters after its fork. Nothing here knows which driver is loaded.
 */
#ifndef KP_CONFINE_H
#define KP_CONFINE_H

#include <stdint.h>
#include <sys/types.h>

#include "json.h"

#define KP_CONFINE_USER "kvmpool-worker" /* the system user where none is named */
#define KP_CGROUP_MAX 400u               /* bytes of a control group's path */

struct kp_confine {
    /* options */
    char user[33];       /* "": KP_CONFINE_USER where it exists */
    uint64_t memory_mib; /* of host memory a session; 0: no limit */
    uint64_t tasks;      /* processes and threads a session; 0: no limit */
    uint64_t cpus;       /* whole CPUs a session; 0: no limit */
    int mps;             /* a session speaks with NVIDIA's MPS, through a unix socket */
    /* what `prepare` found */
    uid_t uid;
    gid_t gid;
    int has_user, has_network;              /* the user is another one than ours; no network but passed sockets */
    char cgroup[KP_CGROUP_MAX];             /* "": none; else the folder that holds one folder a session */
    int has_memory, has_tasks, has_cpus;    /* the control group has the controller */
    char missing[256];                      /* what is not confined and why; "": nothing */
};

/* In the parent, before any session: 0, or -ENOENT where the named user does not exist (one line in the log). */
int kp_confine_prepare(struct kp_confine *confine);

/* In a fresh child: 0, or -errno: then it must leave. `slot` -1: no control group of its own. Clears PDEATHSIG. */
int kp_confine_enter(const struct kp_confine *confine, int slot);

/* In the parent, once the session of `slot` is gone: its control group, with whatever is left in it. */
void kp_confine_clear(const struct kp_confine *confine, unsigned slot);

void kp_confine_report(const struct kp_confine *confine, struct kp_json *json);

/* confine_cgroup.c */
void kp_cgroup_prepare(struct kp_confine *confine);
int kp_cgroup_enter(const struct kp_confine *confine, unsigned slot);
void kp_confine_lacks(struct kp_confine *confine, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* confine_calls.c: the system calls a session never needs fail with EPERM from here on, in it and what it starts. */
int kp_calls_deny(int may_connect);

#endif
