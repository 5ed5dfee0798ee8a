/* confine.c: see confine.h. */
#define _GNU_SOURCE
#include "confine.h"

#include <errno.h>
#include <grp.h>
#include <linux/capability.h>
#include <pwd.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "log.h"

#define OPEN_FILES 4096u /* a session has tens; a driver's own devices and event descriptors are hundreds */

void kp_confine_lacks(struct kp_confine *confine, const char *format, ...)
{
    size_t used = strlen(confine->missing);
    va_list arguments;

    if (used > 0 && used + 3 < sizeof(confine->missing)) {
        memcpy(confine->missing + used, "; ", 3);
        used += 2;
    }
    va_start(arguments, format);
    vsnprintf(confine->missing + used, sizeof(confine->missing) - used, format, arguments);
    va_end(arguments);
}

/* Root's power, but for what `kept` names: also of what is executed from here on. */
static int drop_capabilities(uint64_t kept)
{
    struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
    struct __user_cap_data_struct data[2] = { 0 };

    for (unsigned i = 0; i <= CAP_LAST_CAP; i++)
        if (!(kept >> i & 1) && prctl(PR_CAPBSET_DROP, i, 0, 0, 0) && errno != EPERM && errno != EINVAL)
            return -errno;
    if (syscall(SYS_capget, &header, data))
        return -errno;
    for (unsigned i = 0; i < 2; i++) {
        data[i].effective &= (uint32_t)(kept >> 32 * i);
        data[i].permitted &= (uint32_t)(kept >> 32 * i);
        data[i].inheritable = 0;
    }
    return syscall(SYS_capset, &header, data) ? -errno : 0;
}

static int find_user(struct kp_confine *confine)
{
    int named = confine->user[0] != '\0';
    struct passwd *found;

    if (!named)
        memcpy(confine->user, KP_CONFINE_USER, sizeof(KP_CONFINE_USER));
    found = getpwnam(confine->user);
    if (!found && named) {
        kp_log(KP_ERROR, "there is no user %s for its sessions", confine->user);
        return -ENOENT;
    }
    if (geteuid()) {
        kp_confine_lacks(confine, "no user of their own: kvmpoold is not root");
    } else if (!found) {
        kp_confine_lacks(confine, "no user of their own: there is no system user %s", confine->user);
    } else if (found->pw_uid) {
        confine->uid = found->pw_uid;
        confine->gid = found->pw_gid;
        confine->has_user = 1;
    }
    return 0;
}

int kp_confine_prepare(struct kp_confine *confine)
{
    const uint64_t kept = 1u << CAP_KILL | 1u << CAP_SETUID | 1u << CAP_SETGID;
    int rc = find_user(confine);

    if (rc)
        return rc;
    confine->has_network = !unshare(CLONE_NEWNET);
    if (!confine->has_network)
        kp_confine_lacks(confine, "the host's network: %s", strerror(errno));
    kp_cgroup_prepare(confine);
    rc = drop_capabilities(kept);
    if (rc)
        kp_confine_lacks(confine, "the worker keeps its capabilities: %s", strerror(-rc));
    if (confine->missing[0])
        kp_log(KP_WARNING, "sessions are not confined in full: %s", confine->missing);
    return 0;
}

static int limit(int resource, uint64_t value)
{
    struct rlimit now;

    if (getrlimit((__rlimit_resource_t)resource, &now))
        return -errno;
    if (now.rlim_max != RLIM_INFINITY && value > now.rlim_max)
        value = now.rlim_max;
    now.rlim_cur = now.rlim_max = (rlim_t)value;
    return setrlimit((__rlimit_resource_t)resource, &now) ? -errno : 0;
}

/* Where a control group counts, it alone does: the memory limit of a process knows nothing of what it starts, and that of tasks
 * is one over all processes of the user. */
static int set_limits(const struct kp_confine *confine)
{
    int rc = limit(RLIMIT_CORE, 0); /* it would hold a tenant's data */

    if (!rc)
        rc = limit(RLIMIT_NOFILE, OPEN_FILES);
    if (!rc && confine->memory_mib && !confine->has_memory)
        rc = limit(RLIMIT_DATA, confine->memory_mib << 20);
    if (!rc && confine->tasks && !confine->has_tasks)
        rc = limit(RLIMIT_NPROC, confine->tasks);
    return rc;
}

static int become_user(const struct kp_confine *confine)
{
    if (!confine->has_user)
        return 0;
    if (initgroups(confine->user, confine->gid))
        return -errno;
    if (setresgid(confine->gid, confine->gid, confine->gid) || setresuid(confine->uid, confine->uid, confine->uid))
        return -errno;
    return 0;
}

int kp_confine_enter(const struct kp_confine *confine, int slot)
{
    int rc = slot >= 0 ? kp_cgroup_enter(confine, (unsigned)slot) : 0;

    if (!rc)
        rc = set_limits(confine);
    if (!rc)
        rc = become_user(confine);
    if (!rc)
        rc = drop_capabilities(0);
    if (!rc && (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))
        rc = -errno;
    return rc ? rc : kp_calls_deny(confine->mps);
}

/* What holds a limit: "cgroup", "rlimit", or "" for nothing. */
static const char *holder(uint64_t wanted, int by_cgroup, int by_rlimit)
{
    return !wanted ? "" : by_cgroup ? "cgroup" : by_rlimit ? "rlimit" : "";
}

void kp_confine_report(const struct kp_confine *confine, struct kp_json *json)
{
    kp_json_object(json, "confined");
    kp_json_text(json, "user", confine->has_user ? confine->user : "");
    kp_json_bool(json, "network", confine->has_network);
    kp_json_text(json, "cgroup", confine->cgroup);
    kp_json_text(json, "memory", holder(confine->memory_mib, confine->has_memory, 1));
    kp_json_text(json, "tasks", holder(confine->tasks, confine->has_tasks, confine->has_user));
    kp_json_text(json, "cpus", holder(confine->cpus, confine->has_cpus, 0));
    kp_json_text(json, "missing", confine->missing);
    kp_json_object_end(json);
}
