/* control.h: the local SOCK_SEQPACKET sockets between kvmpoold, relay, worker and acceptor, and the lock that proves one alive.
 *
 * A message is "VERB word word...", then optionally a newline and a payload; it may carry one descriptor. An answer is "OK",
 * "ERROR <one line>" or a JSON object. Only root and the program's own user are spoken to.
 */
#ifndef KP_CONTROL_H
#define KP_CONTROL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "json.h"

#define KP_CONTROL_MAX 32768u   /* bytes of one message */
#define KP_CONTROL_WORDS 8u     /* words of one message */
#define KP_CONTROL_BACKLOG 64   /* connections not yet accepted */
#define KP_CONTROL_NAME_MAX 80u /* bytes of a socket's file name: what is left of sun_path beside /proc/self/fd/N/ */
#define KP_DOMAIN_MAX 256u      /* bytes of a domain's name, with the terminator */
#define KP_UUID_MAX 37u         /* bytes of a uuid as text, with the terminator */
#define KP_PATH_MAX 512u        /* bytes of a path in an option or message, with the terminator */

struct kp_message {
    char text[KP_CONTROL_MAX + 1]; /* as received, cut into words in place */
    char *word[KP_CONTROL_WORDS];  /* word[0]: the verb; "" where absent */
    size_t words;
    char *payload; /* after the first newline; terminated; "" where absent */
    size_t payload_length;
    int passed_fd, second_fd; /* -1, or the receiver's to close */
};

/* Opens, flocks (retrying 500 ms: a reader may be trying it) and fills `directory/name` with "pid start-time". The descriptor
 * is the lock: every process that holds a copy holds the lock. -EWOULDBLOCK: somebody else lives. */
int kp_lock_take(const char *directory, const char *name);

/* When process `pid` started, in clock ticks since boot; 0 when it is not there. With the pid it names a process for good. */
uint64_t kp_start_time(pid_t pid);

/* A listening, non-blocking socket at `path`, replacing a stale one (the caller holds the lock). `type`: SOCK_SEQPACKET or SOCK_STREAM. */
int kp_unix_listen(const char *path, int type);

/* Connected, non-blocking; -ECONNREFUSED or -ENOENT when nobody lives there. */
int kp_unix_connect(const char *path, int type);

/* Whether the peer of this unix socket is root or our own user. */
int kp_peer_allowed(int fd);

/* Never blocks, never raises SIGPIPE. A descriptor of -1: none. 0 or -errno. */
int kp_control_send(int fd, const void *text, size_t length, int pass_fd);
int kp_control_send_two(int fd, const void *text, size_t length, int pass_fd, int second_fd);
int kp_control_say(int fd, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The object that was written as the answer, or that it does not fit a message. */
void kp_control_answer(int fd, const struct kp_json *json);

/* A new connection of root or our own user, non-blocking; -EACCES after another user's was cut, other -errno: none. */
int kp_control_accept(int listener);

/* 1: a message; 0: the peer closed; -EAGAIN: nothing now; other -errno: the connection is unusable. */
int kp_control_receive(int fd, struct kp_message *message);
void kp_message_close(struct kp_message *message); /* the descriptors that nobody took */

/* The stream socket that came with it, the caller's from now on; -1 where none did. */
int kp_control_stream(struct kp_message *message);

/* An option's or word's value as a number of at most `maximum`; 0 or -EINVAL. */
int kp_number(const char *text, uint64_t maximum, uint64_t *value);

/* Whether `text` is a non-empty name of letters, digits, '.', '_', '-' and '+' that fits `size`, and not "." or "..". */
int kp_name_valid(const char *text, size_t size);

/* Copies `text` when it fits; 0 or -ENAMETOOLONG. */
int kp_copy(char *to, size_t size, const char *text);

/* Detaches from the starter: forks, the parent leaves with 0, the child leads a session of its own. */
int kp_detach(void);

#endif
