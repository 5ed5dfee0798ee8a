/* naughty_cuda.c: a libcuda.so.1 that is the enemy. In a session (NAUGHTY_FOLDER has "go"), cuInit tries what a session must not
 * be able to do and writes a line an attempt to NAUGHTY_FOLDER/<pid>: "name errno", 0 where it succeeded.
 *
 * NAUGHTY: "try", or "memory" or "tasks": the session that finds the file "bomb" takes that without end; the others compute.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/netlink.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

int cuInit(unsigned flags);
int cuDeviceGet(int *device, int ordinal);

static FILE *out;

static void told(const char *name, long result)
{
    fprintf(out, "%s %d\n", name, result < 0 ? errno : 0);
    fflush(out);
}

#define TRY(call) told(#call, syscall(SYS_##call, 0, 0, 0, 0, 0, 0))

static void try_network(void)
{
    static const int families[] = { AF_INET, AF_INET6, AF_NETLINK, AF_PACKET, AF_VSOCK, AF_ALG };
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd = socket(AF_UNIX, SOCK_STREAM, 0), pair[2];
    char name[32];

    for (unsigned i = 0; i < sizeof(families) / sizeof(families[0]); i++) {
        snprintf(name, sizeof(name), "socket-%d", families[i]);
        told(name, socket(families[i], families[i] == AF_PACKET || families[i] == AF_NETLINK ? SOCK_RAW : SOCK_STREAM, 0));
    }
    told("allowed-socketpair", socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
    told("datagram", socket(AF_UNIX, SOCK_DGRAM, 0)); /* it reaches /dev/log and its like without connect */
    told("raw-datagram", socket(AF_UNIX, SOCK_RAW | SOCK_CLOEXEC, 0));
    told("datagram-pair", socketpair(AF_UNIX, SOCK_DGRAM, 0, pair));
    snprintf(address.sun_path, sizeof(address.sun_path), "%s/listening", getenv("NAUGHTY_FOLDER"));
    told("connect", connect(fd, (struct sockaddr *)&address, sizeof(address)));
    told("bind", bind(fd, (struct sockaddr *)&address, sizeof(address)));
    TRY(listen);
    TRY(accept);
    TRY(accept4);
}

/* The worker's lock, which a session holds too, names the process that kvmpoold signals; the page of the card's turns is mapped by
 * all workers of the card, and whoever cuts it short ends them. */
static void try_files(void)
{
    DIR *open_files = opendir("/proc/self/fd");
    struct dirent *each;

    while (open_files && (each = readdir(open_files))) {
        char at[64], path[256] = "";
        int fd = atoi(each->d_name);

        snprintf(at, sizeof(at), "/proc/self/fd/%.16s", each->d_name);
        if (readlink(at, path, sizeof(path) - 1) < 5)
            continue;
        if (!strcmp(path + strlen(path) - 5, ".lock")) {
            told("write-lock", pwrite(fd, "1 1\n", 4, 0));
            told("reopen-lock", geteuid() ? open(at, O_RDWR) : (errno = EACCES, -1)); /* root's files are root's */
        } else if (strstr(path, "/turns/")) {
            told("cut-turns", ftruncate(fd, 0));
            told("reopen-turns", geteuid() ? open(at, O_RDWR) : (errno = EACCES, -1));
        }
    }
    if (open_files)
        closedir(open_files);
}

/* Any process of the user may be another claim's session. */
static void try_neighbours(void)
{
    struct rlimit none;
    pid_t child = fork();

    if (child == 0) {
        sleep(1);
        _exit(0);
    }
    told("prlimit", prlimit(child, RLIMIT_CPU, NULL, &none));
    told("setpriority", setpriority(PRIO_USER, geteuid(), 0));
    TRY(ioprio_set);
    waitpid(child, NULL, 0);
}

static void try_processes(void)
{
    pid_t parent = getppid(), child;
    char byte, path[64];
    struct iovec here = { &byte, 1 }, there = { &byte, 1 };
    int fd, status = 0;

    told("kill-parent", kill(parent, 0));
    told("kill-all", kill(-1, 0));
    told("kill-group", kill(0, 0));
    told("allowed-kill-self", kill(getpid(), 0));
    told("sigqueue-parent", sigqueue(parent, 0, (union sigval){ 0 }));
    told("ptrace", ptrace(PTRACE_SEIZE, parent, 0, 0));
    told("process_vm_readv", process_vm_readv(parent, &here, 1, &there, 1, 0));
    snprintf(path, sizeof(path), "/proc/%d/mem", (int)parent);
    fd = open(path, O_RDWR);
    told("parents-memory", fd);
    told("pidfd_open", syscall(SYS_pidfd_open, parent, 0));
    told("unshare", unshare(CLONE_NEWUSER));
    told("setns", setns(0, 0));
    told("clone-newuser", syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, 0, 0, 0, 0));
    told("clone-newnet", syscall(SYS_clone, CLONE_NEWNET | SIGCHLD, 0, 0, 0, 0));
    child = fork();
    if (child == 0) {
        execl("/bin/true", "true", (char *)NULL);
        _exit(1);
    }
    waitpid(child, &status, 0);
    errno = EIO;
    told("allowed-exec", child > 0 && WIFEXITED(status) && !WEXITSTATUS(status) ? 0 : -1);
}

