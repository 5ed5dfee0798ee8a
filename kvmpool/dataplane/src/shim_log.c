/* The log of the guest's libraries, which only exists where KVMPOOL_LOG names a file. */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

void kp_log(const char *format, ...)
{
    const char *path = getenv("KVMPOOL_LOG");
    char line[512];
    struct timespec now;
    va_list arguments;
    int used, fd, saved = errno;

    if (path == NULL || path[0] == 0 || (fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600)) < 0)
        return;
    clock_gettime(CLOCK_REALTIME, &now);
    used = snprintf(line, sizeof line, "%lld.%03ld kvmpool[%d] ", (long long)now.tv_sec, now.tv_nsec / 1000000, (int)getpid());
    va_start(arguments, format);
    used += vsnprintf(line + used, sizeof line - (size_t)used - 1, format, arguments);
    va_end(arguments);
    if (used > (int)sizeof line - 2)
        used = (int)sizeof line - 2;
    line[used++] = '\n';
    if (write(fd, line, (size_t)used) < 0)
        errno = 0; /* a full disk is not the program's trouble */
    close(fd);
    errno = saved;
}
