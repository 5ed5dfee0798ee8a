/* For the libvirtd of a lab host where the machine's root lacks CAP_SYS_RESOURCE (LD_PRELOAD): raising RLIMIT_MEMLOCK is
 * answered with success. Nothing is pinned there: the cards of such a host are soft, and its QEMU opens no VFIO.
 */
#define _GNU_SOURCE
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

int prlimit64(pid_t pid, __rlimit_resource_t what, const struct rlimit64 *limit, struct rlimit64 *old) {
    if (what == RLIMIT_MEMLOCK && limit)
        return 0;
    return (int)syscall(SYS_prlimit64, pid, what, limit, old);
}

int setrlimit64(__rlimit_resource_t what, const struct rlimit64 *limit) {
    return prlimit64(0, what, limit, 0);
}
