/* card.c: see card.h. */
#define _GNU_SOURCE
#include "card.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int (*number_call)(unsigned);
typedef int (*device_call)(int *device, int ordinal);
typedef int (*uuid_call)(unsigned char uuid[16], int device);
typedef int (*string_call)(int result, const char **text);

/* A function of the driver by its name; the unions below are how C makes a function pointer of it. */
static void *symbol(void *driver, const char *name, char *word)
{
    void *found = dlsym(driver, name);

    if (!found)
        snprintf(word, KP_CARD_WORD_MAX, "libcuda.so.1 has no %s", name);
    return found;
}

static int failed(void *driver, const char *call, int result, char *word)
{
    union { void *object; string_call call; } name = { .object = dlsym(driver, "cuGetErrorString") };
    const char *text = NULL;

    if (name.object)
        name.call(result, &text);
    snprintf(word, KP_CARD_WORD_MAX, "%s failed: %d%s%.100s", call, result, text ? " " : "", text ? text : "");
    return -ENODEV;
}

static int check_uuid(void *driver, int device, const char *card, char *word)
{
    union { void *object; uuid_call call; } uuid = { .object = dlsym(driver, "cuDeviceGetUuid") };
    unsigned char u[16];
    char text[48];
    int result;

    if (!uuid.object)
        return 0;
    result = uuid.call(u, device);
    if (result)
        return failed(driver, "cuDeviceGetUuid", result, word);
    snprintf(text, sizeof(text), "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2],
             u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    if (!strcasecmp(text, card))
        return 0;
    snprintf(word, KP_CARD_WORD_MAX, "the driver opened %s instead", text);
    return -ENODEV;
}

static int open_card(const char *card, char *word)
{
    union { void *object; number_call call; } init;
    union { void *object; device_call call; } get;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int result, device = 0;

    if (!driver) {
        snprintf(word, KP_CARD_WORD_MAX, "no driver: %.140s", dlerror());
        return -ENODEV;
    }
    init.object = symbol(driver, "cuInit", word);
    get.object = symbol(driver, "cuDeviceGet", word);
    if (!init.object || !get.object)
        return -ENODEV;
    result = init.call(0);
    if (result)
        return failed(driver, "cuInit", result, word);
    result = get.call(&device, 0);
    if (result)
        return failed(driver, "cuDeviceGet", result, word);
    return check_uuid(driver, device, card, word);
}

/* The child's one line, or none within the deadline. */
static int listen_for(int fd, unsigned deadline_ms, char *word)
{
    struct pollfd wait = { .fd = fd, .events = POLLIN };
    int count;
    ssize_t length;

    do
        count = poll(&wait, 1, (int)deadline_ms);
    while (count < 0 && errno == EINTR);
    if (count <= 0) {
        snprintf(word, KP_CARD_WORD_MAX, "no answer in %u ms", deadline_ms);
        return -ENODEV;
    }
    length = read(fd, word, KP_CARD_WORD_MAX - 1);
    if (length <= 0) {
        snprintf(word, KP_CARD_WORD_MAX, "the driver ended the process that asked");
        return -ENODEV;
    }
    word[length] = '\0';
    return strcmp(word, "opens") ? -ENODEV : 0;
}

int kp_card_check(const struct kp_confine *confine, const char *card, unsigned deadline_ms, char word[KP_CARD_WORD_MAX])
{
    pid_t parent = getpid(), pid;
    int pipe_fds[2], rc;

    if (pipe2(pipe_fds, O_CLOEXEC)) {
        snprintf(word, KP_CARD_WORD_MAX, "no pipe: %s", strerror(errno));
        return -ENODEV;
    }
    pid = fork();
    if (pid == 0) {
        char line[KP_CARD_WORD_MAX] = "opens";

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        if (dup2(pipe_fds[1], 3) < 0 || close_range(4, ~0U, 0)) /* above all the lock: this child stands for no session */
            _exit(1);
        rc = kp_confine_enter(confine, -1);
        if (rc)
            snprintf(line, sizeof(line), "a session cannot be confined: %s", strerror(-rc));
        else
            open_card(card, line);
        _exit(write(3, line, strlen(line)) < 0);
    }
    close(pipe_fds[1]);
    if (pid < 0) {
        snprintf(word, KP_CARD_WORD_MAX, "no process: %s", strerror(errno));
        rc = -ENODEV;
    } else {
        rc = listen_for(pipe_fds[0], deadline_ms, word);
        kill(pid, SIGKILL); /* not waited for: it may be stuck in the driver; it is reaped when it can be */
    }
    close(pipe_fds[0]);
    return rc;
}
