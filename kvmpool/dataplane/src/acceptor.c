/* acceptor.c: kvmpool-acceptor: the host's one vsock port. Asks the kernel who called (the hypervisor sets the CID, a guest cannot),
 * looks up whose CID that is now, and passes the socket to that domain's relay. Outlives kvmpoold; carries no data. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <linux/vm_sockets.h>

#include "control.h"
#include "frame.h"
#include "log.h"
#include "loop.h"
#include "options.h"

#define ACCEPTOR_EXIT_BUSY 3
#define ACCEPTOR_BACKLOG 128
#define FULL_PAUSE_NS 10000000

/* What kvmpoold writes: DIRECTORY/<cid> holds the uuid of the domain that has this CID now, RELAYS/<uuid>/relay.ctl is its relay. */
static struct {
    char relays[KP_PATH_MAX], directory[KP_PATH_MAX], stand_in[KP_PATH_MAX];
    uint64_t port, peer_cid;
    struct kp_loop loop;
    struct kp_watch listener, signals;
    struct kp_rate rate;
    uint64_t passed, refused;
} self;

static int domain_of(uint64_t cid, char uuid[KP_UUID_MAX])
{
    char path[KP_PATH_MAX + 32];
    ssize_t length;
    int fd;

    snprintf(path, sizeof(path), "%s/%llu", self.directory, (unsigned long long)cid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    length = read(fd, uuid, KP_UUID_MAX - 1);
    close(fd);
    if (length != KP_UUID_MAX - 1)
        return -EINVAL;
    uuid[length] = '\0';
    return kp_name_valid(uuid, KP_UUID_MAX) ? 0 : -EINVAL;
}

static int pass_on(uint64_t cid, int guest_fd)
{
    char uuid[KP_UUID_MAX], path[KP_PATH_MAX + KP_UUID_MAX + 16];
    int fd, rc = domain_of(cid, uuid);

    if (rc)
        return rc;
    snprintf(path, sizeof(path), "%s/%s/relay.ctl", self.relays, uuid);
    fd = kp_unix_connect(path, SOCK_SEQPACKET);
    if (fd < 0)
        return fd;
    rc = kp_peer_allowed(fd) ? kp_control_send(fd, "GUEST", 5, guest_fd) : -EACCES;
    close(fd);
    return rc;
}

static void on_listener(struct kp_watch *watch, uint32_t events)
{
    struct sockaddr_vm address = { 0 };
    socklen_t size = sizeof(address);
    uint64_t cid = self.peer_cid;
    int rc, fd = accept4(watch->fd, self.stand_in[0] ? NULL : (struct sockaddr *)&address, self.stand_in[0] ? NULL : &size,
                         SOCK_CLOEXEC);

    (void)events;
    if (fd < 0) {
        const struct timespec pause = { .tv_nsec = FULL_PAUSE_NS };

        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM)
            nanosleep(&pause, NULL);
        return;
    }
    if (!self.stand_in[0])
        cid = address.svm_cid;
    rc = pass_on(cid, fd);
    close(fd); /* the relay holds its own now; without a relay this ends the connection */
    if (rc) {
        self.refused++;
        kp_log_rated(&self.rate, KP_WARNING, "guest with CID %llu refused: %s", (unsigned long long)cid,
                     rc == -ENOENT ? "no domain of kvmpool has this CID, or its relay is gone" : strerror(-rc));
        return;
    }
    self.passed++;
    kp_log_rated(&self.rate, KP_INFO, "guest with CID %llu passed to its relay", (unsigned long long)cid);
}

static void on_signal(struct kp_watch *watch, uint32_t events)
{
    struct signalfd_siginfo signal;

    (void)events;
    if (read(watch->fd, &signal, sizeof(signal)) == (ssize_t)sizeof(signal))
        self.loop.ended = 1;
}

