/* Finds the endpoint and greets: where the claim's worker is reached, and what it says.
 *
 * Order: KVMPOOL_ENDPOINT, /etc/kvmpool/guest.conf, /run/kvmpool/{endpoint,token,claim} (from fw_cfg), the host's vsock
 * port. An endpoint is unix:/path, tcp:HOST:PORT or vsock:CID:PORT; HOST is a number, or a name where the C library can
 * resolve one. This file does not send calls.
 */
#define _GNU_SOURCE
#include "shim.h"
#include "shim_dial.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/vm_sockets.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#define GREETING_SECONDS 30 /* a worker that starts its driver takes a few; a lost packet on the way more */
#define SILENCE_SECONDS 60 /* longer than a pause of the domain while it migrates */
#define TEXT_MAX 256
#define TRIES 4 /* windows that another process of the guest still has, until it goes without */

struct endpoint {
    char address[TEXT_MAX];
    char token[sizeof((struct kp_hello *)0)->token];
    char claim[sizeof((struct kp_hello *)0)->claim];
};

/* A value that does not fit becomes one that no hello may carry: cut short it would be another's name or token. */
static void put(char *to, size_t room, const char *value)
{
    memset(to, 0, room);
    if (strlen(value) < room)
        memcpy(to, value, strlen(value));
    else
        to[0] = 1;
}

/* The first line of a file, without spaces at its ends; false where there is none. */
static bool read_line(const char *path, char *to, size_t room)
{
    char line[TEXT_MAX] = "";
    FILE *file = fopen(path, "re");
    bool found = file != NULL && fgets(line, sizeof line, file) != NULL;

    if (file != NULL)
        fclose(file);
    line[strcspn(line, "\r\n \t")] = 0;
    if (found && line[0] != 0)
        put(to, room, line);
    return found && line[0] != 0;
}

/* guest.conf: lines `endpoint = X`, `token = X`, `claim = X`; others are passed over. */
static void read_config(const char *path, struct endpoint *to)
{
    char line[TEXT_MAX], key[32], value[TEXT_MAX];
    FILE *file = fopen(path, "re");

    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, " %31[a-z] = %255s", key, value) != 2)
            continue;
        if (strcmp(key, "endpoint") == 0)
            put(to->address, sizeof to->address, value);
        if (strcmp(key, "token") == 0)
            put(to->token, sizeof to->token, value);
        if (strcmp(key, "claim") == 0)
            put(to->claim, sizeof to->claim, value);
    }
    if (file != NULL)
        fclose(file);
}

static void from_environment(const char *name, char *to, size_t room)
{
    const char *value = getenv(name);

    if (value != NULL)
        put(to, room, value);
}

static void find_endpoint(struct endpoint *to)
{
    const char *no_vsock = getenv("KVMPOOL_NO_VSOCK");

    *to = (struct endpoint){.claim = "gpu0"};
    read_line("/run/kvmpool/claim", to->claim, sizeof to->claim);
    from_environment("KVMPOOL_ENDPOINT", to->address, sizeof to->address);
    if (to->address[0] == 0)
        read_config("/etc/kvmpool/guest.conf", to);
    if (to->address[0] == 0 && read_line("/run/kvmpool/endpoint", to->address, sizeof to->address))
        read_line("/run/kvmpool/token", to->token, sizeof to->token);
    if (to->address[0] == 0 && (no_vsock == NULL || strcmp(no_vsock, "1") != 0))
        snprintf(to->address, sizeof to->address, "vsock:%u:%u", VMADDR_CID_HOST, KP_PORT);
    from_environment("KVMPOOL_TOKEN", to->token, sizeof to->token);
    from_environment("KVMPOOL_CLAIM", to->claim, sizeof to->claim);
}

static int connected(int fd, const struct sockaddr *address, socklen_t length)
{
    int rc;

    if (fd < 0)
        return -errno;
    do
        rc = connect(fd, address, length);
    while (rc != 0 && errno == EINTR);
    if (rc != 0) {
        rc = -errno;
        close(fd);
        return rc;
    }
    return fd;
}

