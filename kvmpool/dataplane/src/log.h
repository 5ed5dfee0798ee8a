/* log.h: one line a change of state, to standard error (which the starter made the program's log file). */
#ifndef KP_LOG_H
#define KP_LOG_H

#include <stdint.h>

#define KP_LOG_LINE_MAX 1024u /* bytes of one line; more is cut */

enum kp_level { KP_INFO, KP_WARNING, KP_ERROR };

/* What a peer can cause at will is logged at most KP_RATE_LINES times in KP_RATE_WINDOW_MS; the rest is counted. */
#define KP_RATE_LINES 5u
#define KP_RATE_WINDOW_MS 10000u

struct kp_rate {
    uint64_t window_from_ms;
    uint32_t lines;
    uint64_t held_back;
};

/* The name every line starts with: a binding, a domain, a program. */
void kp_log_name(const char *name);
void kp_log(enum kp_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));
void kp_log_rated(struct kp_rate *rate, enum kp_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Milliseconds on CLOCK_BOOTTIME. */
uint64_t kp_now_ms(void);

#endif
