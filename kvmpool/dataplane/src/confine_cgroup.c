/* confine_cgroup.c: a control group (version 2) for each session, under the worker's own.
 *
 * The worker's group must hold no process itself (cgroup-v2.rst, "no internal processes"), so the worker moves into a leaf. At the
 * root of the tree, where no systemd made a scope for us, the worker makes kvmpool/<pid> and works there.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <mntent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "confine.h"

#define CPU_PERIOD_US 100000u /* of cpu.max; the kernel's default */
#define CLEAR_TRIES 100       /* milliseconds: what was killed in a group is gone within a few, on a slow machine later */

static int put(const char *folder, const char *file, const char *text)
{
    char path[KP_CGROUP_MAX + 32];
    size_t length = strlen(text);
    int fd, rc;

    if ((size_t)snprintf(path, sizeof(path), "%s/%s", folder, file) >= sizeof(path))
        return -ENAMETOOLONG;
    fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    rc = write(fd, text, length) == (ssize_t)length ? 0 : -errno;
    close(fd);
    return rc;
}

static int put_number(const char *folder, const char *file, uint64_t number)
{
    char text[24];

    snprintf(text, sizeof(text), "%llu", (unsigned long long)number);
    return put(folder, file, text);
}

static int find_mount(char *path, size_t size)
{
    FILE *mounts = setmntent("/proc/self/mounts", "re");
    struct mntent entry;
    char line[1024];
    int rc = -ENOENT;

    if (!mounts)
        return -errno;
    while (rc && getmntent_r(mounts, &entry, line, sizeof(line)))
        if (!strcmp(entry.mnt_type, "cgroup2"))
            rc = (size_t)snprintf(path, size, "%s", entry.mnt_dir) < size ? 0 : -ENAMETOOLONG;
    endmntent(mounts);
    return rc;
}

/* Our own group's path below the mount: "" at its root. */
static int find_own(char *path, size_t size)
{
    FILE *groups = fopen("/proc/self/cgroup", "re");
    char line[KP_CGROUP_MAX];
    int rc = -ENOENT;

    if (!groups)
        return -errno;
    while (rc && fgets(line, sizeof(line), groups)) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "0::/", 4) == 0)
            rc = (size_t)snprintf(path, size, "%s", line[4] ? line + 3 : "") < size ? 0 : -ENAMETOOLONG;
    }
    fclose(groups);
    return rc;
}

/* Hands the controllers that `folder` has on to its children; those it has not stay unset. */
static void hand_on(struct kp_confine *confine, const char *folder)
{
    confine->has_memory = confine->memory_mib && !put(folder, "cgroup.subtree_control", "+memory");
    confine->has_tasks = confine->tasks && !put(folder, "cgroup.subtree_control", "+pids");
    confine->has_cpus = !put(folder, "cgroup.subtree_control", "+cpu");
}

static int join(char *path, size_t size, const char *folder, const char *name)
{
    return (size_t)snprintf(path, size, "%s/%s", folder, name) < size ? 0 : -ENAMETOOLONG;
}

static int make(const char *folder)
{
    return mkdir(folder, 0755) && errno != EEXIST ? -errno : 0;
}

/* Removes the groups in `path`, and those in them, that bear the pid of a worker that is gone. */
static void prune(const char *path, int levels)
{
    DIR *folder = opendir(path);
    struct dirent *entry;

    while (folder && (entry = readdir(folder))) {
        char below[KP_CGROUP_MAX];

        if (entry->d_name[0] == '.' || entry->d_type != DT_DIR || join(below, sizeof(below), path, entry->d_name))
            continue;
        if (levels > 1 && (!kill(atoi(entry->d_name), 0) || errno != ESRCH))
            continue;
        if (levels > 1)
            prune(below, levels - 1);
        rmdir(below);
    }
    if (folder)
        closedir(folder);
}