static int connect_unix(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    if (strlen(path) >= sizeof address.sun_path)
        return -ENAMETOOLONG;
    strcpy(address.sun_path, path);
    int fd = connected(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), (struct sockaddr *)&address, sizeof address);
    if (fd >= 0)
        kp_socket_widen(fd);
    return fd;
}

/* Small calls at once, and a host that vanished without a word is noticed; unix and vsock need neither. */
static void tune_tcp(int fd)
{
    int on = 1, idle = SILENCE_SECONDS / 4, tries = 3, silence_ms = SILENCE_SECONDS * 1000;

    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &idle, sizeof idle);
    setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &tries, sizeof tries);
    setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silence_ms, sizeof silence_ms);
}

static int connect_tcp(char *host)
{
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV}, *found, *at;
    char *port = strrchr(host, ':');
    int fd = -ENOENT;

    if (port == NULL)
        return -EINVAL;
    *port++ = 0;
    if (host[0] == '[' && port - host > 2) { /* [::1]:port */
        host++;
        host[strcspn(host, "]")] = 0;
    }
    if (getaddrinfo(host, port, &hints, &found) != 0) { /* numbers first: they need no resolver of the C library */
        hints.ai_flags = AI_NUMERICSERV;
        if (getaddrinfo(host, port, &hints, &found) != 0)
            return -EHOSTUNREACH;
    }
    for (at = found; at != NULL && fd < 0; at = at->ai_next)
        fd = connected(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0), at->ai_addr, at->ai_addrlen);
    freeaddrinfo(found);
    if (fd >= 0)
        tune_tcp(fd);
    return fd;
}

static int connect_vsock(const char *text)
{
    struct sockaddr_vm address = {.svm_family = AF_VSOCK};

    if (sscanf(text, "%u:%u", &address.svm_cid, &address.svm_port) != 2)
        return -EINVAL;
    return connected(socket(AF_VSOCK, SOCK_STREAM | SOCK_CLOEXEC, 0), (struct sockaddr *)&address, sizeof address);
}

static int connect_endpoint(char *address)
{
    if (strncmp(address, "unix:", 5) == 0)
        return connect_unix(address + 5);
    if (strncmp(address, "tcp:", 4) == 0)
        return connect_tcp(address + 4);
    if (strncmp(address, "vsock:", 6) == 0)
        return connect_vsock(address + 6);
    return -EINVAL;
}

/* What the greeting asks for. */
struct wish {
    bool window, observer;
    int seconds; /* that an answer is waited for */
};

