/* confine_calls.c: a seccomp filter in plain BPF that refuses what no session needs, whatever driver it loads.
 *
 * A list of what is refused, not of what is allowed: a CUDA driver is a closed library that changes with every release, and a
 * simulated card compiles its kernels with programs of the host. Threads, processes and execution stay; new privileges, other
 * processes, namespaces, mounts, the kernel's own interfaces and every network do not.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "confine.h"

#if defined(__x86_64__)
#define OUR_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define OUR_ARCH AUDIT_ARCH_AARCH64
#else
#error "confine_calls.c: name this machine's AUDIT_ARCH"
#endif
#define X32_BIT 0x40000000u /* system calls of another ABI under the same arch */
#define NAMESPACES 0x7e020000u /* CLONE_NEW* of linux/sched.h; NEWTIME is clone3's alone */
#define DATAGRAMS 2u /* the bit of SOCK_DGRAM and SOCK_RAW, which on a unix socket is the same, that no stream's type has */
#define PROGRAM_MAX 256u
#define REFUSE (SECCOMP_RET_ERRNO | EPERM)

static const int refused[] = {
    /* mounts and roots */
    SYS_mount, SYS_umount2, SYS_pivot_root, SYS_chroot, SYS_move_mount, SYS_open_tree, SYS_fsopen, SYS_fsconfig, SYS_fsmount,
    SYS_fspick, SYS_quotactl, SYS_swapon, SYS_swapoff, SYS_acct, SYS_name_to_handle_at, SYS_open_by_handle_at, SYS_fanotify_init,
    /* other processes */
    SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_kcmp, SYS_pidfd_open, SYS_pidfd_send_signal, SYS_tkill,
    SYS_unshare, SYS_setns, SYS_migrate_pages, SYS_setpriority, SYS_ioprio_set,
    /* the kernel */
    SYS_bpf, SYS_perf_event_open, SYS_userfaultfd, SYS_init_module, SYS_finit_module, SYS_delete_module, SYS_kexec_load,
    SYS_reboot, SYS_syslog, SYS_keyctl, SYS_add_key, SYS_request_key, SYS_io_uring_setup, SYS_io_uring_enter,
    SYS_io_uring_register, SYS_lookup_dcookie, SYS_vhangup,
    /* the machine's name and clock */
    SYS_sethostname, SYS_setdomainname, SYS_settimeofday, SYS_clock_settime, SYS_adjtimex, SYS_clock_adjtime,
    /* the network; `connect` below */
    SYS_bind, SYS_listen, SYS_accept, SYS_accept4,
#ifdef SYS_kexec_file_load
    SYS_kexec_file_load,
#endif
#ifdef SYS_pidfd_getfd
    SYS_pidfd_getfd,
#endif
#ifdef SYS_mount_setattr
    SYS_mount_setattr,
#endif
#ifdef SYS_process_madvise
    SYS_process_madvise,
#endif
#ifdef SYS_iopl
    SYS_iopl, SYS_ioperm, SYS_modify_ldt,
#endif
};

struct program {
    struct sock_filter line[PROGRAM_MAX];
    unsigned short lines;
};

static void add(struct program *p, struct sock_filter line)
{
    if (p->lines < PROGRAM_MAX)
        p->line[p->lines] = line;
    p->lines++; /* past the end: found out before it is loaded */
}

static void load(struct program *p, size_t offset)
{
    add(p, (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offset));
}

static void answer(struct program *p, uint32_t action)
{
    add(p, (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, action));
}

/* The next `lines` lines only where the number equals `value`. */
static void when(struct program *p, uint32_t value, uint8_t lines)
{
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, lines));
}

/* With the call's number loaded: `call` is refused unless the low half of its argument `n` is `value`. */
static void only_with(struct program *p, int call, unsigned n, uint32_t value)
{
    when(p, (uint32_t)call, 4);
    load(p, offsetof(struct seccomp_data, args) + n * sizeof(uint64_t));
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1));
    answer(p, SECCOMP_RET_ALLOW);
    answer(p, REFUSE);
}

/* Likewise: refused where the argument has the value (`set` 0), or any of its bits (`set` 1). */
static void not_with(struct program *p, int call, unsigned n, uint32_t value, int set)
{
    when(p, (uint32_t)call, 4);
    load(p, offsetof(struct seccomp_data, args) + n * sizeof(uint64_t));
    add(p, (struct sock_filter)BPF_JUMP((uint16_t)(BPF_JMP | (set ? BPF_JSET : BPF_JEQ) | BPF_K), value, 0, 1));
    answer(p, REFUSE);
    answer(p, SECCOMP_RET_ALLOW);
}

/* With the call's number loaded: sockets of this host only, and none whose type has a bit of `types`. */
static void only_local(struct program *p, int call, uint32_t types)
{
    when(p, (uint32_t)call, 6);
    load(p, offsetof(struct seccomp_data, args));
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 0, 3));
    load(p, offsetof(struct seccomp_data, args) + sizeof(uint64_t));
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, types, 1, 0));
    answer(p, SECCOMP_RET_ALLOW);
    answer(p, REFUSE);
}

static void write_program(struct program *p, int may_connect)
{
    uint32_t self = (uint32_t)getpid();

    load(p, offsetof(struct seccomp_data, arch));
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OUR_ARCH, 1, 0));
    answer(p, SECCOMP_RET_KILL_PROCESS);
    load(p, offsetof(struct seccomp_data, nr));
    add(p, (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, X32_BIT, 0, 1));
    answer(p, SECCOMP_RET_KILL_PROCESS);
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        when(p, (uint32_t)refused[i], 1);
        answer(p, REFUSE);
    }
    if (!may_connect) {
        when(p, SYS_connect, 1);
        answer(p, REFUSE);
    }
    when(p, SYS_clone3, 1); /* its flags lie in memory, which a filter cannot read; the C library then takes clone */
    answer(p, SECCOMP_RET_ERRNO | ENOSYS);
    not_with(p, SYS_clone, 0, NAMESPACES, 1);
    not_with(p, SYS_ioctl, 1, TIOCSTI, 0);
    only_local(p, SYS_socket, may_connect ? 0 : DATAGRAMS); /* a datagram reaches a server without `connect` */
    only_local(p, SYS_socketpair, may_connect ? 0 : DATAGRAMS);
    only_with(p, SYS_prlimit64, 0, 0); /* the limits of any process of the user; its CPU limit can kill */
    only_with(p, SYS_kill, 0, self);
    only_with(p, SYS_tgkill, 0, self);
    only_with(p, SYS_rt_sigqueueinfo, 0, self);
    only_with(p, SYS_rt_tgsigqueueinfo, 0, self);
    answer(p, SECCOMP_RET_ALLOW);
}

int kp_calls_deny(int may_connect)
{
    struct program p = { .lines = 0 };
    struct sock_fprog loaded = { .filter = p.line };

    write_program(&p, may_connect);
    if (p.lines > PROGRAM_MAX)
        return -E2BIG;
    loaded.len = p.lines;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &loaded, 0, 0) ? -errno : 0;
}
