/* control.c: see control.h. */
#define _GNU_SOURCE
#include "control.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define LOCK_TRIES 50 /* times 10 ms */
#define FDS_MAX 4     /* descriptors a message may carry before the kernel drops the rest; all but two are closed */

/* The 22nd field of /proc/PID/stat: clock ticks since boot; with the pid it names a process for good. */
uint64_t kp_start_time(pid_t pid)
{
    unsigned long long ticks = 0;
    char line[1024];
    const char *at;
    FILE *file;

    snprintf(line, sizeof(line), "/proc/%d/stat", (int)pid);
    file = fopen(line, "re");
    if (!file)
        return 0;
    at = fgets(line, sizeof(line), file) ? strrchr(line, ')') : NULL;
    fclose(file);
    for (int field = 2; at && field < 22; field++)
        at = strchr(at + 1, ' ');
    if (at)
        ticks = strtoull(at, NULL, 10);
    return ticks;
}

static int same_file(int fd, const char *path)
{
    struct stat ours, named;

    return !fstat(fd, &ours) && !stat(path, &named) && ours.st_dev == named.st_dev && ours.st_ino == named.st_ino;
}

/* Through a descriptor of its own: the lock's is only good for reading, because sessions inherit it, and whoever writes the file
 * says which process is signalled. */
static int sign(const char *path)
{
    int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC | O_NOFOLLOW), rc = 0;

    if (fd < 0)
        return -errno;
    if (dprintf(fd, "%d %llu\n", (int)getpid(), (unsigned long long)kp_start_time(getpid())) < 0)
        rc = -EIO;
    close(fd);
    return rc;
}

int kp_lock_take(const char *directory, const char *name)
{
    char path[KP_PATH_MAX + KP_CONTROL_NAME_MAX];
    const struct timespec pause = { .tv_nsec = 10000000 };

    if ((size_t)snprintf(path, sizeof(path), "%s/%s", directory, name) >= sizeof(path))
        return -ENAMETOOLONG;
    for (int try = 0; try < LOCK_TRIES; try++) {
        int fd = open(path, O_RDONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0640);

        if (fd < 0)
            return -errno;
        if (!flock(fd, LOCK_EX | LOCK_NB) && same_file(fd, path)) {
            int rc = sign(path);

            if (!rc)
                return fd;
            close(fd);
            return rc;
        }
        close(fd);
        nanosleep(&pause, NULL);
    }
    return -EWOULDBLOCK;
}

/* sun_path holds 108 bytes, a run directory may be deeper: go through a descriptor of the directory. */
static int address_of(const char *path, struct sockaddr_un *address, int *directory_fd)
{
    const char *slash = strrchr(path, '/');
    char directory[KP_PATH_MAX];

    *address = (struct sockaddr_un){ .sun_family = AF_UNIX };
    *directory_fd = -1;
    if (!slash || slash == path || (size_t)(slash - path) >= sizeof(directory) || strlen(slash + 1) >= KP_CONTROL_NAME_MAX)
        return -ENAMETOOLONG;
    memcpy(directory, path, (size_t)(slash - path));
    directory[slash - path] = '\0';
    *directory_fd = open(directory, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (*directory_fd < 0)
        return -errno;
    snprintf(address->sun_path, sizeof(address->sun_path), "/proc/self/fd/%d/%.*s", *directory_fd,
         (int)KP_CONTROL_NAME_MAX, slash + 1);
    return 0;
}

int kp_unix_listen(const char *path, int type)
{
    struct sockaddr_un address;
    int directory_fd, rc, fd;

    rc = address_of(path, &address, &directory_fd);
    if (rc)
        return rc;
    fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        rc = -errno;
        goto out;
    }
    unlink(address.sun_path);
    if (bind(fd, (struct sockaddr *)&address, sizeof(address)) || chmod(address.sun_path, 0660) ||
        listen(fd, KP_CONTROL_BACKLOG)) {
        rc = -errno;
        close(fd);
    }
out:
    close(directory_fd);
    return rc ? rc : fd;
}

int kp_unix_connect(const char *path, int type)
{
    struct sockaddr_un address;
    int directory_fd, rc, fd;

    rc = address_of(path, &address, &directory_fd);
    if (rc)
        return rc;
    fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        rc = -errno;
    } else if (connect(fd, (struct sockaddr *)&address, sizeof(address))) {
        rc = -errno;
        close(fd);
    }
    close(directory_fd);
    return rc ? rc : fd;
}

int kp_peer_allowed(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof(peer);

    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) && (peer.uid == 0 || peer.uid == geteuid());
}

int kp_control_send(int fd, const void *text, size_t length, int pass_fd)
{
    return kp_control_send_two(fd, text, length, pass_fd, -1);
}

