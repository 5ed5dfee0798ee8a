/* relay_options.c: the relay's command line and token. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "options.h"
#include "relay.h"

static int add_claim(void *to, const char *value)
{
    return relay_claim_add(to, value) ? 0 : -EINVAL;
}

int relay_options_read(struct relay *relay, int argc, char **argv)
{
    struct relay_options *options = &relay->options;
    uint64_t ready_fd = UINT64_MAX;
    const struct kp_option table[] = {
        { "uuid", KP_NAME, 1, options->uuid, sizeof(options->uuid), NULL },
        { "domain", KP_TEXT, 1, options->domain, sizeof(options->domain), NULL },
        { "dir", KP_TEXT, 1, options->directory, sizeof(options->directory), NULL },
        { "endpoint", KP_TEXT, 1, options->endpoint, sizeof(options->endpoint), NULL },
        { "token-file", KP_TEXT, 0, options->token_file, sizeof(options->token_file), NULL },
        { "window", KP_TEXT, 0, options->window, sizeof(options->window), NULL },
        { "claim", KP_EACH, 0, relay, RELAY_CLAIMS, add_claim },
        { "hello-ms", KP_NUMBER, 0, &options->hello_ms, 60000, NULL },
        { "hold-ms", KP_NUMBER, 0, &options->hold_ms, 600000, NULL },
        { "ready-fd", KP_NUMBER, 0, &ready_fd, 1 << 16, NULL },
        { "detach", KP_FLAG, 0, &options->detach, 0, NULL },
    };

    *options = (struct relay_options){ .hello_ms = RELAY_HELLO_MS, .hold_ms = RELAY_HOLD_MS };
    if (kp_options_read("kvmpool-relay", table, sizeof(table) / sizeof(table[0]), argc, argv))
        return -EINVAL;
    options->ready_fd = ready_fd == UINT64_MAX ? -1 : (int)ready_fd;
    return 0;
}

int relay_token_read(struct relay *relay)
{
    char text[RELAY_TOKEN_MAX + 1];
    ssize_t length;
    int fd;

    if (!relay->options.token_file[0])
        return 0;
    fd = open(relay->options.token_file, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    length = read(fd, text, sizeof(text));
    close(fd);
    while (length > 0 && (text[length - 1] == '\n' || text[length - 1] == '\r'))
        length--;
    if (length <= 0 || (size_t)length >= RELAY_TOKEN_MAX) /* an empty file must not mean "none is asked for" */
        return -EINVAL;
    memcpy(relay->token, text, (size_t)length);
    return 0;
}