static int make_below_root(struct kp_confine *confine, const char *root)
{
    char kvmpool[KP_CGROUP_MAX], name[24];
    int rc = join(kvmpool, sizeof(kvmpool), root, "kvmpool");

    if (!rc)
        rc = make(kvmpool);
    if (rc)
        return rc;
    prune(kvmpool, 2);
    hand_on(confine, root);
    hand_on(confine, kvmpool);
    snprintf(name, sizeof(name), "%d", (int)getpid());
    rc = join(confine->cgroup, sizeof(confine->cgroup), kvmpool, name);
    return rc ? rc : make(confine->cgroup);
}

static int settle(struct kp_confine *confine)
{
    char root[KP_CGROUP_MAX / 2], own[KP_CGROUP_MAX / 2], leaf[KP_CGROUP_MAX];
    int rc = find_mount(root, sizeof(root));

    if (!rc)
        rc = find_own(own, sizeof(own));
    if (rc)
        return rc;
    if (own[0])
        rc = (size_t)snprintf(confine->cgroup, sizeof(confine->cgroup), "%s%s", root, own) < KP_CGROUP_MAX ? 0 : -ENAMETOOLONG;
    else
        rc = make_below_root(confine, root);
    if (!rc)
        rc = join(leaf, sizeof(leaf), confine->cgroup, "worker");
    if (!rc)
        rc = make(leaf);
    if (!rc)
        rc = put(leaf, "cgroup.procs", "0");
    if (!rc)
        hand_on(confine, confine->cgroup);
    return rc;
}

void kp_cgroup_prepare(struct kp_confine *confine)
{
    int rc = settle(confine);

    if (rc) {
        confine->cgroup[0] = '\0';
        confine->has_memory = confine->has_tasks = confine->has_cpus = 0;
        kp_confine_lacks(confine, "no control groups: %s", rc == -ENOENT ? "no cgroup2 tree is mounted" : strerror(-rc));
        return;
    }
    if (confine->memory_mib && !confine->has_memory)
        kp_confine_lacks(confine, "%s has no memory controller (a limit a process holds instead)", confine->cgroup);
    if (confine->tasks && !confine->has_tasks)
        kp_confine_lacks(confine, "no pids controller (%s)",
                         confine->has_user ? "one limit over all its user's sessions instead" : "no limit of tasks");
    if (confine->cpus && !confine->has_cpus)
        kp_confine_lacks(confine, "no cpu controller");
}

static int session_folder(const struct kp_confine *confine, unsigned slot, char *path, size_t size)
{
    return (size_t)snprintf(path, size, "%s/session-%u", confine->cgroup, slot) < size ? 0 : -ENAMETOOLONG;
}

int kp_cgroup_enter(const struct kp_confine *confine, unsigned slot)
{
    char folder[KP_CGROUP_MAX + 32], quota[48];
    int rc;

    if (!confine->cgroup[0])
        return 0;
    rc = session_folder(confine, slot, folder, sizeof(folder));
    if (!rc)
        rc = make(folder);
    if (!rc && confine->has_memory)
        rc = put_number(folder, "memory.max", confine->memory_mib << 20);
    if (!rc && confine->has_memory) {
        put(folder, "memory.swap.max", "0"); /* absent where the kernel counts no swap */
        rc = put(folder, "memory.oom.group", "1");
    }
    if (!rc && confine->has_tasks)
        rc = put_number(folder, "pids.max", confine->tasks);
    snprintf(quota, sizeof(quota), "%llu %u", (unsigned long long)confine->cpus * CPU_PERIOD_US, CPU_PERIOD_US);
    if (!rc && confine->has_cpus && confine->cpus)
        rc = put(folder, "cpu.max", quota);
    return rc ? rc : put(folder, "cgroup.procs", "0");
}

void kp_confine_clear(const struct kp_confine *confine, unsigned slot)
{
    const struct timespec pause = { .tv_nsec = 1000000 };
    char folder[KP_CGROUP_MAX + 32];

    if (!confine->cgroup[0] || session_folder(confine, slot, folder, sizeof(folder)) || !rmdir(folder))
        return;
    put(folder, "cgroup.kill", "1"); /* what the session started and left behind */
    for (int i = 0; i < CLEAR_TRIES && rmdir(folder) && errno == EBUSY; i++)
        nanosleep(&pause, NULL);
}
