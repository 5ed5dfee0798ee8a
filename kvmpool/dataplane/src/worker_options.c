/* worker_options.c: the worker's command line. */
#define _GNU_SOURCE
#include "worker.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "options.h"

int worker_uuid_parse(const char *text, uint8_t uuid[16])
{
    static const char shape[] = "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", hex[] = "0123456789abcdef";
    unsigned digits = 0;

    if (strlen(text) != sizeof(shape) - 1)
        return -EINVAL;
    for (size_t i = 0; shape[i]; i++) {
        const char *at;

        if ((shape[i] == '-') != (text[i] == '-'))
            return -EINVAL;
        if (shape[i] == '-')
            continue;
        at = memchr(hex, text[i] | 0x20, sizeof(hex) - 1);
        if (!at)
            return -EINVAL;
        uuid[digits / 2] = (uint8_t)(digits % 2 ? uuid[digits / 2] << 4 | (at - hex) : at - hex);
        digits++;
    }
    return 0;
}

static int uuid_option(void *to, const char *value)
{
    uint8_t uuid[16];

    return worker_uuid_parse(value, uuid) ? -EINVAL : kp_copy(to, KP_UUID_MAX, value);
}

static int claim_option(void *to, const char *value)
{
    char name[32] = "";

    if (kp_copy(name, sizeof(name), value) || kp_claim_name_check(name, sizeof(name)))
        return -EINVAL;
    memcpy(to, name, sizeof(name));
    return 0;
}

int worker_options_read(struct worker_options *options, int argc, char **argv)
{
    uint64_t ready_fd = UINT64_MAX;
    const struct kp_option table[] = {
        { "uuid", KP_EACH, 1, options->uuid, 36, uuid_option },
        { "domain", KP_TEXT, 1, options->domain, sizeof(options->domain), NULL },
        { "claim", KP_EACH, 1, options->claim, sizeof(options->claim), claim_option },
        { "generation", KP_NUMBER, 1, &options->generation, INT64_MAX, NULL },
        { "dir", KP_TEXT, 1, options->directory, sizeof(options->directory), NULL },
        { "card", KP_NAME, 1, options->card, sizeof(options->card), NULL },
        { "memory-mib", KP_NUMBER, 1, &options->memory_mib, KP_ACCOUNT_LIMIT_MAX >> 20, NULL },
        { "pinned-mib", KP_NUMBER, 0, &options->pinned_mib, KP_ACCOUNT_LIMIT_MAX >> 20, NULL },
        { "compute", KP_NUMBER, 0, &options->compute_percent, 100, NULL },
        { "compute-limit", KP_NUMBER, 0, &options->compute_limit_percent, 100, NULL },
        { "launch-timeout-ms", KP_NUMBER, 0, &options->launch_timeout_ms, UINT64_C(1) << 32, NULL },
        { "mps", KP_FLAG, 0, &options->confine.mps, 0, NULL },
        { "virtual-uuid", KP_EACH, 1, options->virtual_uuid, 36, uuid_option },
        { "virtual-pci", KP_TEXT, 1, options->virtual_pci, sizeof(options->virtual_pci), NULL },
        { "card-deadline-ms", KP_NUMBER, 0, &options->card_deadline_ms, 600000, NULL },
        { "ready-fd", KP_NUMBER, 0, &ready_fd, 1 << 16, NULL },
        { "user", KP_NAME, 0, options->confine.user, sizeof(options->confine.user), NULL },
        { "session-memory-mib", KP_NUMBER, 0, &options->confine.memory_mib, KP_ACCOUNT_LIMIT_MAX >> 20, NULL },
        { "session-tasks", KP_NUMBER, 0, &options->confine.tasks, 1 << 20, NULL },
        { "session-cpus", KP_NUMBER, 0, &options->confine.cpus, 1 << 16, NULL },
        { "detach", KP_FLAG, 0, &options->detach, 0, NULL },
    };

    *options = (struct worker_options){ .card_deadline_ms = WORKER_CARD_MS, .compute_limit_percent = 100 };
    if (kp_options_read("kvmpool-worker", table, sizeof(table) / sizeof(table[0]), argc, argv))
        return -EINVAL;
    options->ready_fd = ready_fd == UINT64_MAX ? -1 : (int)ready_fd;
    return 0;
}