static int listen_vsock(void)
{
    struct sockaddr_vm address = { .svm_family = AF_VSOCK, .svm_cid = VMADDR_CID_ANY, .svm_port = (unsigned)self.port };
    int rc, fd = socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    if (fd < 0)
        return -errno;
    if (!bind(fd, (struct sockaddr *)&address, sizeof(address)) && !listen(fd, ACCEPTOR_BACKLOG))
        return fd;
    rc = -errno;
    close(fd);
    return rc;
}

static int open_all(void)
{
    sigset_t set;
    int rc = kp_loop_open(&self.loop);

    if (rc)
        return rc;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGHUP, SIG_IGN);
    sigprocmask(SIG_BLOCK, &set, NULL);
    self.signals = (struct kp_watch){ .on_event = on_signal, .fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK) };
    self.listener = (struct kp_watch){ .on_event = on_listener };
    self.listener.fd = self.stand_in[0] ? kp_unix_listen(self.stand_in, SOCK_STREAM) : listen_vsock();
    if (self.signals.fd < 0 || self.listener.fd < 0)
        return self.listener.fd < 0 ? self.listener.fd : -EMFILE;
    rc = kp_loop_watch(&self.loop, &self.signals, EPOLLIN);
    return rc ? rc : kp_loop_watch(&self.loop, &self.listener, EPOLLIN);
}

static int listen_option(void *to, const char *value)
{
    return strncmp(value, "unix:/", 6) ? -EINVAL : kp_copy(to, KP_PATH_MAX, value + 5);
}

static int tell_and_serve(uint64_t ready_fd)
{
    int rc = 0;

    kp_log(KP_INFO, "ready, pid %d", (int)getpid());
    if (ready_fd != UINT64_MAX) {
        dprintf((int)ready_fd, "ready\n");
        close((int)ready_fd);
    }
    while (!self.loop.ended && !rc)
        rc = kp_loop_turn(&self.loop, -1);
    kp_log(KP_INFO, "ends: %llu guests passed, %llu refused", (unsigned long long)self.passed,
           (unsigned long long)self.refused);
    return rc ? 1 : 0;
}

int main(int argc, char **argv)
{
    uint64_t ready_fd = UINT64_MAX;
    int rc, detach = 0;
    const struct kp_option table[] = {
        { "dir", KP_TEXT, 1, self.directory, sizeof(self.directory), NULL }, /* its lock and the map of CIDs live here */
        { "relays", KP_TEXT, 1, self.relays, sizeof(self.relays), NULL },
        { "port", KP_NUMBER, 0, &self.port, UINT32_MAX - 1, NULL },
        { "listen", KP_EACH, 0, self.stand_in, KP_PATH_MAX, listen_option }, /* instead of vsock, with --peer-cid: for tests */
        { "peer-cid", KP_NUMBER, 0, &self.peer_cid, UINT32_MAX, NULL },
        { "ready-fd", KP_NUMBER, 0, &ready_fd, 1 << 16, NULL },
        { "detach", KP_FLAG, 0, &detach, 0, NULL },
    };

    self.port = KP_PORT;
    kp_log_name("acceptor");
    if (kp_options_read("kvmpool-acceptor", table, sizeof(table) / sizeof(table[0]), argc, argv))
        return 2;
    if (detach && kp_detach())
        return 1;
    if (mkdir(self.directory, 0755) && errno != EEXIST)
        kp_log(KP_WARNING, "%s: %s", self.directory, strerror(errno));
    rc = kp_lock_take(self.directory, "acceptor.lock");
    if (rc == -EWOULDBLOCK) {
        if (ready_fd != UINT64_MAX)
            dprintf((int)ready_fd, "busy\n");
        return ACCEPTOR_EXIT_BUSY;
    }
    if (rc >= 0)
        rc = open_all();
    if (rc) {
        kp_log(KP_ERROR, "cannot start: %s", strerror(-rc));
        if (ready_fd != UINT64_MAX)
            dprintf((int)ready_fd, "failed %s\n", strerror(-rc));
        return 1;
    }
    return tell_and_serve(ready_fd);
}