int kp_control_send_two(int fd, const void *text, size_t length, int pass_fd, int second_fd)
{
    const int fds[2] = { pass_fd, second_fd };
    size_t room = (pass_fd >= 0) * sizeof(int) + (pass_fd >= 0 && second_fd >= 0) * sizeof(int);
    union {
        char bytes[CMSG_SPACE(sizeof(fds))];
        struct cmsghdr align;
    } control = { 0 };
    struct iovec part = { .iov_base = (void *)(uintptr_t)text, .iov_len = length };
    struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1 };

    if (room) {
        struct cmsghdr *rights;

        header.msg_control = control.bytes;
        header.msg_controllen = CMSG_SPACE(room);
        rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(room);
        memcpy(CMSG_DATA(rights), fds, room);
    }
    return sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 ? -errno : 0;
}

int kp_control_say(int fd, const char *format, ...)
{
    char text[KP_PATH_MAX * 2];
    va_list arguments;
    int length;

    va_start(arguments, format);
    length = vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    if (length < 0)
        return -EINVAL;
    return kp_control_send(fd, text, (size_t)length < sizeof(text) ? (size_t)length : sizeof(text) - 1, -1);
}

void kp_control_answer(int fd, const struct kp_json *json)
{
    int length = kp_json_end(json);

    if (length < 0)
        kp_control_say(fd, "ERROR the status does not fit a message");
    else
        kp_control_send(fd, json->text, (size_t)length, -1);
}

int kp_control_accept(int listener)
{
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

    if (fd < 0)
        return -errno;
    if (kp_peer_allowed(fd))
        return fd;
    close(fd);
    return -EACCES;
}

static void take_descriptors(struct msghdr *header, struct kp_message *message)
{
    for (struct cmsghdr *part = CMSG_FIRSTHDR(header); part; part = CMSG_NXTHDR(header, part)) {
        size_t count;

        if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS)
            continue;
        count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < count; i++) {
            int fd;

            memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
            if (message->passed_fd < 0)
                message->passed_fd = fd;
            else if (message->second_fd < 0)
                message->second_fd = fd;
            else
                close(fd);
        }
    }
}

void kp_message_close(struct kp_message *message)
{
    if (message->passed_fd >= 0)
        close(message->passed_fd);
    if (message->second_fd >= 0)
        close(message->second_fd);
    message->passed_fd = message->second_fd = -1;
}

static void cut_into_words(struct kp_message *message, size_t length)
{
    static char nothing[1];
    char *at = message->text, *newline;

    message->text[length] = '\0';
    newline = memchr(message->text, '\n', length);
    message->payload = newline ? newline + 1 : nothing;
    message->payload_length = newline ? length - (size_t)(message->payload - message->text) : 0;
    if (newline)
        *newline = '\0';
    message->words = 0;
    for (size_t i = 0; i < KP_CONTROL_WORDS; i++) {
        message->word[i] = nothing;
        at += strspn(at, " ");
        if (!*at)
            continue;
        message->word[i] = at;
        message->words++;
        at += strcspn(at, " ");
        if (*at)
            *at++ = '\0';
    }
}

int kp_control_receive(int fd, struct kp_message *message)
{
    union {
        char bytes[CMSG_SPACE(sizeof(int) * FDS_MAX)];
        struct cmsghdr align;
    } control;
    struct iovec part = { .iov_base = message->text, .iov_len = KP_CONTROL_MAX };
    struct msghdr header = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                 .msg_controllen = sizeof(control.bytes) };
    ssize_t length = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);

    message->passed_fd = message->second_fd = -1;
    if (length < 0)
        return errno == EINTR ? -EAGAIN : -errno;
    take_descriptors(&header, message);
    if (length == 0 || (header.msg_flags & MSG_TRUNC)) {
        kp_message_close(message);
        return length == 0 ? 0 : -EMSGSIZE;
    }
    cut_into_words(message, (size_t)length);
    return 1;
}

int kp_control_stream(struct kp_message *message)
{
    int type = 0, fd = message->passed_fd;
    socklen_t size = sizeof(type);

    if (fd < 0 || getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) || type != SOCK_STREAM)
        return -1; /* whoever received the message closes it */
    message->passed_fd = -1;
    return fd;
}

int kp_number(const char *text, uint64_t maximum, uint64_t *value)
{
    char *end;

    if (!isdigit((unsigned char)text[0]))
        return -EINVAL;
    errno = 0;
    *value = strtoull(text, &end, 10);
    return errno || *end || *value > maximum ? -EINVAL : 0;
}

int kp_name_valid(const char *text, size_t size)
{
    size_t length = strlen(text);

    if (!length || length >= size || !strcmp(text, ".") || !strcmp(text, ".."))
        return 0;
    for (size_t i = 0; i < length; i++)
        if (!isalnum((unsigned char)text[i]) && !strchr("._-+", text[i]))
            return 0;
    return 1;
}

int kp_copy(char *to, size_t size, const char *text)
{
    size_t length = strlen(text);

    if (length >= size)
        return -ENAMETOOLONG;
    memcpy(to, text, length + 1);
    return 0;
}

int kp_detach(void)
{
    pid_t pid = fork();

    if (pid < 0)
        return -errno;
    if (pid > 0)
        _exit(0);
    return setsid() < 0 ? -errno : 0;
}
