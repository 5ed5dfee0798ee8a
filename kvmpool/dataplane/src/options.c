/* options.c: see options.h. */
#define _GNU_SOURCE
#include "options.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "control.h"

#define OPTIONS_MAX 32u

static int take(const struct kp_option *option, const char *value)
{
    switch (option->kind) {
    case KP_FLAG:
        *(int *)option->to = 1;
        return 0;
    case KP_NAME:
        if (!kp_name_valid(value, option->limit))
            return -EINVAL;
        return kp_copy(option->to, option->limit, value);
    case KP_TEXT:
        return value[0] ? kp_copy(option->to, option->limit, value) : -EINVAL;
    case KP_NUMBER:
        return kp_number(value, option->limit, option->to);
    default:
        return option->each(option->to, value);
    }
}

static const struct kp_option *find(const struct kp_option *table, size_t count, const char *word)
{
    if (strncmp(word, "--", 2))
        return NULL;
    for (size_t i = 0; i < count; i++)
        if (!strcmp(table[i].name, word + 2))
            return &table[i];
    return NULL;
}

int kp_options_read(const char *program, const struct kp_option *table, size_t count, int argc, char **argv)
{
    uint32_t seen = 0;

    if (count > OPTIONS_MAX)
        return -EINVAL;
    for (int i = 1; i < argc; i++) {
        const struct kp_option *option = find(table, count, argv[i]);
        const char *value = "";

        if (!option || (option->kind != KP_FLAG && ++i >= argc)) {
            fprintf(stderr, "%s: %s \"%s\"\n", program, option ? "a value is missing after" : "there is no option",
                    option ? argv[i - 1] : argv[i]);
            return -EINVAL;
        }
        if (option->kind != KP_FLAG)
            value = argv[i];
        if (take(option, value)) {
            fprintf(stderr, "%s: --%s \"%s\" is not usable (%s at most %llu)\n", program, option->name, value,
                    option->kind == KP_NUMBER ? "a number of" : "a text shorter than its limit,",
                    (unsigned long long)option->limit);
            return -EINVAL;
        }
        seen |= UINT32_C(1) << (option - table);
    }
    for (size_t i = 0; i < count; i++) {
        if (!table[i].required || seen & UINT32_C(1) << i)
            continue;
        fprintf(stderr, "%s: --%s is missing\n", program, table[i].name);
        return -EINVAL;
    }
    return 0;
}
