/* options.h: a program's command line from one table. */
#ifndef KP_OPTIONS_H
#define KP_OPTIONS_H

#include <stddef.h>
#include <stdint.h>

enum kp_option_kind {
    KP_TEXT,   /* to: char[limit] */
    KP_NAME,   /* likewise, of letters, digits, . _ - + */
    KP_NUMBER, /* to: uint64_t of at most limit */
    KP_FLAG,   /* to: int, set to 1; takes no value */
    KP_EACH,   /* may come several times: `each` is called with `to` and the value */
};

struct kp_option {
    const char *name;
    enum kp_option_kind kind;
    int required;
    void *to;
    uint64_t limit;
    int (*each)(void *to, const char *value); /* 0 or -errno */
};

/* Reads "--name value" pairs; 0, or -EINVAL after one line to standard error that names the option. */
int kp_options_read(const char *program, const struct kp_option *table, size_t count, int argc, char **argv);

#endif
