/* log.c: see log.h. One write(2) a line, so that lines of several processes never mix. */
#define _GNU_SOURCE
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static char log_name[320] = "kvmpool";

void kp_log_name(const char *name)
{
    snprintf(log_name, sizeof(log_name), "%s", name);
}

uint64_t kp_now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}

static void write_line(enum kp_level level, const char *format, va_list arguments)
{
    static const char *const words[] = { "INFO", "WARNING", "ERROR" };
    char line[KP_LOG_LINE_MAX], stamp[32];
    struct timespec now;
    struct tm utc;
    int used, more;
    size_t length;

    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &utc);
    strftime(stamp, sizeof(stamp), "%Y-%m-%dT%H:%M:%S", &utc);
    used = snprintf(line, sizeof(line), "%s.%03ldZ %s %s: ", stamp, now.tv_nsec / 1000000, words[level], log_name);
    if (used < 0)
        return;
    more = vsnprintf(line + used, sizeof(line) - (size_t)used, format, arguments);
    if (more < 0)
        return;
    length = strnlen(line, sizeof(line) - 1);
    for (size_t i = (size_t)used; i < length; i++) /* what a peer sent may be in it: one line of text stays that */
        if (line[i] < 0x20 || line[i] > 0x7e)
            line[i] = '?';
    line[length++] = '\n';
    if (write(STDERR_FILENO, line, length) < 0)
        return; /* a full disk must not end a guest's session */
}

void kp_log(enum kp_level level, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    write_line(level, format, arguments);
    va_end(arguments);
}

void kp_log_rated(struct kp_rate *rate, enum kp_level level, const char *format, ...)
{
    uint64_t now = kp_now_ms();
    va_list arguments;

    if (now - rate->window_from_ms >= KP_RATE_WINDOW_MS) {
        if (rate->held_back)
            kp_log(level, "%llu more lines like the last ones were held back", (unsigned long long)rate->held_back);
        *rate = (struct kp_rate){ .window_from_ms = now };
    }
    if (rate->lines >= KP_RATE_LINES) {
        rate->held_back++;
        return;
    }
    rate->lines++;
    va_start(arguments, format);
    write_line(level, format, arguments);
    va_end(arguments);
}
