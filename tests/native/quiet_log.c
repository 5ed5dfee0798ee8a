/* quiet_log.c: log.h for fuzz targets: writes nothing, so that what a sanitizer says is all there is; checks what it is given. */
#define _GNU_SOURCE
#include "log.h"

#include <stdarg.h>
#include <stdio.h>
#include <time.h>

static void format_only(const char *format, va_list arguments)
{
    char line[KP_LOG_LINE_MAX];

    vsnprintf(line, sizeof(line), format, arguments);
}

void kp_log_name(const char *name)
{
    (void)name;
}

void kp_log(enum kp_level level, const char *format, ...)
{
    va_list arguments;

    (void)level;
    va_start(arguments, format);
    format_only(format, arguments);
    va_end(arguments);
}

void kp_log_rated(struct kp_rate *rate, enum kp_level level, const char *format, ...)
{
    va_list arguments;

    (void)level;
    rate->lines++;
    va_start(arguments, format);
    format_only(format, arguments);
    va_end(arguments);
}

uint64_t kp_now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_BOOTTIME, &now);
    return (uint64_t)now.tv_sec * 1000u + (uint64_t)now.tv_nsec / 1000000u;
}
