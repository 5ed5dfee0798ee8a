/* echo_session.c: stands in for session.c in the tests of worker and relay: no CUDA, a few words that a test needs.
 *
 * After the welcome it reads lines: "charge N" -> "0" or "-12", "release N" -> "0", "used" -> bytes, "pid" -> its pid,
 * "crash" dies by SIGSEGV, "stop" hangs for ever, "quit" ends; anything else comes back as it was.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "session.h"

static int one_line(const struct kp_session *session, int fd, const char *line)
{
    char answer[256];

    snprintf(answer, sizeof(answer), "%s", line);
    if (!strncmp(line, "charge ", 7)) {
        snprintf(answer, sizeof(answer), "%d\n", kp_account_charge(session->account, session->slot, strtoull(line + 7, NULL, 10)));
    } else if (!strncmp(line, "release ", 8)) {
        kp_account_release(session->account, session->slot, strtoull(line + 8, NULL, 10));
        snprintf(answer, sizeof(answer), "0\n");
    } else if (!strcmp(line, "used\n")) {
        snprintf(answer, sizeof(answer), "%llu\n", (unsigned long long)kp_account_used(session->account));
    } else if (!strcmp(line, "pid\n")) {
        snprintf(answer, sizeof(answer), "%d\n", (int)getpid());
    } else if (!strcmp(line, "card\n")) {
        snprintf(answer, sizeof(answer), "%s\n", getenv("CUDA_VISIBLE_DEVICES"));
    } else if (!strcmp(line, "crash\n")) {
        setrlimit(RLIMIT_CORE, &(struct rlimit){ 0, 0 });
        signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
    } else if (!strcmp(line, "stop\n")) {
        for (;;)
            pause();
    } else if (!strcmp(line, "quit\n")) {
        return 1;
    }
    return kp_write_full(fd, answer, strlen(answer));
}

int kp_session_run(const struct kp_session *session, int fd, const struct kp_hello *hello)
{
    struct kp_welcome welcome = { .memory_bytes = session->memory_bytes };
    char line[200];
    size_t used = 0;

    memcpy(welcome.caps_hash, hello->caps_hash, sizeof(welcome.caps_hash));
    memcpy(welcome.uuid, session->uuid, sizeof(welcome.uuid));
    memcpy(welcome.pci, session->pci, sizeof(welcome.pci));
    if (kp_welcome_write(fd, &welcome))
        return -EPIPE;
    while (used < sizeof(line) - 1 && read(fd, line + used, 1) == 1) {
        if (line[used++] != '\n')
            continue;
        line[used] = '\0';
        used = 0;
        if (one_line(session, fd, line))
            break;
    }
    return 0;
}
