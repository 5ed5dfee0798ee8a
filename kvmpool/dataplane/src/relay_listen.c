/* relay_listen.c: the endpoint: "tcp:ADDRESS:PORT" (port 0: chosen here), "unix:/path", "vsock:2:PORT" (the acceptor listens). */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "relay.h"

#define TCP_BACKLOG 128
#define FULL_PAUSE_NS 10000000 /* no descriptor left: let some come back rather than spin */

/* A guest whose host went away is noticed within 25 s. */
static void make_tcp_quick(int fd)
{
    const int on = 1, idle_s = 10, between_s = 5, probes = 3;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &between_s, sizeof(between_s));
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
}

static void on_listener(struct kp_watch *watch, uint32_t events)
{
    struct sockaddr_storage address = { 0 };
    socklen_t size = sizeof(address);
    char peer[48] = "unix";
    int fd = accept4(watch->fd, (struct sockaddr *)&address, &size, SOCK_CLOEXEC);

    (void)events;
    if (fd < 0) {
        const struct timespec pause = { .tv_nsec = FULL_PAUSE_NS };

        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            kp_log_rated(&the_relay.rate, KP_WARNING, "cannot accept: %s", strerror(errno));
            nanosleep(&pause, NULL);
        }
        return;
    }
    if (address.ss_family == AF_INET) {
        const struct sockaddr_in *from = (const struct sockaddr_in *)&address;
        char text[INET_ADDRSTRLEN] = "?";

        inet_ntop(AF_INET, &from->sin_addr, text, sizeof(text));
        snprintf(peer, sizeof(peer), "%s:%u", text, ntohs(from->sin_port));
        make_tcp_quick(fd);
    }
    relay_guest_admit(&the_relay, fd, peer, 0);
}

static int listen_tcp(struct relay *relay, const char *rest)
{
    struct sockaddr_in address = { .sin_family = AF_INET };
    socklen_t size = sizeof(address);
    char host[INET_ADDRSTRLEN];
    const char *colon = strrchr(rest, ':');
    const int on = 1;
    uint64_t port;
    int fd, rc = 0;

    if (!colon || (size_t)(colon - rest) >= sizeof(host) || kp_number(colon + 1, 65535, &port))
        return -EINVAL;
    memcpy(host, rest, (size_t)(colon - rest));
    host[colon - rest] = '\0';
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1)
        return -EINVAL;
    address.sin_port = htons((uint16_t)port);
    fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)); /* reopened at the same port while old connections fade */
    if (bind(fd, (struct sockaddr *)&address, size) || listen(fd, TCP_BACKLOG) ||
        getsockname(fd, (struct sockaddr *)&address, &size)) {
        rc = -errno;
        close(fd);
        return rc;
    }
    snprintf(relay->endpoint, sizeof(relay->endpoint), "tcp:%s:%u", host, ntohs(address.sin_port));
    return fd;
}

static int listen_unix(struct relay *relay, const char *path)
{
    int fd = kp_unix_listen(path, SOCK_STREAM);

    if (fd >= 0) {
        kp_copy(relay->unix_path, sizeof(relay->unix_path), path);
        snprintf(relay->endpoint, sizeof(relay->endpoint), "%s", relay->options.endpoint);
    }
    return fd;
}

int relay_listen(struct relay *relay)
{
    const char *endpoint = relay->options.endpoint;
    int fd;

    relay->listener = (struct kp_watch){ .on_event = on_listener, .fd = -1 };
    if (!strncmp(endpoint, "vsock:", 6)) { /* its guests come from the acceptor, over the control socket */
        snprintf(relay->endpoint, sizeof(relay->endpoint), "%s", endpoint);
        return 0;
    }
    if (!strncmp(endpoint, "tcp:", 4))
        fd = relay->token[0] ? listen_tcp(relay, endpoint + 4) : -EACCES; /* on a network nobody is let in without one */
    else if (!strncmp(endpoint, "unix:/", 6))
        fd = listen_unix(relay, endpoint + 5);
    else
        return -EINVAL;
    if (fd < 0)
        return fd;
    relay->listener.fd = fd;
    return kp_loop_watch(&relay->loop, &relay->listener, EPOLLIN);
}