static void limit_wait(int fd, int seconds)
{
    struct timeval limit = {.tv_sec = seconds};

    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

static uint32_t window_flag(int fd)
{
    const char *wish = getenv("KVMPOOL_SHM");

    if (wish != NULL && strcmp(wish, "0") == 0)
        return 0;
    return kp_window_possible(fd) ? KP_HELLO_WINDOW : kp_slots_seen() ? KP_HELLO_DEVICE : 0;
}

static int greet(int fd, const struct endpoint *endpoint, const struct wish *wish, struct kp_welcome *welcome, int *memory)
{
    const uint8_t hash[16] = KP_CAPS_HASH;
    struct kp_hello hello = {.wire_version = KP_WIRE_VERSION, .pid = (uint32_t)getpid(), .va_base = KP_VA_BASE};
    const char *program = program_invocation_short_name;
    int rc;

    memcpy(hello.caps_hash, hash, sizeof hash);
    snprintf(hello.claim, sizeof hello.claim, "%s", endpoint->claim);
    snprintf(hello.token, sizeof hello.token, "%s", endpoint->token);
    for (size_t i = 0; program != NULL && program[i] != 0 && i < sizeof hello.program - 1; i++)
        hello.program[i] = program[i] >= 0x20 && program[i] <= 0x7e ? program[i] : '?';
    if (getrandom(&hello.nonce, sizeof hello.nonce, GRND_NONBLOCK) < 0)
        hello.nonce = (uint64_t)getpid();
    if (kp_hello_check(&hello, sizeof hello, &hello) != 0)
        return -EINVAL;
    hello.flags = wish->observer ? KP_HELLO_OBSERVER : wish->window ? window_flag(fd) : 0;
    limit_wait(fd, wish->seconds);
    rc = kp_hello_write(fd, &hello);
    if (rc == 0)
        rc = kp_window_welcome_read(fd, welcome, memory);
    limit_wait(fd, 0);
    return rc;
}

/* What CUDA says where the relay or worker said `status`. */
static CUresult refusal(int status)
{
    switch (status) {
    case -ENOENT:
    case -EACCES:
    case -EPERM: return CUDA_ERROR_NO_DEVICE;
    case -ENOMEM: return CUDA_ERROR_OUT_OF_MEMORY;
    case -EPROTO: return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    default: return CUDA_ERROR_DEVICE_UNAVAILABLE;
    }
}

static int open_window(const struct kp_welcome *welcome, int memory, struct kp_window *window)
{
    if (memory >= 0)
        return kp_window_open(window, memory);
    return welcome->window_bytes > 0 ? kp_slots_open(welcome, window) : 0;
}

/* Connects and greets: a socket, -1 where nobody is there; where its window was no good -2 (go without) or -3 (another may be). */
static int dial(const struct endpoint *endpoint, const struct wish *wish, struct kp_welcome *welcome, struct kp_window *window,
                CUresult *why)
{
    char address[TEXT_MAX];
    int fd, rc, memory = -1;

    memcpy(address, endpoint->address, sizeof address);
    if ((fd = connect_endpoint(address)) < 0) {
        kp_log("%s: %s", endpoint->address, strerror(-fd));
        *why = fd == -EINVAL || fd == -ENODEV || fd == -EAFNOSUPPORT ? CUDA_ERROR_NO_DEVICE : CUDA_ERROR_DEVICE_UNAVAILABLE;
        return -1;
    }
    rc = greet(fd, endpoint, wish, welcome, &memory);
    int opened = rc == 0 && welcome->status == 0 ? open_window(welcome, memory, window) : 0;
    if (memory >= 0)
        close(memory);
    if (rc == 0 && welcome->status == 0 && opened == 0) {
        kp_log("%s: claim %s, %llu bytes, over %s", endpoint->address, endpoint->claim,
               (unsigned long long)welcome->memory_bytes, window->base != NULL ? "shared memory" : "its socket");
        return fd;
    }
    if (opened != 0)
        kp_log("%s: shared memory: %s", endpoint->address, strerror(-opened));
    else if (rc == -EINVAL)
        kp_log("%s: the claim's name or the token is malformed. Next: compare it with the domain's XML", endpoint->address);
    else
        kp_log("%s: claim %s: %s", endpoint->address, endpoint->claim, rc != 0 ? strerror(-rc) : welcome->text);
    *why = rc == -EINVAL ? CUDA_ERROR_NO_DEVICE : rc != 0 ? CUDA_ERROR_DEVICE_UNAVAILABLE : refusal(welcome->status);
    kp_window_close(window);
    close(fd);
    return opened == -EAGAIN ? -3 : opened != 0 ? -2 : -1;
}

static int dial_found(struct wish wish, struct kp_welcome *welcome, struct kp_window *window, CUresult *why)
{
    struct endpoint endpoint;
    int fd;

    find_endpoint(&endpoint);
    if (endpoint.address[0] == 0) {
        kp_log("no endpoint: set KVMPOOL_ENDPOINT or write /etc/kvmpool/guest.conf");
        *why = CUDA_ERROR_NO_DEVICE;
        return -1;
    }
    fd = dial(&endpoint, &wish, welcome, window, why);
    for (int i = 1; fd == -3 && i < TRIES; i++)
        fd = dial(&endpoint, &wish, welcome, window, why);
    wish.window = false;
    return fd < -1 ? dial(&endpoint, &wish, welcome, window, why) : fd;
}

int kp_dial(struct kp_welcome *welcome, struct kp_window *window, CUresult *why)
{
    return dial_found((struct wish){.window = true, .seconds = GREETING_SECONDS}, welcome, window, why);
}

int kp_dial_observer(int seconds, struct kp_welcome *welcome, CUresult *why)
{
    struct kp_window none = {.base = NULL};
    int fd = dial_found((struct wish){.observer = true, .seconds = seconds}, welcome, &none, why);

    kp_window_close(&none); /* nobody asked for one */
    return fd;
}