static void try_kernel(void)
{
    struct rlimit more = { RLIM_INFINITY, RLIM_INFINITY };
    struct timespec then = { .tv_nsec = -1 }; /* nothing here would do harm, were it let through */

    told("mount", mount("none", "/nowhere", "tmpfs", 0, NULL));
    told("umount2", umount2("/nowhere", MNT_DETACH));
    told("chroot", chroot("/"));
    told("clock_settime", syscall(SYS_clock_settime, CLOCK_REALTIME, &then));
    told("sethostname", syscall(SYS_sethostname, NULL, -1L));
    told("raise-core", setrlimit(RLIMIT_CORE, &more));
    told("terminal", ioctl(0, TIOCSTI, "x"));
    TRY(pivot_root);
    TRY(open_tree);
    TRY(fsopen);
    TRY(bpf);
    TRY(perf_event_open);
    TRY(userfaultfd);
    TRY(init_module);
    TRY(finit_module);
    TRY(delete_module);
    TRY(kexec_load);
    TRY(reboot);
    TRY(keyctl);
    TRY(add_key);
    TRY(request_key);
    TRY(io_uring_setup);
    TRY(open_by_handle_at);
    TRY(swapon);
    TRY(syslog);
}

static int has_capability(void)
{
    struct __user_cap_header_struct header = { .version = _LINUX_CAPABILITY_VERSION_3 };
    struct __user_cap_data_struct data[2] = { 0 };

    syscall(SYS_capget, &header, data);
    return (data[0].permitted | data[1].permitted) != 0;
}

static void take_memory(void)
{
    for (size_t taken = 0; taken < (size_t)4 << 30; taken += 1 << 20) {
        char *more = malloc(1 << 20);

        if (!more)
            abort(); /* an allocation that fails ends most programs */
        memset(more, 1, 1 << 20);
    }
    told("memory-bomb", 0);
}

/* Processes that stay, until there are no more to be had. */
static void take_tasks(void)
{
    int count = 0;

    for (; count < 2000; count++) {
        pid_t child = fork();

        if (child < 0)
            break;
        if (child == 0) {
            pause();
            _exit(0);
        }
    }
    told("tasks-bomb", count < 2000 ? -1 : 0);
    fprintf(out, "tasks %d\n", count);
    fflush(out);
    sleep(2);
    _exit(0);
}

static void compute(void)
{
    uint64_t x = 88172645463325252ull;

    for (unsigned i = 0; i < 200000000u; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
    }
    fprintf(out, "computed %016llx\n", (unsigned long long)x);
    fflush(out);
}

static void misbehave(const char *folder, const char *mode)
{
    char bomb[256], bombed[256];

    snprintf(bomb, sizeof(bomb), "%s/bomb", folder);
    snprintf(bombed, sizeof(bombed), "%s/bombed", folder);
    if (!strcmp(mode, "try")) {
        fprintf(out, "uid %u\ncapability %d\n", (unsigned)geteuid(), has_capability());
        try_network();
        try_files();
        try_neighbours();
        try_processes();
        try_kernel();
    } else if (rename(bomb, bombed)) {
        compute();
    } else if (!strcmp(mode, "memory")) {
        take_memory();
    } else {
        take_tasks();
    }
}

int cuInit(unsigned flags)
{
    const char *folder = getenv("NAUGHTY_FOLDER");
    char path[256];

    (void)flags;
    snprintf(path, sizeof(path), "%s/go", folder);
    if (access(path, F_OK)) /* the worker's own look at the card */
        return 0;
    snprintf(path, sizeof(path), "%s/%d", folder, (int)getpid());
    out = fopen(path, "w");
    if (!out)
        return 999;
    misbehave(folder, getenv("NAUGHTY"));
    fprintf(out, "end\n");
    fclose(out);
    return 0;
}

int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return 0;
}
