/* relay_listen.c: the endpoint: "tcp:HOST:PORT" (port 0: chosen here), "unix:/path", "vsock:2:PORT" (the acceptor listens). */
#define _GNU_SOURCE
#include <errno.h>
#include <netdb.h>
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
    char peer[sizeof(the_relay.guests[0].peer)] = "unix";
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
    if (address.ss_family == AF_INET || address.ss_family == AF_INET6) {
        char host[INET6_ADDRSTRLEN] = "?", port[8] = "?";

        getnameinfo((struct sockaddr *)&address, size, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV);
        snprintf(peer, sizeof(peer), "%s port %s", host, port);
        make_tcp_quick(fd);
    }
    relay_guest_admit(&the_relay, fd, peer, 0);
}

/* "ADDRESS:PORT" or "[ADDRESS6]:PORT": where the address begins and ends, and the port. */
static int split(const char *rest, char *host, size_t size, uint64_t *port)
{
    const char *colon = strrchr(rest, ':');
    size_t length;

    if (!colon || kp_number(colon + 1, 65535, port))
        return -EINVAL;
    length = (size_t)(colon - rest);
    if (length >= 2 && rest[0] == '[' && rest[length - 1] == ']') {
        rest++;
        length -= 2;
    } else if (memchr(rest, ':', length)) {
        return -EINVAL;
    }
    if (!length || length >= size)
        return -EINVAL;
    memcpy(host, rest, length);
    host[length] = '\0';
    return 0;
}

static int bind_and_listen(const struct addrinfo *at, uint64_t *port)
{
    struct sockaddr_storage bound = { 0 };
    socklen_t size = sizeof(bound);
    int rc, fd = socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const int on = 1;

    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)); /* reopened at the same port while old connections fade */
    if (!bind(fd, at->ai_addr, at->ai_addrlen) && !listen(fd, TCP_BACKLOG) &&
        !getsockname(fd, (struct sockaddr *)&bound, &size)) {
        *port = ntohs(bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port
                                                  : ((struct sockaddr_in *)&bound)->sin_port);
        return fd;
    }
    rc = -errno;
    close(fd);
    return rc;
}

static int listen_tcp(struct relay *relay, const char *rest)
{
    const struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_PASSIVE | AI_NUMERICSERV };
    struct addrinfo *found = NULL;
    char host[RELAY_ENDPOINT_MAX];
    uint64_t port;
    int fd;

    if (split(rest, host, sizeof(host), &port) || getaddrinfo(host, strrchr(rest, ':') + 1, &hints, &found))
        return -EINVAL;
    fd = bind_and_listen(found, &port);
    freeaddrinfo(found);
    if (fd >= 0) /* the address as it was given: what a guest can dial is for the configuration to know */
        snprintf(relay->endpoint, sizeof(relay->endpoint), "tcp:%.*s:%u", (int)(strrchr(rest, ':') - rest), rest,
                 (unsigned)port);
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
