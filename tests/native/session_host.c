/* The least that a session needs around it: listens, reads the hello, runs the session in a fork.
 *
 * usage: session_host SOCKET MEMORY_BYTES [refuse ERRNO]
 * SOCKET is a path; beside it, PATH.tcp says the TCP port of this machine that is listened on too.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "session.h"

static int listen_tcp(const char *path)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    FILE *file = fopen(path, "we");

    setsockopt(listener, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on); /* what is accepted inherits it */
    if (file == NULL || bind(listener, (struct sockaddr *)&address, length) != 0 || listen(listener, 64) != 0)
        return -1;
    getsockname(listener, (struct sockaddr *)&address, &length);
    fprintf(file, "%u", ntohs(address.sin_port));
    return fclose(file) == 0 ? listener : -1;
}

static pid_t owners[KP_ACCOUNT_SLOTS];

static void interrupt(int signal)
{
    (void)signal; /* accept returns EINTR */
}

/* What ended sessions held is free again. */
static void reap(struct kp_account *account)
{
    pid_t gone;

    while ((gone = waitpid(-1, NULL, WNOHANG)) > 0)
        for (unsigned slot = 0; slot < KP_ACCOUNT_SLOTS; slot++)
            if (owners[slot] == gone) {
                owners[slot] = 0;
                kp_account_clear(account, slot);
            }
}

static unsigned free_slot(void)
{
    unsigned slot = 0;

    while (slot < KP_ACCOUNT_SLOTS - 1 && owners[slot] != 0)
        slot++;
    return slot;
}

static void serve(int fd, struct kp_session *session, int refuse)
{
    struct kp_hello hello;
    struct kp_welcome welcome = {.status = -refuse, .text = "the test said no"};

    prctl(PR_SET_PDEATHSIG, SIGKILL);
    kp_socket_widen(fd);
    if (kp_hello_read(fd, &hello) != 0)
        _exit(3);
    if (refuse != 0)
        _exit(kp_welcome_write(fd, &welcome) != 0);
    exit(kp_session_run(session, fd, &hello) == 0 ? 0 : 4); /* exit, not _exit: the leak checker looks then */
}

int main(int argc, char **argv)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct kp_session session = {.pci = "0000:0a:0b.0", .log_fd = 2};
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), fd, tcp;
    char beside[256];
    int refuse = argc > 4 ? atoi(argv[4]) : 0;

    if (argc < 3)
        return 2;
    session.memory_bytes = strtoull(argv[2], NULL, 0);
    session.account = kp_account_new(session.memory_bytes);
    session.account->pinned_limit = 1ull << 30; /* host memory is not what these tests are about */
    session.cache = kp_cache_new();
    memcpy(session.uuid, "0123456789abcdef", 16);
    snprintf(address.sun_path, sizeof address.sun_path, "%s.new", argv[1]);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 64) != 0)
        return 1;
    snprintf(beside, sizeof beside, "%s.tcp", argv[1]);
    if ((tcp = listen_tcp(beside)) < 0)
        return 1;
    if (rename(address.sun_path, argv[1]) != 0) /* whoever sees the socket can dial it */
        return 1;
    sigaction(SIGCHLD, &(struct sigaction){.sa_handler = interrupt}, NULL);
    for (;;) {
        struct pollfd both[2] = {{.fd = listener, .events = POLLIN}, {.fd = tcp, .events = POLLIN}};
        int came = poll(both, 2, -1);
        reap(session.account);
        if (came <= 0)
            continue;
        if ((fd = accept(both[0].revents != 0 ? listener : tcp, NULL, NULL)) < 0)
            continue;
        session.slot = free_slot();
        pid_t child = fork();
        if (child == 0)
            serve(fd, &session, refuse);
        owners[session.slot] = child;
        close(fd);
    }
}
