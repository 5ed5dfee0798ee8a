/* The least that a session needs around it: listens on a unix socket, reads the hello, runs the session in a fork.
 *
 * usage: session_host SOCKET MEMORY_BYTES [refuse ERRNO]
 */
#define _GNU_SOURCE
#include <errno.h>
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
    int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), fd;
    int refuse = argc > 4 ? atoi(argv[4]) : 0;

    if (argc < 3)
        return 2;
    session.memory_bytes = strtoull(argv[2], NULL, 0);
    session.account = kp_account_new(session.memory_bytes);
    memcpy(session.uuid, "0123456789abcdef", 16);
    snprintf(address.sun_path, sizeof address.sun_path, "%s.new", argv[1]);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 64) != 0)
        return 1;
    if (rename(address.sun_path, argv[1]) != 0) /* whoever sees the socket can dial it */
        return 1;
    sigaction(SIGCHLD, &(struct sigaction){.sa_handler = interrupt}, NULL);
    while ((fd = accept(listener, NULL, NULL)) >= 0 || errno == EINTR) {
        reap(session.account);
        if (fd < 0)
            continue;
        session.slot = free_slot();
        pid_t child = fork();
        if (child == 0)
            serve(fd, &session, refuse);
        owners[session.slot] = child;
        close(fd);
    }
    return 1;
}
