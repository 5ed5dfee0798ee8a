/* refuse.c: see refuse.h. */
#define _GNU_SOURCE
#include "refuse.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "frame.h"

void kp_refuse(int guest_fd, int status, const char *format, ...)
{
    struct {
        struct kp_frame frame;
        struct kp_welcome welcome;
    } __attribute__((packed)) answer = {
        .frame = { .magic = KP_MAGIC, .op = KP_OP_WELCOME, .length = sizeof(struct kp_welcome) },
        .welcome = { .status = status },
    };
    char text[512];
    va_list arguments;
    int length;

    va_start(arguments, format);
    length = vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    /* A welcome's text is printable ASCII and zero to its end; a domain's name may be anything and long. */
    for (int i = 0; i < length && i < (int)sizeof(answer.welcome.text) - 1; i++)
        answer.welcome.text[i] = (char)(text[i] >= 0x20 && text[i] <= 0x7e ? text[i] : '?');
    /* The first bytes on this socket: they fit its buffer whole, or the guest is not reading and gets none. */
    (void)!send(guest_fd, &answer, sizeof(answer), MSG_NOSIGNAL | MSG_DONTWAIT);
    shutdown(guest_fd, SHUT_RDWR);
}
