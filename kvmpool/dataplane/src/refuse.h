/* refuse.h: ends a guest's connection with a reason that the guest's program can show. */
#ifndef KP_REFUSE_H
#define KP_REFUSE_H

/* Sends a welcome with `status` (a negative errno) and the text, without waiting, and shuts the socket down for every copy of
 * the descriptor. Closes nothing. */
void kp_refuse(int guest_fd, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
